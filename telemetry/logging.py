"""Loggers that leave the host's logging alone, and a limit for events that would repeat a thousand times a second.

No line of Octavo's shows what clients sent or the model answered. Foreign errors may quote it (a tokenizer names the
text that it cannot read), so faults that a request can cause are logged by :func:`fault_fields`: their types and where
they were raised, without a message. The caller who sent the text gets the whole error.
"""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypedDict, cast

import structlog
from opentelemetry import trace

MOST_CAUSES = 8
"""Links of a chain of errors that a line names."""
MOST_FRAMES = 12
"""Calls that a line names of each."""


class Logger(Protocol):
    """What Octavo uses of a structlog logger, whichever wrapper the host has configured."""

    def bind(self, **fields: object) -> Self:
        """A new logger that adds ``fields`` to each event."""

    def debug(self, event: str, **fields: object) -> object: ...

    def info(self, event: str, **fields: object) -> object: ...

    def warning(self, event: str, **fields: object) -> object: ...

    def error(self, event: str, **fields: object) -> object: ...

    def exception(self, event: str, **fields: object) -> object: ...


def get_logger(name: str) -> Logger:
    """A logger called ``name``, made when the object that logs is made, not when its module is imported.

    Where the host has configured structlog, its configuration applies. Where it has not, events go to the standard
    library's logger ``name`` as ``event='...' key=value ...``, which shows warnings and errors unless the host says
    otherwise. Nothing is configured globally in either case.
    """
    if structlog.is_configured():
        return cast("Logger", structlog.get_logger(name).bind(logger=name))
    return cast(
        "Logger",
        structlog.wrap_logger(
            logging.getLogger(name),
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                add_trace_ids,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            context_class=dict,
            cache_logger_on_first_use=True,
        ),
    )


def add_trace_ids(
    _logger: object,
    _method: str,
    event_dict: MutableMapping[str, Any],  # structlog's own type of a processor
) -> MutableMapping[str, Any]:
    """Add ``trace_id`` and ``span_id`` (hex, as in W3C trace context) of the current span, if there is one.

    A structlog processor: hosts that configure structlog themselves can put it in their chain. A line that was bound to
    a request (:func:`bound_to`) keeps the ids of that one.
    """
    if "trace_id" in event_dict:  # of the request that the line is about, which is not what runs now
        return event_dict
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event_dict["trace_id"] = trace.format_trace_id(context.trace_id)
        event_dict["span_id"] = trace.format_span_id(context.span_id)
    return event_dict


class Traced(Protocol):
    """The trace of a request, as far as log lines need to know it."""

    @property
    def trace_id(self) -> str | None:
        """Hex; ``None`` where the request has no trace."""

    @property
    def span_id(self) -> str | None: ...


def bound_to(logger: Logger, request_id: str, request: Traced) -> Logger:
    """``logger`` for lines about a request, with its ids, for where its span is not the current one."""
    fields = {"request_id": request_id, "trace_id": request.trace_id, "span_id": request.span_id}
    return logger.bind(**{name: value for name, value in fields.items() if value is not None})


class FaultFields(TypedDict):
    """What a log line shows of a fault."""

    error: str
    """Its type and those of its causes."""
    raised_at: list[str]
    """The calls that led to it and then to each of its causes, outermost first: ``intake.py:176 _encode``."""


def fault_fields(error: BaseException) -> FaultFields:
    """What failed and where, and nothing of what it worked on: ``logger.error("...", **fault_fields(error))``."""
    chain = list(_causes(error))
    frames = [frame for link in chain for frame in traceback.extract_tb(link.__traceback__, limit=-MOST_FRAMES)]
    return {
        "error": " from ".join(type(link).__name__ for link in chain),
        "raised_at": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
    }


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < MOST_CAUSES:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


class _Seen(NamedTuple):
    since: float
    """When it was last let through."""
    swallowed: int


class RateLimited:
    """Lets an event through at most once per interval and key, and counts what it swallowed meanwhile.

    Memory is bounded: of more than ``max_keys`` keys the one let through longest ago is forgotten, with its count.
    """

    def __init__(self, interval: float, clock: Callable[[], float], *, max_keys: int = 1024) -> None:
        """``interval`` in seconds of ``clock``, which must not run backwards; ``max_keys`` at least 1."""
        self._interval = interval
        self._clock = clock
        self._max_keys = max_keys
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def admit(self, key: str) -> int | None:
        """How many events of ``key`` were swallowed since one was let through; ``None``: swallow this one too."""
        now = self._clock()
        seen = self._seen.get(key)
        if seen is not None and now - seen.since < self._interval:
            self._seen[key] = seen._replace(swallowed=seen.swallowed + 1)
            return None
        self._seen[key] = _Seen(now, 0)
        self._seen.move_to_end(key)
        if len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return seen.swallowed if seen else 0

    def log(self, emit: Callable[..., object], event: str, *, key: str | None = None, **fields: object) -> None:
        """Call ``emit(event, **fields)`` unless ``key`` (by default the event) is over its limit.

        The field ``swallowed`` says how many were, if any: ``limited.log(logger.warning, "tier_slow", tier=name)``.
        """
        swallowed = self.admit(event if key is None else key)
        if swallowed is None:
            return
        if swallowed:
            fields["swallowed"] = swallowed
        emit(event, **fields)
