"""Faults of the model, of policies and of the engine itself: kept to the requests that they hit; the loop lives."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType

import pytest
import torch

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo import errors as octavo_errors
from octavo.engine.commit import Committer
from octavo.engine.model.runner import Row, RowOutput, StepInput, StepOutput
from octavo.engine.scheduler import Scheduler
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ContractBroken, DeviceOutOfMemory, ModelError, OctavoError, PluginError, UnknownPlugin
from octavo.policies.eviction.base import Entry, EvictionPolicy, Returned
from octavo.policies.scheduling.base import Job, SchedulingPolicy

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Result = list[RequestOutput] | BaseException

BAD = 61
"""A token id that the faulty models below cannot stand."""
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
MANY = [[n, n + 1, n + 2, *range(1, 8)] for n in range(1, 40, 3)]
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [20, 21], [30] * 12]


@asynccontextmanager
async def opened(
    runner: FakeRunner | None = None, codec: FakeCodec | None = None, **config: object
) -> AsyncIterator[AsyncEngine]:
    """An engine with a real model thread, which must be idle and clean at the end."""
    settings = EngineConfig(**{"num_blocks": 64, "block_size": 4, "check_every_step": True} | config)  # type: ignore[arg-type]  # names come from tests
    async with AsyncEngine(runner=runner or FakeRunner(), codec=codec, config=settings) as engine:
        async with asyncio.timeout(60):
            yield engine
            await engine._loop.wait_idle()
        census, stats = engine.census(), engine.stats()
        assert (census.held, census.in_transfer, stats.running, stats.waiting) == (0, 0, 0, 0)
        assert not engine._loop.cache.pool._pins
        assert engine._loop.groups == {}


@pytest.fixture(autouse=True)
def no_contradiction_in_the_books(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.get_records("call") if "self-check" in record.getMessage()]


async def answers(
    engine: AsyncEngine, prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = GREEDY
) -> list[Result]:
    return await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts), return_exceptions=True)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """What the prompts give when nothing is wrong."""
    return asyncio.run(references())


@pytest.fixture(scope="module")
def many_expected() -> list[tuple[int, ...]]:
    return asyncio.run(references(MANY))


async def references(prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    outputs = []
    for prompt in prompts:
        async with opened(num_blocks=512, enable_prefix_caching=False) as engine:
            outputs.append((await engine.complete(prompt, params))[0].token_ids)
    return outputs


def tokens(result: Result) -> tuple[int, ...]:
    assert isinstance(result, list), result
    return result[0].token_ids


# the model


def raises_on(token: int, error: Callable[[], BaseException]) -> Callable[[StepInput], None]:
    def before_step(step: StepInput) -> None:
        if token in step.tokens:
            raise error()

    return before_step


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad logits"),
    "ModelError": lambda: ModelError("named"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "StopIteration": StopIteration,
    "CancelledError": asyncio.CancelledError,
    "EngineClosed": lambda: octavo_errors.EngineClosed("from the model itself"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ERRORS)
async def test_what_the_model_raises_ends_only_the_request_at_fault(expected: list[tuple[int, ...]], kind: str) -> None:
    """Whatever it is, ends of the world included; found among its neighbours by halving the batch."""
    prompts = [*PROMPTS, [5, 6, BAD], [40, BAD, 41]]
    async with opened(FakeRunner(before_step=raises_on(BAD, ERRORS[kind]))) as engine:
        for _ in range(2):
            results = await answers(engine, prompts)
            assert [tokens(result) for result in results[:5]] == expected
            assert all(isinstance(result, ModelError) for result in results[5:]), results[5:]
        stats = engine.stats()
        assert stats.finished == {"length": 10, "error": 4}
        assert stats.failed_rows == 4


@pytest.mark.asyncio
async def test_a_model_that_always_raises_ends_each_request_and_no_more(expected: list[tuple[int, ...]]) -> None:
    broken = [True]

    def before_step(step: StepInput) -> None:
        if broken:
            raise RuntimeError("gone")

    async with opened(FakeRunner(before_step=before_step)) as engine:
        results = await answers(engine)
        assert all(isinstance(result, ModelError) and "gone" in str(result) for result in results)
        assert all(isinstance(result, ModelError) and isinstance(result.__cause__, RuntimeError) for result in results)
        broken.clear()
        assert [tokens(result) for result in await answers(engine)] == expected


class Malformed(FakeRunner):
    """Spoils what comes out for prompts that hold the bad token."""

    def __init__(self, spoil: Callable[[StepOutput, int], object]) -> None:
        super().__init__()
        self._spoil = spoil

    def execute(self, step: StepInput) -> StepOutput:
        output = super().execute(step)
        for number, row in enumerate(step.rows):
            history = (
                row.sampling.history if row.sampling is not None else step.tokens[row.start : row.start + row.length]
            )
            if BAD in history:
                return self._spoil(output, number)  # type: ignore[return-value]  # that it is none is the point
        return output


def _with_row(output: StepOutput, number: int, row: object) -> StepOutput:
    rows: list[object] = list(output.rows)
    rows[number] = row
    return StepOutput(tuple(rows))  # type: ignore[arg-type]  # that it is none is the point


SPOILS: dict[str, Callable[[StepOutput, int], object]] = {
    "a row too few": lambda output, _: StepOutput(output.rows[:-1]),
    "a row too many": lambda output, _: StepOutput((*output.rows, RowOutput())),
    "nothing": lambda _output, _: None,
    "no draw": lambda output, number: _with_row(output, number, RowOutput()),
    "no row": lambda output, number: _with_row(output, number, None),
    "two draws": lambda output, number: _with_row(
        output, number, RowOutput(sampled=(*output.rows[number].sampled, *output.rows[number].sampled))
    ),
    "an error": lambda output, number: _with_row(output, number, RowOutput(error="not finite")),
    "a token of 40 bits": lambda output, number: _with_row(
        output, number, RowOutput(sampled=(output.rows[number].sampled[0]._replace(token_id=2**40),))
    ),
    "a token beyond the vocabulary": lambda output, number: _with_row(
        output, number, RowOutput(sampled=(output.rows[number].sampled[0]._replace(token_id=64),))
    ),
    "a negative token": lambda output, number: _with_row(
        output, number, RowOutput(sampled=(output.rows[number].sampled[0]._replace(token_id=-1),))
    ),
    "no number": lambda output, number: _with_row(
        output,
        number,
        RowOutput(sampled=(output.rows[number].sampled[0]._replace(token_id=None),)),  # type: ignore[arg-type]
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("spoil", SPOILS)
async def test_what_the_model_returns_wrongly_ends_only_the_request_at_fault(
    expected: list[tuple[int, ...]], spoil: str
) -> None:
    prompts = [*PROMPTS, [5, 6, BAD]]
    async with opened(Malformed(SPOILS[spoil])) as engine:
        results = await answers(engine, prompts)
        assert [tokens(result) for result in results[:5]] == expected
        assert isinstance(results[5], ModelError), results[5]
        assert engine.stats().finished == {"length": 5, "error": 1}


@pytest.mark.asyncio
async def test_logits_that_are_no_numbers_end_only_their_request(expected: list[tuple[int, ...]]) -> None:
    class Overflowing(FakeRunner):
        def _logits(self, row: Row, length: int) -> torch.Tensor:
            logits = super()._logits(row, length)
            history = row.sampling.history if row.sampling is not None else ()
            return torch.full_like(logits, math.nan) if BAD in history else logits

    async with opened(Overflowing()) as engine:
        results = await answers(engine, [*PROMPTS, [5, 6, BAD]])
        assert [tokens(result) for result in results[:5]] == expected
        assert isinstance(results[5], ModelError)


@pytest.mark.asyncio
async def test_a_token_that_cannot_be_decoded_ends_only_its_request(expected: list[tuple[int, ...]]) -> None:
    class Fussy(FakeCodec):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            if set(ids) & forbidden:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "no such piece")
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    forbidden = {expected[1][2]}
    hit = [bool(set(output) & forbidden) for output in expected]
    assert not all(hit)
    async with opened(codec=Fussy()) as engine:
        results = await answers(engine)
        assert [isinstance(result, ModelError) for result in results] == hit
        assert [tokens(r) for r, bad in zip(results, hit, strict=True) if not bad] == [
            e for e, bad in zip(expected, hit, strict=True) if not bad
        ]


@pytest.mark.asyncio
async def test_an_error_comes_after_what_was_generated_before_it() -> None:
    expected = (await references([PROMPTS[0]]))[0]
    async with opened(FakeRunner(before_step=raises_on(expected[3], lambda: ValueError("late")))) as engine:
        seen: list[int] = []

        async def read() -> None:
            async for output in engine.generate(PROMPTS[0], GREEDY):
                seen.extend(output.new_token_ids)

        with pytest.raises(ModelError, match="late"):
            await read()
        assert tuple(seen) == expected[: len(seen)]
        assert len(seen) == 1 + expected.index(expected[3])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=6, n=4, seed=1), SamplingParams(max_tokens=6, beam_width=3)]
)
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_fault_in_one_sample_ends_its_whole_group(
    expected: list[tuple[int, ...]], params: SamplingParams, which: int
) -> None:
    """In whatever order the good and the bad rows of the group come; in blocks that they share."""
    bad: list[tuple[int, ...]] = []

    def before_step(step: StepInput) -> None:
        for row in step.rows:
            history = () if row.sampling is None else tuple(row.sampling.history.tolist())
            if len(history) == len(PROMPTS[0]) + 3:
                bad.append(history)
                if history in bad[which : which + 1]:
                    raise RuntimeError("one of several")

    async with opened(FakeRunner(before_step=before_step)) as engine:
        several = asyncio.create_task(engine.complete(PROMPTS[0], params))
        others = await answers(engine, PROMPTS[1:])
        assert [tokens(result) for result in others] == expected[1:]
        with pytest.raises(ModelError, match="one of several"):
            await several
        assert engine.stats().finished == {"error": 1, "length": 4}


# out of memory


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [DeviceOutOfMemory, MemoryError])
async def test_a_step_too_large_for_the_device_is_made_in_pieces(error: type[Exception]) -> None:
    """LOOP-07: steps shrink until they fit, every request ends as ever, and later steps grow again."""
    sizes: list[int] = []
    limit = [40]

    def before_step(step: StepInput) -> None:
        if len(step.tokens) > limit[0]:
            raise error("too many tokens")
        sizes.append(len(step.tokens))

    prompts = [[n % 50 + 1 for n in range(k, k + length)] for k, length in enumerate((10, 30, 50, 50, 30, 10))]
    expected = await references(prompts)
    async with opened(FakeRunner(before_step=before_step), max_batch_tokens=64, num_blocks=128) as engine:
        results = await answers(engine, prompts)
        assert [tokens(result) for result in results] == expected
        scheduler = engine._loop._scheduler
        assert scheduler.token_limit < 64
        assert max(sizes) <= 40
        limit[0] = 1000
        await engine.complete([60, 61], SamplingParams(max_tokens=200))
        assert scheduler.token_limit == 64


@pytest.mark.asyncio
async def test_a_device_that_is_always_out_of_memory_ends_requests_with_an_error() -> None:
    steps = []

    def before_step(step: StepInput) -> None:
        steps.append(len(step.tokens))
        raise DeviceOutOfMemory("nothing left")

    async with opened(FakeRunner(before_step=before_step), max_batch_tokens=64, num_blocks=128) as engine:
        results = await answers(engine, [list(range(1, 51)), [1], list(range(1, 31))])
        assert all(isinstance(result, DeviceOutOfMemory) for result in results)
        assert len(steps) < 100


# the engine itself


def fails_once(function: Callable[..., object], at: int) -> Callable[..., object]:
    calls = iter(range(10**6))

    def failing(*args: object, **kwargs: object) -> object:
        if next(calls) == at:
            raise ZeroDivisionError("injected")
        return function(*args, **kwargs)

    return failing


PLACES: dict[str, tuple[type, str]] = {
    "plan": (Scheduler, "plan"),
    "admit": (Scheduler, "_try_admit"),
    "room": (Scheduler, "_make_room"),
    "chunk": (Scheduler, "_chunk"),
    "commit": (Committer, "apply"),
    "compute": (Committer, "_compute"),
    "accept": (Committer, "_accept"),
    "close": (Committer, "_close"),
    "branch": (Committer, "_branch"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("place", PLACES)
async def test_a_fault_inside_the_engine_ends_requests_and_the_loop_lives(
    expected: list[tuple[int, ...]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-08: at every one of the first calls of each part; everything that was taken comes back, nobody waits."""
    owner, name = PLACES[place]
    original = getattr(owner, name)
    for at in (0, 1, 2, 5, 11):
        async with opened(num_blocks=20, max_batch_tokens=16) as engine:
            monkeypatch.setattr(owner, name, fails_once(original, at))
            several = asyncio.create_task(
                engine.complete([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=7, n=4, seed=2))
            )
            results = [*await answers(engine), *await asyncio.gather(several, return_exceptions=True)]
            assert all(isinstance(result, list | OctavoError) for result in results), results
            monkeypatch.setattr(owner, name, original)
            assert [tokens(result) for result in await answers(engine)] == expected
            census = engine.census()
            assert census.held == 0
            assert census.in_transfer == 0
            assert not engine._loop.cache.pool._pins


