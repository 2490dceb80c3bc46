from __future__ import annotations

import datetime as dt
import io
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from octavo.engine.bench.compare import compare, differences, show_comparison
from octavo.engine.bench.live import Live
from octavo.engine.bench.plot import content_moments, draw, in_flight, save_plot
from octavo.engine.bench.recorder import Recorder
from octavo.engine.bench.report import Report, environment, make_report, read_report, save_report, with_rows
from octavo.engine.bench.rows import OK, REFUSED, TRUNCATED, Row
from octavo.engine.bench.screen import BarScreen, LineScreen, text_of
from octavo.engine.bench.settings import Load, Pace, Prompts, Settings, Target
from octavo.engine.bench.tables import show_report
from octavo.engine.bench.vocabulary import Vocabulary
from octavo.errors import InvalidRequest


def _row(sent: float, ttft: float, gaps: list[float], outcome: str = OK, message: str | None = None) -> Row:
    return Row(
        conversation=0,
        turn=0,
        due=sent,
        sent=sent,
        ended=sent + ttft + sum(gaps),
        outcome=outcome,
        ttft=ttft,
        gaps=tuple(gaps),
        prompt_tokens=100,
        cached_tokens=25,
        output_tokens=2 * (len(gaps) + 1),
        message=message,
    )


ROW = st.builds(
    _row,
    st.floats(0, 100),
    st.floats(0, 10),
    st.lists(st.floats(0, 1), max_size=4),
    st.sampled_from([OK, OK, TRUNCATED]),
)


def report_of(rows: list[Row], concurrency: int = 4, slo: dict[str, float] | None = None) -> Report:
    chosen = Settings(
        target=Target(url="http://stub", fields={"top_k": 3}),
        load=Load(pace=Pace(concurrency=concurrency)),
        prompts=Prompts(),
        slo=slo or {},
    )
    recorder = Recorder()
    for row in rows:
        recorder.add(row)
    where = environment("stub-model", None, Vocabulary(), dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
    return make_report(chosen, where, recorder, [])


TROUBLED = [
    *[_row(number, 0.5, [0.1, 0.1]) for number in range(4)],
    _row(4, 0.5, [], TRUNCATED, "cut [red]off"),
    _row(5, 0.5, [], "http 500", "boom"),
    _row(6, 0.5, [], REFUSED, "full"),
]


def shown(report: Report) -> str:
    file = io.StringIO()
    show_report(Console(file=file, width=140), report)
    return file.getvalue()


@settings(max_examples=15)
@given(st.lists(ROW, max_size=6))
def test_a_saved_report_reads_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    path = tmp_path_factory.mktemp("reports") / "r.json"
    report = report_of(rows, slo={"ttft": 1.0})
    save_report(with_rows(report, rows), path)
    assert read_report(path) == with_rows(report, rows)
    save_report(report, path)
    assert read_report(path) == report
    assert b"rows" not in path.read_bytes()


def test_the_report_counts_every_request_once() -> None:
    report = report_of(TROUBLED)
    counts = report.requests
    assert (counts.all, counts.ok, counts.refused, counts.failed) == (7, 4, 1, 2)
    assert report.errors == {"http 500": 1, TRUNCATED: 1}
    assert report.messages == ["cut [red]off", "boom", "full"]


def test_the_table_says_what_was_found() -> None:
    text = shown(report_of(TROUBLED, slo={"ttft": 1.0}))
    [first_token] = [line for line in text.splitlines() if "first token" in line]
    assert first_token.split()[-6:] == ["500.0"] * 6
    assert "prefix cache 25.0%" in text
    assert "cut [red]off" in text
    assert "4 ok, 1 refused (429), 2 failed" in text
    assert "57.1% of all requests keep" in text
    assert "held here" not in text


def test_a_client_that_is_late_says_so() -> None:
    late = [msgspec.structs.replace(row, due=row.sent - 0.2) for row in TROUBLED]
    assert any("did not keep up" in note for note in report_of(late).notes)
    assert "held here" in shown(report_of(late))
    assert report_of(TROUBLED).notes == []


def test_a_report_of_nothing_can_be_shown_and_drawn(tmp_path: Path) -> None:
    assert "0 ok" in shown(report_of([]))
    save_plot([], "nothing", tmp_path / "p.png")


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_report(path)
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="no report"):
        read_report(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(report_of([]), format="octavo-bench-9")))
    with pytest.raises(InvalidRequest, match="octavo-bench-9"):
        read_report(path)
    with pytest.raises(InvalidRequest, match="cannot be saved"):
        save_report(report_of([]), tmp_path)


