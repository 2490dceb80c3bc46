"""Fixtures for tests of the whole engine over the fake model.

The engines that ``engine_of`` opens run their steps in the event loop instead of a thread, so that a test decides what
happens between and during steps: ``on_step(number)`` is awaited when step ``number`` is planned and not yet executed,
which is where calls from outside arrive in life. Steps are counted from 1. On leaving, the engine must be idle and its
books clean.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine import life, mounting
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.model.text import TextCodec
from octavo.engine.plan import StepPlan
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeRunner
from octavo.errors import CensusFailed
from octavo.storage.base import Options, Tier, TierGeometry

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OnStep = Callable[[int], Awaitable[None]]
EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
DEFAULTS: dict[str, object] = {
    "num_blocks": 64,
    "block_size": 4,
    "check_every_step": True,
    # by path: looking names up in what is installed takes longer than most tests
    "eviction_policy": "octavo.policies.eviction.lru:Lru",
    "scheduling_policy": "octavo.policies.scheduling.fcfs:Fcfs",
    "persistence_backend": "octavo.storage.snapshot.backend:FolderBackend",
}
PATIENCE = 15.0
"""Seconds after which a test that hangs is told so; no result depends on it."""


class InlineThread:
    """Stands in for the model thread: calls run in the event loop."""

    on_step: OnStep | None = None

    def __init__(self, **_: bool) -> None:
        self.steps = 0

    async def call(self, function: Callable[..., object], *args: object) -> object:
        if args and isinstance(args[0], StepInput):
            self.steps += 1
            if self.on_step is not None:
                await self.on_step(self.steps)
        await asyncio.sleep(0)  # readers get their turn, as in life
        return function(*args)

    async def call_beside(
        self, meanwhile: Callable[[], object] | None, function: Callable[..., object], *args: object
    ) -> object:
        if meanwhile is not None:
            meanwhile()
        return await self.call(function, *args)

    async def close(self, timeout: float) -> bool:
        return True


class Cellar:
    """Stands in for the group of tier plug-ins: makes the tiers that a test hands in."""

    def __init__(self, makers: Mapping[str, Callable[[TierGeometry], Tier]]) -> None:
        self._makers = makers
        self._name = ""

    def find(self, name: str) -> None:
        assert name in self._makers

    def resolve(self, name: str) -> Cellar:
        self._name = name
        return self

    def create(self, options: Options, geometry: TierGeometry) -> Tier:
        return self._makers[self._name](geometry)


class FakeClock:
    """Seconds that pass only when told to, and ``step`` with every look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 1000.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> EngineOf:
    """``async with engine_of(runner=, codec=, clock=, on_step=, mounts=, restore=, record=, **config) as engine``.

    ``mounts``: tiers by name, fastest first, and how each is made.
    """

    @asynccontextmanager
    async def opened(
        *,
        runner: FakeRunner | None = None,
        codec: TextCodec | None = None,
        clock: Callable[[], float] | None = None,
        on_step: OnStep | None = None,
        wall: Callable[[], float] | None = None,
        restore: str | os.PathLike[str] | None = None,
        record: str | os.PathLike[str] | None = None,
        mounts: Mapping[str, Callable[[TierGeometry], Tier]] | None = None,
        **config: object,
    ) -> AsyncIterator[AsyncEngine]:
        thread = InlineThread()
        thread.on_step = on_step
        own = {} if mounts is None else {"tiers": tuple(mounts)}
        settings = EngineConfig(**DEFAULTS | own | config)  # type: ignore[arg-type]  # names and values come from the tests
        engine = AsyncEngine(
            runner=runner or FakeRunner(),
            codec=codec,
            config=settings,
            restore=restore,
            record=record,
            clock=clock or FakeClock(),
            wall=wall or FakeClock(),
        )
        failures: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(life, "ModelThread", lambda **_: thread)
            if mounts is not None:
                patch.setattr(mounting, "STORAGE_TIERS", Cellar(mounts))
            await engine.__aenter__()

        def check() -> None:
            try:
                engine._loop.cache.census()
            except CensusFailed as error:
                failures.append(f"step {thread.steps}: {error}")

        recover = engine._loop._recover

        def recovered(error: Exception) -> None:
            failures.append(f"the loop failed: {error!r}")
            recover(error)

        monkeypatch.setattr(engine._loop, "_check", check)
        monkeypatch.setattr(engine._loop, "_recover", recovered)
        try:
            with anyio.fail_after(PATIENCE):
                yield engine
                await engine._loop.wait_idle()
            assert_idle(engine)
            assert failures == []
        finally:
            thread.on_step = None
            await engine.__aexit__(None, None, None)

    return opened


