from __future__ import annotations

import gzip
import json
import lzma
import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest, TraceError
from octavo.policies.eviction.base import NAME_BYTES
from octavo.policies.eviction.lru import Lru
from octavo.policies.simulator import ATOMIC, Request, open_trace, optimum_at, replay
from octavo.policies.simulator.kvtrace import Merging

Runs: TypeAlias = list[list[int]]
HEADER = {"format": "kvtrace-1", "name": "small", "block_tokens": 16, "arrivals": "absolute", "license": "MIT"}
GROUPS = {"7": [0, 3], "8": [0, 3], "9": [1, 2]}
SESSIONS = {**HEADER, "arrivals": "session", "session_prefix": GROUPS}


def write(path: Path, *lines: object, header: object = HEADER, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in (header, *lines))
    path.write_text(text + end)
    return path


def ids(request: Request) -> list[int]:
    names = request.names
    return [int.from_bytes(names[at : at + NAME_BYTES], "little") for at in range(0, len(names), NAME_BYTES)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


# kvtrace


Fields: TypeAlias = tuple[float, int, int, int, str, list[tuple[int, int]]]
REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 1e6),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.integers(-1, 10**6),
        st.sampled_from(["", "tool", "stop"]),
        st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 20)), max_size=4),
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(requests=REQUESTS)
def test_kvtrace_round_trip(tmp_path_factory: pytest.TempPathFactory, requests: list[Fields]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "round.jsonl", *requests)
    found = list(open_trace(path))
    expected = [
        (at, tokens_in, tokens_out, session, end, [first + i for first, count in runs for i in range(count)])
        for at, tokens_in, tokens_out, session, end, runs in sorted(requests, key=itemgetter(0))
    ]
    assert [(r.arrival, r.input_tokens, r.output_tokens, r.session, r.end, ids(r)) for r in found] == expected


def test_a_trace_says_what_it_is_and_can_be_read_again(path: Path) -> None:
    trace = open_trace(write(path, [0.5, 20, 3, -1, "", [[4, 1]]], "", [0.75, 1, 1, -1, "", []]))
    counts = [trace.requests]
    assert list(trace) == list(trace)
    counts.append(trace.requests)
    assert counts == [None, 2]
    assert trace.info == ("small", 16, "", "MIT")
    assert not trace.has_priorities


def test_two_readers_of_one_trace_do_not_disturb_each_other(path: Path) -> None:
    trace = open_trace(write(path, *([float(at % 5), 1, 1, -1, "", [[at, 1]]] for at in range(20))))
    alone = list(trace)
    assert list(zip(trace, trace, strict=True)) == list(zip(alone, alone, strict=True))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "xz": lzma.compress,
    "gz": gzip.compress,
    "zst": zstandard.compress,
}


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compressed_traces_are_told_by_their_content(path: Path, kind: str) -> None:
    write(path, *([float(at), 16, 1, -1, "", [[at, 1]]] for at in range(50)))
    packed = path.with_name("no ending")
    packed.write_bytes(COMPRESSIONS[kind](path.read_bytes()))
    assert list(open_trace(packed)) == list(open_trace(path))


@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_a_compressed_trace_that_was_cut_off_says_so(path: Path, kind: str) -> None:
    rng = random.Random(1)  # noqa: S311  # no secret
    write(path, *([float(at), 16, 1, -1, "", [[rng.randrange(2**40), 1]]] for at in range(20_000)))
    packed = COMPRESSIONS[kind](path.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"trace\.jsonl, after line \d{4,}: the file is damaged or cut off"):
        list(open_trace(path))


def test_a_damaged_zstd_trace_says_so(path: Path) -> None:
    path.write_bytes(zstandard.compress(b"x" * 100)[:6] + b"nonsense" * 4)
    with pytest.raises(TraceError, match="the file is damaged or cut off"):
        open_trace(path)


