"""The picture: what is written, at any size."""

from __future__ import annotations

import datetime as dt
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from octavo.telemetry.metrics import catalogue as c
from octavo.telemetry.top.picture import Picture
from octavo.telemetry.top.rates import Estimate
from octavo.telemetry.top.reading import Failure
from octavo.telemetry.top.watching import Moment, Watch
from octavo.telemetry.top.wording import UNICODE, cells, count, duration, estimate, rate, size, sparkline
from octavo.tests.telemetry.top.top_rig import INFO, Told, busy, exposition, latencies, scrape

NOON = 12 * 3600.0


def moment(*outage: Failure, told: Told = ()) -> Moment:
    watch = Watch(window=10.0)
    watch.take(scrape(exposition(busy(1)), 0.0), NOON)
    found = watch.take(scrape(exposition([*busy(2), *told]) + latencies(0.15), 2.0), NOON + 2)
    for number, failure in enumerate(outage):
        found = watch.take(failure, NOON + 4 + number)
    return found


def drawn(
    shown: Moment, width: int = 80, height: int | None = None, *, encoding: str = "utf-8", hint: str = ""
) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, no_color=True, color_system=None)
    options = console.options.update(height=height)
    lines = console.render_lines(Picture(shown, dt.UTC, hint), options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_the_whole_picture_on_eighty_columns() -> None:
    """One look at everything. The numbers are those of the scenario."""
    assert drawn(moment(), 80, 24, hint="q quits") == [
        "octavo · 1.2.3 · tiny · float32 · lru           12:00:02 · last 2.00 s · q quits",
        "╭─ pool: 100 blocks of 16 ─────────────╮╭─ prefix cache ───────────────────────╮",
        "│ ████████████████████████████████████ ││ hit rate   75.0 %    ▆               │",
        "│ █████████████████▓▓▓▓▓▓▓░░░░░░░░░░░░ ││ overall    52.9 %  regretted 9       │",
        "│ ░░░░░░░░░░░░░···············         ││ hit tokens device 600 (150/s)        │",
        "│ █used 60  ▓pinned 7  ░idle 25        ││            host 300 (75/s)           │",
        "│ ·free 15                             ││ evicted    allocate 80 (20/s)        │",
        "│ usage      60.0 %   ▅▅               ││            disk capacity 3           │",
        "╰──────────────────────────────────────╯╰──────────────────────────────────────╯",
        "╭─ requests ───────────────────────────╮╭─ latency ────────────────────────────╮",
        "│ running 12 loading 2 waiting 34      ││                   p50       p95      │",
        "│ waits for  blocks 30                 ││ TTFT           150 ms    195 ms      │",
        "│ prefill    4000/s    █               ││ TPOT                -         -      │",
        "│ decode     1000/s    █               ││ queue               -         -      │",
        "│ preempted  recompute 5  swap 4       ││ step                -         -      │",
        "│ ended      10/s  stop 40  rejected 1 ││ request             -         -      │",
        "╰──────────────────────────────────────╯╰──────────────────────────────────────╯",
        "╭─ tiers ──────────────────────────────────────────────────────────────────────╮",
        "│ tier blocks       bytes read/s write/s read write queued errors state        │",
        "│ host    200 3.00G/8.00G  2.00M   1.00M    -     -      -      - ok           │",
        "│ disk    900       1.00M      -       -    -     -  5.00K      6 open:w       │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
        "restart    ready · snapshot 2 m 05 s old, 3.00MB · restored tokens 4096 · +2",
        "upkeep     loop lag p95 195 us · spans dropped 8 · policy faults 0 · +1",
    ]


def test_a_larger_terminal_leaves_nothing_out() -> None:
    text = "\n".join(drawn(moment(), 120, 40))
    assert "+1" not in text
    assert "+2" not in text
    for told in ("rejected 1", "checkpoints 6", "loads complete 13", "failed rows 0", "copied", "for writing 11"):
        assert told in text
    assert "corrupt" in text


@pytest.mark.parametrize("told", [(), [(c.STUCK, 250.0, {})]])
@given(st.integers(1, 200), st.none() | st.integers(1, 80))
def test_no_line_is_wider_and_no_picture_higher_than_the_terminal(told: Told, width: int, height: int | None) -> None:
    lines = drawn(moment(told=told), width, height)
    assert max(cell_len(line) for line in lines) <= width
    assert height is None or len(lines) <= height


def test_narrow_terminals_have_one_frame_below_the_other() -> None:
    lines = drawn(moment(), 40)
    titles = [line.split("─")[1].strip() for line in lines if line.startswith("╭")]
    assert titles == ["pool: 100 blocks of 16", "prefix cache", "requests", "latency", "tiers"]
    assert "│ tier       bytes errors state        │" in lines
    assert "loads complete 13" in "\n".join(lines)


def test_terminals_of_few_characters_get_those() -> None:
    text = "\n".join([*drawn(moment(), 80, 24, encoding="ascii"), *drawn(moment(), 40, encoding="ascii")])
    assert text.isascii()
    assert "#" * 30 in text
    assert "pinned 7" in text


def test_before_the_second_reading_nothing_is_made_up() -> None:
    first = Watch(10.0).take(scrape(exposition(busy(1)), 0.0), NOON)
    text = "\n".join(drawn(first))
    assert "decode     -" in text
    assert "hit rate   -" in text
    assert "last" not in text.splitlines()[0]


def test_an_engine_that_tells_little() -> None:
    text = "\n".join(drawn(Watch(10.0).take(scrape(exposition([(c.RUNNING, 3, {})]), 0.0), NOON)))
    assert "running 3 loading - waiting -" in text
    assert "tiers      none" in text
    assert "pool       -" in text
    assert "restart    - · snapshot none yet" in text


def test_an_outage_says_since_when_and_why_and_keeps_the_numbers() -> None:
    gone = Failure("Connection refused", answered=False)
    lines = drawn(moment(gone, gone), 80, 24)
    assert lines[0].startswith("unreachable since 12:00:04, retrying")
    assert lines[0].endswith("12:00:05 · last 2.00 s")
    assert lines[1] == "Connection refused"
    assert "stop 40" in "\n".join(lines)


def test_an_endpoint_that_says_something_else_is_not_unreachable() -> None:
    lines = drawn(Watch(10.0).take(Failure("no engine with " + "x" * 100, answered=True), NOON), 40)
    assert lines[0].startswith("no metrics since 12:00:00, retrying")
    assert "".join(lines[1:]).count("x") == 100


def test_restarts_show() -> None:
    watch = Watch(10.0)
    watch.take(scrape(exposition(busy(2)), 0.0), NOON)
    assert "restarted 1x" in drawn(watch.take(scrape(exposition(busy(1)), 2.0), NOON), 120)[0]


def test_several_engines_are_counted_and_one_of_them_is_named() -> None:
    two = "".join(exposition(busy(1), engine=name) for name in ("a", "b"))
    assert "octavo · 2 engines" in drawn(Watch(10.0).take(scrape(two, 0.0), NOON))[0]
    chosen = scrape(two, 0.0, frozenset({("engine", "b")}))
    assert "octavo · engine=b · 1.2.3 · tiny" in drawn(Watch(10.0).take(chosen, NOON))[0]


def test_what_an_endpoint_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J[bold]\x07"
    told = [
        (c.INFO, 1, INFO | {"model": evil}),
        (c.TIER_BLOCKS, 1, {"tier": evil}),
        (c.TIER_BREAKER, 1, {"tier": evil, "direction": evil}),
        (c.EVICTIONS, 1, {"reason": evil, "policy": "", "tier": evil}),
        (c.FINISHED, 1, {"reason": evil}),
        (c.LOADS, 1, {"outcome": evil}),
    ]
    text = "".join(drawn(Watch(10.0).take(scrape(exposition(told, engine=evil), 0.0), NOON), 160))
    assert text.isprintable()
    assert "?[2J[bold]?" in text
    assert "".join(drawn(Watch(10.0).take(Failure(evil, answered=True), NOON))).isprintable()


def test_a_small_pool_has_a_cell_for_each_block() -> None:
    told = [(c.POOL_BLOCKS, 3, {"state": "used"}), (c.POOL_BLOCKS, 2, {"state": "free"}), (c.PINNED_BLOCKS, 1, {})]
    lines = drawn(Watch(10.0).take(scrape(exposition(told), 0.0), NOON))
    assert "│ ██▓·· " in lines[2]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(0, 2000))
