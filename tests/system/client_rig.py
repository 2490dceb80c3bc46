"""What the tests of real clients share: a server in a thread of its own that remembers all that went over its border.

No client is trusted to notice what is wrong with an answer: all answers are looked at a second time in the end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.counters import EngineStats
from octavo.engine.model.runner import Row, StepInput, StepOutput
from octavo.engine.request import Prompt
from octavo.engine.server import running
from octavo.engine.server.app import app_of
from octavo.engine.server.running import serving
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.scripted import ASCII, AsciiCodec
from octavo.tests.system.strict_answers import Exchange, check

T = TypeVar("T")
PATIENCE: Final = 20.0
"""Seconds after which a test that hangs is told so; no result depends on it."""
HERMES: Final = "octavo.engine.server.tools.hermes:Hermes"
END: Final = "\0"
GREETING: Final = "Hello, you!"
CALLS: Final = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
ADVICE: Final = "Take a coat."
ANSWERS: Final[Mapping[str, str]] = MappingProxyType({"Hi": GREETING, "weather?": CALLS, "cold": ADVICE})
"""What the model says: to a greeting, to a question that it needs tools for, and to what the tools tell it."""
LONG: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A prompt that it has no answer to: it goes on at random, for a long time."""
CONFIG: Final = EngineConfig(
    num_blocks=512,
    block_size=4,
    check_every_step=True,
    # by path: looking names up in what is installed takes longer than most tests
    eviction_policy="octavo.policies.eviction.lru:Lru",
    scheduling_policy="octavo.policies.scheduling.fcfs:Fcfs",
)


class Speaker(FakeRunner):
    """Says what it was told to say: ``answers`` by what was last said to it. The tokens are those of ``AsciiCodec``.

    To anything else it answers like :class:`FakeRunner`. It knows the text from its "K/V memory" alone.
    """

    def __init__(
        self,
        answers: Mapping[str, str] = ANSWERS,
        *,
        step_seconds: float = 0.0,
        before_step: Callable[[StepInput], None] | None = None,
    ) -> None:
        super().__init__(
            vocab_size=ASCII, eos_token_ids=frozenset({0}), step_seconds=step_seconds, before_step=before_step
        )
        self._answers = answers
        self._text: npt.NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        super().allocate(num_blocks, block_size)
        self._text = np.zeros((num_blocks, block_size), dtype=np.uint8)

    def execute(self, step: StepInput) -> StepOutput:
        if len(step.copies):
            self._text[step.copies[:, 1]] = self._text[step.copies[:, 0]]
        self._text.reshape(-1)[step.slots] = step.tokens
        return super().execute(step)

    def _logits(self, row: Row, length: int) -> torch.Tensor:
        logits = super()._logits(row, length)
        following = self._following(self._text[row.blocks].reshape(-1)[:length].tobytes().decode("ascii"))
        if following is not None:
            logits[ord(following)] = 1000.0
        return logits

    def _following(self, text: str) -> str | None:
        """What comes next in the answer to the last question in ``text``; ``None``: there is none, or it was left."""
        asked = max(self._answers, key=text.rfind, default="")
        if not asked or asked not in text:
            return None
        said, answer = text.rpartition(asked)[2], self._answers[asked] + END
        return answer[len(said)] if answer.startswith(said) and len(said) < len(answer) else None


class Gate:
    """Keeps steps from being taken until it is opened."""

    def __init__(self) -> None:
        self._is_open = threading.Event()

    def __call__(self, step: StepInput) -> None:
        assert self._is_open.wait(PATIENCE)

    def open(self) -> None:
        self._is_open.set()


class Fault:
    """Fails at the step with this number."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, step: StepInput) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("the device is gone")


class Recorder:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, exchanges: list[Exchange]) -> None:
        self._app = app
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(scope["path"], headers)
        self._exchanges.append(exchange)

        async def noted_receive() -> Message:
            message = await receive()
            exchange.sent += message.get("body", b"")
            return message

        async def noted_send(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.got += message.get("body", b"")
            exchange.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        await self._app(scope, noted_receive, noted_send)


@dataclass
class Served:
    """A server, its engine, and what it was asked."""

    url: str
    """With ``/v1``, as clients want it."""
    engine: AsyncEngine
    service: Service
    portal: BlockingPortal
    exchanges: list[Exchange] = field(default_factory=list, repr=False)

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    def run(self, function: Callable[..., Awaitable[T]], *args: object, **options: object) -> T:
        """Call something of the engine in the thread that it lives in."""
        return self.portal.call(partial(function, *args, **options))

    def continuations(self, prompt: Prompt, **params: object) -> list[RequestOutput]:
        """How ``prompt`` goes on, as the engine itself says, greedily."""
        wanted = SamplingParams.from_mapping({"temperature": 0.0, **params})
        return self.run(self.engine.complete, prompt, wanted)

    def text(self, prompt: Prompt, **params: object) -> str:
        return self.continuations(prompt, **params)[0].text

    def stats(self) -> EngineStats:
        return self.portal.call(self.engine.stats)

    def until(self, condition: Callable[[EngineStats], bool]) -> EngineStats:
        """Wait for what must come to be."""
        deadline = time.monotonic() + PATIENCE
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"it did not come to be: {stats}"
            time.sleep(0.005)
        return stats

    async def has_begun(self, request: asyncio.Task[T]) -> None:
        """Wait until the engine runs it, unless it ends before that."""
        while not self.stats().running and not request.done():  # noqa: ASYNC110  # it is seen from outside only
            await asyncio.sleep(0.005)

    def finished(self) -> dict[str, int]:
        """How all requests ended, once none is left."""
        return self.until(lambda stats: not stats.running and not stats.waiting).finished

    def tries(self) -> list[tuple[int, int]]:
        """Of each request: the client's own count of its retries, and the status of the answer."""
        return [(int(each.headers.get("x-stainless-retry-count", "0")), each.status) for each in self.exchanges]

    def check(self) -> None:
        """Nothing is held, and every answer was as it must be."""
        self.finished()
        census = self.portal.call(self.engine.census)
        assert (census.held, census.in_transfer) == (0, 0)
        for exchange in self.exchanges:
            if exchange.is_whole and exchange.sent:
                check(exchange)


@contextmanager
def served(
    runner: FakeRunner | None = None, *, settings: ServerSettings | None = None, config: EngineConfig = CONFIG
) -> Iterator[Served]:
    """A server over a fake model that knows how to write tool calls. In the end all is checked that it did."""
    engine = AsyncEngine(runner=runner or Speaker(), codec=AsciiCodec(), config=config)
    with serve(engine, settings or ServerSettings(tool_format=HERMES)) as server:
        yield server
        server.check()


@contextmanager
def serve(engine: AsyncEngine, settings: ServerSettings) -> Iterator[Served]:
    """A server over ``engine``, which is opened in a thread of its own, and closed."""
    exchanges: list[Exchange] = []
    service = Service(settings, engine)
    with (
        pytest.MonkeyPatch.context() as patch,
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(engine),
    ):
        patch.setattr(running, "app_of", lambda service: Recorder(app_of(service), exchanges))
        with portal.wrap_async_context_manager(serving(service)) as address:
            yield Served(f"{address.url}/v1", engine, service, portal, exchanges)
