"""The Jaeger example runs, as its first lines say: its load shows what it promises, and its pictures can be read."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Status, StatusCode

from octavo.tests.telemetry.export.otlp_receiver import GrpcReceiver, HttpReceiver, Receiver

if TYPE_CHECKING:
    from octavo.examples.jaeger.saved_spans import Span

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parents[2] / "examples" / "jaeger"
PICTURES = sorted(FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 60_000


def _module(name: str) -> ModuleType:
    """As the scripts themselves import it: their folder is no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


saved_spans, drawing, picture = _module("saved_spans"), _module("drawing"), _module("picture")


def _run(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    around = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250, env=around)  # noqa: S603  # our own file
    return done.stdout


class Played(NamedTuple):
    shown: str
    file: Path
    spans: list[Span]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """One run on the fake model, saved."""
    file = tmp_path_factory.mktemp("jaeger") / "spans.jsonl"
    shown = _run("load.py", "--fake", "--save", str(file), "--port", "0")
    return Played(shown, file, saved_spans.read(file))


# the load


def test_the_load_shows_what_it_promises(played: Played) -> None:
    spans = played.spans
    requests = {span.id: span for span in spans if "gen_ai.operation.name" in span.attributes}
    called = {span.text("octavo.request.id") for span in requests.values()}
    assert called == {f"{name}-1" for name in ("anna", "ben", "clara", "dora", "emil", "finn", "greta", "hugo", "ida")}
    events = {event.name for span in requests.values() for event in span.events}
    assert {"first_token", "fork", "preempt", "resume", "swap_out"} <= events
    by_name = {span.name for span in spans}
    assert {"evict", "cow_fork", "swap_out", "snapshot", "persist", "octavo.step", "prefill_chunk"} <= by_name
    strangers = [
        link
        for span in spans
        for link in span.links
        if link.relation == "victim_owner" and requests[link.span].trace != span.trace
    ]
    assert strangers
    aborted = {span.text("octavo.request.id") for span in requests.values() if span.failed}
    assert aborted == {"ida-1"}


def test_each_request_is_below_its_visitor_and_nothing_is_lost(played: Played) -> None:
    spans = {span.id: span for span in played.spans}
    for span in spans.values():
        if "gen_ai.operation.name" in span.attributes:
            assert span.parent is not None
            assert spans[span.parent].name == f"visitor {span.text('octavo.request.id').removesuffix('-1')}"
    assert f"{len(spans)} spans were delivered, 0 lost" in played.shown


def test_what_is_worth_opening_is_told_with_its_trace(played: Played) -> None:
    told = re.findall(r"^(\S+)\n  trace ([0-9a-f]{32})\n((?:  - .*\n)+)", played.shown, re.MULTILINE)
    traces = {name: trace for name, trace, _ in told}
    assert {"ida-1", "octavo.step", "snapshot", "persist"} < set(traces)
    for span in played.spans:
        if (name := span.text("octavo.request.id")) in traces and "gen_ai.operation.name" in span.attributes:
            assert span.trace == traces[name]
    lines = {name: seen for name, _, seen in told}
    assert "error.type is aborted" in lines["ida-1"]
    assert any("preempt (swap)" in seen for seen in lines.values())