@pytest.mark.asyncio
async def test_a_fault_that_stays_does_not_take_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan fails: requests are answered with errors, other tasks run, and closing works."""

    def plan(self: Scheduler, now: float) -> None:
        raise ZeroDivisionError("always")

    monkeypatch.setattr(Scheduler, "plan", plan)
    async with AsyncEngine(runner=FakeRunner(), config=EngineConfig(num_blocks=8)) as engine:
        async with asyncio.timeout(30):
            for _ in range(3):
                results = await answers(engine)
                assert all(isinstance(result, ModelError) and "always" in str(result) for result in results)
                assert len({id(result) for result in results}) == len(results)


@pytest.mark.asyncio
async def test_a_group_that_cannot_be_ended_in_order_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """The books are beyond repair: everybody gets an answer, and the loop does not spin on what it cannot end."""
    async with AsyncEngine(runner=FakeRunner(), config=EngineConfig(num_blocks=64, block_size=4)) as engine:
        async with asyncio.timeout(30):
            original = Scheduler.remove
            monkeypatch.setattr(Scheduler, "plan", fails_once(Scheduler.plan, 2))
            monkeypatch.setattr(Scheduler, "remove", fails_once(original, 0))
            results = await answers(engine)
            assert all(isinstance(result, ModelError) for result in results)
            monkeypatch.setattr(Scheduler, "remove", original)
            assert all(isinstance(result, list) for result in await answers(engine))
            assert engine.stats().running == 0


@pytest.mark.asyncio
async def test_when_the_loop_is_cancelled_from_outside_nobody_waits_for_ever() -> None:
    """Somebody cancels every task of the event loop but its own."""
    async with AsyncEngine(runner=FakeRunner(), config=EngineConfig(num_blocks=512, block_size=4)) as engine:
        generation = engine.generate([1, 2, 3], SamplingParams(max_tokens=1000))
        await anext(generation)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        async with asyncio.timeout(30):
            reasons = [output.finish_reason async for output in generation]
            assert reasons[-1] is FinishReason.ABORT
            with pytest.raises(octavo_errors.EngineClosed):
                await engine.complete([1, 2, 3], GREEDY)


# policies


class Explosive(EvictionPolicy):
    """Raises wherever it is called."""

    def on_insert(self, entry: Entry, now: float) -> None:
        raise RuntimeError("on_insert")

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        raise RuntimeError("on_extend")

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        raise RuntimeError("on_split")

    def on_hit(self, entry: Entry, now: float) -> None:
        raise RuntimeError("on_hit")

    def on_candidate(self, entry: Entry, now: float) -> None:
        raise RuntimeError("on_candidate")

    def on_held(self, entry: Entry) -> None:
        raise RuntimeError("on_held")

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        raise RuntimeError("on_evict")

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        raise RuntimeError("on_ghost_hit")

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise RuntimeError("victims")


class Collecting(EvictionPolicy):
    """Knows every entry, and names what ``choose`` makes of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.entries: list[Entry] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        self.entries.append(entry)


