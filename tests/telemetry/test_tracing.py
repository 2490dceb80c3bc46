from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, NoOpTracerProvider, SpanContext, TraceFlags

from octavo.telemetry import names, tracing
from octavo.telemetry.record import MOST_LINKS, NO_TRACE, Act, Link, NotedRequest, RequestTrace
from octavo.telemetry.tracing import TracerProvider as AnyProvider
from octavo.telemetry.tracing import Tracing, parent_of
from octavo.tests.engine.conftest import FakeClock
from octavo.tests.engine.insight.trace_rig import Picky, Recorder, Spans, assert_nothing_left, recording

TRACE, SPAN = "a" * 32, "b" * 16
SECOND = 10**9


class Setting:
    """Tracing with clocks of the test's, and what it makes. Without an event loop, spans are made at once."""

    def __init__(self, provider: AnyProvider | None = None, *, shows_text: bool = False) -> None:
        own, self.recorder = recording()
        self.clock, self.wall = FakeClock(), FakeClock()
        self.wall.now = 1e9
        self.tracing = Tracing(provider or own, clock=self.clock, wall=self.wall, version="1.2", shows_text=shows_text)

    def begin(self, parent: Context | None = None) -> NotedRequest:
        found = self.tracing.begin(parent or Context(), "chat", "fake")
        assert isinstance(found, NotedRequest)
        return found

    def passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.wall.now += seconds

    @property
    def spans(self) -> Spans:
        assert_nothing_left(self.tracing)
        return self.recorder.spans


def context_of(trace_id: int, span_id: int, *, sampled: bool = True) -> Context:
    span = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(int(sampled)))
    return trace.set_span_in_context(NonRecordingSpan(span), Context())


def ids_of(context: Context) -> tuple[str, str]:
    found = trace.get_current_span(context).get_span_context()
    return trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id)


@pytest.fixture
def current() -> Iterator[SpanContext]:
    """A span of trace 1 that is current."""
    token = otel_context.attach(context_of(1, 2))
    yield trace.get_current_span().get_span_context()
    otel_context.detach(token)


# the parent


def test_headers_say_where_a_request_belongs() -> None:
    found = parent_of({"Traceparent": f"00-{TRACE}-{SPAN}-01", "TRACESTATE": "x=1,y=2"})
    assert ids_of(found) == (TRACE, SPAN)
    state = trace.get_current_span(found).get_span_context().trace_state
    assert dict(state) == {"x": "1", "y": "2"}


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"accept": "*/*"},
        {"traceparent": ""},
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
        {"traceparent": f"ff-{TRACE}-{SPAN}-01"},
        {"traceparent": f"00-{TRACE}-{SPAN}"},
    ],
)
def test_without_a_word_in_the_headers_the_current_span_is_the_parent(
    headers: dict[str, str] | None, current: SpanContext
) -> None:
    assert trace.get_current_span(parent_of(headers)).get_span_context() == current


def test_headers_of_another_trace_win_over_the_current_span(current: SpanContext) -> None:
    assert ids_of(parent_of({"traceparent": f"00-{TRACE}-{SPAN}-01"})) == (TRACE, SPAN)


def test_the_current_span_wins_over_headers_of_its_own_trace(current: SpanContext) -> None:
    """TRACE-06: it is that of the server which took the headers, and closer."""
    found = parent_of({"traceparent": f"00-{1:032x}-{SPAN}-01"})
    assert trace.get_current_span(found).get_span_context() == current


# requests


