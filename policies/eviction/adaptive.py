"""Adaptive: tries several policies on a sample of the requests and follows the one that would have hit most.

Each policy that is tried has a ghost cache: the whole cache in small, without contents, to which it is the policy. It
sees the blocks whose names fall into a hashed sample, and has room for the same share of the blocks, as SHARDS does for
LRU (C. A. Waldspurger, N. Park, A. Garthwaite, I. Ahmad, "Efficient MRC construction with SHARDS", FAST 2015) and
miniature simulations for any policy (Waldspurger et al., "Cache modeling and optimization using miniature simulations",
USENIX ATC 2017).

All policies hear of the real cache too, so following another one takes effect with the next victim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from .arc import Arc
from .base import NAME_BYTES, Entry, EvictionPolicy, Json, Returned, Tail
from .gittins import Gittins
from .lru import Lru
from .s3_fifo import S3Fifo
from .trials import Race, Sample, Trial

POLICIES: tuple[Callable[[int], EvictionPolicy], ...] = (Gittins, Lru, S3Fifo, Arc)
"""What is tried. The first one is followed until another one has proved better."""

_SAMPLE_BLOCKS = 2048
"""Room of a ghost cache: of smaller pools all blocks are looked at. With more, the same policies were followed."""
_HALF_LIFE = 1800.0
"""Seconds after which a use counts half: the day changes by the hour."""
_MARGIN = 0.002
"""Share of the blocks asked for that another policy must have hit more often to be followed."""
_CHANCE = 4.0
"""Of standard deviations. It is asked with every request, so what is rare once is not rare at all."""


class Adaptive(EvictionPolicy):
    """See the module. Costs what its policies cost, twice: on the real cache and on the sample."""

    wants_requests = True

    def __init__(self, capacity: int, policies: Sequence[Callable[[int], EvictionPolicy]] = POLICIES) -> None:
        """``policies``: at least one, the first of which is followed until another one leads."""
        super().__init__(capacity)
        room = min(capacity, _SAMPLE_BLOCKS)
        self._sample = Sample(room, capacity)
        self._policies = [make(capacity) for make in policies]
        self._trials = [Trial(make(room), room) for make in policies]
        self._race = Race(len(policies), half_life=_HALF_LIFE, margin=_MARGIN, chance=_CHANCE)

    @property
    def followed(self) -> EvictionPolicy:
        """The policy whose victims go now."""
        return self._policies[self._race.followed]

    def on_insert(self, entry: Entry, now: float) -> None:
        for policy in self._policies:
            policy.on_insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        for policy in self._policies:
            policy.on_extend(entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        for policy in self._policies:
            policy.on_split(upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        for policy in self._policies:
            policy.on_hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        for policy in self._policies:
            policy.on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        return tuple(policy.on_evict(entry, blocks, now) for policy in self._policies)

    def on_forget(self, entry: Entry) -> None:
        for policy in self._policies:
            policy.on_forget(entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        memories = returned.memory
        if isinstance(memories, tuple) and len(memories) == len(self._policies):
            for policy, memory in zip(self._policies, memories, strict=True):
                policy.on_ghost_hit(entry, returned._replace(memory=memory), now)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        if sample := self._sample.of(names):
            found = [trial.ask(number, sample, now) for trial in self._trials]
            self._race.tell(len(sample) // NAME_BYTES, found, now)

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        sample = self._sample.of(names)
        for trial in self._trials:
            trial.complete(number, sample, now)

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        return self.followed.victims(count, now)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return {"race": self._race.dump(), "policies": [policy.dump(key) for policy in self._policies]}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        """The ghost caches start empty, and the policies in them anew."""
        race, policies = state["race"], state["policies"]
        if not isinstance(race, Mapping) or isinstance(policies, str) or not isinstance(policies, Sequence):
            raise TypeError("the state of adaptive needs that of its race and a list of those of its policies")
        learned = [one for one in policies if isinstance(one, Mapping)]
        if not len(learned) == len(policies) == len(self._policies):
            raise ValueError("the state of adaptive is of other policies")
        for policy, one in zip(self._policies, learned, strict=True):
            policy.load(one, entry)
        self._race.load(race)
