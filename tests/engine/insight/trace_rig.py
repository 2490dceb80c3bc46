"""What tests of traces share: engines whose time is the test's, spans as they look on the wire, and what every trace
must keep.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import NamedTuple

import anyio
import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, Tracer, format_span_id
from opentelemetry.trace import TracerProvider as AnyProvider
from opentelemetry.util.types import Attributes

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine import life, mounting
from octavo.engine.model.text import TextCodec
from octavo.engine.testing import FakeRunner
from octavo.telemetry import names
from octavo.telemetry.tracing import Tracing
from octavo.tests.engine.conftest import DEFAULTS, PATIENCE, Cellar, FakeClock, InlineThread, OnStep, assert_idle
from octavo.tests.engine.tier_rig import MakeTier, at_rest, memory, until
from octavo.tests.telemetry.export.received import ReceivedSpan, decode

LOOK = 0.0001
"""Seconds that pass with every look at the clock."""
STEP = 0.01
"""Seconds of a step of the model, and more."""
SLACK = 2_000_000
"""Nanoseconds that may lie between two phases: some looks at the clock, and far less than a step."""
EPOCH = 1_700_000_000.0
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


class Recorder(SpanProcessor):
    """Counts the spans that begin, and keeps those that end."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.started.append(format_span_id(span.get_span_context().span_id))

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)

    @property
    def spans(self) -> Spans:
        """Those that ended, through the bytes that an exporter would send."""
        return Spans(decode(encode_spans(self.ended).SerializeToString()))


class Picky(Sampler):
    """Cannot stand some spans: the tracer's ``start_span`` raises."""

    def __init__(self, *only: str) -> None:
        self._only = only
        self.raised = 0

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        *_: object,
        **__: object,
    ) -> SamplingResult:
        if not self._only or name in self._only:
            self.raised += 1
            raise RuntimeError("a faulty sampler")
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        return "Picky"


