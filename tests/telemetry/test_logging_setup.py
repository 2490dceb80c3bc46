from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
import structlog
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from octavo.errors import InvalidRequest
from octavo.telemetry import configure_logging
from octavo.telemetry.log_setup import _Handler
from octavo.telemetry.logging import bound_to, get_logger
from octavo.telemetry.record import NO_TRACE, RequestTrace

SPAN = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@pytest.fixture(autouse=True)
def logging_of_the_process() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("octavo")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_is_one_object_with_its_time_level_logger_and_event_first() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    get_logger("octavo.engine").warning("evicted\nmore", blocks=3, tier="disk")
    [line] = lines(stream)
    assert list(line)[:4] == ["timestamp", "level", "logger", "event"]
    when = datetime.fromisoformat(str(line.pop("timestamp")))
    assert when.utcoffset() == timedelta(0)
    assert line == {
        "level": "warning",
        "logger": "octavo.engine",
        "event": "evicted\nmore",
        "blocks": 3,
        "tier": "disk",
    }


def test_lines_for_people_have_the_same_in_words() -> None:
    stream = io.StringIO()
    configure_logging("console", stream=stream)
    get_logger("octavo.engine").warning("evicted", blocks=3)
    [line] = stream.getvalue().splitlines()
    assert "evicted" in line
    assert "blocks=3" in line
    assert "octavo.engine" in line
    assert "\x1b" not in line  # colours are for terminals


def test_lines_of_other_libraries_come_in_the_same_form() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("redis").warning("lost %s", "a connection", extra={"attempt": 2})
    [line] = lines(stream)
    assert (line["event"], line["logger"], line["level"], line["attempt"]) == (
        "lost a connection",
        "redis",
        "warning",
        2,
    )


def test_the_level_is_that_of_our_lines_alone() -> None:
    stream = io.StringIO()
    configure_logging(level="debug", stream=stream)
    get_logger("octavo.engine").debug("shown")
    logging.getLogger("redis").info("hidden")
    assert [line["event"] for line in lines(stream)] == ["shown"]
    configure_logging(level="ERROR", stream=stream)
    get_logger("octavo.engine").warning("hidden")
    assert len(lines(stream)) == 1


def test_a_second_call_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    log = None
    for stream in (first, second):
        configure_logging(stream=stream)
        log = log or get_logger("octavo.engine")
    assert log is not None
    log.warning("once")
    assert (first.getvalue(), len(lines(second))) == ("", 1)
    assert len([handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]) == 1


def test_handlers_of_the_host_get_every_line_too(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging(stream=io.StringIO())
    get_logger("octavo.engine").warning("evicted", blocks=3)
    [record] = caplog.records
    assert (record.name, record.levelname) == ("octavo.engine", "WARNING")
    assert "'blocks': 3" in record.getMessage()


@pytest.mark.parametrize("arguments", [{"format": "xml"}, {"level": "loud"}])
def test_unknown_formats_and_levels_are_refused_before_anything_changes(arguments: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="choose"):
        configure_logging(**arguments)  # type: ignore[arg-type]  # wrong on purpose
    assert not structlog.is_configured()


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_local_variables(form: str) -> None:
    stream = io.StringIO()
    configure_logging("json" if form == "json" else "console", stream=stream)

    def fails() -> None:
        prompt = "my " + "secret"
        raise KeyError(len(prompt))

    try:
        fails()
    except KeyError:
        get_logger("octavo.engine").exception("failed")
    assert "Traceback" in stream.getvalue()
    assert "my secret" not in stream.getvalue()


# ids


def test_lines_about_a_request_have_its_ids_wherever_they_are_written() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    request = RequestTrace(SPAN)
    other = SpanContext(trace_id=1, span_id=2, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    log = get_logger("octavo.engine")
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(other)))
    bound_to(log, "r1", request).warning("of the request")
    log.warning("of what runs")
    context.detach(token)
    of_request, of_current = lines(stream)
    assert (of_request["request_id"], of_request["trace_id"], of_request["span_id"]) == (
        "r1",
        f"{0xABC:032x}",
        f"{0xDEF:016x}",
    )
    assert (of_current["trace_id"], "request_id" in of_current) == (f"{1:032x}", False)


def test_a_request_without_a_trace_has_its_own_id_alone() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    bound_to(get_logger("octavo.engine"), "r1", NO_TRACE).warning("here")
    [line] = lines(stream)
    assert line["request_id"] == "r1"
    assert not {"trace_id", "span_id"} & set(line)


def test_an_unconfigured_host_gets_the_ids_too(caplog: pytest.LogCaptureFixture) -> None:
    request = RequestTrace(SPAN)
    bound_to(get_logger("octavo.engine"), "r1", request).warning("here")
    assert "request_id='r1'" in caplog.text
    assert f"trace_id='{0xABC:032x}'" in caplog.text
