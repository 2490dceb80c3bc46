"""Retention over any policy: what somebody asked to be kept longer outlives the rest, until its time is over.

One policy of the same kind ranks the entries of each priority, so none of them has to know that there are priorities.
The wish itself, ranges of tokens with a priority and a time, has the form of TensorRT-LLM's ``KvCacheRetentionConfig``
(NVIDIA, 2025).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from .base import Entry, EvictionPolicy, Json, Returned, Tail
from .candidates import CandidateQueue
from .lru import Lru

MOST_POLICIES = 8
"""Priorities that have a policy of the chosen kind at the same time; of more, those that come later are ranked by LRU.
Callers choose priorities, and a policy may keep tables as large as the pool."""


@dataclass(slots=True, eq=False)
class _Level:
    """The entries of one priority."""

    priority: int
    number: int
    """Of the policy: what tells its memories from those of another one at the same priority, earlier or later."""
    policy: EvictionPolicy
    entries: int = 0
    """Not counted for priority 0, which always is there."""
    candidates: int = 0


class _Memory(NamedTuple):
    number: int
    memory: object


class PriorityTtl(EvictionPolicy):
    """Candidates of a lower :attr:`Entry.priority` go before all of a higher one; those of one priority in the order of
    a policy of their own.

    What nobody asked for has priority 0, and so has an entry whose ``expires`` has come, whether or not somebody else
    makes its priority fall back. An entry that changes its priority starts anew under the other policy: with its
    ``hits`` and ``last_use``, without what the first policy knew of it. The policy of a priority is dropped with the
    last entry of that priority, except for 0: what it has learned lasts. With more than ``MOST_POLICIES`` priorities
    those that come later are ranked by LRU.

    O(log n) per event on top of the policies; without priorities a dictionary look-up and a count.
    """

    def __init__(self, capacity: int, make: Callable[[int], EvictionPolicy] = Lru) -> None:
        """``make(capacity)`` gives a new policy; it is called once here, and once for each further priority."""
        super().__init__(capacity)
        self._make = make
        self._numbers = count()
        self._plain = _Level(0, next(self._numbers), make(capacity))
        self._levels = {0: self._plain}
        self._elsewhere: dict[Entry, _Level] = {}  # entries that are not of priority 0
        self._ready: list[int] = []  # priorities that have candidates, ascending
        self._ends = CandidateQueue()  # candidates with a priority that will expire
        self._evictions = 0
        self.wants_requests = self._plain.policy.wants_requests
        self._name = self._plain.policy.name

    @property
    def name(self) -> str:
        """Of the policy underneath: that one is what users chose."""
        return self._name

    def on_insert(self, entry: Entry, now: float) -> None:
        if entry.priority:
            self._enter(entry, self._level_of(_priority(entry, now)), now)
        else:
            self._plain.policy.on_insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._elsewhere.get(entry, self._plain).policy.on_extend(entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        level = self._where(lower)
        self._record(upper, level)
        level.policy.on_split(upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        level = self._elsewhere.get(entry, self._plain)
        if not entry.candidate and (entry.priority or level.priority):
            level = self._settle(entry, level, now)
        level.policy.on_hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        level = self._elsewhere.get(entry, self._plain)
        if entry.priority or level.priority:
            level = self._settle(entry, level, now)
        level.candidates += 1
        if level.candidates == 1:
            insort(self._ready, level.priority)
        if level is not self._plain and entry.expires is not None:
            self._ends.push(entry, entry.expires)
        level.policy.on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        level = self._elsewhere.get(entry, self._plain)
        self._withdraw(entry, level)
        level.policy.on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        level = self._elsewhere.get(entry, self._plain)
        self._evictions += 1
        if not entry.blocks:
            self._withdraw(entry, level)
            if level is not self._plain:
                self._strike(entry, level)
        memory = level.policy.on_evict(entry, blocks, now)
        return None if memory is None else _Memory(level.number, memory)

    def on_forget(self, entry: Entry) -> None:
        level = self._where(entry)
        self._strike(entry, level)
        level.policy.on_forget(entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        """A memory goes to the policy that made it, if the run came back to that one, and to no other."""
        level, memory = self._where(entry), returned.memory
        own = memory.memory if isinstance(memory, _Memory) and memory.number == level.number else None
        level.policy.on_ghost_hit(entry, returned._replace(memory=own), now)

    @property
    def wants_returns(self) -> bool:
        """As the policy underneath."""
        return self._plain.policy.wants_returns

    def on_request(self, number: int, names: bytes, now: float) -> None:
        for level in self._levels.values():
            level.policy.on_request(number, names, now)

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        for level in self._levels.values():
            level.policy.on_complete(number, names, now)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {str(level.priority): level.policy.dump(key) for level in self._levels.values()}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        """State of a priority that nothing has now is of no use and is ignored."""
        for level in list(self._levels.values()):
            saved = state.get(str(level.priority), {})
            if not isinstance(saved, Mapping):
                raise TypeError(f"the state of priority {level.priority} must be a mapping, not {saved!r}")
            level.policy.load(saved, self._among(level, entry))

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        if self._elsewhere:
            self._let_expire(now)
        ready, place = self._ready, 0  # among the priorities that have candidates
        while place < len(ready):
            level, evictions, named = self._levels[ready[place]], self._evictions, False
            victims = level.policy.victims(count, now)
            try:
                for entry in victims:
                    named = True
                    yield entry
                    if self._evictions != evictions and ready and ready[0] < level.priority:
                        break  # a parent of a lower priority has lost its last child
            finally:
                close = getattr(victims, "close", None)
                if close is not None:
                    close()
            if self._evictions == evictions and named:  # somebody only looks: show the next ones too
                place += 1
            elif ready and ready[0] <= level.priority:
                return  # to be asked again: a lower priority has got candidates, or this policy has more to say

    def _where(self, entry: Entry) -> _Level:
        return self._elsewhere.get(entry, self._plain)

    def _level_of(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            make = self._make if len(self._levels) < MOST_POLICIES else Lru
            level = self._levels[priority] = _Level(priority, next(self._numbers), make(self.capacity))
        return level

    def _settle(self, entry: Entry, level: _Level, now: float) -> _Level:
        """Where an entry that is no candidate of ``level``, where it is, belongs; it moves if that has changed."""
        priority = _priority(entry, now)
        if priority == level.priority:
            return level
        other = self._level_of(priority)
        self._strike(entry, level)
        level.policy.on_forget(entry)
        self._enter(entry, other, now)
        return other

    def _enter(self, entry: Entry, level: _Level, now: float) -> None:
        self._record(entry, level)
        level.policy.on_insert(entry, now)

    def _record(self, entry: Entry, level: _Level) -> None:
        if level is not self._plain:
            self._elsewhere[entry] = level
            level.entries += 1

    def _strike(self, entry: Entry, level: _Level) -> None:
        """``entry`` is none of this level's any more."""
        if self._elsewhere.pop(entry, None) is None:
            return
        level.entries -= 1
        if not level.entries:
            del self._levels[level.priority]

    def _withdraw(self, entry: Entry, level: _Level) -> None:
        """``entry`` is no candidate any more."""
        level.candidates -= 1
        if not level.candidates:
            del self._ready[bisect_left(self._ready, level.priority)]
        if level is not self._plain:
            self._ends.discard(entry)

    def _let_expire(self, now: float) -> None:
        """Make candidates fall back to 0 that nobody made fall back. The others are looked at when they become such."""
        while (entry := self._ends.first()) is not None and not _priority(entry, now):
            self.on_held(entry)
            self.on_candidate(entry, now)

    def _among(self, level: _Level, entry: Callable[[int], Entry | None]) -> Callable[[int], Entry | None]:
        def find(key: int) -> Entry | None:
            found = entry(key)
            return found if found is not None and self._where(found) is level else None

        return find


def _priority(entry: Entry, now: float) -> int:
    return 0 if entry.expires is not None and entry.expires <= now else entry.priority
