"""The connection to a Redis server: URLs that are safe, batches of commands, errors mapped once."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit

import anyio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ...errors import InvalidRequest, StorageError, describe

_CONNECTIONS = 8
_PAGE = 512
"""Keys in one round trip of a search."""
_TRIP = 128
"""Commands in one round trip; their answers are parsed without letting others on the loop run, which takes
milliseconds."""
_QUERY = re.compile(r"db|username|password|ssl_[a-z_]+")

Command: TypeAlias = tuple[str | bytes | int, ...]
"""A command and its arguments."""


class RedisLink:
    """A few connections to a server, made when they are needed and again when they were lost."""

    def __init__(self, url: str, timeout: float) -> None:
        """``timeout`` in seconds, for connecting and for each answer."""
        self.problem = ""
        """What went wrong in the latest call; empty: nothing."""
        self._connections = anyio.Semaphore(_CONNECTIONS)
        self._client = Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 1),  # one more try, for connections that a restarted server has dropped
            protocol=2,
        )

    async def run(self, commands: Sequence[Command]) -> list[object]:
        """The answers, in order; an error of a single command is an answer.

        :raises StorageError: when the server cannot be reached or does not answer.
        """
        answers: list[object] = []
        for at in range(0, len(commands), _TRIP):
            answers += await self._trip(commands[at : at + _TRIP])
        return answers

    async def _trip(self, commands: Sequence[Command]) -> list[object]:
        try:
            async with self._connections, self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.pipeline_execute_command(*command)  # type: ignore[no-untyped-call]  # has no types
                answers: list[object] = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            self.problem = describe(error)
            raise StorageError(f"the Redis server cannot be used: {describe(error)}") from error
        self.problem = ""
        return answers

    async def scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """All keys that match, a page at a time; one may come twice.

        :raises StorageError: as ``run``, and when the server refuses.
        """
        cursor = 0
        while True:
            answer = checked((await self.run([("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE)]))[0])
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                raise StorageError("the Redis server answered SCAN with something else")
            cursor = int(answer[0])
            yield [bytes(key) for key in answer[1]]
            if not cursor:
                return

    async def close(self) -> None:
        """Disconnect. Raises nothing."""
        with suppress(RedisError, OSError):
            await self._client.aclose()


def checked(answer: object) -> object:
    """:raises StorageError: when the answer is an error."""
    if isinstance(answer, Exception):
        raise StorageError(f"the Redis server refused: {describe(answer)}") from answer
    return answer


def check_url(url: str) -> None:
    """:raises InvalidRequest: when it cannot be used, or not safely; the message never repeats its password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise InvalidRequest("option 'url' of Redis tier cannot be read as a URL") from None
    if parts.scheme not in {"redis", "rediss", "unix"}:
        raise InvalidRequest(f"option 'url' of Redis tier begins with redis, rediss or unix, not {parts.scheme!r}")
    if not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise InvalidRequest("option 'url' of Redis tier names no host or socket")
    unknown = [name for name in query if not _QUERY.fullmatch(name)]
    if unknown:
        raise InvalidRequest(f"option 'url' of Redis tier has the parameter {unknown[0]!r}; db and ssl_* are known")
    if any(name.startswith("ssl_") for name in query) and parts.scheme != "rediss":
        raise InvalidRequest("option 'url' of Redis tier has ssl_* parameters but does not begin with rediss")
    lax = {"ssl_cert_reqs": {"none", "optional"}, "ssl_check_hostname": {"false", "0", "no", "n", "f"}}
    for name, values in lax.items():
        if values & {value.lower() for value in query.get(name, [])}:
            raise InvalidRequest(f"option 'url' of Redis tier turns {name} off, which lets anybody play the server")


def shown(url: str) -> str:
    """A URL without user, password and parameters."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