class NamesHeld(Collecting):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield from self.entries


class NamesGarbage(EvictionPolicy):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while True:
            yield Entry(blocks=3, depth=7, insert_time=0.0, last_use=0.0, candidate=True)
            yield None  # type: ignore[misc]  # that it is none is the point


class NamesNothing(EvictionPolicy):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


class NoIterator(EvictionPolicy):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return 7  # type: ignore[return-value]  # that it is none is the point


class Stubborn(Collecting):
    """Its iterator never ends and does not take no for an answer."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while True:
            try:
                yield self.entries[0] if self.entries else None  # type: ignore[misc]  # that it is none is the point
            except GeneratorExit:
                yield self.entries[0]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Speechless(EvictionPolicy):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise Unspeakable


class Vandal(Collecting):
    """Writes into what it may only read."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        for entry in self.entries:
            entry.blocks, entry.candidate, entry.last_use = -5, not entry.candidate, math.nan
        yield from self.entries


EVICTIONS = [Explosive, NamesHeld, NamesGarbage, NamesNothing, NoIterator, Stubborn, Speechless]


class ExplosiveRank(SchedulingPolicy):
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        raise RuntimeError("rank")

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        raise RuntimeError("displaces")


class NotANumber(SchedulingPolicy):
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (math.nan, -job.order) if job.order % 2 else (1.0, job.order)


