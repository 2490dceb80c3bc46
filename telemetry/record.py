"""Records: what happened to a request, noted in plain values while it happens.

Making spans takes time, and the loop has none between two steps. So it only notes, here, and :mod:`.tracing` makes
spans of the notes while the model computes. A request that is not traced has the same objects, which note nothing: the
path through the engine is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from . import names

Value: TypeAlias = str | bool | int | float | Sequence[str]
Origin: TypeAlias = SpanContext
"""A span that others link to."""
Attributes: TypeAlias = Mapping[str, Value]
NOTHING: Attributes = {}

MOST_TRACKS = 64
"""Samples of one request that get spans of their own; of the others only the counts are known."""
MOST_STAGES = 512
"""Phases noted for one request, which may be preempted again and again; those beyond are counted."""
MOST_ACTS = 512
"""Acts noted for one request; those beyond are counted."""
MOST_EVENTS = 100
"""Events noted for one request; the SDK keeps 128 by default."""
MOST_LINKS = 32


class Link(NamedTuple):
    """A span that this one has to do with."""

    to: Origin
    relation: str


class Step:
    """One step of the loop, with the traced requests in it: ``origins``. ``origin``: its span, once that was made."""

    __slots__ = ("attributes", "end", "number", "origin", "origins", "start")

    def __init__(
        self, number: int, start: float, end: float, attributes: Attributes, origins: Sequence[Origin]
    ) -> None:
        self.number = number
        self.start = start
        self.end = end
        self.attributes = attributes
        self.origins = origins
        self.origin: Origin | None = None


class Act(NamedTuple):
    """Something that was done for a request, from ``start`` to ``end`` (seconds of the engine's clock)."""

    name: str
    start: float
    end: float
    attributes: Attributes
    links: Sequence[Link] = ()
    step: Step | None = None
    """In which step."""


class Event(NamedTuple):
    """Something that happened at one moment."""

    name: str
    when: float
    attributes: Attributes
    step: Step | None = None


class Stage:
    """One phase of one sample."""

    __slots__ = ("acts", "attributes", "chunks", "end", "first_step", "is_kept", "last_step", "name", "start", "tokens")

    def __init__(self, name: str, start: float, first_step: int, attributes: Attributes) -> None:
        self.name = name
        self.start = self.end = start
        self.first_step = self.last_step = first_step
        self.attributes = dict(attributes)
        self.acts: list[Act] = []
        self.chunks: list[Act] = []
        """Parts of a prefill, each of one step."""
        self.tokens = 0
        """Computed in all of its parts."""
        self.is_kept = True
        """Whether it gets a span."""


class Desk(Protocol):
    """Where notes are taken."""

    step_number: int
    """Of the newest step that was committed."""

    def clock(self) -> float:
        """Seconds."""

    def finished(self, request: NotedRequest) -> None:
        """``request`` is over: its notes are complete."""

    def note(self, act: Act) -> None:
        """Something was done for a request that is over."""


class Track:
    """The phases of one sample, one after the other without a gap. This one notes nothing."""

    __slots__ = ()

    @property
    def is_on(self) -> bool:
        """Whether notes are taken; what costs something to find out is asked for only then."""
        return False

    @property
    def origin(self) -> Origin | None:
        """The request's span, for those who link to it."""
        return None

    def enter(self, phase: str, attributes: Attributes = NOTHING) -> None:
        """The next phase begins now, and the one before ends. Nothing happens when it is in this one already."""

    def leave(self) -> None:
        """The last phase ends now."""

    def describe(self, attributes: Attributes) -> None:
        """Put these on the phase."""

    def act(self, name: str, start: float, end: float, attributes: Attributes, links: Sequence[Link] = ()) -> None:
        """Something was done for the sample."""

    def event(self, name: str, attributes: Attributes = NOTHING) -> None:
        """Something happened to the sample."""

    def prefilled(self, step: Step, tokens: int) -> None:
        """``tokens`` of the sample that are not its newest were computed in ``step``."""


NO_TRACK = Track()


class RequestTrace:
    """What is noted of one request. This one notes nothing; it knows its ids when the caller's trace is not sampled."""

    shows_text = False
    """Whether the host wants prompts and answers in its spans."""

    def __init__(self, origin: Origin | None = None) -> None:
        self.origin = origin
        """The request's own span."""

    @property
    def is_on(self) -> bool:
        """Whether the request is traced: sampled, and not over."""
        return False

    @property
    def trace_id(self) -> str | None:
        """Hex, as in W3C trace context; also of a trace that is not sampled."""
        return format_trace_id(self.origin.trace_id) if self.origin is not None else None

    @property
    def span_id(self) -> str | None:
        return format_span_id(self.origin.span_id) if self.origin is not None else None

    def track(self, index: int) -> Track:
        """The track of the sample ``index``."""
        return NO_TRACK

    def describe(self, attributes: Attributes) -> None:
        """Put these on the request's span."""

    def event(self, name: str, attributes: Attributes = NOTHING, step: Step | None = None) -> None:
        """Something happened to the request."""

    def begin_finish(self) -> None:
        """The last token is there or the end was decided."""

    def finish(self, error_type: str | None = None, description: str = "") -> None:
        """The request is over; ``error_type``: it failed, or was aborted."""


NO_TRACE = RequestTrace()


class NotedRequest(RequestTrace):
    """A request that is traced."""

    def __init__(self, origin: Origin, desk: Desk, *, shows_text: bool = False) -> None:
        super().__init__(origin)
        self.shows_text = shows_text
        self.desk = desk
        self._as_cause = Link(origin, "cause")
        self.start = self.end = desk.clock()
        self.stages: list[tuple[int, Stage]] = []
        """With the sample that each is of; -1: of the request as a whole."""
        self.acts: list[Act] = []
        """Done between phases."""
        self.events: list[Event] = []
        self.attributes: dict[str, Value] = {}
        self.error_type: str | None = None
        self.error_text = ""
        self.dropped = 0
        """Spans that were too many."""
        self.events_dropped = 0
        self.is_over = False
        self._acts = 0
        self._tracks: dict[int, NotedTrack] = {}
        self._whole = NotedTrack(self, -1)
        self._whole.enter(names.ADD_REQUEST)

    @property
    def is_on(self) -> bool:
        return not self.is_over

    def track(self, index: int) -> Track:
        self._whole.leave()
        known = self._tracks.get(index)
        if known is None:
            if len(self._tracks) >= MOST_TRACKS:
                self.dropped += 1
                return NO_TRACK
            known = self._tracks[index] = NotedTrack(self, index)
        return known

    @property
    def spans(self) -> int:
        """How many it is going to have."""
        return 1 + len(self.stages) + self._acts

    def describe(self, attributes: Attributes) -> None:
        self.attributes.update(attributes)

    def event(self, name: str, attributes: Attributes = NOTHING, step: Step | None = None) -> None:
        if self.is_over:  # a fork of one that ended a moment before, say
            return
        if len(self.events) < MOST_EVENTS:
            self.events.append(Event(name, self.desk.clock(), attributes, step))
        else:
            self.events_dropped += 1

    def begin_finish(self) -> None:
        for track in self._tracks.values():
            track.leave()
        self._whole.enter(names.FINISH)

    def finish(self, error_type: str | None = None, description: str = "") -> None:
        if self.is_over:
            return
        for track in self._tracks.values():
            track.leave()
        self._whole.leave()
        self.is_over = True
        self.end = self.desk.clock()
        self.error_type, self.error_text = error_type, description
        self._tracks.clear()
        self.desk.finished(self)

    def note_stage(self, index: int, stage: Stage) -> None:
        """Keep a phase that the sample ``index`` enters; the last one of the whole request always."""
        if len(self.stages) < MOST_STAGES or index < 0:
            self.stages.append((index, stage))
        else:
            stage.is_kept = False
            self.dropped += 1

    def note(self, act: Act, stage: Stage | None) -> None:
        """Keep ``act``, below ``stage`` if it is given."""
        if self.is_over:
            self.desk.note(act._replace(links=(*act.links, self._as_cause)))
        elif self._acts >= MOST_ACTS or (stage is not None and not stage.is_kept):
            self.dropped += 1
        else:
            self._acts += 1
            (self.acts if stage is None else stage.acts).append(act)

    def note_chunk(self, chunk: Act, stage: Stage) -> None:
        """Keep a part of the prefill ``stage``."""
        if self._acts >= MOST_ACTS or not stage.is_kept:
            self.dropped += 1
        else:
            self._acts += 1
            stage.chunks.append(chunk)


class NotedTrack(Track):
    """The track of a sample that is traced."""

    __slots__ = ("_index", "_request", "_stage")

    def __init__(self, request: NotedRequest, index: int) -> None:
        self._request = request
        self._index = index
        self._stage: Stage | None = None

    @property
    def is_on(self) -> bool:
        return True

    @property
    def origin(self) -> Origin | None:
        return self._request.origin

    def enter(self, phase: str, attributes: Attributes = NOTHING) -> None:
        stage = self._stage
        if self._request.is_over or (stage is not None and stage.name == phase):
            return
        desk = self._request.desk
        now, number = desk.clock(), desk.step_number
        if stage is not None:
            stage.end, stage.last_step = now, number
        self._stage = Stage(phase, now, number + 1, attributes)
        self._request.note_stage(self._index, self._stage)

    def leave(self) -> None:
        if self._stage is not None:
            desk = self._request.desk
            self._stage.end, self._stage.last_step = desk.clock(), desk.step_number
            self._stage = None

    def describe(self, attributes: Attributes) -> None:
        if self._stage is not None:
            self._stage.attributes.update(attributes)

    def act(self, name: str, start: float, end: float, attributes: Attributes, links: Sequence[Link] = ()) -> None:
        self._request.note(Act(name, start, end, attributes, links), self._stage)
        # they are spans already, and must not crowd out what is told by events alone
        if name in (names.SWAP_OUT, names.SWAP_IN) and len(self._request.events) < MOST_EVENTS // 2:
            self._request.event(name, attributes)

    def event(self, name: str, attributes: Attributes = NOTHING) -> None:
        self._request.event(name, {names.SAMPLE: self._index, **attributes})

    def prefilled(self, step: Step, tokens: int) -> None:
        if self._stage is not None:
            self._stage.tokens += tokens
            start = max(step.start, self._stage.start)
            chunk = Act(names.PREFILL_CHUNK, start, step.end, {names.TOKENS: tokens}, (), step)
            self._request.note_chunk(chunk, self._stage)