class Spans:
    """Spans that were received, and how they hang together."""

    def __init__(self, spans: Sequence[ReceivedSpan]) -> None:
        self.all = sorted(spans, key=lambda span: (span.start, span.end))
        self.by_id = {span.span_id: span for span in spans}

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.all if span.name == name]

    @property
    def requests(self) -> list[ReceivedSpan]:
        return [span for span in self.all if names.OPERATION_NAME in span.attributes]

    def request(self, request_id: str) -> ReceivedSpan:
        (found,) = [span for span in self.requests if span.attributes.get(names.REQUEST_ID) == request_id]
        return found

    def below(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        """Its children."""
        return [child for child in self.all if child.parent_id == span.span_id]

    def within(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        """All that descends from it."""
        children = self.below(span)
        return children + [each for child in children for each in self.within(child)]

    def phases(self, request: ReceivedSpan) -> dict[int, list[ReceivedSpan]]:
        """The phases of each sample, in order; those of the whole request under -1."""
        found: dict[int, list[ReceivedSpan]] = {}
        for child in self.below(request):
            if child.name in names.PHASES:
                sample = child.attributes.get(names.SAMPLE, -1)
                assert isinstance(sample, int)
                found.setdefault(sample, []).append(child)
        return found

    def linked(self, span: ReceivedSpan, relation: str) -> list[str]:
        """Ids of the spans that ``span`` links to in this way."""
        return [link.span_id for link in span.links if link.attributes.get(names.RELATION) == relation]


NOTES = {f"octavo.telemetry.record.{name}" for name in ("NotedRequest", "NotedTrack", "Stage", "Act", "Event", "Step")}
"""What a traced request consists of, until its spans are made."""


def tracer_of(provider: AnyProvider) -> Tracer:
    """That of the application around the engine."""
    return provider.get_tracer("caller")


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What OpenTelemetry logged: contexts that cannot be detached, spans that end twice (TRACE-01, TRACE-04)."""
    return [each.getMessage() for each in caplog.get_records("call") if each.name.startswith("opentelemetry")]


def recording() -> tuple[TracerProvider, Recorder]:
    """A provider that samples everything, and what it makes."""
    provider, recorder = TracerProvider(shutdown_on_exit=False), Recorder()
    provider.add_span_processor(recorder)
    return provider, recorder


class Watch(FakeClock):
    """Time that goes on a little with every look; its ``wall`` shows the same time of day."""

    def __init__(self, step: float = LOOK) -> None:
        super().__init__(step)

    def wall(self) -> float:
        return EPOCH + self.now


@asynccontextmanager
async def traced(
    patch: pytest.MonkeyPatch,
    provider: AnyProvider | None,
    *,
    runner: FakeRunner | None = None,
    codec: TextCodec | None = None,
    watch: Watch | None = None,
    on_step: OnStep | None = None,
    mounts: Mapping[str, MakeTier] | None = None,
    restore: str | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    **more: object,
) -> AsyncIterator[AsyncEngine]:
    """An engine that is traced and whose steps run in the event loop; see the conftest. When it ends nothing is left
    of its requests, in the tracing neither.
    """
    thread, watch = InlineThread(), watch or Watch()
    own = {} if mounts is None else {"tiers": tuple(mounts)}
    config = EngineConfig(**DEFAULTS | own | dict(settings) | more)  # type: ignore[arg-type]  # names and values come from the tests

    async def stepped(number: int) -> None:
        watch.now += STEP
        if on_step is not None:
            await on_step(number)

    thread.on_step = stepped
    engine = AsyncEngine(
        runner=runner or FakeRunner(),
        codec=codec,
        config=config,
        restore=restore,
        tracer_provider=provider,
        clock=watch,
        wall=watch.wall,
    )
    with patch.context() as during:
        during.setattr(life, "ModelThread", lambda **_: thread)
        if mounts is not None:
            during.setattr(mounting, "STORAGE_TIERS", Cellar(mounts))
        await engine.__aenter__()
    try:
        with anyio.fail_after(PATIENCE):
            yield engine
            if engine.is_open:
                await engine._loop.wait_idle()
                assert_idle(engine)
    finally:
        await engine.close()
    assert_nothing_left(engine._tracing)


async def at_peace(engine: AsyncEngine) -> None:
    """Wait until nothing runs and nothing is under way to the tiers or to a span."""
    await engine._loop.wait_idle()
    await until(lambda: at_rest(engine))
    await until(lambda: not engine._tracing._waiting)


def assert_nothing_left(tracing: Tracing) -> None:
    """No request is kept by what traces it."""
    assert (len(tracing._spans), len(tracing._waiting), tracing.live) == (0, 0, 0)


# what every trace keeps


def check(recorder: Recorder, slack: int = SLACK) -> Spans:
    """Every span that began has ended, once, and all of them keep the rules."""
    spans = recorder.spans
    assert Counter(recorder.started) == Counter(span.span_id for span in spans.all)
    check_rules(spans, slack)
    return spans


def check_rules(spans: Spans, slack: int = SLACK) -> None:
    """One trace for each request, parents that exist and enclose, phases without a gap, links to what exists."""
    assert len(spans.by_id) == len(spans.all)
    for span in spans.all:
        assert span.start <= span.end, span
        _check_parent(spans, span)
        assert all(span.start <= event.when <= span.end for event in span.events), span
    for request in spans.requests:
        _check_request(spans, request, slack)
    for step in spans.named(names.STEP):
        assert step.parent_id is None
        _check_step(spans, step)


def _check_parent(spans: Spans, span: ReceivedSpan) -> None:
    if span.parent_id is None:
        assert span.name not in (*names.PHASES, names.PREFILL_CHUNK, names.COW_FORK)
        return
    parent = spans.by_id[span.parent_id]
    assert parent.trace_id == span.trace_id
    if parent.scope == span.scope:  # a caller's span has the time of day
        assert parent.encloses(span), (parent, span)


def _check_request(spans: Spans, request: ReceivedSpan, slack: int) -> None:
    phases = spans.phases(request)
    whole = {phase.name: phase for phase in phases.pop(-1)}
    assert whole.keys() <= {names.ADD_REQUEST, names.FINISH}
    assert 0 <= whole[names.ADD_REQUEST].start - request.start <= slack
    for sample, chain in phases.items():
        for before, after in itertools.pairwise(chain):
            assert 0 <= after.start - before.end <= slack, (sample, before, after)
            assert before.name != after.name
        assert names.FINISH not in whole or whole[names.FINISH].start >= chain[-1].end
    if 0 in phases:
        assert 0 <= phases[0][0].start - whole[names.ADD_REQUEST].end <= slack
    if names.FINISH in whole:
        last = max((chain[-1].end for chain in phases.values()), default=whole[names.ADD_REQUEST].end)
        assert 0 <= whole[names.FINISH].start - last <= slack
        assert 0 <= request.end - whole[names.FINISH].end <= slack


def _check_step(spans: Spans, step: ReceivedSpan) -> None:
    """It links to requests, and what links to it is a part of one of them, at this time."""
    linked = [spans.by_id[link.span_id] for link in step.links]
    assert all(names.OPERATION_NAME in request.attributes for request in linked)
    inside = {each.span_id: request for request in linked for each in spans.within(request)}
    for span in spans.all:
        if step.span_id in spans.linked(span, "step"):
            assert span.span_id in inside
            assert span.attributes[names.STEP_SPAN_ID] == step.span_id
            assert span.attributes[names.STEP_TRACE_ID] == step.trace_id
            assert span.attributes[names.STEP_NUMBER] == step.attributes[names.STEP_NUMBER]
            assert span.start <= step.end
            assert span.end >= step.start


# the life of one request


class Scene(NamedTuple):
    """Ids of the requests of :func:`whole_life`."""

    before: str
    """Whose blocks were evicted."""
    neighbour: str
    """For whom the hero waits."""
    rival: str
    """Who shares a prefix and comes first when blocks are short."""
    hero: str


PREFIX = [3, 1, 4, 1, 5, 9, 2, 6]
"""Two blocks."""
HERO_COMES = 8
BYTES = 32
"""Of a block."""


async def whole_life(patch: pytest.MonkeyPatch, provider: AnyProvider) -> Scene:
    """The hero waits, finds a prefix, evicts, has two samples, is preempted, swapped, comes back and ends."""
    scene = Scene("before", "neighbour", "rival", "hero")
    arrival = anyio.Event()

    async def on_step(number: int) -> None:
        if number == HERO_COMES:
            arrival.set()

    async def hero_comes() -> None:
        await arrival.wait()
        params = SamplingParams(max_tokens=14, n=2, temperature=1.0, seed=7, ignore_eos=True)
        await engine.complete([*PREFIX, 9, 9, 9, 9, 8], params, request_id=scene.hero)

    async def plain(prompt: list[int], max_tokens: int, request_id: str) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        await engine.complete(prompt, params, request_id=request_id)

    settings = {"num_blocks": 12, "max_running": 3, "max_batch_tokens": 16}
    async with traced(patch, provider, mounts={"memory": memory()}, on_step=on_step, settings=settings) as engine:
        await plain(list(range(30, 46)), 4, scene.before)
        await at_peace(engine)
        async with anyio.create_task_group() as work:
            work.start_soon(plain, [*PREFIX, 7, 7, 7, 7], 27, scene.rival)
            work.start_soon(plain, [5], 6, scene.neighbour)
            work.start_soon(hero_comes)
        await at_peace(engine)
    return scene


def check_whole_life(spans: Spans, scene: Scene) -> None:
    """All of it is in the hero's one trace, and leads to the others."""
    hero = spans.request(scene.hero)
    assert {span.trace_id for span in spans.within(hero)} == {hero.trace_id}
    assert hero.status == "UNSET"
    assert hero.attributes[names.RESPONSE_FINISH_REASONS] == ["length", "length"]
    assert hero.attributes[names.USAGE_CACHE_READ] == len(PREFIX)
    assert hero.attributes[names.PREEMPTIONS] == 2
    phases = {sample: [phase.name for phase in chain] for sample, chain in spans.phases(hero).items()}
    assert phases == {
        -1: ["add_request", "finish"],
        0: ["queue", "prefill", "decode", "queue", "load", "decode"],
        1: ["decode", "queue", "prefill", "decode"],
    }
    queue = spans.phases(hero)[0][0]
    assert queue.end - queue.start > 2 * STEP * 1e9
    assert queue.attributes[names.CACHED_TOKENS] == len(PREFIX)
    load = spans.phases(hero)[0][4]
    assert load.attributes[names.OUTCOME] == "complete"
    acts = Counter(span.name for span in spans.within(hero) if span.name in names.ACTS)
    assert acts == {"evict": 6, "cow_fork": 1, "swap_out": 6, "swap_in": 1}
    (swap_in,) = [span for span in spans.below(load) if span.name == names.SWAP_IN]
    assert (swap_in.attributes[names.TIER], swap_in.attributes[names.BLOCKS]) == ("memory", 2)
    events = Counter(event.name for event in hero.events)
    assert events == {"first_token": 1, "fork": 1, "preempt": 2, "resume": 2, "swap_out": 6, "swap_in": 1}
    _check_victims(spans, scene, hero)
    _check_steps(spans, hero)


def _check_victims(spans: Spans, scene: Scene, hero: ReceivedSpan) -> None:
    """Evictions link to those who used the victims last; the first of the hero's took those of ``before``."""
    evictions = [span for span in spans.within(hero) if span.name == names.EVICT]
    owners = [spans.linked(span, "victim_owner") for span in evictions]
    assert all(owners)
    ids = {spans.request(request_id).span_id for request_id in scene}
    assert {owner for each in owners for owner in each} <= ids
    assert owners[0] == [spans.request(scene.before).span_id]
    for span in evictions:
        assert span.attributes[names.REASON] == "allocate"
        assert span.attributes[names.POLICY] == "Lru"
        assert span.attributes[names.TIER] == "device"
        assert span.attributes[names.BYTES] == BYTES * integer(span, names.BLOCKS)


def _check_steps(spans: Spans, hero: ReceivedSpan) -> None:
    """The steps of its prefills are known from both ends, and the first token knows its own."""
    prefills = [span for span in spans.within(hero) if span.name == names.PREFILL]
    steps = [spans.by_id[step] for span in prefills for step in spans.linked(span, "step")]
    assert len(steps) == len(prefills) == 2
    assert all(hero.span_id in {link.span_id for link in step.links} for step in steps)
    (first,) = [event for event in hero.events if event.name == names.FIRST_TOKEN]
    assert first.attributes[names.STEP_SPAN_ID] == steps[0].span_id


def integer(span: ReceivedSpan, name: str) -> int:
    """An attribute of ``span`` that is a number."""
    value = span.attributes[name]
    assert isinstance(value, int)
    return value