class MixedTypes(SchedulingPolicy):
    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return ("a", None, (1,), 3.0)[job.order % 4]  # type: ignore[return-value]  # that it is none is the point


class Fickle(SchedulingPolicy):
    """Another order each time, and everybody displaces everybody."""

    def __init__(self) -> None:
        self._calls = 0

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        self._calls += 1
        return (float(self._calls * 7919 % 13),)

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        return True


class Quarrelsome(SchedulingPolicy):
    """A fixed order, and everybody displaces everybody."""

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        return (-job.order,)

    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        return True


class Undecided(Fickle):
    def displaces(self, waiting: Job, running: Job, now: float) -> bool:
        return Neither()  # type: ignore[return-value]  # that it is none is the point


class Neither:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


SCHEDULINGS = [ExplosiveRank, NotANumber, MixedTypes, Quarrelsome, Undecided]


class BrokenConstructor(EvictionPolicy):
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("cannot be made")

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> str:
    """This module's classes under a name that ``module:Class`` can import."""
    module = ModuleType("octavo_faulty_plugins")
    module.__dict__.update({cls.__name__: cls for cls in (*EVICTIONS, *SCHEDULINGS, Fickle, Vandal, BrokenConstructor)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.mark.asyncio
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("policy", EVICTIONS, ids=lambda cls: cls.__name__)
async def test_a_faulty_eviction_policy_changes_no_output(
    policy: type, plugins: str, many_expected: list[tuple[int, ...]]
) -> None:
    """Under a pool that is always full; the fallback evicts the least recently used."""
    name = f"{plugins}:{policy.__name__}"
    async with opened(num_blocks=12, eviction_policy=name, evict_below=0.3, evict_until=0.5) as engine:
        results = await answers(engine, MANY * 2)
        assert [tokens(result) for result in results] == many_expected * 2
        assert sum(engine.stats().cache.evictions.values()) > 20
        assert engine.stats().cache.policy_faults > 0


@pytest.mark.asyncio
async def test_a_policy_that_writes_into_entries_breaks_nothing(plugins: str) -> None:
    config = EngineConfig(num_blocks=12, block_size=4, eviction_policy=f"{plugins}:Vandal")
    async with AsyncEngine(runner=FakeRunner(), config=config) as engine:
        for prompt in MANY:
            await engine.complete(prompt, GREEDY)
            engine.census()


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [*SCHEDULINGS, Fickle], ids=lambda cls: cls.__name__)
async def test_a_faulty_scheduling_policy_changes_no_output(
    policy: type, plugins: str, many_expected: list[tuple[int, ...]]
) -> None:
    name = f"{plugins}:{policy.__name__}"
    async with opened(num_blocks=12, max_running=3, max_batch_tokens=16, scheduling_policy=name) as engine:
        results = await answers(engine, MANY)
        assert [tokens(result) for result in results] == many_expected
        assert engine.stats().policy_faults > 0 or policy in (NotANumber, Fickle, Quarrelsome)


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["eviction_policy", "scheduling_policy"])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nobody-offers-this", UnknownPlugin),
        ("octavo_nowhere:Policy", PluginError),
        ("octavo_faulty_plugins:Missing", PluginError),
        ("builtins:int", ContractBroken),
    ],
)
async def test_a_policy_that_cannot_be_had_is_told_before_the_model_is_loaded(
    field: str, name: str, error: type[Exception], plugins: str
) -> None:
    runner = FakeRunner()
    engine = AsyncEngine(runner=runner, config=EngineConfig(**{field: name}))  # type: ignore[arg-type]  # a field of the config
    with pytest.raises(error):
        await engine.__aenter__()
    assert runner._memory.size == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(octavo_errors.EngineClosed):
        await engine.complete([1], GREEDY)
    with pytest.raises(octavo_errors.EngineClosed):
        await engine.__aenter__()