@pytest.mark.parametrize("kind", [HttpReceiver, pytest.param(GrpcReceiver, marks=pytest.mark.slow)])
def test_without_a_file_the_spans_go_to_the_collector(kind: type[Receiver]) -> None:
    receiver = kind()
    protocol = {"OTEL_EXPORTER_OTLP_PROTOCOL": kind.protocol, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    try:
        shown = _run("load.py", "--fake", "--port", "0", **protocol)
        delivered = re.search(r"^(\d+) spans were delivered, 0 lost$", shown, re.MULTILINE)
        assert delivered is not None
        assert len(receiver.received.spans) == int(delivered[1])
        opened = set(re.findall(r"http://localhost:16686/trace/([0-9a-f]{32})", shown))
        assert opened
        assert opened <= set(receiver.received.traces())
    finally:
        receiver.close()


# the file


def test_spans_come_back_from_a_line_as_they_were() -> None:
    seen = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    tracer = provider.get_tracer("test")
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "text": "null",
        "yes": True,
        "count": 2**53 + 1,
        "share": 0.25,
        "list": ["a", "b"],
        "none": 0,
    }
    other = tracer.start_span("other")
    link = Link(other.get_span_context(), {"octavo.relation": "victim_owner"})
    span = tracer.start_span("one", links=[link], attributes=attributes, start_time=2**60 + 1)
    span.add_event("happened", {"n": 1}, timestamp=2**60 + 2)
    span.set_status(Status(StatusCode.ERROR, "no"))
    span.end(2**60 + 3)
    (read,) = saved_spans.decode([saved_spans.encode(seen.get_finished_spans())])
    context, to = span.get_span_context(), other.get_span_context()
    assert (read.trace, read.id, read.parent) == (f"{context.trace_id:032x}", f"{context.span_id:016x}", None)
    assert (read.name, read.start, read.end, read.failed) == ("one", 2**60 + 1, 2**60 + 3, True)
    assert read.attributes == attributes
    assert [(event.name, event.when, event.attributes) for event in read.events] == [("happened", 2**60 + 2, {"n": 1})]
    assert read.links == ((f"{to.span_id:016x}", "victim_owner"),)


def test_a_line_is_the_json_that_otlp_asks_for(played: Played) -> None:
    """Ids in hex, kinds as numbers, times as strings: other readers insist on it."""
    for line in played.file.read_text(encoding="utf-8").splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"])
                assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
                assert isinstance(span["kind"], int)
                assert span["startTimeUnixNano"].isdecimal()


# the pictures


class Text(NamedTuple):
    words: str
    style: str
    left: float
    right: float
    base: float


class Bar(NamedTuple):
    left: float
    right: float
    top: float
    bottom: float


def _texts(root: ET.Element) -> Iterator[Text]:
    for each in root.iter(f"{SVG}text"):
        words, style = each.text or "", each.get("class", "")
        wide = len(words) * (drawing.TITLE_CHARACTER if style == "title" else drawing.CHARACTER)
        anchor = {"start": 0.0, "middle": 0.5, "end": 1.0}[each.get("text-anchor", "start")]
        left = float(each.get("x", "nan")) - wide * anchor
        yield Text(words, style, left, left + wide, float(each.get("y", "nan")))


def _bars(root: ET.Element) -> Iterator[Bar]:
    for each in root.iter(f"{SVG}rect"):
        if each.get("class") != "paper":
            x, y, width, height = (float(each.get(name, "nan")) for name in ("x", "y", "width", "height"))
            yield Bar(x, x + width, y, y + height)


def _assert_readable(drawn: str) -> None:
    """All of it on the sheet, no text on another, and none on a bar but those that are meant to be."""
    assert len(drawn.encode()) < MOST_BYTES
    root = ET.fromstring(drawn)  # noqa: S314  # our own
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    texts, bars = list(_texts(root)), list(_bars(root))
    assert texts
    assert bars
    for bar in bars:
        assert bar.left >= 0
        assert bar.right <= width
        assert bar.bottom <= height
    for number, text in enumerate(texts):
        assert text.left >= 0, text
        assert text.right <= width, text
        assert drawing.FONT < text.base < height, text
        on = [
            bar
            for bar in bars
            if bar.left < text.right and text.left < bar.right and bar.top < text.base - 1 < bar.bottom
        ]
        assert bool(on) == (text.style == "in"), text
        assert all(bar.left <= text.left and text.right <= bar.right for bar in on if len(on) == 1), text
        for other in texts[:number]:
            apart = abs(text.base - other.base) >= drawing.FONT or text.right <= other.left or other.right <= text.left
            assert apart, (text, other)


@pytest.mark.parametrize("path", PICTURES, ids=[path.name for path in PICTURES])
def test_the_pictures_that_are_shown_can_be_read(path: Path) -> None:
    drawn = path.read_text(encoding="utf-8")
    if path.name.startswith("top"):  # drawn by octavo top, which has its own tests
        assert len(drawn.encode()) < MOST_BYTES
    else:
        _assert_readable(drawn)