def test_cells_are_shared_out_to_the_last(parts: list[int], number: int) -> None:
    shares = cells(parts, number)
    assert sum(shares) == (number if sum(parts) else 0)
    assert all(share >= 0 for share in shares)
    assert all(share == 0 for share, part in zip(shares, parts, strict=True) if part == 0)
    if number >= 2 * len(parts):
        assert all(share > 0 for share, part in zip(shares, parts, strict=True) if part > 0)
        whole = max(1, sum(parts))
        assert all(abs(s - p / whole * number) <= len(parts) for s, p in zip(shares, parts, strict=True) if sum(parts))


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "-"), (0, "0"), (987, "987"), (9876, "9876"), (98765, "98.8k"), (4.56e6, "4.56M"), (2.5e10, "25.0G")],
)
def test_counts(value: float | None, words: str) -> None:
    assert count(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(None, "-"), (0, "0/s"), (0.25, "0.2/s"), (12.4, "12/s"), (2e4, "20.0k/s")]
)
def test_rates(value: float | None, words: str) -> None:
    assert rate(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(None, "-"), (512, "512"), (1280, "1.25K"), (2**20 * 99.97, "100M"), (2**43, "8.00T")]
)
def test_sizes(value: float | None, words: str) -> None:
    assert size(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        (0.0, "0 us"),
        (0.00025, "250 us"),
        (0.0123, "12.3 ms"),
        (1.234, "1.23 s"),
        (99.0, "99.0 s"),
        (245, "4 m 05 s"),
        (12000, "3 h 20 m"),
        (187200, "2 d 04 h"),
    ],
)
def test_durations(value: float | None, words: str) -> None:
    assert duration(value) == words


def test_estimates() -> None:
    assert (estimate(Estimate(0.5, beyond=False)), estimate(Estimate(120.0, beyond=True))) == ("500 ms", "> 2 m 00 s")


def test_sparklines() -> None:
    levels = UNICODE.levels
    assert sparkline([0.0, 0.5, 1.0], 10, levels, top=1.0) == "▁▄█"
    assert sparkline([1.0, None, 2.0], 10, levels) == "▄ █"
    assert sparkline([1.0, 2.0, 4.0, 4.0], 2, levels) == "██"
    assert sparkline([0.0, 0.0], 2, levels) == "▁▁"
    assert sparkline([1.0], 0, levels) == ""
    assert sparkline([2.0], 5, levels, top=1.0) == "█"