@pytest.mark.asyncio
async def test_a_policy_whose_constructor_raises_is_a_plugin_error(plugins: str) -> None:
    runner = FakeRunner()
    with pytest.raises(ContractBroken, match="cannot be made"):
        async with AsyncEngine(runner=runner, config=EngineConfig(eviction_policy=f"{plugins}:BrokenConstructor")):
            pass
    assert runner.is_closed


def test_every_error_is_in_the_one_tree() -> None:
    classes = [value for value in vars(octavo_errors).values() if isinstance(value, type)]
    assert len(classes) > 15
    assert all(issubclass(cls, OctavoError) for cls in classes)
    assert all(cls.__doc__ for cls in classes)


@pytest.mark.asyncio
async def test_what_a_failed_request_has_published_fails_nobody_after_it() -> None:
    """K and V that went bad in one chunk show only with the last one; a later request must not find them."""
    runner = FakeRunner()
    spoil = {"next": True}

    def before_step(step: StepInput) -> None:
        if not spoil["next"]:
            return
        if len(step.rows) == 1 and step.rows[0].sampling is not None and step.rows[0].context == 30:
            spoil["next"] = False
            raise RuntimeError("not finite")

    runner.before_step = before_step
    prompt = [i % 7 for i in range(30)]
    async with opened(runner=runner, num_blocks=40, max_batch_tokens=16) as engine:
        with pytest.raises(ModelError):
            await engine.complete(prompt, GREEDY)
        assert engine.census().idle == 0
        assert engine.stats().cache.evictions["distrust"] > 0
        [output] = await engine.complete(prompt, GREEDY)
        assert output.cached_tokens == 0
        engine.census()


