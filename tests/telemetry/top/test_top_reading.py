"""Reading an endpoint: what is understood, and what becomes of everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client import generate_latest as plain
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from octavo.errors import InvalidRequest
from octavo.telemetry.metrics import catalogue as c
from octavo.telemetry.top.rates import by, total
from octavo.telemetry.top.reading import MOST_BYTES, Failure, Scrape, Series, checked_url, parsed, read
from octavo.tests.telemetry.top.top_rig import busy, exposition, scrape

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def endpoint(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that it has
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def says(body: str, *, status: int = 200, length: int | None = None) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        data = body.encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "text/plain; version=0.0.4")
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def still() -> float:
    return 100.0


def failure(url: str, clock: Callable[[], float] = still, timeout: float = 5.0) -> Failure:
    found = read(url, frozenset(), clock, timeout)
    assert isinstance(found, Failure)
    return found


def test_values_come_with_the_moment_at_which_they_were_read() -> None:
    with endpoint(says(exposition([(c.RUNNING, 3, {})]))) as url:
        assert read(url, frozenset(), still, 5.0) == Scrape(
            100.0, {"octavo_requests_running": {Series(frozenset(), frozenset()): 3.0}}
        )


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with endpoint(says(exposition([(c.RUNNING, 3, {})]))) as url:
        assert isinstance(read(url, frozenset(), still, 5.0), Scrape)
        assert isinstance(read(url.replace("127.0.0.1", "localhost"), frozenset(), still, 5.0), Scrape)


@pytest.mark.parametrize("form", ["plain", "openmetrics"])
def test_both_text_formats_say_the_same(form: str) -> None:
    registry = CollectorRegistry()
    counter = Counter(c.EVICTIONS.name.removesuffix("_total"), "?", c.EVICTIONS.labels, registry=registry)
    counter.labels("allocate", "lru", "device").inc(5)
    text, kind = plain(registry), "text/plain; version=0.0.4; charset=utf-8"
    if form == "openmetrics":
        text = openmetrics(registry)  # type: ignore[no-untyped-call]  # as the library has it
        kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert by(parsed(text.decode(), kind, frozenset(), 0.0).values, c.EVICTIONS, "reason") == {("allocate",): 5.0}


def test_families_that_the_catalogue_does_not_know_and_values_that_are_none_are_left_out() -> None:
    text = exposition([(c.RUNNING, 1, {}), (c.WAITING, float("nan"), {})]) + "octavo_of_tomorrow 1\nup 1\n"
    assert set(scrape(text, 0.0).values) == {c.RUNNING.name}


def test_constant_labels_tell_engines_apart_and_choose_among_them() -> None:
    text = exposition([(c.RUNNING, 1, {})], engine="a", zone="x") + exposition([(c.RUNNING, 2, {})], engine="b")
    assert total(scrape(text, 0.0).values, c.RUNNING) == 3
    assert total(scrape(text, 0.0, frozenset({("engine", "b")})).values, c.RUNNING) == 2
    assert total(scrape(text, 0.0, frozenset({("engine", "a"), ("zone", "x")})).values, c.RUNNING) == 1


def test_who_chooses_what_is_not_there_is_told_what_is() -> None:
    text = exposition([(c.RUNNING, 1, {})], engine="a") + exposition([(c.RUNNING, 2, {})])
    with pytest.raises(ValueError, match=r'no engine with engine="c"; there: engine="a"; one without labels'):
        scrape(text, 0.0, frozenset({("engine", "c")}))


def test_everything_of_a_busy_engine_is_kept() -> None:
    told = busy(1)
    values = scrape(exposition(told), 0.0).values
    assert sum(len(series) for series in values.values()) == len(told)


def test_an_endpoint_without_an_engine_says_so() -> None:
    with endpoint(says("up 1\n")) as url:
        assert failure(url) == Failure("no metrics of Octavo there", answered=True)


@pytest.mark.parametrize("body", ["<html>hello</html>", "octavo_steps_total one", 'a{b="', "x{y=1} 2", "\x00"])
def test_what_is_no_exposition_is_no_reading(body: str) -> None:
    with endpoint(says(body)) as url:
        found = failure(url)
    assert found.answered
    assert "not in a Prometheus text format" in found.reason or found.reason == "no metrics of Octavo there"


@given(st.text(), st.sampled_from(["text/plain", "application/openmetrics-text"]))
def test_no_text_breaks_the_parser(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"no metrics of Octavo|not in a Prometheus"):
        parsed(text, kind, frozenset(), 0.0)


@given(st.integers(0, 4000))
def test_a_text_that_was_cut_anywhere_breaks_nothing(cut: int) -> None:
    try:
        parsed(exposition(busy(3))[:cut], "text/plain", frozenset(), 0.0)
    except ValueError:
        return


def test_an_error_status_is_named() -> None:
    with endpoint(says("gone", status=503)) as url:
        assert failure(url) == Failure("HTTP status 503", answered=True)


def test_an_answer_that_was_cut_short_is_none() -> None:
    """Half of a number would be a counter that fell."""
    with endpoint(says("octavo_steps_total 12", length=4000)) as url:
        found = failure(url)
    assert not found.answered
    assert "IncompleteRead" in found.reason


def test_nobody_there() -> None:
    with endpoint(says("")) as url:
        pass
    assert failure(url) == Failure("Connection refused", answered=False)


def test_an_answer_that_does_not_come_ends_in_time() -> None:
    done = threading.Event()

    def answer(_: BaseHTTPRequestHandler) -> None:
        done.wait(20)

    with endpoint(answer) as url:
        found = failure(url, timeout=0.05)
        done.set()
    assert found == Failure("no answer in time", answered=False)


def test_an_answer_in_drops_ends_in_time() -> None:
    """Each drop comes within the timeout of the socket."""
    now = iter(range(1000))
    with endpoint(says(exposition(busy(1)))) as url:
        assert failure(url, clock=lambda: 10.0 * next(now)) == Failure("no answer in time", answered=False)


def test_an_answer_without_end_is_refused() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(MOST_BYTES // 2**20 + 64):
                handler.wfile.write(b"# \n" * 2**20)
        except OSError:  # the reader has gone
            return

    with endpoint(answer) as url:
        assert failure(url) == Failure("the answer has more than 16 MiB", answered=True)


@pytest.mark.parametrize(
    ("given_url", "whole"),
    [
        ("http://h:1/metrics", "http://h:1/metrics"),
        ("https://h/m?x=1", "https://h/m?x=1"),
        ("h:9464", "http://h:9464/metrics"),
        ("http://h/", "http://h/metrics"),
        ("http://[::1]:5", "http://[::1]:5/metrics"),
    ],
)
def test_addresses_are_made_whole(given_url: str, whole: str) -> None:
    assert checked_url(given_url) == whole


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h/x", "http://", "http://h:x", "http://h:99999", "", "http://[h"]
)
def test_only_http_is_read(url: str) -> None:
    with pytest.raises(InvalidRequest, match="no address of a metrics endpoint"):
        checked_url(url)
