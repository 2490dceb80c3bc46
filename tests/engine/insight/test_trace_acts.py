"""Acts of the whole engine in traces, tracers that fail, and what is kept of requests that are over."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from octavo import AsyncEngine, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.errors import FingerprintMismatch
from octavo.storage.testing.contract import Fault, MemoryStore
from octavo.telemetry import names
from octavo.telemetry.tracing import Tracing
from octavo.tests.engine.insight.trace_rig import (
    GREEDY,
    NOTES,
    Picky,
    Recorder,
    Spans,
    at_peace,
    check,
    complaints,
    integer,
    recording,
    traced,
    tracer_of,
    whole_life,
)
from octavo.tests.engine.test_growth import octavo_objects
from octavo.tests.engine.tier_rig import Faulty, lasting, memory, prompt, until
from octavo.tests.telemetry.export.received import ReceivedSpan

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def nothing_is_logged_by_opentelemetry(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert complaints(caplog) == []


# whoever takes the spans is at fault


class Raising(SpanProcessor):
    """Raises where it is told to, for spans with these names."""

    def __init__(self, where: str, *only: str) -> None:
        self._where, self._only = where, only
        self.raised = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._raise("start", span)

    def on_end(self, span: ReadableSpan) -> None:
        self._raise("end", span)

    def _raise(self, where: str, span: ReadableSpan) -> None:
        if where == self._where and (not self._only or span.name in self._only):
            self.raised += 1
            raise RuntimeError("a faulty processor")


FAULTS: dict[str, tuple[str, ...]] = {
    "all": (),
    "requests": ("text_completion fake",),
    "phases": names.PHASES,
    "decode": (names.DECODE,),
    "acts": (*names.ACTS, names.PREFILL_CHUNK),
    "steps": (names.STEP,),
}


@pytest.mark.parametrize("only", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("where", ["sampler", "start", "end"])
async def test_a_fault_of_the_tracer_costs_spans_and_nothing_else(
    where: str, only: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault costs the span it hits, and what is below; all of them are counted."""
    faulty: Picky | Raising
    recorder = Recorder()
    if where == "sampler":
        faulty = Picky(*only)
        provider = TracerProvider(sampler=faulty, shutdown_on_exit=False)
    else:
        faulty = Raising(where, *only)
        provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(recorder)
    if isinstance(faulty, Raising):
        provider.add_span_processor(faulty)
    known: list[Tracing] = []
    original = Tracing.begin

    def begin(self: Tracing, *args: object, **how: object) -> object:
        known.append(self)
        return original(self, *args, **how)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(Tracing, "begin", begin)
    scene = await whole_life(monkeypatch, provider)  # which fails where a request does
    assert faulty.raised > 0
    assert known[0].dropped["error"] == faulty.raised
    spans = recorder.spans
    if "text_completion fake" in only or not only:
        return
    hero = spans.request(scene.hero)
    assert hero.attributes[names.PREEMPTIONS] == 2
    assert {event.name for event in hero.events} >= {"fork", "preempt", "resume", "first_token"}
    if where != "end":
        missing = set(only)
        assert not [span for span in spans.within(hero) if span.name in missing]
        rest = {"add_request", "queue", "load", "prefill", "finish", "decode", "evict", "cow_fork"} - missing
        rest -= {"evict", "cow_fork"} if names.DECODE in only else set()  # they are below it
        assert rest <= {span.name for span in spans.within(hero)}


# acts of the whole engine


@contextmanager
def below(provider: TracerProvider) -> Iterator[None]:
    with tracer_of(provider).start_as_current_span("operator"):
        yield


async def test_snapshots_and_imports_are_below_their_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    provider, recorder = recording()
    path = tmp_path / "snapshot"
    async with traced(monkeypatch, provider, mounts={"m": memory()}) as engine:
        await engine.complete(prompt(1), GREEDY)
        with below(provider):
            report = await engine.snapshot(path)
        await at_peace(engine)
    async with traced(monkeypatch, provider, mounts={"m": memory()}) as engine:
        with below(provider):
            assert await engine.import_snapshot(path) == report.blocks
    async with traced(monkeypatch, provider, runner=FakeRunner(fingerprint="other"), mounts={"m": memory()}) as engine:
        with below(provider), pytest.raises(FingerprintMismatch):
            await engine.import_snapshot(path)
    spans = check(recorder)
    wrote, took, failed = (spans.below(span)[0] for span in spans.named("operator"))
    assert (wrote.name, wrote.status, wrote.attributes[names.BLOCKS]) == ("snapshot", "UNSET", report.blocks)
    assert wrote.attributes[names.BYTES] == 32 * report.blocks
    assert (took.name, took.attributes[names.KIND], took.attributes[names.BLOCKS]) == (
        "restore",
        "import",
        report.blocks,
    )
    assert (failed.name, failed.status, failed.attributes[names.ERROR_TYPE]) == (
        "restore",
        "ERROR",
        "FingerprintMismatch",
    )


def of_kind(spans: Spans, name: str, kind: str) -> list[ReceivedSpan]:
    return [span for span in spans.named(name) if span.attributes.get(names.KIND) == kind]