BAD_LINES = [
    ("[1.0, 2, 3, -1", "truncated"),
    ('{"t": 1}', "Expected `array`, got `object`"),
    ('[1.0, 2, 3, -1, "", [["4", 1]]]', r"Expected `int`, got `str`.*\[5\]\[0\]\[0\]"),
    ('[1.0, 2, 3, -1, "", [[4.5, 1]]]', "Expected `int`, got `float`"),
    ('[1.0, 2, 3, -1, "", [[4]]]', "of length 2"),
    ('[1.0, 2.5, 3, -1, "", []]', "Expected `int`, got `float`"),
    ('[1.0, -2, 3, -1, "", []]', "-2 input and 3 output tokens: neither can be negative"),
    ('[1.0, 2, -3, -1, "", []]', "neither can be negative"),
    ('[-1.0, 2, 3, -1, "", []]', "the arrival is -1.0"),
    ('[1.0, 2, 3, -1, "", [[-4, 1]]]', "a run of 1 blocks from id -4 on"),
    ('[1.0, 2, 3, -1, "", [[4, 0]]]', "a run of 0 blocks"),
    ('[1.0, 2, 3, -1, "", [[9223372036854775807, 2]]]', "2 blocks from id 9223372036854775807"),
]


@pytest.mark.parametrize(("line", "what"), BAD_LINES)
def test_a_bad_line_is_named(path: Path, line: str, what: str) -> None:
    write(path, [0.0, 1, 1, -1, "", []], line, [2.0, 1, 1, -1, "", []])
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 3: .*{what}") as raised:
        list(open_trace(path))
    assert "torn" not in str(raised.value)


def test_a_torn_last_line_is_told_apart(path: Path) -> None:
    write(path, [0.0, 1, 1, -1, "", []], "[1.0, 1, 1, -1", end="")
    with pytest.raises(TraceError, match=r"line 3: .* \(the file ends in the middle of this line: it was torn"):
        list(open_trace(path))


def test_a_last_line_without_an_end_is_fine_when_it_is_whole(path: Path) -> None:
    assert len(list(open_trace(write(path, [0.0, 1, 1, -1, "", []], end="")))) == 1


BAD_HEADERS = [
    ("", "is neither a JSON header"),
    ("hello", "is neither a JSON header"),
    ('{"name": "x"}', "neither a JSON header with a format"),
    ({**HEADER, "format": "kvtrace-2"}, "has the format 'kvtrace-2'; known are kvtrace-1"),
    ({**HEADER, "block_tokens": 0}, "line 1: block_tokens is 0"),
    ({**HEADER, "arrivals": "random"}, r"line 1: this is no header of kvtrace-1: .*random"),
    ({**HEADER, "name": 3}, r"Expected `str`, got `int` - at `\$\.name`"),
    ({**SESSIONS, "session_prefix": {"x": [0, 1]}}, "session_prefix names something"),
]


@pytest.mark.parametrize(("header", "what"), BAD_HEADERS)
def test_a_bad_header_is_explained(path: Path, header: object, what: str) -> None:
    with pytest.raises(TraceError, match=what):
        open_trace(write(path, header=header))