def assert_idle(engine: AsyncEngine) -> None:
    """Nothing is held, nothing waits, and the books are right."""
    census, stats = engine.census(), engine.stats()
    assert (census.held, census.in_transfer, stats.running, stats.waiting) == (0, 0, 0, 0)
    assert engine._loop.groups == {}
    assert not engine._loop.cache._sequences
    assert len(engine._loop.cache._in_flight) == 0
    assert census.free + census.idle == census.total
    assert stats.submitted == sum(stats.finished.values())


@pytest.fixture
def alone(engine_of: EngineOf) -> Alone:
    """The reference: the same request alone in a fresh engine with a large pool and without sharing."""

    async def reference(
        prompt: list[int] | str,
        params: SamplingParams,
        *,
        codec: TextCodec | None = None,
        vocab_size: int = 64,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> list[RequestOutput]:
        runner = FakeRunner(vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        async with engine_of(
            runner=runner,
            codec=codec,
            num_blocks=512,
            max_batch_tokens=4096,
            enable_prefix_caching=False,
            check_every_step=False,
        ) as engine:
            return await engine.complete(prompt, params)

    return reference


@pytest.fixture
def read() -> Read:
    """Read a stream to its end; the last output of each sample. The deltas must join to the whole, each token once."""

    async def collect(generation: Generation) -> list[RequestOutput]:
        last: dict[int, RequestOutput] = {}
        async for output in generation:
            before = last.get(output.index)
            if before is not None:
                assert before.finish_reason is None
            assert output.token_ids == (before.token_ids if before else ()) + output.new_token_ids
            assert output.text == (before.text if before else "") + output.text_delta
            last[output.index] = output
        assert all(output.finish_reason is not None for output in last.values())
        return [last[index] for index in sorted(last)]

    return collect


@pytest.fixture
def preempt_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[AsyncEngine, Callable[[Sample], bool]], None]:
    """Before each plan, preempt the running samples that a condition names, as if others needed their blocks."""

    def install(engine: AsyncEngine, condition: Callable[[Sample], bool]) -> None:
        scheduler = engine._loop._scheduler
        plan = scheduler.plan

        def plan_after_preemption(now: float) -> StepPlan:
            for sample in list(scheduler.running):
                if sample in scheduler.running and condition(sample):
                    scheduler._preempt(sample)
            return plan(now)

        monkeypatch.setattr(scheduler, "plan", plan_after_preemption)

    return install


@pytest.fixture
def save_llama(tmp_path: Path) -> Callable[..., Path]:
    """Save a random two-layer Llama with a byte tokenizer; keyword arguments change its configuration."""
    import torch  # noqa: PLC0415  # other tests of this folder must not wait for it
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    def save(name: str = "model", *, seed: int = 0, tokenizer: bool = True, **changes: object) -> Path:
        torch.manual_seed(seed)
        settings: dict[str, object] = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "tie_word_embeddings": True,
            **changes,
        }
        config = LlamaConfig.from_dict(settings)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        if tokenizer:
            vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
            backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            fast = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)  # type: ignore[no-untyped-call]
            fast.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save
