from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanContext, TraceFlags

from octavo.telemetry import names, record
from octavo.telemetry.record import NO_TRACE, NO_TRACK, Act, Link, NotedRequest, Step, Track

ORIGIN = SpanContext(7, 9, is_remote=False, trace_flags=TraceFlags(1))


class Desk:
    """Takes notes; every look at its clock takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_number = 0
        self.done: list[NotedRequest] = []
        self.late: list[Act] = []

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def finished(self, request: NotedRequest) -> None:
        self.done.append(request)

    def note(self, act: Act) -> None:
        self.late.append(act)


def begun() -> tuple[NotedRequest, Desk]:
    desk = Desk()
    return NotedRequest(ORIGIN, desk), desk


def phases(request: NotedRequest, index: int = 0) -> list[tuple[str, float, float]]:
    return [(stage.name, stage.start, stage.end) for sample, stage in request.stages if sample == index]


def test_phases_follow_each_other_without_a_gap() -> None:
    request, _ = begun()
    track = request.track(0)
    for phase in (names.QUEUE, names.PREFILL, names.DECODE):
        track.enter(phase)
    track.leave()
    (queue, prefill, decode) = phases(request)
    assert queue[2] == prefill[1] < prefill[2] == decode[1] < decode[2]
    assert phases(request, -1) == [(names.ADD_REQUEST, 2.0, 3.0)]


def test_a_phase_that_it_is_in_already_goes_on() -> None:
    request, _ = begun()
    track = request.track(0)
    track.enter(names.DECODE)
    track.enter(names.DECODE)
    assert [name for name, *_ in phases(request)] == [names.DECODE]


def test_a_phase_knows_its_steps_and_what_is_said_of_it() -> None:
    request, desk = begun()
    track = request.track(0)
    desk.step_number = 4
    track.enter(names.DECODE, {names.BLOCKS: 1})
    track.describe({names.OUTCOME: "well"})
    desk.step_number = 9
    track.leave()
    track.describe({names.OUTCOME: "too late"})
    (_, stage) = request.stages[-1]
    assert (stage.first_step, stage.last_step) == (5, 9)
    assert stage.attributes == {names.BLOCKS: 1, names.OUTCOME: "well"}


def test_acts_are_below_the_phase_or_the_request() -> None:
    request, _ = begun()
    track = request.track(0)
    track.act(names.EVICT, 1.0, 2.0, {})
    track.enter(names.DECODE)
    track.act(names.COW_FORK, 3.0, 4.0, {})
    assert [act.name for act in request.acts] == [names.EVICT]
    assert [act.name for act in request.stages[-1][1].acts] == [names.COW_FORK]


def test_copies_are_events_of_the_request_too() -> None:
    request, _ = begun()
    track = request.track(0)
    track.act(names.SWAP_OUT, 1.0, 2.0, {names.BLOCKS: 2})
    track.act(names.EVICT, 1.0, 2.0, {})
    track.event(names.PREEMPT, {names.KIND: "swap"})
    assert [(event.name, dict(event.attributes)) for event in request.events] == [
        (names.SWAP_OUT, {names.BLOCKS: 2}),
        (names.PREEMPT, {names.KIND: "swap", names.SAMPLE: 0}),
    ]


def test_chunks_are_no_longer_than_their_phase() -> None:
    request, desk = begun()
    track = request.track(0)
    desk.now = 10.0
    track.enter(names.PREFILL)
    track.prefilled(Step(1, 5.0, 12.0, {}, []), 3)
    (chunk,) = request.stages[-1][1].chunks
    assert (chunk.start, chunk.end, chunk.attributes[names.TOKENS]) == (11.0, 12.0, 3)
    track.leave()
    track.prefilled(Step(2, 12.0, 13.0, {}, []), 3)
    assert len(request.stages[-1][1].chunks) == 1


def test_what_comes_when_it_is_over_links_to_it() -> None:
    request, desk = begun()
    track = request.track(0)
    track.enter(names.DECODE)
    request.finish()
    track.act(names.SWAP_OUT, 20.0, 21.0, {}, [Link(SpanContext(1, 2, is_remote=False), "victim_owner")])
    (late,) = desk.late
    assert [link.relation for link in late.links] == ["victim_owner", "cause"]
    assert late.links[1].to == ORIGIN
    track.enter(names.QUEUE)
    track.event(names.PREEMPT)
    assert (request.events, request.acts) == ([], [])
    assert [name for name, *_ in phases(request)] == [names.DECODE]


def test_it_ends_once() -> None:
    request, desk = begun()
    request.track(0).enter(names.QUEUE)
    request.begin_finish()
    request.begin_finish()
    request.finish("aborted", "why")
    request.finish("other")
    assert desk.done == [request]
    assert (request.error_type, request.error_text, request.is_on) == ("aborted", "why", False)
    assert [name for name, *_ in phases(request, -1)] == [names.ADD_REQUEST, names.FINISH]
    assert all(request.start <= stage.start <= stage.end <= request.end for _, stage in request.stages)


def test_a_request_that_fails_at_once_is_all_preparation() -> None:
    request, _ = begun()
    request.finish("InvalidRequest", "no")
    assert [stage.name for _, stage in request.stages] == [names.ADD_REQUEST]


def fill_acts(request: NotedRequest) -> None:
    request.track(0).act(names.EVICT, 1.0, 2.0, {})


def fill_chunks(request: NotedRequest) -> None:
    track = request.track(0)
    track.enter(names.PREFILL)
    track.prefilled(Step(1, 1.0, 2.0, {}, []), 1)


def fill_events(request: NotedRequest) -> None:
    request.event(names.PREEMPT)


def fill_stages(request: NotedRequest) -> None:
    track = request.track(0)
    track.leave()
    track.enter(names.QUEUE)


@pytest.mark.parametrize(
    ("bound", "fill"),
    [
        (record.MOST_ACTS, fill_acts),
        (record.MOST_ACTS, fill_chunks),
        (record.MOST_EVENTS, fill_events),
        (record.MOST_STAGES, fill_stages),
    ],
)
def test_what_is_beyond_the_bounds_is_counted(bound: int, fill: Callable[[NotedRequest], None]) -> None:
    request, _ = begun()
    for _ in range(bound + 7):
        fill(request)
    kept = [
        *request.acts,
        *request.events,
        *(chunk for _, stage in request.stages for chunk in stage.chunks),
        *(stage for _, stage in request.stages if stage.name == names.QUEUE),
    ]
    before = 1 if fill is fill_stages else 0  # the preparation is a phase, too
    dropped = request.events_dropped if fill is fill_events else request.dropped
    assert (len(kept), dropped) == (bound - before, 7 + before)
    assert request.events_dropped + request.dropped == dropped  # an event is no span
    request.begin_finish()
    assert request.stages[-1][1].name == names.FINISH  # however many there were


def test_only_so_many_samples_have_tracks() -> None:
    request, _ = begun()
    tracks = [request.track(index) for index in range(record.MOST_TRACKS + 3)]
    assert tracks[record.MOST_TRACKS :] == [NO_TRACK] * 3
    assert request.track(0) is tracks[0]
    assert NO_TRACK not in tracks[: record.MOST_TRACKS]


def test_what_is_off_notes_nothing_and_knows_nothing() -> None:
    track = NO_TRACE.track(0)
    assert track is NO_TRACK
    assert not (track.is_on)
    assert not (NO_TRACE.is_on)
    assert not (NO_TRACE.shows_text)
    assert (track.origin, NO_TRACE.origin, NO_TRACE.trace_id, NO_TRACE.span_id) == (None, None, None, None)
    track.enter(names.QUEUE)
    track.act(names.EVICT, 1.0, 2.0, {})
    track.event(names.PREEMPT)
    track.describe({})
    track.prefilled(Step(1, 1.0, 2.0, {}, []), 1)
    track.leave()
    NO_TRACE.describe({})
    NO_TRACE.event(names.FORK)
    NO_TRACE.begin_finish()
    NO_TRACE.finish("error")
    assert not hasattr(track, "__dict__")  # there is no place for a note


def test_ids_are_as_in_a_traceparent() -> None:
    request, _ = begun()
    assert (request.trace_id, request.span_id) == (f"{7:032x}", f"{9:016x}")


Doing = Callable[[NotedRequest, Track], None]
DEEDS: list[Doing] = [
    lambda _, track: track.enter(names.QUEUE),
    lambda _, track: track.enter(names.PREFILL),
    lambda _, track: track.enter(names.DECODE),
    lambda _, track: track.leave(),
    lambda _, track: track.event(names.PREEMPT),
    lambda request, _: request.event(names.FIRST_TOKEN),
    lambda request, _: request.begin_finish(),
    lambda request, _: request.finish("aborted"),
]


@given(st.lists(st.tuples(st.sampled_from(range(3)), st.sampled_from(DEEDS)), max_size=40))
def test_whatever_happens_the_times_are_in_order(deeds: list[tuple[int, Doing]]) -> None:
    """Everything lies within the request, the phases of one sample do not overlap, and it is handed over once."""
    request, desk = begun()
    for index, do in deeds:
        do(request, request.track(index))
    request.finish()
    assert desk.done == [request]
    assert all(request.start <= stage.start <= stage.end <= request.end for _, stage in request.stages)
    assert all(request.start <= event.when <= request.end for event in request.events)
    for index in range(-1, 3):
        chain = phases(request, index)
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(chain))