def test_every_request_and_the_steps_make_pictures_that_can_be_read(played: Played) -> None:
    for name in picture.request_names(played.spans).values():
        _assert_readable(picture.request_picture(played.spans, name))
    _assert_readable(picture.steps_picture(played.spans))


def test_the_same_spans_make_the_same_pictures_in_whatever_order_they_came(played: Played) -> None:
    lines = played.file.read_text(encoding="utf-8").splitlines()
    for _ in range(2):
        random.Random(1).shuffle(lines)  # noqa: S311  # not for secrets
        spans = saved_spans.decode(lines)
        assert picture.request_picture(spans, "hugo-1") == picture.request_picture(played.spans, "hugo-1")
        assert picture.steps_picture(spans) == picture.steps_picture(played.spans)


def test_the_picture_of_a_request_has_every_span_of_its_trace_and_every_event(played: Played) -> None:
    request = next(span for span in played.spans if span.text("octavo.request.id") == "hugo-1")
    trace = [span for span in played.spans if span.trace == request.trace]
    root = ET.fromstring(picture.request_picture(played.spans, "hugo-1"))  # noqa: S314  # our own
    assert len(list(_bars(root))) == len(trace)
    words = [text.words for text in _texts(root)]
    assert {span.name for span in trace} <= set(words)
    labels = [re.fullmatch(r"(\w+?)(?: x(\d+))?", text) for text in words]
    counts = dict.fromkeys({event.name for event in request.events} - {span.name for span in trace}, 0)
    for label in labels:
        if label is not None and label[1] in counts:
            counts[label[1]] += int(label[2] or 1)
    assert counts == {name: sum(event.name == name for event in request.events) for name in counts}
    owners = {link.span for span in trace for link in span.links if link.relation == "victim_owner"}
    for owner in owners:
        assert any("→" in text and picture.request_names(played.spans)[owner] in text for text in words)


def test_the_steps_are_consecutive_and_show_every_link(played: Played) -> None:
    root = ET.fromstring(picture.steps_picture(played.spans))  # noqa: S314  # our own
    title = next(text.words for text in _texts(root) if text.style == "title")
    first, last = (int(number) for number in re.findall(r"\d+", title))
    steps = [span for span in played.spans if first <= span.number("octavo.step.number") <= last]
    steps = [span for span in steps if span.name == "octavo.step"]
    assert len(steps) == last - first + 1 > 1
    assert len(list(root.iter(f"{SVG}circle"))) == sum(len(step.links) for step in steps) > len(steps)


def test_labels_of_moments_never_cross_what_stands_for_others() -> None:
    random_ = random.Random(2)  # noqa: S311  # not for secrets
    for _ in range(50):
        moments = [(random_.uniform(0, 300), random_.choice(("fork", "preempt", "swap_out"))) for _ in range(12)]
        placed = drawing.marks(moments)
        assert sum(int(mark.words.partition(" x")[2] or 1) for mark in placed) == len(moments)
        for mark in placed:
            for other in placed:
                if mark.x < other.x <= mark.x + drawing.width_of(mark.words):
                    assert other.tier < mark.tier  # so neither its label nor its line is in the way


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--request", "nobody"], "there is no request 'nobody'; there are: anna-1, ben-1"), ([], "request.svg")],
)
def test_the_command_draws_or_says_what_there_is(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], said: str
) -> None:
    command = [str(played.file), "--to", str(tmp_path / "new"), *arguments]
    if not arguments:
        picture.main(command)
        assert said in capsys.readouterr().out
        assert {path.name for path in (tmp_path / "new").iterdir()} == {"request.svg", "steps.svg"}
        return
    with pytest.raises(SystemExit, match=said):
        picture.main(command)


def test_no_spans_make_no_picture() -> None:
    with pytest.raises(ValueError, match="there is no request None; there are: none"):
        picture.request_picture([])
    with pytest.raises(ValueError, match="no steps"):
        picture.steps_picture([])


@pytest.mark.parametrize("held", [None, "no json", '{"resourceSpans": 3}'])
def test_a_file_that_is_missing_or_something_else_is_said(tmp_path: Path, held: str | None) -> None:
    file = tmp_path / "spans.jsonl"
    if held is not None:
        file.write_text(held)
    with pytest.raises(SystemExit, match="error: "):
        picture.main([str(file)])
