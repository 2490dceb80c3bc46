"""SIEVE: one queue, one bit per entry and a hand that goes round.

Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is simpler than LRU: an efficient turn-key eviction
algorithm for web caches", NSDI 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from .base import Entry, EvictionPolicy, Json
from .candidates import CandidateQueue
from .state import integers, living


class Sieve(EvictionPolicy):
    """Entries stand in a queue in the order of insertion and never move; a use sets their bit. The hand goes from the
    oldest to the youngest and begins anew at the oldest. It clears the bit of an entry that has one and goes on; it
    evicts the first that has none and stays there for the next time. New entries come in at the young end, so those
    that the hand has spared and the new ones are sifted apart.

    An entry that cannot go is passed over: it keeps its place and its bit. The pieces of a run that was cut have the
    same place, the head the younger part of it, and the same bit.

    O(log n) per event; clearing bits is paid for by the uses that set them. It is part of looking for a victim, so an
    iterator that is read on without anything being evicted clears bits too.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._places: dict[Entry, int] = {}
        self._next_place = 0
        self._used: dict[Entry, None] = {}  # whose bit is set
        self._hand = -math.inf  # candidates from this place on are ahead
        self._ahead, self._behind = CandidateQueue(), CandidateQueue()

    def on_insert(self, entry: Entry, now: float) -> None:
        self._places[entry] = self._next_place
        self._next_place += 1
        if entry.hits:  # from a snapshot, or from another policy
            self._used[entry] = None

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._places[upper] = self._places[lower]
        if lower in self._used:
            self._used[upper] = None

    def on_hit(self, entry: Entry, now: float) -> None:
        self._used[entry] = None

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._offer(entry)

    def on_held(self, entry: Entry) -> None:
        self._withdraw(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if entry.blocks == 0:
            self.on_forget(entry)
        return None

    def on_forget(self, entry: Entry) -> None:
        self._withdraw(entry)
        self._used.pop(entry, None)
        self._places.pop(entry, None)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        passed: list[Entry] = []  # had their turn and lost nothing: not again in this call
        try:
            while (entry := self._sift()) is not None:
                blocks = entry.blocks
                yield entry
                if entry.candidate and entry.blocks == blocks:
                    self._withdraw(entry)
                    passed.append(entry)
        finally:
            for entry in passed:
                if entry.candidate and entry in self._places:
                    self._offer(entry)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        order = sorted(self._places, key=self._places.__getitem__)
        behind = sum(place < self._hand for place in self._places.values())
        return {
            "queue": [key(entry) for entry in order],
            "used": [key(entry) for entry in self._used],
            "behind": behind,
        }

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        """Entries that the state does not name are the oldest, in their order, and the hand has passed them."""
        queue, used, behind = integers(state, "queue"), integers(state, "used"), state["behind"]
        if not isinstance(behind, int):
            raise TypeError(f"the place of the hand must be an integer, not {type(behind).__name__}")
        named = [(index, known) for index, known in living(queue, entry) if known in self._places]
        rest = sorted(self._places.keys() - {known for _, known in named}, key=self._places.__getitem__)
        offered = [known for known in self._places if self._withdraw(known)]
        self._places = {known: place for place, known in enumerate([*rest, *(known for _, known in named)])}
        self._next_place = len(self._places)
        self._hand = len(rest) + sum(index < behind for index, _ in named)
        self._used = {known: None for _, known in living(used, entry) if known in self._places}
        for known in offered:
            self._offer(known)

    def _sift(self) -> Entry | None:
        """Move the hand to the next candidate without a bit."""
        while (entry := self._at_hand()) is not None:
            place = self._places[entry]
            if entry not in self._used:
                self._hand = place
                return entry
            del self._used[entry]
            self._withdraw(entry)
            self._hand = place + 0.5  # pieces of the same run are behind as well
            self._offer(entry)
        return None

    def _at_hand(self) -> Entry | None:
        """The next candidate on the hand's way; it begins anew when there is none ahead."""
        if not len(self._ahead):
            self._ahead, self._behind = self._behind, self._ahead
            self._hand = -math.inf
        return self._ahead.first()

    def _offer(self, entry: Entry) -> None:
        place = self._places[entry]
        (self._ahead if place >= self._hand else self._behind).push(entry, place)

    def _withdraw(self, entry: Entry) -> bool:
        """Take ``entry`` out of the candidates; whether it was one."""
        was_candidate = entry in self._ahead or entry in self._behind
        self._ahead.discard(entry)
        self._behind.discard(entry)
        return was_candidate