def test_a_request_has_the_times_and_the_words_that_were_noted() -> None:
    setting = Setting()
    request = setting.begin()
    setting.passes(2.0)
    track = request.track(3)
    track.enter(names.QUEUE, {names.BLOCKS: 4})
    setting.passes(1.0)
    request.event(names.FIRST_TOKEN)
    track.act(names.EVICT, setting.clock.now - 0.5, setting.clock.now, {names.BLOCKS: 2})
    request.describe({names.TENANT: "t"})
    setting.passes(1.0)
    request.finish("Sad", "so it went")
    (whole,) = setting.spans.requests
    assert (whole.start, whole.end) == (SECOND * SECOND, SECOND * SECOND + 4 * SECOND)
    assert (whole.name, whole.scope, whole.status, whole.status_text) == ("chat fake", "octavo", "ERROR", "so it went")
    assert whole.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "octavo.tenant": "t",
        "error.type": "Sad",
    }
    assert [(event.name, event.when - whole.start) for event in whole.events] == [("first_token", 3 * SECOND)]
    preparing, queue = setting.spans.below(whole)
    assert (preparing.name, preparing.end - whole.start) == ("add_request", 2 * SECOND)
    assert (queue.name, queue.attributes) == ("queue", {names.BLOCKS: 4, names.SAMPLE: 3})
    (evict,) = setting.spans.below(queue)
    assert (evict.start - whole.start, evict.end - whole.start) == (2.5 * SECOND, 3 * SECOND)


def test_the_time_of_day_may_jump_and_children_stay_within_their_parents() -> None:
    """The wall clock is set back, and others begin, while a request runs: one offset holds for all its spans."""
    setting = Setting()
    first = setting.begin()
    first.track(0).enter(names.DECODE)
    setting.passes(1.0)
    setting.wall.now -= 3600.0
    setting.begin().finish()
    setting.passes(1.0)
    first.finish()
    later, earlier = setting.spans.requests
    assert earlier.start - later.start == 3599 * SECOND
    assert earlier.end - earlier.start == 2 * SECOND
    assert all(earlier.encloses(child) for child in setting.spans.below(earlier))


def test_the_parent_and_a_fork_s_source_are_kept() -> None:
    setting = Setting()
    source = setting.begin(context_of(1, 2))
    fork = setting.tracing.begin(Context(), "chat", "fake", source.origin)
    source.finish()
    fork.finish()
    below, other = setting.spans.requests
    assert (below.trace_id, below.parent_id) == (f"{1:032x}", f"{2:016x}")
    assert other.parent_id is None
    assert setting.spans.linked(other, "forked_from") == [below.span_id]


@pytest.mark.parametrize("provider", [NoOpTracerProvider(), trace.ProxyTracerProvider(), None])
def test_nobody_makes_spans(provider: AnyProvider | None) -> None:
    off = Tracing(provider, clock=FakeClock(), wall=FakeClock())
    assert not off.is_on
    assert off.begin(context_of(1, 2), "chat", "fake") is NO_TRACE
    with off.acting(names.SNAPSHOT) as shown:
        shown[names.BLOCKS] = 1
    off.background.act(names.EVICT, 1.0, 2.0, {})
    assert not off.background.is_on
    assert_nothing_left(off)


@pytest.mark.parametrize("sampler", [None, ALWAYS_OFF])
def test_a_request_that_is_not_sampled_knows_its_trace_and_notes_nothing(sampler: Sampler | None) -> None:
    setting = Setting(TracerProvider(sampler=sampler, shutdown_on_exit=False))
    found = setting.tracing.begin(context_of(0xA, 2, sampled=False), "chat", "fake")
    assert type(found) is RequestTrace
    assert found.trace_id == f"{0xA:032x}"
    assert not found.is_on
    assert_nothing_left(setting.tracing)


def test_as_many_requests_are_traced_as_the_sampler_wants() -> None:
    setting = Setting(TracerProvider(sampler=TraceIdRatioBased(0.25), shutdown_on_exit=False))
    traces = [setting.tracing.begin(Context(), "chat", "fake") for _ in range(400)]
    assert 50 < sum(found.is_on for found in traces) < 150
    assert setting.tracing.live == sum(found.is_on for found in traces)
    for found in traces:
        found.finish()
    assert_nothing_left(setting.tracing)


# steps