async def test_a_restart_is_shown_with_what_was_kept_and_what_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    store = MemoryStore()
    async with traced(monkeypatch, provider, mounts={"m": lasting(store)}, checkpoint_interval=0) as engine:
        await engine.complete(prompt(1), GREEDY)
    spans = check(recorder)
    (made,) = of_kind(spans, names.PERSIST, "checkpoint")
    assert (made.parent_id, made.attributes[names.BLOCKS]) == (None, 5)
    written = [span for span in spans.named(names.PERSIST) if span is not made]
    assert sum(integer(span, names.BLOCKS) for span in written) == 5
    copied = spans.named(names.SWAP_OUT)
    assert sum(integer(span, names.BLOCKS) for span in copied) == 5
    assert {span.parent_id for span in (*written, *copied)} == {None}

    provider, recorder = recording()
    settings = {"warm_bytes": 10**6, "checkpoint_interval": 0}
    async with traced(monkeypatch, provider, mounts={"m": lasting(store)}, settings=settings) as engine:
        await until(lambda: engine.stats().restore.warmed_blocks == 5)
        await until(lambda: engine.stats().restore.readiness == "ready")
        await at_peace(engine)
    spans = check(recorder)
    (opened,) = of_kind(spans, names.RESTORE, "open")
    assert (opened.attributes[names.TIER], opened.attributes[names.BLOCKS]) == ("m", 5)
    (warmed,) = of_kind(spans, names.RESTORE, "warming")
    assert (warmed.parent_id, warmed.attributes[names.BLOCKS]) == (None, 5)
    came = spans.named(names.SWAP_IN)
    assert sum(integer(span, names.BLOCKS) for span in came) == 5
    assert {span.parent_id for span in came} == {None}


async def test_evictions_without_a_request_are_traces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider, num_blocks=16, evict_below=0.5, evict_until=0.6) as engine:
        await engine.complete(prompt(1, 36), SamplingParams(max_tokens=1), request_id="owner")
        await engine.complete(prompt(2, 4), SamplingParams(max_tokens=1))
        await engine.evict(prompt(1, 4))
        await at_peace(engine)
        evicted = engine.stats().cache.evictions
    spans = check(recorder)
    found = Counter[object]()
    for span in spans.named(names.EVICT):
        found[span.attributes[names.REASON]] += integer(span, names.BLOCKS)
        assert span.parent_id is None
        assert spans.linked(span, "victim_owner") == [spans.request("owner").span_id]
    assert found == Counter(evicted)
    assert set(found) == {"watermark", "forget"}


async def test_who_used_a_victim_last_is_nobody_where_that_one_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    unsampled = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-00"}
    async with traced(monkeypatch, provider, num_blocks=12) as engine:
        one = SamplingParams(max_tokens=1)
        await engine.complete(prompt(1, 20), one, request_id="first")
        await engine.complete(prompt(1, 20), one, trace_headers=unsampled)
        await engine.complete(prompt(2, 20), one, request_id="second")
        await engine.complete(prompt(3, 48), one, request_id="third")
    spans = check(recorder)
    (evict,) = [span for span in spans.within(spans.request("third")) if span.name == names.EVICT]
    assert evict.attributes[names.BLOCKS] == 10
    assert spans.linked(evict, "victim_owner") == [spans.request("second").span_id]


async def test_a_load_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    faulty = Faulty()
    async with traced(monkeypatch, provider, mounts={"m": faulty}, num_blocks=16) as engine:
        await engine.complete(prompt(1, 36), SamplingParams(max_tokens=1))
        await engine.complete(prompt(2, 36), SamplingParams(max_tokens=1))
        await at_peace(engine)
        faulty.tier.inject(Fault("get", "fail"))
        await engine.complete(prompt(1, 36), SamplingParams(max_tokens=1), request_id="again")
        await at_peace(engine)
    spans = check(recorder)
    (load,) = [phase for phase in spans.phases(spans.request("again"))[0] if phase.name == names.LOAD]
    assert load.attributes[names.OUTCOME] == "failed"
    assert spans.request("again").status == "UNSET"


async def test_what_is_done_for_a_request_that_is_over_links_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are copied down once their request is done."""
    provider, recorder = recording()
    async with traced(monkeypatch, provider, mounts={"m": memory()}, demotion="write_through") as engine:
        await engine.complete(prompt(1), GREEDY, request_id="over")
        await at_peace(engine)
    spans = check(recorder)
    request = spans.request("over")
    copies = spans.named(names.SWAP_OUT)
    assert sum(integer(span, names.BLOCKS) for span in copies) == 5
    for span in copies:
        assert span.parent_id is None
        assert spans.linked(span, "cause") == [request.span_id]
        assert span.start >= request.end


# growth


def span_contexts() -> list[object]:
    """All that there are."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is trace.SpanContext]


async def test_nothing_of_a_request_is_kept_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a node of the tree keeps the ids of one owner at most."""
    provider = TracerProvider(shutdown_on_exit=False)
    others = span_contexts()  # what tests before this one have left

    async def some(engine: AsyncEngine, first: int, count: int) -> Counter[str]:
        for number in range(first, first + count):
            params = SamplingParams(max_tokens=3, n=1 + (number % 7 == 0), seed=number)
            task = asyncio.create_task(engine.complete([*prompt(number % 3, 8), *prompt(number, 5)], params))
            await asyncio.sleep(0)
            if number % 11 == 0:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await at_peace(engine)
        return octavo_objects()

    async with traced(monkeypatch, provider, mounts={"m": memory(32)}, num_blocks=24) as engine:
        before = await some(engine, 0, 160)  # ghosts are as many as they get
        after = await some(engine, 160, 200)
        assert not NOTES & set(after)
        assert after - before <= Counter(dict.fromkeys(after, 40))
        assert len(span_contexts()) <= len(others) + 24 + 20
