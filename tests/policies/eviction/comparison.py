"""Events of a small cache for a policy, and what it does with them beside its reference or a cache of single pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from octavo.policies.eviction import Entry, EvictionPolicy, Returned
from octavo.policies.eviction.base import NAME_BYTES
from octavo.policies.replica import Lease, Replica
from octavo.policies.testing import PrefixModel, play
from octavo.tests.policies.eviction.references import Reference

Act = tuple[int, int, int]


def _acts(length: int, seed: int) -> list[Act]:
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    return [(random.randrange(10), random.randrange(1000), random.randrange(1000)) for _ in range(length)]


def _pages(length: int, different: int, seed: int) -> list[int]:
    """The lower numbers more often."""
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    skew = random.choice([1, 2, 3])
    return [int(different * random.random() ** skew) for _ in range(length)]


# Long ones from a seed: the returns that tell policies apart are rare in what is drawn step by step.
SEEDS = st.integers(0, 2**32)
ACTS = st.builds(_acts, st.integers(0, 200), SEEDS)
PAGES = st.builds(_pages, st.integers(0, 250), st.integers(2, 30), SEEDS)
CAPACITIES = st.integers(1, 12)

_LONGEST = 8
"""Blocks of a prompt that :class:`Traffic` makes."""


class _Pair(NamedTuple):
    policy: object
    reference: object


class Compared(EvictionPolicy):
    """A policy and its reference: the same events for both, and each victim must be the same."""

    def __init__(self, policy: EvictionPolicy, reference: Reference) -> None:
        super().__init__(policy.capacity)
        self.policy, self.reference = policy, reference
        self.returns = 0

    def on_insert(self, entry: Entry, now: float) -> None:
        self.policy.on_insert(entry, now)
        self.reference.insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self.policy.on_extend(entry, blocks, now)
        self.reference.extend(entry, blocks)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self.policy.on_split(upper, lower, now)
        self.reference.split(upper, lower)

    def on_hit(self, entry: Entry, now: float) -> None:
        self.policy.on_hit(entry, now)
        self.reference.hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self.policy.on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self.policy.on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        return _Pair(self.policy.on_evict(entry, blocks, now), self.reference.evict(entry, blocks))

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        pair = returned.memory
        assert isinstance(pair, _Pair)
        self.returns += 1
        self.policy.on_ghost_hit(entry, returned._replace(memory=pair.policy), now)
        self.reference.back(entry, pair.reference)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        self.reference.make_room()
        for entry in self.policy.victims(count, now):
            assert entry is self.reference.pick(now)
            yield entry


class Traffic:
    """Requests for a replica, up to three at a time, whose prompts go on where earlier ones left, anywhere in them."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._prompts = [b""]
        self._leases: list[Lease] = []
        self._fresh = count(1)
        self._now = 0.0

    def act(self, action: int, pick: int, amount: int) -> None:
        """Start a request, let one generate, or end one."""
        self._now += 1.0
        if self._leases and (action > 5 or len(self._leases) == 3):
            lease = self._leases[pick % len(self._leases)]
            if action > 7 and len(lease.names) < _LONGEST * NAME_BYTES:
                self._generate(lease, 1 + amount % 2)
            else:
                self._leases.remove(lease)
                self.replica.finish(lease, self._now)
        else:
            self._start(self._prompts[-1 - pick % min(len(self._prompts), 12)], amount)

    def _start(self, earlier: bytes, amount: int) -> None:
        kept = len(earlier) // NAME_BYTES - amount % 3
        names = earlier[: max(kept, 0) * NAME_BYTES]
        names += self._new_names(min(amount // 3 % 4, _LONGEST - len(names) // NAME_BYTES))
        lease = self.replica.admit(names, 0, self._now)
        if lease is not None:
            self._prompts.append(names)
            self._leases.append(lease)
            self.replica.publish(lease, len(names) // NAME_BYTES, self._now)

    def _generate(self, lease: Lease, blocks: int) -> None:
        if self.replica.extend(lease, blocks, self._now):
            lease.names += self._new_names(blocks)
            self.replica.publish(lease, len(lease.names) // NAME_BYTES, self._now)

    def _new_names(self, blocks: int) -> bytes:
        return b"".join(next(self._fresh).to_bytes(NAME_BYTES) for _ in range(blocks))


def compare_in_a_cache(policy: EvictionPolicy, reference: Reference, acts: list[Act]) -> Compared:
    """Requests one upon another in a pool that is too small for them."""
    compared = Compared(policy, reference)
    traffic = Traffic(Replica(policy.capacity, compared))
    for act in acts:
        traffic.act(*act)
    return compared


def compare_in_a_tree(policy: EvictionPolicy, reference: Reference, acts: list[Act]) -> None:
    """Any events in any order, without returns; in the end everything goes."""
    model = PrefixModel(Compared(policy, reference))
    for act in acts:
        play(model, *act)
    model.evict_all()
    assert model.entries == []


def hits_of_pages(policy: EvictionPolicy, pages: list[int]) -> list[bool]:
    """Whether each was there when it was asked for: each is a prompt of one block, over before the next comes."""
    replica = Replica(policy.capacity, policy, most_ghosts=1000)
    hits: list[bool] = []
    for now, page in enumerate(pages):
        lease = replica.admit(page.to_bytes(NAME_BYTES), 0, float(now))
        assert lease is not None
        hits.append(lease.found == 1)
        replica.publish(lease, 1, float(now))
        replica.finish(lease, float(now))
    return hits


def assert_restored(make: Callable[[], EvictionPolicy], acts: list[Act]) -> None:
    """Another object that gets the state, through JSON, ranks as the first one does."""
    model = PrefixModel(make())
    for act in acts:
        play(model, *act)
    state = json.loads(json.dumps(model.policy.dump(model.name)))
    entries = {model.name(entry): entry for entry in model.entries}
    other = make()
    for entry in reversed(model.entries):
        other.on_insert(entry, model.now)
        if entry.candidate:
            other.on_candidate(entry, model.now)
    other.load(state, entries.get)
    expected = list(model.policy.victims(1000, model.now + 1))
    assert list(other.victims(1000, model.now + 1)) == expected
    assert set(expected) == set(model.candidates)
