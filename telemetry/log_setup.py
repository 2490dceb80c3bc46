"""Log set-up: one call for an application that has no logging of its own. The library never makes it."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

from ..errors import InvalidRequest
from .logging import add_trace_ids

LIBRARY = "octavo"
FIRST = ("timestamp", "level", "logger", "event")
Format = Literal["json", "console"]


class _Handler(logging.StreamHandler[TextIO]):
    """Known by its type, so that a second call replaces it."""


def configure(format: Format = "json", level: str = "INFO", stream: TextIO | None = None) -> None:  # noqa: A002  # apt
    """Write log lines to ``stream`` (standard error): one JSON object each, or coloured for people to read.

    Configures structlog for the whole process, on top of the standard library's loggers, and puts one handler on the
    root logger: lines of other libraries come out in the same form, and handlers of the host's own get every line, too.
    Octavo's lines are shown from ``level`` up; the levels of all others stay as they are. Each line has ``timestamp``
    (ISO, UTC), ``level``, ``logger``, ``event`` and, where it is about a request, ``request_id``, ``trace_id`` and
    ``span_id``. Call it before engines are opened. A second call replaces the first.

    :raises InvalidRequest: the format or the level is unknown.
    """
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise InvalidRequest(f"level is {level!r}; choose one of {', '.join(known)}")
    if format not in {"json", "console"}:
        raise InvalidRequest(f"format is {format!r}; choose json or console")
    target = sys.stderr if stream is None else stream
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_common(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a cached logger would keep the format of the first call
    )
    _replace_handler(_Handler(target), _renderers(format, colors=target.isatty()))
    logging.getLogger(LIBRARY).setLevel(level.upper())


def _common() -> list[Processor]:
    """What every line goes through, ours and those of other libraries."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        add_trace_ids,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(format: Format, *, colors: bool) -> Sequence[Processor]:  # noqa: A002
    """Tracebacks are plain: the decorated ones show local variables, and with them what clients sent."""
    plain = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if format == "json":
        return [plain, structlog.processors.format_exc_info, _in_order, structlog.processors.JSONRenderer()]
    return [
        plain,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def _in_order(
    _logger: object,
    _method: str,
    line: MutableMapping[str, Any],  # structlog's own type of a line
) -> MutableMapping[str, Any]:
    """What every line has comes first."""
    return {name: line[name] for name in sorted(line, key=_rank)}


def _rank(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _replace_handler(handler: _Handler, renderers: Sequence[Processor]) -> None:
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_common(), processors=renderers, keep_exc_info=False)
    )
    root = logging.getLogger()
    for earlier in [known for known in root.handlers if isinstance(known, _Handler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
