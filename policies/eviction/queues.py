"""Ordered lists of entries, lists of ghosts, and the base of the policies that are made of such lists.

The papers know pages of one size, any of which may go. Here an entry is a run of blocks, so sizes are counted in
blocks; and only candidates can go, so a list keeps these in a structure of their own, ordered by their places: naming
the first one never walks over the others, and nobody loses his place by being held.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .base import Entry, EvictionPolicy, Json
from .candidates import CandidateQueue
from .state import integers, living


@dataclass(slots=True, eq=False)
class _Place:
    """A link of the list. ``number`` rises from the old end to the young one; pieces of one run share it, for they lie
    on one path of the tree, where no two can be candidates at a time."""

    entry: Entry
    number: int
    blocks: int
    older: _Place | None = None
    younger: _Place | None = None


class EntryList:
    """Entries from the oldest to the youngest. Candidates amortised O(log n) per call, all else O(1).

    Who is a candidate is told by :meth:`offer` and :meth:`withdraw`.
    """

    def __init__(self) -> None:
        self.blocks = 0
        """Of all entries in it, candidates or not."""
        self._places: dict[Entry, _Place] = {}
        self._oldest: _Place | None = None
        self._youngest: _Place | None = None
        self._candidates = CandidateQueue()
        self._number = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._places

    def __iter__(self) -> Iterator[Entry]:
        """From the oldest to the youngest; the list must not change meanwhile."""
        place = self._oldest
        while place is not None:
            yield place.entry
            place = place.younger

    @property
    def oldest(self) -> Entry | None:
        """Whether it is a candidate or not; ``None`` when the list is empty."""
        return None if self._oldest is None else self._oldest.entry

    @property
    def candidate(self) -> Entry | None:
        """The oldest candidate; ``None`` when there is none."""
        return self._candidates.first()

    def append(self, entry: Entry, *, offered: bool = False) -> None:
        """Add ``entry``, which is in no list, at the young end. ``offered``: it is a candidate."""
        self._number += 1
        self._link(_Place(entry, self._number, entry.blocks), self._youngest)
        if offered:
            self.offer(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        """``upper`` was cut off ``lower``, which is in the list: it gets the next younger place."""
        self.resize(lower)
        below = self._places[lower]
        self._link(_Place(upper, below.number, upper.blocks), below)

    def remove(self, entry: Entry) -> bool:
        """Take ``entry``, which is in the list, out. Returns whether it was a candidate."""
        place = self._places.pop(entry)
        self._unlink(place)
        self.blocks -= place.blocks
        offered = entry in self._candidates
        self._candidates.discard(entry)
        return offered

    def resize(self, entry: Entry) -> None:
        """``entry`` has another number of blocks now."""
        place = self._places[entry]
        self.blocks += entry.blocks - place.blocks
        place.blocks = entry.blocks

    def offer(self, entry: Entry) -> None:
        """``entry`` is a candidate."""
        self._candidates.push(entry, self._places[entry].number)

    def withdraw(self, entry: Entry) -> None:
        """``entry`` is no candidate; nothing happens when it was none."""
        self._candidates.discard(entry)

    def _link(self, place: _Place, older: _Place | None) -> None:
        younger = None if older is None else older.younger
        place.older, place.younger = older, younger
        if older is None:
            self._oldest = place
        else:
            older.younger = place
        if younger is None:
            self._youngest = place
        else:
            younger.older = place
        self._places[place.entry] = place
        self.blocks += place.blocks

    def _unlink(self, place: _Place) -> None:
        if place.older is None:
            self._oldest = place.younger
        else:
            place.older.younger = place.younger
        if place.younger is None:
            self._youngest = place.older
        else:
            place.younger.older = place.older


@dataclass(slots=True, eq=False)
class Ghost:
    """An evicted run: what a policy gives the engine as its memory."""

    blocks: int
    """Those of its head that are remembered still."""


class GhostList:
    """Evicted runs from the oldest to the youngest. O(1) per call and ghost that goes."""

    def __init__(self) -> None:
        self.blocks = 0
        """Of all ghosts in it."""
        self._ghosts: OrderedDict[Ghost, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def __contains__(self, memory: object) -> bool:
        return isinstance(memory, Ghost) and memory in self._ghosts

    def add(self, blocks: int) -> Ghost:
        """A new ghost at the young end."""
        ghost = Ghost(blocks)
        self._ghosts[ghost] = None
        self.blocks += blocks
        return ghost

    def take(self, memory: object) -> Ghost | None:
        """Take the ghost out that the engine brings back; ``None`` when ``memory`` is none in this list."""
        if not isinstance(memory, Ghost) or memory not in self._ghosts:
            return None
        del self._ghosts[memory]
        self.blocks -= memory.blocks
        return memory

    def trim(self, most: int) -> None:
        """Forget the oldest blocks until ``most`` are left; below 0 all go. The tail of a run was evicted before its
        head, so that is older."""
        while self._ghosts and self.blocks > most:
            oldest = next(iter(self._ghosts))
            forgotten = min(oldest.blocks, self.blocks - most)
            oldest.blocks -= forgotten
            self.blocks -= forgotten
            if not oldest.blocks:
                del self._ghosts[oldest]


class ListPolicy(EvictionPolicy):
    """A policy whose entries stand in one of several lists.

    A subclass makes its lists with :meth:`add_list`, puts new entries into one of them (:meth:`place` in
    ``on_insert``), moves them on uses (:meth:`move` in ``on_hit`` and ``on_ghost_hit``) and says in :meth:`order` which
    list gives the next victim. Growing, shrinking, splitting, candidates, forgetting and the saved state are done here;
    ghosts are not saved. A subclass that overrides an event that is done here calls the method of this class too.

    A new entry that has hits was in the cache before: it comes from a snapshot or from another policy.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._lists: dict[str, EntryList] = {}
        self._homes: dict[Entry, EntryList] = {}

    def add_list(self, name: str) -> EntryList:
        """A new, empty list. ``name``: what it is called in the saved state."""
        self._lists[name] = EntryList()
        return self._lists[name]

    @abstractmethod
    def order(self) -> Sequence[EntryList]:
        """All lists; the next victim is the oldest candidate of the first that has one. Asked anew for each."""

    def home(self, entry: Entry) -> EntryList:
        """The list in which ``entry`` stands.

        :raises KeyError: when there is no such list.
        """
        return self._homes[entry]

    def place(self, entry: Entry, target: EntryList) -> None:
        """Put a new entry at the young end of ``target``."""
        target.append(entry)
        self._homes[entry] = target

    def move(self, entry: Entry, target: EntryList) -> None:
        """Put ``entry``, wherever it stands, at the young end of ``target``."""
        offered = self._homes[entry].remove(entry)
        target.append(entry, offered=offered)
        self._homes[entry] = target

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._homes[entry].resize(entry)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        home = self._homes[lower]
        home.split(upper, lower)
        self._homes[upper] = home

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._homes[entry].offer(entry)

    def on_held(self, entry: Entry) -> None:
        self._homes[entry].withdraw(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if entry.blocks:
            self._homes[entry].resize(entry)
        else:
            self.on_forget(entry)
        return None

    def on_forget(self, entry: Entry) -> None:
        self._homes.pop(entry).remove(entry)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        passed: list[Entry] = []  # had their turn and lost nothing: not again in this call
        try:
            while (entry := self._first()) is not None:
                blocks = entry.blocks
                yield entry
                if entry.candidate and entry.blocks == blocks:
                    self._homes[entry].withdraw(entry)
                    passed.append(entry)
        finally:
            for entry in passed:
                if entry.candidate and entry in self._homes:
                    self._homes[entry].offer(entry)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {name: [key(entry) for entry in entries] for name, entries in self._lists.items()}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        """Entries that the state does not name stay in their lists, and are older there than those it names."""
        for name, target in self._lists.items():
            for _, known in living(integers(state, name) if name in state else (), entry):
                if known in self._homes:
                    self.move(known, target)

    def _first(self) -> Entry | None:
        return next((entry for entries in self.order() if (entry := entries.candidate) is not None), None)