def test_steps_and_what_was_done_in_them_know_each_other() -> None:
    setting = Setting()
    first, second = setting.begin(), setting.begin()
    track = first.track(0)
    track.enter(names.PREFILL)
    for number in (1, 2):
        setting.tracing.step_number = number
        setting.passes(1.0)
        step = setting.tracing.step(setting.clock.now - 0.5, setting.clock.now, {names.ROWS: 2}, [first, second])
        track.prefilled(step, 5)
    first.event(names.FIRST_TOKEN, {}, step)
    first.finish()
    second.finish()
    spans = setting.spans
    (request, _), steps = spans.requests, spans.named(names.STEP)
    assert [made.attributes[names.STEP_NUMBER] for made in steps] == [1, 2]
    assert {made.parent_id for made in steps} == {None}
    ids = [each.span_id for each in spans.requests]
    assert all(sorted(link.span_id for link in made.links) == sorted(ids) for made in steps)
    chunks = spans.named(names.PREFILL_CHUNK)
    for chunk, made in zip(chunks, steps, strict=True):
        assert spans.linked(chunk, "step") == [made.span_id]
        assert chunk.attributes[names.STEP_TRACE_ID] == made.trace_id
        assert chunk.attributes[names.STEP_SPAN_ID] == made.span_id
    (event,) = request.events
    assert event.attributes[names.STEP_SPAN_ID] == steps[1].span_id


def test_a_step_links_to_so_many_requests_and_counts_the_others() -> None:
    setting = Setting()
    requests = [setting.begin() for _ in range(MOST_LINKS + 5)]
    setting.tracing.step(1.0, 2.0, {}, requests)
    for request in requests:
        request.finish()
    (step,) = setting.spans.named(names.STEP)
    assert (len(step.links), step.attributes[names.LINKS_DROPPED]) == (MOST_LINKS, 5)
    assert setting.tracing.dropped["link"] == 5


# acts without a request


def test_an_act_is_below_its_caller_or_a_trace_of_its_own() -> None:
    setting = Setting()
    setting.tracing.block_bytes = 32
    with setting.tracing.acting(names.SNAPSHOT, context_of(1, 2)) as shown:
        setting.passes(2.0)
        shown[names.BLOCKS] = 3
    with setting.tracing.acting(names.PERSIST):
        pass
    setting.tracing.background.act(names.EVICT, 0.0, 1.0, {names.BLOCKS: 1}, [Link(SpanContext(3, 4, False), "cause")])
    spans = setting.spans
    (snapshot,), (persist,), (evict,) = (spans.named(name) for name in (names.SNAPSHOT, names.PERSIST, names.EVICT))
    assert (snapshot.trace_id, snapshot.parent_id) == (f"{1:032x}", f"{2:016x}")
    assert snapshot.end - snapshot.start == 2 * SECOND
    assert snapshot.attributes == {names.BLOCKS: 3, names.BYTES: 96}
    assert (persist.parent_id, evict.parent_id) == (None, None)
    assert [link.trace_id for link in evict.links] == [f"{3:032x}"]


def test_an_act_is_not_below_what_happens_to_be_current(current: SpanContext) -> None:
    setting = Setting()
    with setting.tracing.acting(names.PERSIST):
        setting.tracing.background.act(names.EVICT, 0.0, 1.0, {})
    setting.begin().finish()
    assert {span.parent_id for span in setting.spans.all if span.name != names.ADD_REQUEST} == {None}


def test_an_act_that_fails_says_so_and_nothing_more() -> None:
    setting = Setting()
    with pytest.raises(ValueError, match="secret"), setting.tracing.acting(names.SNAPSHOT):
        raise ValueError("secret")
    (snapshot,) = setting.spans.all
    assert (snapshot.status, snapshot.attributes) == ("ERROR", {names.ERROR_TYPE: "ValueError"})
    assert (snapshot.status_text, snapshot.events) == ("ValueError", ())


# when spans are made


@pytest.mark.asyncio
async def test_spans_are_made_when_the_event_loop_has_time() -> None:
    setting = Setting()
    setting.begin().finish()
    assert setting.recorder.ended == []
    await asyncio.sleep(0)
    assert len(setting.spans.requests) == 1


