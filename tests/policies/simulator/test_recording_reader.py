"""The reader of recordings: lines, chains of names, requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import TraceError
from octavo.policies.eviction.lru import Lru
from octavo.policies.history import (
    FORMAT,
    Admitted,
    Done,
    End,
    Event,
    Evicted,
    Forked,
    Gap,
    Header,
    Left,
    Locked,
    Part,
    Published,
)
from octavo.policies.simulator.exact import play, replay_exactly
from octavo.policies.simulator.readers import open_trace
from octavo.policies.simulator.recording import Chains, RecordingTrace, events, read_header


def header(**other: object) -> Header:
    fields = {"format": FORMAT, "block_tokens": 4, "num_blocks": 8, "eviction_policy": "lru", "octavo": "1"}
    return Header(**fields | {"started": 1e9, "clock": 100.0} | other)  # type: ignore[arg-type]  # of the right types


def written(path: Path, lines: Sequence[Event], head: Header | None = None) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (head or header(), *lines)))
    return path


def name(number: int) -> bytes:
    return number.to_bytes(8, "little")


def names(*numbers: int) -> bytes:
    return b"".join(map(name, numbers))


def published(now: float, number: int, blocks: int, new: bytes, known: int = 0) -> Published:
    return Published(now, number, blocks, new, known, (Part(len(new) // 8, 0.5),))


FIRST = [
    Locked(101.0, 1, b"", 0),
    Admitted(101.0, 1, 11, 13, 0, 4, names(1, 2, 3)),
    published(102.0, 1, 3, names(1, 2, 3)),
    published(103.0, 1, 4, names(4)),
    Left(104.0, 1, "finished"),
    Done(104.0, 11, 100.5, 0, 13, 4, "length"),
]
SECOND = [
    Locked(105.0, 2, name(2), 2),
    Admitted(105.0, 2, 12, 16, 2, 2, names(5, 6), tenant=3),
    published(106.0, 2, 4, names(5, 6)),
    Left(107.0, 2, "finished"),
    Done(107.0, 12, 104.0, 0, 16, 1, "stop"),
]


def test_requests_with_their_whole_names(tmp_path: Path) -> None:
    first, second = RecordingTrace(written(tmp_path / "r", [*FIRST, *SECOND, End(108.0)]))
    assert first[:5] == (1.0, 13, 4, names(1, 2, 3), name(4))
    assert (second.arrival, second.names, second.published) == (5.0, names(1, 2, 5, 6), b"")
    assert (first.tenant, second.tenant, second.end) == ("", "3", "stop")


def test_it_is_known_by_its_first_line_and_can_be_read_again(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "r", [*FIRST, End(108.0)]))
    assert isinstance(trace, RecordingTrace)
    assert trace.info.block_tokens == 4
    assert list(trace) == list(trace)


def test_requests_come_in_order_of_admission_whoever_ends_first(tmp_path: Path) -> None:
    lines = [
        *(Locked(101.0, number, b"", 0) for number in (1, 2, 3)),
        *(Admitted(100.0 + number, number, number, 4, 0, 1, name(number)) for number in (1, 2, 3)),
        Done(110.0, 3, 100.0, 0, 4, 1, "stop"),
        Done(111.0, 1, 100.0, 0, 4, 1, "stop"),
    ]
    found = list(RecordingTrace(written(tmp_path / "r", lines)))
    assert [request.arrival for request in found] == [1.0, 2.0, 3.0]
    assert [request.end for request in found] == ["stop", "", "stop"]  # the second was not over


def test_one_that_comes_back_after_a_preemption_is_the_same(tmp_path: Path) -> None:
    lines = [
        *FIRST[:3],
        Left(103.0, 1, "preempted"),
        Locked(104.0, 1, name(3), 3),
        Admitted(104.0, 1, 11, 15, 3, 1, b"", resumed=True),
        published(105.0, 1, 4, name(4)),
        Done(106.0, 11, 100.0, 0, 13, 4, "stop"),
    ]
    (request,) = RecordingTrace(written(tmp_path / "r", lines))
    assert (request.input_tokens, request.names, request.published) == (13, names(1, 2, 3), name(4))


def test_forks_of_the_same_request_are_lines_of_it_and_others_their_own(tmp_path: Path) -> None:
    lines = [
        *FIRST[:3],
        Forked(103.0, 7, 11, 1, 13),
        Forked(103.5, 8, 20, 1, 14),
        published(104.0, 7, 4, name(9)),
        published(104.0, 8, 4, name(10)),
        Done(105.0, 11, 100.0, 0, 13, 8, "stop"),
        Done(105.0, 20, 103.0, 0, 13, 2, "stop"),
    ]
    first, fork = RecordingTrace(written(tmp_path / "r", lines))
    assert (first.names, first.published, first.output_tokens) == (names(1, 2, 3), b"", 8)
    assert (fork.arrival, fork.input_tokens, fork.names, fork.published) == (3.5, 14, names(1, 2, 3), name(10))


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "r", FIRST)
    whole = list(events(path))
    path.write_bytes(path.read_bytes()[:-7])
    assert list(events(path)) == whole[:-1]
    (request,) = RecordingTrace(path)
    assert (request.names, request.end) == (names(1, 2, 3), "")


@pytest.mark.parametrize("line", ["nonsense", "{}", '["nobody",1.0]', '["admit",1.0]', '["leave","x",1,"finished"]'])
def test_a_line_that_is_wrong_is_named(line: str, tmp_path: Path) -> None:
    path = written(tmp_path / "r", FIRST[:2])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match="line 4"):
        list(events(path))


@pytest.mark.parametrize("text", ["", "{}\n", '{"format":"octavo-recording-1"}\n', "[1]\n"])
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(TraceError):
        RecordingTrace(tmp_path / "r")


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "r", [], header(format="octavo-recording-2"))
    with pytest.raises(TraceError, match="octavo-recording-2"):
        read_header(path)
    with pytest.raises(TraceError, match="octavo-recording-2"):
        open_trace(path)


def test_lines_of_a_later_writer_may_have_more_fields(tmp_path: Path) -> None:
    path = written(tmp_path / "r", [])
    path.write_text(path.read_text() + '["leave",101.0,1,"finished","something new"]\n')
    assert [event for _, event in events(path)] == [Left(101.0, 1, "finished")]


def test_after_a_gap_unknown_prefixes_have_names_that_stay_the_same(tmp_path: Path) -> None:
    lines = [Gap(101.0, 3), *SECOND, Locked(108.0, 3, name(2), 2), Admitted(108.0, 3, 13, 9, 2, 1, b"")]
    trace = RecordingTrace(written(tmp_path / "r", lines))
    first, second = trace
    assert trace.lost == 3
    assert len(first.names) == 4 * 8
    assert first.names.endswith(names(2, 5, 6))
    assert second.names == first.names[:16]


def test_gaps_and_impossible_histories_cannot_be_played_back(tmp_path: Path) -> None:
    for lines in ([*FIRST, Gap(105.0, 2)], SECOND, [*FIRST[:2], published(102.0, 9, 1, name(1))]):
        with pytest.raises(TraceError, match=r"line \d+: this cannot be done again"):
            replay_exactly(written(tmp_path / "r", lines), Lru(8))


@pytest.mark.parametrize(("end", "blocks", "same"), [(4, 1, True), (6, 1, False), (4, 2, False)])
def test_play_compares_names_and_blocks(end: int, blocks: int, same: bool, tmp_path: Path) -> None:
    """The first request's last blocks were used before those of the second."""
    lines = [*FIRST, *SECOND, Evicted(108.0, 1, "call", name(end), (1,)), End(109.0)]
    if blocks > 1:
        lines[-2] = Evicted(108.0, blocks, "call", name(end) + name(6), (1, 1))
    played = play(written(tmp_path / "r", lines), Lru(8))
    assert (played.divergence is None) == same
    if played.divergence is not None:
        assert played.divergence.line == len(lines)
        assert played.divergence.chosen == (name(4), blocks)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=40), st.data())
