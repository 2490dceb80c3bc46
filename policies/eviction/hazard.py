"""HazardTable: how likely runs come back, by the time since their last use and by a class, learned from all uses.

For each class the table counts, in steps of age, how many blocks came through the step unused or were used in it, and
how many were used. Their quotient is the hazard of the step. Blocks that were evicted count like those that were not,
or the table would never hear of a return that the cache did not wait for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .base import Json

Floats: TypeAlias = npt.NDArray[np.float64]

_STEPS_PER_OCTAVE = 4
_OCTAVES = 16
EDGES: tuple[float, ...] = (0.0, *(2 ** (i / _STEPS_PER_OCTAVE) for i in range(_OCTAVES * _STEPS_PER_OCTAVE)))
"""Seconds at which the steps of age begin: 0, then quarters of octaves from one second to some eighteen hours."""

END = 2 * EDGES[-1]
"""Where the last step ends. What comes back later is new."""
_EDGES = np.array((*EDGES, END))
_WIDTHS = np.diff(_EDGES)
_MOST = 1e16
"""No table counts so far."""
_CALM = 0.9
"""The highest hazard that is believed of a class before it is seen."""
_GROWTH = 1.2
"""A class of more uses is at first taken for so many times as likely to come back as the one below it."""


class Use:
    """The last use of a run. Its blocks are at risk of coming back until they do."""

    __slots__ = ("kind", "number", "when")

    def __init__(self, when: float, kind: int, number: int) -> None:
        self.when = when
        self.kind = kind
        self.number = number
        """In the log of the table."""


class HazardTable:
    """See the module. A use costs O(1) and :meth:`advance` O(steps), both amortised and mostly in numpy; the log has
    17 bytes a use. :meth:`indices` is some hundred thousand operations of numpy.
    """

    def __init__(self, kinds: int, most_uses: int) -> None:
        """``kinds``: number of classes, ordered by how many uses they stand for. ``most_uses``: uses whose return is
        waited for; of more, the oldest are no longer watched: neither that they come back counts nor that they do not.
        """
        self._kinds = kinds
        self._most = most_uses
        self._returns = [[0.0] * len(EDGES) for _ in range(kinds)]
        self._at_risk: Floats = np.zeros((kinds, len(EDGES)))
        self._changes = self._no_changes()
        """Of ``_at_risk`` from one step to the next, not yet in it."""
        self._whens = array("d")
        """The log, in order of time: when they were, of which class, and how many blocks were not used since."""
        self._kinds_used = array("b")
        self._unused = array("q")
        self._first = 0
        """Number of the first use in the log."""
        self._passed = [0] * len(EDGES)
        """By step of age: minus the number of the first use that is not counted in it yet."""

    def begin(self, when: float, kind: int, blocks: int) -> Use:
        """``blocks`` blocks of class ``kind`` were used at ``when``, in seconds. Of one that is older than the last one
        the risk counts from that one on.
        """
        whens = self._whens
        use = Use(when, kind, self._first + len(whens))
        whens.append(max(when, whens[-1]) if whens else when)
        self._kinds_used.append(kind)
        self._unused.append(blocks)
        if len(whens) >= 2 * self._most:
            self._drop(len(whens) - self._most)
        return use

    def returned(self, use: Use, blocks: int, now: float) -> None:
        """``blocks`` of a use are used again."""
        place, age = use.number - self._first, now - use.when
        if place < 0:
            return
        step = step_of(age)
        first, changes = bisect_left(self._passed, -use.number), self._changes[use.kind]
        if first <= step:
            changes[first] += blocks
            changes[step + 1] -= blocks
        if age < END:
            self._returns[use.kind][step] += blocks
        self._unused[place] -= blocks

    def add(self, use: Use, blocks: int) -> None:
        """So many ``blocks`` more, or less, belong to a use; of those taken away nobody will hear whether they come
        back.
        """
        place = use.number - self._first
        if place >= 0:
            self._unused[place] += blocks

    def advance(self, now: float) -> None:
        """Count the steps of age that uses have come through by ``now``."""
        if self._whens:
            through = self._count_steps(now)
            self._drop(max(len(self._whens) - self._most, through))

    def halve(self) -> None:
        """Let everything that was learned so far count half."""
        self._settle()
        self._at_risk /= 2
        self._returns = (np.array(self._returns) / 2).tolist()

    def hazards(self, evidence: float) -> Floats:
        """Shape ``(kinds, steps)``: probability that a block which got to a step unused is used in it.

        ``evidence``: how many blocks a first guess weighs. The guess is the hazard of all classes together, times how
        much more often this class came back so far than that; of a class that was never seen, times ``_GROWTH`` more
        than the one below.
        """
        self._settle()
        returns = np.array(self._returns)
        at_risk = np.maximum(self._at_risk, returns)
        common = (returns.sum(0) + 0.05 * evidence / 30) / (at_risk.sum(0) + evidence / 30)
        expected = (at_risk * common).sum(1)
        ratio, guesses = 1.0, np.empty_like(returns)
        for kind in range(self._kinds):
            before = ratio * _GROWTH if kind else 1.0
            ratio = (returns[kind].sum() + 0.1 * evidence * before) / (expected[kind] + 0.1 * evidence)
            guesses[kind] = np.minimum(_CALM, ratio * common)
        guess: Floats = (returns + evidence * guesses) / (at_risk + evidence)
        return guess

    def indices(self, evidence: float) -> list[list[float]]:
        """What a block of each class is worth at each step of age: the most uses for the time it takes that some
        patience can bring, ``max over T of P(used within T) / E[min(time to use, T)]`` (J. C. Gittins, "Bandit
        processes and dynamic allocation indices", Journal of the Royal Statistical Society B 41(2), 1979).
        """
        risk, width = np.ascontiguousarray(self.hazards(evidence).T), _WIDTHS[:, np.newaxis]
        unused, seconds = 1 - risk, (1 - risk / 2) * width
        half = risk / 2  # on average, half of the step of the present age has passed
        gain, time, alive = half.copy(), (1 - half / 2) * (width / 2), 1 - half
        best, more = gain / time, np.empty_like(risk)
        for ahead in range(1, len(EDGES)):  # one step further for every age at once
            ages = slice(len(EDGES) - ahead)
            gain[ages] += np.multiply(alive[ages], risk[ahead:], out=more[ages])
            time[ages] += np.multiply(alive[ages], seconds[ahead:], out=more[ages])
            alive[ages] *= unused[ahead:]
            np.maximum(best[ages], np.divide(gain[ages], time[ages], out=more[ages]), out=best[ages])
        worth: list[list[float]] = best.T.tolist()
        return worth

    def dump(self) -> Mapping[str, Json]:
        """Both tables."""
        self._settle()
        return {"returns": [list(row) for row in self._returns], "at_risk": self._at_risk.tolist()}

    def load(self, state: Mapping[str, Json]) -> None:
        """Take the tables of :meth:`dump`.

        :raises ValueError: when they have another shape or hold anything but numbers that are not negative.
        """
        returns, at_risk = (_table(state[name], self._kinds) for name in ("returns", "at_risk"))
        self._returns, self._at_risk, self._changes = returns, np.array(at_risk), self._no_changes()

    def _no_changes(self) -> list[list[float]]:
        return [[0.0] * (len(EDGES) + 1) for _ in range(self._kinds)]

    def _settle(self) -> None:
        self._at_risk += np.cumsum(self._changes, axis=1)[:, :-1]
        self._changes = self._no_changes()

    def _count_steps(self, now: float) -> int:
        """Returns how many uses, from the first one on, have come through all steps."""
        whens = np.frombuffer(self._whens)
        kinds, unused = np.frombuffer(self._kinds_used, np.int8), np.frombuffer(self._unused, np.int64)
        ends: list[int] = np.searchsorted(whens, now - _EDGES, side="right").tolist()
        for step, end in enumerate(ends[:-1]):
            begin = -self._passed[step] - self._first
            if end > begin:
                self._at_risk[:, step] += np.bincount(kinds[begin:end], unused[begin:end], self._kinds)
                self._passed[step] = -(self._first + end)
        return ends[-1]

    def _drop(self, count: int) -> None:
        """Watch the first ``count`` uses no longer; only many at once, since the others have to move."""
        if count <= 0 or count < len(self._whens) // 8:
            return
        for log in (self._whens, self._kinds_used, self._unused):
            del log[:count]
        self._first += count
        self._passed = [min(passed, -self._first) for passed in self._passed]


def step_of(age: float) -> int:
    """The step in which an age, in seconds, lies."""
    return bisect_right(EDGES, age, 1) - 1


def _table(rows: Json, kinds: int) -> list[list[float]]:
    if isinstance(rows, str) or not isinstance(rows, Sequence) or len(rows) != kinds:
        raise ValueError(f"a table of hazards must have {kinds} rows")
    table = []
    for row in rows:
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != len(EDGES):
            raise ValueError(f"a row of hazards must have {len(EDGES)} numbers")
        numbers = [float(value) for value in row if isinstance(value, int | float) and 0 <= value < _MOST]
        if len(numbers) != len(EDGES):
            raise ValueError("hazards are counted in numbers from 0 to some quadrillions")
        table.append(numbers)
    return table