@pytest.mark.asyncio
async def test_the_event_loop_gets_its_turn_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time at all for a slice there is still one span in each."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(tracing, "perf_counter", lambda: next(ticks) * tracing.SLICE_SECONDS * 0.6)
    setting = Setting()
    for number in range(5):
        setting.tracing.note(Act(f"act {number}", 0.0, 1.0, {}))
    made = []
    while setting.tracing._waiting:
        made.append(len(setting.recorder.ended))
        await asyncio.sleep(0)
    assert made == [0, 1, 2, 3, 4]
    assert [span.name for span in setting.recorder.ended] == [f"act {number}" for number in range(5)]


@pytest.mark.asyncio
async def test_only_so_many_wait_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 3)
    setting = Setting()
    requests = [setting.begin() for _ in range(5)]
    for request in requests:
        request.finish()
    setting.tracing.note(Act(names.EVICT, 0.0, 1.0, {}))
    assert setting.tracing.dropped["queue"] == 2 + 1  # the preparation of two, and the act
    assert len(setting.recorder.spans.requests) == 2, "their own spans had been begun: they are ended at once"
    setting.tracing.flush()
    assert len(setting.spans.requests) == 5
    await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_flush_leaves_nothing() -> None:
    setting = Setting()
    setting.begin().finish()
    setting.tracing.flush()
    assert len(setting.spans.requests) == 1
    await asyncio.sleep(0)
    assert len(setting.recorder.started) == len(set(setting.recorder.started))


# tracers and processors that fail


def fragile(*only: str) -> tuple[Setting, Recorder]:
    provider, recorder = TracerProvider(sampler=Picky(*only), shutdown_on_exit=False), Recorder()
    provider.add_span_processor(recorder)
    return Setting(provider), recorder


def test_a_request_whose_span_cannot_be_begun_is_not_traced() -> None:
    setting, _ = fragile()
    assert setting.tracing.begin(Context(), "chat", "fake") is NO_TRACE
    assert setting.tracing.dropped == {"error": 1}
    assert_nothing_left(setting.tracing)


def test_a_phase_that_fails_costs_no_other_and_the_request_says_all() -> None:
    setting, recorder = fragile(names.QUEUE)
    request = setting.begin()
    track = request.track(0)
    track.enter(names.QUEUE)
    track.act(names.EVICT, 0.0, 1.0, {})
    track.enter(names.DECODE)
    request.event(names.FIRST_TOKEN)
    request.describe({names.TENANT: "t"})
    request.finish("Sad", "why")
    spans = recorder.spans
    (whole,) = spans.requests
    assert [span.name for span in spans.below(whole)] == ["add_request", "decode"]
    assert (whole.status, whole.attributes[names.TENANT], whole.events[0].name) == ("ERROR", "t", "first_token")
    assert setting.tracing.dropped["error"] == 1
    assert_nothing_left(setting.tracing)


class EndsBadly(SpanProcessor):
    def on_end(self, span: object) -> None:
        raise RuntimeError("a faulty exporter")


def test_a_processor_that_fails_at_every_end_is_counted_at_every_end() -> None:
    provider, recorder = recording()
    provider.add_span_processor(EndsBadly())
    setting = Setting(provider)
    request = setting.begin()
    track = request.track(0)
    track.enter(names.DECODE)
    track.act(names.EVICT, 0.0, 1.0, {})
    request.finish()
    with setting.tracing.acting(names.SNAPSHOT):
        pass
    setting.tracing.step(0.0, 1.0, {}, [])
    assert len(recorder.spans.all) == len(recorder.started) == setting.tracing.dropped["error"] == 6
    assert_nothing_left(setting.tracing)


class StartsBadly(SpanProcessor):
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("a faulty processor")


def test_a_processor_that_fails_at_every_start_harms_nobody() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(StartsBadly())
    setting = Setting(provider)
    assert setting.tracing.begin(Context(), "chat", "fake") is NO_TRACE
    with setting.tracing.acting(names.SNAPSHOT):
        pass
    assert setting.tracing.dropped["error"] == 2
