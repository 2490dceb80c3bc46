"""Stop strings: the stream equals the text before the first stop, however it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.engine.model.stops import StopChecker, StopResult

letters = st.text(alphabet="ab", min_size=0, max_size=14)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=0, max_size=4)
cuts = st.lists(st.integers(0, 14), max_size=6)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """Naively: the shortest beginning of the text that ends with a stop string, and the longest such stop."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), end, longest
    return None


def make(*stops: str) -> StopChecker:
    return StopChecker(stops, include_stop=False)


def pieces(text: str, cut_at: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cut_at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def stream(checker: StopChecker, deltas: Sequence[str]) -> tuple[list[str], str | None]:
    emitted = []
    for delta in deltas:
        result = checker.push(delta)
        emitted.append(result.emit)
        if result.stopped_by is not None:
            return emitted, result.stopped_by
    return [*emitted, checker.flush()], None


@given(text=letters, stops=stop_lists, cut_at=cuts, include=st.booleans())
@example(text="abab", stops=["abab"], cut_at=[1, 2, 3], include=False)
@example(text="aabab", stops=["abab"], cut_at=[1, 2, 3, 4], include=True)
@example(text="aba", stops=["aba", "b"], cut_at=[], include=False)
def test_equals_the_rule_on_the_whole_text(text: str, stops: list[str], cut_at: list[int], include: bool) -> None:
    emitted, stopped_by = stream(StopChecker(tuple(stops), include), pieces(text, cut_at))
    found = first_stop(text, stops)
    if found is None:
        assert ("".join(emitted), stopped_by) == (text, None)
    else:
        start, end, stop = found
        assert ("".join(emitted), stopped_by) == (text[: end if include else start], stop)


@given(text=letters, stops=stop_lists, cut_at=cuts)
def test_holds_back_no_more_than_may_become_a_stop(text: str, stops: list[str], cut_at: list[int]) -> None:
    checker, shown, seen = make(*stops), "", ""
    for piece in pieces(text, cut_at):
        result = checker.push(piece)
        shown, seen = shown + result.emit, seen + piece
        if result.stopped_by is not None:
            return
        held = seen[len(shown) :]
        assert shown + held == seen
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(seen.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop)))


@given(text=letters, rest=letters, stops=stop_lists, other=letters)
def test_a_copy_goes_its_own_way(text: str, rest: str, stops: list[str], other: str) -> None:
    checker = make(*stops)
    if checker.push(text).stopped_by is not None:
        return
    twin = checker.copy()
    checker.push(other)
    fresh = make(*stops)
    fresh.push(text)
    assert stream(twin, [rest]) == stream(fresh, [rest])


def test_a_stop_over_several_deltas_is_never_shown() -> None:
    checker = make("\nUser:")
    results = [checker.push(delta) for delta in ("Hello", ".\nUs", "er", ": forged")]
    assert results == [
        StopResult("Hello", None),
        StopResult(".", None),
        StopResult("", None),
        StopResult("", "\nUser:"),
    ]


def test_a_false_start_is_shown_as_soon_as_it_is_known_to_be_one() -> None:
    checker = make("abab")
    assert [checker.push(delta).emit for delta in ("a", "b", "a", "c")] == ["", "", "", "abac"]


def test_a_stop_at_the_very_start() -> None:
    assert make("<end>").push("<end>text") == StopResult("", "<end>")
    assert StopChecker(("<end>",), include_stop=True).push("<end>text") == StopResult("<end>", "<end>")


def test_a_stop_that_begins_another_wins() -> None:
    checker = make("stop", "st")
    assert checker.push("a stop") == StopResult("a ", "st")


def test_the_longer_of_two_that_end_together_wins() -> None:
    assert make("c", "abc").push("xabcd") == StopResult("x", "abc")


def test_one_inside_another_stops_when_it_is_complete() -> None:
    """No look-ahead: whether "abcd" follows is not waited for."""
    for deltas in (["abcd"], ["a", "b", "c", "d"]):
        emitted, stopped_by = stream(make("abcd", "bc"), deltas)
        assert ("".join(emitted), stopped_by) == ("a", "bc")


def test_without_stops_everything_passes() -> None:
    checker = make()
    assert checker.push("text") == StopResult("text", None)
    assert checker.push("") == StopResult("", None)
    assert checker.flush() == ""


def test_flush_gives_the_held_text_once() -> None:
    checker = make("###")
    assert checker.push("end##") == StopResult("end", None)
    assert [checker.flush(), checker.flush()] == ["##", ""]


@pytest.mark.parametrize("stop", ["a" * 1024, "ab" * 512, "a" * 1023 + "b"])
def test_work_does_not_grow_with_the_text(stop: str) -> None:
    """The steps of the automaton are counted: at most two comparisons per character, however long the match is."""
    checker = make(stop)
    text = ("a" * 1000 + "c") * 20
    steps = 0

    class Counting(tuple[int, ...]):
        __slots__ = ()

        def __getitem__(self, key: object) -> int:  # type: ignore[override]  # only single indices are asked for
            nonlocal steps
            steps += 1
            return super().__getitem__(key)  # type: ignore[call-overload,no-any-return]

    checker._failures = tuple(Counting(failures) for failures in checker._failures)
    emitted, stopped_by = stream(checker, list(text))
    assert ("".join(emitted), stopped_by) == (text, None)
    assert 0 < steps <= len(text)