def test_no_file_no_text_no_line(tmp_path: Path, path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere cannot be read: No such file"):
        open_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        open_trace(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="is empty"):
        open_trace(path)
    path.write_bytes(json.dumps(HEADER).encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match="no UTF-8 text"):
        list(open_trace(path))


# order


def test_requests_out_of_order_are_sorted_and_those_of_one_moment_keep_theirs(path: Path) -> None:
    times = [5.0, 3.0, 3.0, 9.0, 0.0, 3.0]
    write(path, *([at, 1, 1, -1, "", [[number, 1]]] for number, at in enumerate(times)))
    assert [(r.arrival, ids(r)) for r in open_trace(path)] == [
        (0.0, [4]),
        (3.0, [1]),
        (3.0, [2]),
        (3.0, [5]),
        (5.0, [0]),
        (9.0, [3]),
    ]


def test_a_bad_line_keeps_its_number_when_the_trace_is_sorted(path: Path) -> None:
    write(path, [5.0, 1, 1, -1, "", []], [3.0, 1, 1, -1, "", []], '[4.0, 1, 1, -1, "", [[1, 0]]]', end="")
    with pytest.raises(TraceError, match=r"line 4: .*torn"):
        list(open_trace(path))


# sessions


def sessions(path: Path, **options: object) -> list[Request]:
    lines = [
        [0.0, 64, 1, 7, "tool", [[1, 4]]],
        [9.0, 96, 1, 7, "stop", [[1, 4], [5, 2]]],
        [4.0, 48, 1, 7, "", [[1, 2], [9, 1]]],
        [0.0, 80, 1, 8, "", [[1, 5]]],
        [1.0, 32, 1, 8, "", [[6, 2]]],
        [0.0, 64, 1, 9, "", [[1, 4]]],
        [0.0, 64, 1, 10, "", [[1, 4]]],
    ]
    return list(open_trace(write(path, *lines, header=SESSIONS), **options))  # type: ignore[arg-type]  # any of them


def test_sessions_start_within_the_window_and_keep_their_own_time(path: Path) -> None:
    found = sessions(path, window=1000.0, seed=3)
    assert all(one.arrival <= two.arrival for one, two in pairwise(found))
    starts = {session: min(r.arrival for r in found if r.session == session) for session in (7, 8, 9, 10)}
    assert all(0 <= start <= 1000 for start in starts.values())
    assert len(set(starts.values())) == 4
    assert [r.arrival - starts[7] for r in found if r.session == 7] == pytest.approx([0.0, 4.0, 9.0])


def test_the_seed_decides_and_the_window_scales(path: Path) -> None:
    first, again, other = (sessions(path, window=1000.0, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert {r.arrival for r in sessions(path, window=0.0)} == {0.0, 1.0, 4.0, 9.0}


def test_starts_are_uniform() -> None:
    starts = [Merging(window=8.0, seed=5).start(session) for session in range(4000)]
    assert all(400 < count < 600 for count in Counter(int(start) for start in starts).values())


def test_sessions_share_nothing_but_the_prefix_of_their_group(path: Path) -> None:
    blocks = {session: {i for r in sessions(path) if r.session == session for i in ids(r)} for session in range(7, 11)}
    assert len(blocks[7] & blocks[8]) == 3
    assert not blocks[7] & blocks[9]
    assert not blocks[9] & blocks[10]
    assert [len(blocks[session]) for session in range(7, 11)] == [7, 7, 4, 4]


def test_a_shared_prefix_is_one_from_its_start(path: Path) -> None:
    one, two = (
        next(ids(r) for r in sessions(path) if r.session == s and r.input_tokens == n) for s, n in ((7, 96), (8, 80))
    )
    assert [a == b for a, b in zip(one, two, strict=False)] == [True, True, True, False, False]
    assert len(set(one)) == 6


def test_without_shared_prefixes_sessions_share_nothing(path: Path) -> None:
    found = sessions(path, share_prefixes=False)
    assert len({(r.session, i) for r in found for i in ids(r)}) == len({i for r in found for i in ids(r)}) == 22


@pytest.mark.parametrize(("session", "runs"), [(-1, [[1, 1]]), (2**22, [[1, 1]]), (3, [[2**40, 1]]), (3, [[-1, 1]])])
def test_sessions_and_their_ids_have_room_in_a_name(path: Path, session: int, runs: Runs) -> None:
    with pytest.raises(TraceError, match=r"line 2: .*(session|ids)"):
        list(open_trace(write(path, [0.0, 16, 1, session, "", runs], header=SESSIONS)))


@pytest.mark.parametrize("window", [-1.0, float("inf"), float("nan")])
def test_a_window_is_seconds(path: Path, window: float) -> None:
    with pytest.raises(InvalidRequest, match="window is"):
        open_trace(write(path), window=window)


# csv


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "log.2026.csv"
    path.write_text(
        "\ufefftenant, arrival,input_tokens,output_tokens,blocks,session,priority,end\n"
        '"a, b",1.5,64,9,0-1 3-4,3,2,stop\n'
        "\n"
        ",0.0,48,20,0-2,,,\r\n"
    )
    trace = open_trace(path, block_tokens=32)
    assert trace.info == ("log", 32, "", "")
    assert trace.has_priorities
    first, second = trace
    assert (first[:3], ids(first), first[5:]) == ((0.0, 48, 20), [0, 1, 2], (-1, "", 0, ""))
    assert (second[:3], ids(second), second[5:]) == ((1.5, 64, 9), [0, 1, 3, 4], (3, "a, b", 2, "stop"))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("0,1,2", "3 fields; the header has 4"),
        ("0,1,2,3,4", "5 fields"),
        ("x,1,2,3", "could not convert string to float: 'x'"),
        ("0,1.5,2,3", "invalid literal for int.*1.5"),
        ("0,-1,2,3", "neither can be negative"),
        ("nan,1,2,3", "the arrival is nan"),
        ("0,1,2,a", "'a' is neither a block id nor a range"),
        ("0,1,2,0-99999999999", "a run of 100000000000 blocks from id 0 on"),
        ("0,1,2,-3", "'-3' is neither"),
        ("0,1,2,3-", "'3-' is neither"),
        ("0,1,2,5-4", "a run of 0 blocks"),
        ('0,1,2,"3', "unexpected end of data"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, what: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"arrival,input_tokens,output_tokens,blocks\n0,1,2,3\n{row}\n")
    with pytest.raises(TraceError, match=rf"log\.csv, line 3: .*({what})"):
        list(open_trace(path))


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("arrival,output_tokens,blocks", "missing columns: input_tokens; unknown: none"),
        ("arrival,input_tokens,output_tokens,blocks,user", "unknown: 'user'"),
        ("arrival,input_tokens,output_tokens,blocks,blocks", "is needed once"),
    ],
)
def test_a_header_without_what_is_needed_is_refused(tmp_path: Path, header: str, what: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{header}\n")
    with pytest.raises(TraceError, match=rf"line 1: .*{what}"):
        open_trace(path)


def test_csv_blocks_have_a_token(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("arrival,input_tokens,output_tokens,blocks\n")
    with pytest.raises(TraceError, match="block_tokens is 0"):
        open_trace(path, block_tokens=0)


# memory


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def long_trace(path: Path, requests: int, *, ascending: bool = True) -> Path:
    """Few different blocks, many uses."""
    rng = random.Random(2)  # noqa: S311  # no secret

    def lines() -> Iterator[list[object]]:
        for number in range(requests):
            at = float(number if ascending else requests - number)
            first = 1000 * rng.randrange(20)
            yield [at, 16 * 200, 5, -1, "", [[first, 200]]]

    return write(path, *lines())


def test_reading_and_replaying_hold_a_line_and_not_the_trace(tmp_path: Path) -> None:
    short, long = (open_trace(long_trace(tmp_path / f"{n}.jsonl", n)) for n in (400, 4000))
    few, many = (peak(partial(replay, trace, Lru(2000), 2000, ATOMIC)) for trace in (short, long))
    assert many < 1.2 * few


def test_sorting_holds_some_bytes_for_each_request(tmp_path: Path) -> None:
    short, long = (open_trace(long_trace(tmp_path / f"{n}.jsonl", n, ascending=False)) for n in (400, 4000))
    few, many = (peak(partial(deque, trace, maxlen=0)) for trace in (short, long))
    assert many - few < 3600 * 64


def test_the_optimum_holds_numbers_and_not_uses(tmp_path: Path) -> None:
    short, long = (open_trace(long_trace(tmp_path / f"{n}.jsonl", n)) for n in (400, 4000))
    few, many = (peak(partial(optimum_at, trace, [2000], ATOMIC)) for trace in (short, long))
    assert many - few < 3600 * 128  # 200 uses each


def test_the_reader_does_not_run_ahead(path: Path) -> None:
    trace = open_trace(long_trace(path, 3000))
    assert len(list(islice(trace, 3))) == 3