def test_ratios_say_what_became_better() -> None:
    fast, slow = report_of([_row(0, 1, [0.1])]), report_of([_row(0, 2, [0.1])], concurrency=8)
    lines = {line.title: line for line in compare(fast, slow)}
    assert lines["ttft p50, ms"].ratio == 2
    assert lines["ttft p50, ms"].verdict == "worse"
    assert lines["requests/s"].verdict == "worse"
    assert lines["cache hit share"].verdict == ""
    assert {line.verdict for line in compare(slow, fast)} >= {"better", ""}
    assert {line.verdict for line in compare(fast, fast)} == {""}
    assert differences(fast, slow) == ["load.pace.concurrency: 4 | 8"]
    file = io.StringIO()
    show_comparison(Console(file=file, width=120), fast, slow, ("a[b].json", "c"))
    assert "a[b].json" in file.getvalue()
    assert "differs: load.pace.concurrency: 4 | 8" in file.getvalue()


def test_what_one_report_lacks_has_no_ratio() -> None:
    lines = {line.title: line for line in compare(report_of([]), report_of([_row(0, 1, [0.1])]))}
    assert lines["ttft p50, ms"].ratio is None
    assert lines["requests/s"].ratio is None


@given(st.lists(ROW, max_size=8))
def test_what_is_in_flight_begins_and_ends_with_nothing(rows: list[Row]) -> None:
    steps = in_flight(rows)
    assert len(steps) == 2 * len(rows)
    assert all(level >= 0 for _, level in steps)
    assert not steps or steps[-1][1] == 0
    assert all(earlier <= later for (earlier, _), (later, _) in pairwise(steps))


@given(st.lists(ROW, max_size=8))
def test_the_timeline_has_every_token_within_the_run(rows: list[Row]) -> None:
    found = content_moments(rows)
    assert sum(weight for _, weight in found) == pytest.approx(sum(row.output_tokens or 0 for row in rows))
    start, end = min((row.sent for row in rows), default=0), max((row.ended for row in rows), default=0)
    assert all(0 <= moment <= end - start + 1e-9 for moment, _ in found)


def test_the_picture_has_its_four_panels(tmp_path: Path) -> None:
    figure = draw(TROUBLED, "a run")
    assert [axes.get_title() for axes in figure.axes] == [
        "time to first token",
        "time per output token",
        "throughput",
        "requests in flight",
    ]
    assert all(axes.lines or axes.patches for axes in figure.axes)
    save_plot(TROUBLED, "a run", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequest, match="PNG"):
        save_plot(TROUBLED, "a run", tmp_path / "p.svg")


LIVE = Live("running", 12.0, done=30, in_flight=4, refused=2, failed=1, request_rate=2.5, content_rate=1234.0, of=60)


def test_progress_in_one_line() -> None:
    assert text_of(LIVE) == "30/60 done  4 in flight  2.5 req/s  ~1,234 tok/s  2 refused  1 errors"
    assert text_of(LIVE._replace(of=None, refused=0, failed=0)).startswith("30 done  4 in flight")
    assert LIVE.share == 0.5
    assert LIVE._replace(of=None).share is None
    assert LIVE._replace(duration=10.0).share == 1.0


def test_lines_without_a_terminal_and_a_bar_with_one() -> None:
    lines, bar = io.StringIO(), io.StringIO()
    with LineScreen(Console(file=lines)) as screen:
        screen.show(LIVE)
    assert lines.getvalue() == f"running   12.0 s  {text_of(LIVE)}\n"
    with BarScreen(Console(file=bar, force_terminal=True, width=120)) as view:
        view.show(LIVE._replace(phase="warming up", of=None))
        view.show(LIVE)
    assert "30/60 done" in bar.getvalue()
