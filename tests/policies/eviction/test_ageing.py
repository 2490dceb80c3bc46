"""What was hot once must not stay for ever (EVICT-08)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, repeat

import pytest

from octavo.policies.eviction import EvictionPolicy, Gdsf, S3Fifo, WTinyLfu
from octavo.policies.eviction.base import NAME_BYTES
from octavo.policies.eviction.trials import Race
from octavo.policies.replica import Replica

POOL = 64
WORKING_SET = 32
HOT = b"".join(number.to_bytes(NAME_BYTES, "little") for number in range(1, 9))
AFTER_HOT, LATER = 10**9, 2 * 10**9


class Cache:
    """A pool with a prefix of eight blocks that can be used a thousand times."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.replica = Replica(POOL, policy)
        self._now = count()
        self.misses = 0

    def heat(self) -> None:
        for _ in range(1000):
            self.use(HOT)
        assert self.is_hot_whole
        self.misses = 0

    def use_all(self, order: Iterator[int], first: int) -> int:
        """How many were hits."""
        return sum(self.use((first + name).to_bytes(NAME_BYTES, "little")) for name in order)

    def use(self, names: bytes) -> bool:
        """Whether all of it was there."""
        now = float(next(self._now))
        lease = self.replica.admit(names, 0, now)
        assert lease is not None
        self.replica.publish(lease, len(names) // NAME_BYTES, now)
        self.replica.finish(lease, now)
        is_hit = lease.found == len(names) // NAME_BYTES
        self.misses += not is_hit
        return is_hit

    @property
    def is_hot_whole(self) -> bool:
        return self.replica.match(HOT).blocks == len(HOT) // NAME_BYTES


def one_by_one(working_set: int) -> Iterator[int]:
    for item in range(WORKING_SET):
        yield from repeat(working_set * WORKING_SET + item, 6)


def pass_by_pass(working_set: int) -> Iterator[int]:
    for _ in range(6):
        yield from range(working_set * WORKING_SET, (working_set + 1) * WORKING_SET)


@pytest.mark.parametrize(
    ("policy", "order", "pools"),
    [
        (S3Fifo, one_by_one, 5),  # four turns of the main queue, and the pool to be filled first
        (S3Fifo, pass_by_pass, 5),
        (WTinyLfu, one_by_one, 1 + 40 / 6),  # ten pools of uses for each of four halvings, six uses to a miss
        (WTinyLfu, pass_by_pass, 1 + 40),
        (Gdsf, one_by_one, 1 + 1000 / 6),  # its clock rises by six in each pool
        (Gdsf, pass_by_pass, 1 + 1000),  # and by one here
    ],
)
def test_what_was_hot_once_goes_within_a_bounded_number_of_misses(
    policy: type[EvictionPolicy], order: Callable[[int], Iterator[int]], pools: float
) -> None:
    cache = Cache(policy(POOL))
    cache.heat()
    hits_beside, sets = 0, count()
    while cache.is_hot_whole:
        hits_beside = cache.use_all(order(next(sets)), AFTER_HOT)
        assert cache.misses <= pools * POOL
    hits_after = sum(cache.use_all(order(at), LATER) for at in range(2))
    assert hits_after >= hits_beside


def test_what_a_race_has_loaded_does_not_age_with_the_time_before_it() -> None:
    """Clocks begin anywhere: a machine that has been up for weeks must not make the standing of yesterday nothing."""
    first = Race(2, half_life=1800.0, margin=0.002, chance=4.0)
    first.tell(10, [0, 1], 1e6)
    second = Race(2, half_life=1800.0, margin=0.002, chance=4.0)
    second.load(first.dump())
    second.tell(0, [0, 0], 2e6)
    assert second.dump() == first.dump()
    second.tell(0, [0, 0], 2e6 + 1800.0)
    assert second.dump() == {"followed": 0, "asked": 5.0, "leads": [0.0, 0.5], "spreads": [0.0, 0.25]}
