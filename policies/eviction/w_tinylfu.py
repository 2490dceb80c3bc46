"""W-TinyLFU: a small window for what is new, and a main cache into which only what is used more often may come.

G. Einziger, R. Friedman, B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage
13(4), 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .base import Entry, Json, Returned
from .queues import EntryList, ListPolicy
from .state import counts

_MOST = 15
_SAMPLE = 10
"""Uses, in pools full of blocks, after which all counts are halved."""


class _Count(NamedTuple):
    """Uses as they were counted after ``halvings`` halvings."""

    uses: int
    halvings: int


class WTinyLfu(ListPolicy):
    """New entries go into the window, an LRU list for 1 % of the pool, and spill over from there into the main part,
    an SLRU with a list on probation and a protected one, 80 % of it. While the main part has room nobody is asked. When
    it has none and the window has too much, the oldest of the window is compared with the next victim of the main part:
    it comes in, on probation, and the victim goes, if its frequency is higher; otherwise it goes itself.

    The frequency is that of a counter of 4 bits: uses up to 15, and all are halved after uses of ten pools full of
    blocks. The paper counts in a sketch of hashes, because a web cache has no other place to remember what it does not
    have. Here each entry has a counter of its own, which its memory keeps when it is evicted: what the sketch
    approximates, without collisions, for as many evicted runs as the engine remembers. So counts need neither a
    doorkeeper nor hashes, and halving all of them is noted and done when one is read.

    What was hot once has a count of 0 after four halvings, 40 pools full of uses. A protected entry of that kind is the
    next victim of the main part, before those on probation; the paper has nothing of the sort, and there it could stay
    for as long as nothing else was used often enough to be protected.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._most_window = max(capacity // 100, 1)
        self._most_main = capacity - self._most_window
        self._most_protected = self._most_main * 4 // 5
        self._window = self.add_list("window")
        self._probation, self._protected = self.add_list("probation"), self.add_list("protected")
        self._counts: dict[Entry, _Count] = {}
        self._used_blocks = 0  # since the last halving
        self._halvings = 0

    def frequency(self, entry: Entry) -> int:
        """Uses of ``entry``, the computation included, as far as they still count; 0 to 15."""
        return self._read(self._counts[entry])

    def order(self) -> Sequence[EntryList]:
        """Lets the window spill over, and decides between its oldest and the victim of the main part."""
        self._spill()
        newcomer, main = self._window.candidate, self._main()
        victim = main[0].candidate or main[1].candidate
        if newcomer is None or self._window.blocks <= self._most_window:
            return *main, self._window
        if victim is None or self.frequency(newcomer) <= self.frequency(victim):
            return self._window, *main
        target = self.home(victim)
        self.move(newcomer, self._probation)
        return target, *main, self._window

    def on_insert(self, entry: Entry, now: float) -> None:
        self.place(entry, self._window)
        self._counts[entry] = _Count(min(entry.hits, _MOST), self._halvings)
        self._use(entry)
        self._spill()

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_extend(entry, blocks, now)
        self._spill()
        self._demote()

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        super().on_split(upper, lower, now)
        self._counts[upper] = self._counts[lower]

    def on_hit(self, entry: Entry, now: float) -> None:
        self._use(entry)
        home = self.home(entry)
        if home is self._probation and entry.blocks <= self._most_protected:
            home = self._protected
        self.move(entry, home)
        self._demote()

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        """The uses before it was evicted count too; where the head of the run had stayed, it has them already."""
        if isinstance(returned.memory, _Count):
            uses = max(self._read(returned.memory) + 1, self.frequency(entry))
            self._counts[entry] = _Count(min(uses, _MOST), self._halvings)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        memory = self._counts[entry]
        super().on_evict(entry, blocks, now)
        return memory

    def on_forget(self, entry: Entry) -> None:
        super().on_forget(entry)
        self._counts.pop(entry, None)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        counted = [key(entry) for entry in self._counts]
        return {**super().dump(key), "counted": counted, "uses": [self.frequency(entry) for entry in self._counts]}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        counted = list(counts(state, "counted", "uses", entry))
        super().load(state, entry)
        for _, known, uses in counted:
            if known in self._counts:
                self._counts[known] = _Count(min(uses, _MOST), self._halvings)
        self._spill()
        self._demote()

    def _use(self, entry: Entry) -> None:
        self._counts[entry] = _Count(min(self.frequency(entry) + 1, _MOST), self._halvings)
        self._used_blocks += entry.blocks
        if self._used_blocks >= _SAMPLE * self.capacity:
            self._used_blocks = 0
            self._halvings += 1

    def _read(self, count: _Count) -> int:
        return count.uses >> (self._halvings - count.halvings)

    def _main(self) -> tuple[EntryList, EntryList]:
        """Where the next victim of the main part is looked for, and where if there is none."""
        oldest = self._protected.candidate
        if oldest is not None and not self.frequency(oldest):
            return self._protected, self._probation
        return self._probation, self._protected

    def _spill(self) -> None:
        """Move the oldest of the window on, while it has too much and the main part has room."""
        while self._window.blocks > self._most_window and (oldest := self._window.oldest) is not None:
            if self._probation.blocks + self._protected.blocks + oldest.blocks > self._most_main:
                return
            self.move(oldest, self._probation)

    def _demote(self) -> None:
        while self._protected.blocks > self._most_protected and (oldest := self._protected.oldest) is not None:
            self.move(oldest, self._probation)
