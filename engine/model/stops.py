"""Stop strings in a growing text."""

from __future__ import annotations

from typing import NamedTuple


class StopResult(NamedTuple):
    """What one delta amounts to."""

    emit: str
    """Text that may be shown now."""
    stopped_by: str | None
    """The stop string that was completed; the text ends here and what follows in the delta is dropped."""


class StopChecker:
    """Finds the first stop string and holds back what may still become one.

    The first is the one that is complete first, reading character by character; of two that are complete with the same
    character, the longer. So a stop takes effect with the token that completes it, no look-ahead is needed, and the
    result does not depend on how the text was cut into deltas: it is the text before that occurrence.

    Each stop string is followed by the automaton of Knuth, Morris and Pratt (1977); the cost of a delta depends on its
    own length and the number of stop strings, not on the text so far. Nothing may be pushed after a stop.
    """

    __slots__ = ("_failures", "_held", "_include", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        """``stops``: non-empty strings. ``include_stop``: emit the stop string itself too."""
        self._stops = stops
        self._include = include_stop
        self._failures = tuple(_failures(stop) for stop in stops)
        self._matched = [0] * len(stops)
        """How many characters of each stop string the end of the text matches."""
        self._held = ""
        """The end of the text, not emitted yet: as long as the longest of those matches."""

    def push(self, delta: str) -> StopResult:
        """Take new text and say what may be shown."""
        if not self._held and not any(stop[0] in delta for stop in self._stops):
            return StopResult(delta, None)
        text = self._held + delta
        for end, character in enumerate(delta, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                self._held = ""
                return StopResult(text[: end if self._include else end - len(stop)], stop)
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> str:
        """The text held back, when the output ends for another reason."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def copy(self) -> StopChecker:
        """An independent checker with the same past, for a fork of the sequence."""
        twin = StopChecker((), self._include)
        twin._stops, twin._failures = self._stops, self._failures
        twin._matched, twin._held = list(self._matched), self._held
        return twin

    def _advance(self, character: str) -> str | None:
        """Follow one character in all stop strings; the longest one that is complete with it, if any."""
        complete: list[str] = []
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = self._failures[i][matched - 1]
            self._matched[i] = matched + (stop[matched] == character)
            if self._matched[i] == len(stop):
                complete.append(stop)
        return max(complete, key=len, default=None)


def _failures(stop: str) -> tuple[int, ...]:
    """For each prefix of ``stop``, the length of its longest proper suffix that is a prefix of ``stop`` too."""
    lengths = [0]
    for character in stop[1:]:
        length = lengths[-1]
        while length and stop[length] != character:
            length = lengths[length - 1]
        lengths.append(length + (stop[length] == character))
    return tuple(lengths)