def test_chains_give_back_what_was_put_in(paths: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against whole paths kept in a list; cutting takes blocks off the ends of those that nothing continues."""
    chains, known, numbers = Chains(), [b""], iter(range(1, 10_000))
    for where, blocks in paths:
        before = known[where % len(known)]
        new = names(*(next(numbers) for _ in range(blocks)))
        chains.add(before[-8:], new)
        known += [before + new[: 8 * (at + 1)] for at in range(blocks)]
    leaves = [path for path in known if path and not any(o != path and o.startswith(path) for o in known)]
    if leaves:
        leaf = data.draw(st.sampled_from(leaves))
        alone = sum(_is_alone(leaf[:at], known, leaf) for at in range(8, len(leaf) + 8, 8))
        cut = data.draw(st.integers(1, alone))
        chains.cut(Evicted(1.0, cut, "call", leaf[-8:], (cut,)))
        gone = {leaf[: len(leaf) - 8 * at] for at in range(cut)}
        known = [path for path in known if path not in gone]
    assert len(chains) == len(known) - 1
    for path in known:
        assert chains.path(path[-8:], len(path) // 8) == path
        assert chains.path(path[-8:]) == path


def _is_alone(path: bytes, known: list[bytes], leaf: bytes) -> bool:
    return all(leaf.startswith(other) for other in known if other.startswith(path))
