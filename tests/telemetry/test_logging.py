from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from octavo.telemetry.logging import RateLimited, add_trace_ids, get_logger

SPAN = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@pytest.fixture
def in_span() -> Iterator[None]:
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(SPAN)))
    yield
    context.detach(token)


@pytest.fixture
def structlog_of_the_host() -> Iterator[structlog.testing.LogCapture]:
    capture = structlog.testing.LogCapture()
    structlog.configure(processors=[add_trace_ids, capture])
    yield capture
    structlog.reset_defaults()


def test_nothing_is_configured_globally() -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    get_logger("octavo.test").warning("here")
    assert not structlog.is_configured()
    assert (logging.getLogger().handlers, logging.getLogger().level) == before


def test_an_unconfigured_host_gets_events_through_the_standard_library(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("octavo.test").bind(request_id="r1")
    log.warning("evicted", blocks=3)
    log.debug("hidden")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("octavo.test", logging.WARNING)
    assert record.getMessage() == "event='evicted' request_id='r1' blocks=3"


def test_a_configured_host_gets_events_in_its_own_way(structlog_of_the_host: structlog.testing.LogCapture) -> None:
    get_logger("octavo.test").info("evicted", blocks=3)
    assert structlog_of_the_host.entries == [
        {"event": "evicted", "blocks": 3, "logger": "octavo.test", "log_level": "info"}
    ]


def test_an_exception_brings_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        int("broken policy")
    except ValueError:
        get_logger("octavo.test").exception("policy_failed")
    assert "broken policy" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.usefixtures("in_span")
def test_events_carry_the_ids_of_the_current_span(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("octavo.test").warning("evicted")
    assert f"trace_id='{0xABC:032x}'" in caplog.text
    assert f"span_id='{0xDEF:016x}'" in caplog.text


def test_without_a_span_there_are_no_ids() -> None:
    assert add_trace_ids(None, "info", {"event": "x"}) == {"event": "x"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_event_per_interval_and_key_with_the_count_of_the_rest() -> None:
    clock = Clock()
    limit = RateLimited(10.0, clock)
    assert [limit.admit("a"), limit.admit("a"), limit.admit("b"), limit.admit("a")] == [0, None, 0, None]
    clock.now = 9.99
    assert limit.admit("a") is None
    clock.now = 10.0
    assert [limit.admit("a"), limit.admit("a"), limit.admit("b")] == [3, None, 0]
    clock.now = 20.0
    assert limit.admit("a") == 1


def test_a_steady_stream_is_let_through_at_the_rate_of_the_limit() -> None:
    clock = Clock()
    limit = RateLimited(10.0, clock)
    passed = []
    for second in range(100):
        clock.now = float(second)
        passed.append(limit.admit("a"))
    assert [swallowed for swallowed in passed if swallowed is not None] == [0] + [9] * 9


def test_logging_adds_the_count_only_when_something_was_swallowed() -> None:
    clock = Clock()
    limit = RateLimited(10.0, clock)
    calls: list[tuple[str, dict[str, object]]] = []

    def emit(event: str, **fields: object) -> None:
        calls.append((event, fields))

    for tier in ("host", "disk", "disk"):
        limit.log(emit, "tier_slow", key=tier, tier=tier)
    clock.now = 10.0
    limit.log(emit, "tier_slow", key="disk", tier="disk")
    limit.log(emit, "tier_slow")
    assert calls == [
        ("tier_slow", {"tier": "host"}),
        ("tier_slow", {"tier": "disk"}),
        ("tier_slow", {"tier": "disk", "swallowed": 1}),
        ("tier_slow", {}),
    ]


def test_keys_are_bounded() -> None:
    limit = RateLimited(10.0, Clock(), max_keys=3)
    for key in "abcd":
        assert limit.admit(key) == 0
    assert limit.admit("d") is None
    assert limit.admit("a") == 0
    assert len(limit._seen) == 3