class Deaf(FakeCodec):
    """Cannot decode with special tokens."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            raise RuntimeError("cannot")
        return super().decode(ids)


@pytest.mark.asyncio
async def test_a_fork_whose_text_cannot_be_made_fails_alone() -> None:
    async with opened(runner=FakeRunner(), codec=Deaf(), num_blocks=60) as engine:
        neighbour = asyncio.create_task(engine.complete([9, 9], SamplingParams(max_tokens=40, temperature=0.0)))
        source = engine.generate([1, 2], SamplingParams(max_tokens=40, temperature=0.0), request_id="source")
        await anext(source)
        fork = await engine.fork("source", SamplingParams(max_tokens=40, skip_special_tokens=False))
        with pytest.raises(ModelError, match="text"):
            async for _ in fork:
                pass
        outputs = [output async for output in source]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert (await neighbour)[0].finish_reason is FinishReason.LENGTH
        assert engine.census().held == 0


@pytest.mark.asyncio
async def test_a_runner_that_forgets_prompt_scores_fails_the_request() -> None:
    class Forgetful(FakeRunner):
        def execute(self, step: StepInput) -> StepOutput:
            output = super().execute(step)
            return StepOutput(tuple(RowOutput(row.sampled, row.beam) for row in output.rows))

    async with opened(runner=Forgetful()) as engine:
        with pytest.raises(ModelError, match="prompt scores"):
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=2, prompt_logprobs=0))
        assert engine.census().held == 0
