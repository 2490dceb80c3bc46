"""Gittins once more, slow and obvious: every block has its own history, and every candidate is looked at.

Two things are the policy's own and are mirrored. Blocks that were used together since they came into the cache learn as
one: their time between uses counts at once, with the weight of all of them, and so they age by one half-life. And it
goes on with the run from which it took the last block, as long as the next block was used at the same time and is of
the same class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, groupby

from octavo.policies.eviction import Entry
from octavo.policies.eviction.gittins import KINDS
from octavo.policies.eviction.hazard import EDGES, END, HazardTable, step_of

BLOCK_TOKENS = 16
Rows = list[list[float]]


@dataclass(eq=False)
class Block:
    """One use of one block."""

    when: float
    weight: float
    together: object
    """Shared by the blocks that have one history."""
    end: float | None = None

    @property
    def kind(self) -> int:
        return min(int(4 * math.log2(self.weight) + 0.01), KINDS - 1)


class GittinsReference:
    """Fed with the same events."""

    def __init__(self) -> None:
        self.runs: dict[Entry, list[Block]] = {}
        self.uses: list[Block] = []
        self.gaps = self.mean_log_gap = 0.0
        self.requests = self.blocks = 0
        self.last: Block | None = None
        self.last_entry: Entry | None = None
        self.worth: Rows = [[0.0] * len(EDGES)] * KINDS

    def insert(self, entry: Entry, now: float) -> None:
        self.runs[entry] = self._new(entry.blocks, now)
        self._asked(entry)

    def extend(self, entry: Entry, blocks: int, now: float) -> None:
        self.runs[entry] += self._new(blocks, now)
        self.blocks += blocks

    def split(self, upper: Entry, lower: Entry) -> None:
        self.runs[upper], self.runs[lower] = self.runs[lower][: upper.blocks], self.runs[lower][upper.blocks :]

    def hit(self, entry: Entry, now: float) -> None:
        self.runs[entry] = self._used(self.runs[entry], now)
        self._asked(entry)

    def evict(self, entry: Entry, blocks: int) -> list[Block]:
        run = self.runs[entry]
        self.runs[entry], gone = run[: len(run) - blocks], run[len(run) - blocks :]
        self.last, self.last_entry = gone[0], entry if self.runs[entry] else None
        if not self.runs[entry]:
            del self.runs[entry]
        return gone

    def offered(self, entry: Entry) -> None:
        if self.last is not None and self.last_entry is None:
            if self._goes_on(self.runs[entry][-1]):
                self.last_entry = entry
            else:
                self.last = None

    def back(self, entry: Entry, memory: list[Block], at: int, blocks: int, now: float) -> None:
        new = self.runs[entry][at : at + blocks]
        self.uses = [use for use in self.uses if use not in new]
        self.runs[entry][at : at + blocks] = self._used(memory[:blocks], now)
        del memory[:blocks]

    def renew(self, now: float) -> None:
        returns, at_risk = ([[0.0] * len(EDGES) for _ in range(KINDS)] for _ in range(2))
        for use in self.uses:
            age = (now if use.end is None else use.end) - use.when
            at_risk[use.kind][step_of(age)] += 1
            if use.end is not None and age < END:
                returns[use.kind][step_of(age)] += 1
        for row in at_risk:  # who came to a step came through those before
            row[:] = reversed(list(accumulate(reversed(row))))
        table = HazardTable(KINDS, most_uses=1)  # which has tests and a reference of its own
        table.load({"returns": returns, "at_risk": at_risk})
        blocks_per_request = max(self.blocks / max(self.requests, 1), 1.0)
        if self.gaps >= 8 * blocks_per_request:
            self.worth = table.indices(60 * blocks_per_request)

    def pick(self, now: float) -> Entry:
        if self.last_entry is not None and self.last_entry.candidate and self._goes_on(self.runs[self.last_entry][-1]):
            return self.last_entry
        return min((entry for entry in self.runs if entry.candidate), key=lambda entry: self.rank(entry, now))

    def rank(self, entry: Entry, now: float) -> tuple[float, float, int]:
        tail = self.runs[entry][-1]
        age = now - tail.when
        return self.worth[tail.kind][step_of(age)] if age < END else 0.0, tail.when, -entry.depth

    def _new(self, blocks: int, now: float) -> list[Block]:
        together = object()
        new = [Block(now, 1.0, together) for _ in range(blocks)]
        self.uses += new
        return new

    def _used(self, blocks: list[Block], now: float) -> list[Block]:
        used: list[Block] = []
        for _, group in groupby(blocks, key=lambda block: block.together):
            alike, together = list(group), object()
            gap = now - alike[0].when
            half_life = max(2 * math.exp(self.mean_log_gap), 1.0)
            for block in alike:
                block.end = now
                used.append(Block(now, block.weight * 2.0 ** -(gap / half_life) + 1.0, together))
            if gap:
                self.gaps += len(alike)
                self.mean_log_gap += (math.log(gap) - self.mean_log_gap) * min(len(alike) / self.gaps, 1.0)
        self.uses += used
        return used

    def _asked(self, entry: Entry) -> None:
        self.blocks += entry.blocks
        self.requests += entry.depth == entry.blocks * BLOCK_TOKENS

    def _goes_on(self, block: Block) -> bool:
        return self.last is not None and (block.when, block.kind) == (self.last.when, self.last.kind)
