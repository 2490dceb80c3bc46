"""A server over the fake model, and crowds of clients that ask for all kinds of things and leave at any moment."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from typing import Final, NamedTuple

import anyio

from octavo import AsyncEngine, EngineConfig
from octavo.engine.generation import Generation
from octavo.engine.kv import Sequence
from octavo.engine.sequence import Sample, SequenceGroup
from octavo.engine.server.call import Call
from octavo.engine.server.running import Address, serving
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.server.transport import GuardedProtocol
from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.http_rig import read_events
from octavo.tests.engine.server.scripted import ASCII, AsciiCodec
from octavo.tests.engine.server.socket_rig import PATIENCE, Wire, post, until, wire

Body = Mapping[str, object]
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
TOOL: Final[Body] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}},
}
MESSAGES: Final = [{"role": "user", "content": "What is the weather like?"}]
CANARY: Final[Body] = {"prompt": "a canary in a mine", "max_tokens": 12, "temperature": 0}
STORM_PATIENCE: Final = 200.0
"""Seconds after which a client that still waits is a failure: behind hundreds of others it takes its time."""
OF_A_REQUEST: Final = (Call, Generation, SequenceGroup, Sample, Sequence, GuardedProtocol)
"""What must be gone with its request or its connection."""


class Asked(NamedTuple):
    path: str
    body: Body


KINDS: Final = (
    Asked(COMPLETIONS, {"prompt": "The quick brown fox jumps", "max_tokens": 12}),
    Asked(COMPLETIONS, {"prompt": "The quick brown dog", "max_tokens": 6, "echo": True, "logprobs": 3}),
    Asked(COMPLETIONS, {"prompt": ["The quick", "brown fox", "jumps over"], "n": 2, "max_tokens": 6}),
    Asked(COMPLETIONS, {"prompt": [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]], "max_tokens": 6}),
    Asked(COMPLETIONS, {"prompt": "Choose", "best_of": 3, "max_tokens": 6}),
    Asked(COMPLETIONS, {"prompt": "Search", "use_beam_search": True, "n": 3, "max_tokens": 6}),
    Asked(CHAT, {"messages": MESSAGES, "max_tokens": 12}),
    Asked(CHAT, {"messages": MESSAGES, "n": 4, "max_tokens": 8, "stop": ["e", "zz"]}),
    Asked(CHAT, {"messages": MESSAGES, "max_tokens": 12, "guided_regex": "[a-f]{4,20}"}),
    Asked(CHAT, {"messages": MESSAGES, "max_tokens": 12, "response_format": {"type": "json_object"}}),
    Asked(CHAT, {"messages": MESSAGES, "max_tokens": 20, "tools": [TOOL], "tool_choice": "required"}),
    Asked(CHAT, {"messages": MESSAGES, "max_tokens": 12, "tools": [TOOL]}),
    Asked(RESPONSES, {"input": "What is the weather like?", "max_output_tokens": 8}),
)


class Leaves(Enum):
    """When a client goes away."""

    IN_THE_HEAD = auto()
    IN_THE_BODY = auto()
    AT_ONCE = auto()
    """When all is sent."""
    SOMETIME = auto()
    AT_THE_FIRST_BYTE = auto()
    IN_THE_MIDDLE = auto()
    AT_THE_LAST_BYTE = auto()
    """With a whole answer."""
    THEN_NEVER = auto()
    """It asks again on the same connection, and leaves that."""


class Storm:
    """Clients of one server, that do different things each time."""

    def __init__(self, address: Address, rng: random.Random) -> None:
        self._address = address
        self._rng = rng
        self.read: list[tuple[int, bool, object]] = []
        """Which kind, whether as a stream, and what was answered, of those who stayed."""
        self.statuses: Counter[int] = Counter()

    async def rage(self, clients: int) -> None:
        await asyncio.gather(*(self._visit() for _ in range(clients)))

    async def ask(self, kind: int, *, stream: bool) -> object:
        """An answer, read to its end."""
        async with wire(self._address) as connection:
            await connection.send(request(KINDS[kind], stream=stream))
            status, answer = await whole_answer(connection)
        assert status == 200, answer
        return answer

    async def _visit(self) -> None:
        rng = self._rng
        kind, stream, leaves = rng.randrange(len(KINDS)), rng.random() < 0.6, rng.choice(list(Leaves))
        data, how, patience = request(KINDS[kind], stream=stream), rng.randrange(3), rng.random() * 0.3
        share = rng.random()
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async with wire(self._address, patience=STORM_PATIENCE) as connection:
                try:
                    answer = await self._stay(connection, leaves, data, share, patience)
                finally:
                    leave(connection, how)
                if answer is not None:
                    self.statuses[answer[0]] += 1
                    if answer[0] == 200:
                        self.read.append((kind, stream, answer[1]))

    @staticmethod
    async def _stay(
        connection: Wire, leaves: Leaves, data: bytes, share: float, patience: float
    ) -> tuple[int, object] | None:
        head = data.index(b"\r\n\r\n") + 4
        cut = {Leaves.IN_THE_HEAD: head, Leaves.IN_THE_BODY: len(data)}.get(leaves)
        await connection.send(data if cut is None else data[: int(share * cut)])
        if leaves in (Leaves.SOMETIME, Leaves.IN_THE_BODY):
            await asyncio.sleep(patience)
        elif leaves is Leaves.AT_THE_FIRST_BYTE:
            await connection.read_some()
        elif leaves is Leaves.IN_THE_MIDDLE:
            with suppress(TimeoutError):  # it was all of the answer
                async with asyncio.timeout(patience):
                    for _ in range(1 + int(share * 9)):
                        await connection.read_some()
        elif leaves in (Leaves.AT_THE_LAST_BYTE, Leaves.THEN_NEVER):
            answer = await whole_answer(connection)
            if leaves is Leaves.THEN_NEVER:
                await connection.send(data)
            return answer
        return None


def request(asked: Asked, *, stream: bool) -> bytes:
    body = {"temperature": 1, "seed": 3, **asked.body, "stream": stream}
    if asked.path == RESPONSES:
        body = {**asked.body, "temperature": 0, "stream": stream}
    return post(asked.path, body)


async def whole_answer(connection: Wire) -> tuple[int, object]:
    """Status, and what the model said: texts by choice, which streams and other answers have in common."""
    answer = await connection.answer()
    if "content-length" in answer.headers:
        body = json.loads(answer.body)
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
        return answer.status, body if answer.status != 200 else said(body)
    return answer.status, said_in_stream(await connection.chunks())


def said(body: dict[str, object]) -> object:
    if "choices" not in body:
        return body["output"][0]["content"][0]["text"]  # type: ignore[index]  # JSON
    return {choice["index"]: text_of(choice) for choice in body["choices"]}  # type: ignore[attr-defined]  # JSON


def said_in_stream(raw: bytes) -> object:
    events = read_events(raw)
    if events[0].name is not None:
        return json.loads(events[-1].data)["response"]["output"][0]["content"][0]["text"]
    assert events[-1].data == "[DONE]"
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in json.loads(event.data)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + text_of(choice)
    return texts


def text_of(choice: Mapping[str, object]) -> str:
    """Text, and calls as text; ids of calls are drawn."""
    part = choice.get("message") or choice.get("delta") or choice
    assert isinstance(part, dict)
    calls = "".join(str(call["function"]) for call in part.get("tool_calls") or [])
    return str(part.get("content") or part.get("text") or "") + calls


def leave(connection: Wire, how: int) -> None:
    """By saying so, by saying that nothing more comes, or without a word."""
    writer = connection.writer
    raw = writer.get_extra_info("socket")
    if how == 0:
        writer.close()
    elif how == 1 and writer.can_write_eof() and not writer.is_closing():
        writer.write_eof()
    elif raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Rig(NamedTuple):
    address: Address
    engine: AsyncEngine
    service: Service
    tasks: int
    threads: int

    async def calm(self, connections: int = 0) -> None:
        """Nothing is under way any more, but for so many ``connections`` that wait."""
        await until(lambda: len(asyncio.all_tasks()) <= self.tasks + connections)
        await until(lambda: not self.engine.requests() and not self.service.under_way)
        await self.engine._loop.wait_idle()
        census, stats = self.engine.census(), self.engine.stats()
        assert (census.held, census.in_transfer) == (0, 0)
        assert census.free + census.idle == census.total
        assert stats.submitted == sum(stats.finished.values())

    async def empty(self) -> None:
        """Nothing that belongs to a request or a connection is in memory any more."""
        left = {"": 1}
        with anyio.fail_after(PATIENCE):
            while left:  # the server may not have seen yet that connections are closed
                await asyncio.sleep(0.02)
                gc.collect()
                kinds = map(type, gc.get_objects())  # no isinstance: some objects of others do not like to be asked
                left = dict(Counter(kind.__name__ for kind in kinds if kind in OF_A_REQUEST))

    async def canary(self) -> str:
        async with wire(self.address) as connection:
            await connection.send(post(COMPLETIONS, CANARY))
            status, answer = await whole_answer(connection)
        assert status == 200
        assert isinstance(answer, dict)
        return str(answer[0])


@asynccontextmanager
async def rig_of(**config: object) -> AsyncIterator[Rig]:
    values: dict[str, object] = {
        "num_blocks": 96,
        "block_size": 4,
        "eviction_policy": "lru",
        "max_waiting": 60,
        "policy_timeout": float("inf"),  # a busy machine's pauses are no fault of the policy
    }
    engine = AsyncEngine(
        runner=FakeRunner(vocab_size=ASCII, eos_token_ids=frozenset({0})),
        codec=AsciiCodec(),
        config=EngineConfig(**{**values, **config}),  # type: ignore[arg-type]  # names and values come from the tests
    )
    gc.collect()
    gc.freeze()  # what other tests have left in memory is not counted, and not looked through again and again
    try:
        async with engine:
            service = Service(ServerSettings(tool_format="hermes"), engine)
            tasks = len(asyncio.all_tasks())
            async with serving(service) as address:
                yield Rig(address, engine, service, tasks + 1, threading.active_count())
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
    finally:
        gc.unfreeze()


async def answers_alone(storm: Storm) -> dict[tuple[int, bool], object]:
    """What each kind of client reads when it has the server for itself."""
    return {
        (kind, stream): await storm.ask(kind, stream=stream) for kind in range(len(KINDS)) for stream in (False, True)
    }
