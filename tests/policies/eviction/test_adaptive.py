from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.policies.eviction import Arc, Entry, EvictionPolicy, Lru, S3Fifo, adaptive
from octavo.policies.eviction.adaptive import Adaptive
from octavo.policies.eviction.base import NAME_BYTES, Json
from octavo.policies.eviction.gittins import Gittins
from octavo.policies.eviction.trials import Race, Sample, Trial
from octavo.policies.replica import Replica
from octavo.policies.testing import EvictionPolicyContract, PrefixModel, walk


class Mru(EvictionPolicy):
    """The last one that became a candidate goes: best for loops, worst for what moves on."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._candidates: dict[Entry, None] = {}

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._candidates[entry] = None

    def on_held(self, entry: Entry) -> None:
        self._candidates.pop(entry, None)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            self.on_held(entry)
        return None

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        seen = list(self._candidates)
        while self._candidates and seen:
            yield seen.pop() if seen[-1] in self._candidates else next(reversed(self._candidates))


class Whichever(EvictionPolicy):
    """Any goes: better than LRU for loops, worse for what moves on, and it rids itself of anything."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._candidates: list[Entry] = []
        self._random = Random(1)  # noqa: S311  # reproducible, not secret

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._candidates.append(entry)

    def on_held(self, entry: Entry) -> None:
        self._candidates.remove(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        if not entry.blocks:
            self.on_held(entry)
        return None

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while self._candidates:
            yield self._random.choice(self._candidates)


class TestAdaptive(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Adaptive(capacity, (Gittins, S3Fifo))  # all four take as long again


def names_of(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<u8").tobytes()


class Cache:
    """Requests one after another, one each second."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.replica = Replica(policy.capacity, policy)
        self.now = 0.0

    def use(self, *numbers: int) -> int:
        """How many blocks were there."""
        self.now += 1.0
        lease = self.replica.admit(names_of(*numbers), 0, self.now)
        assert lease is not None
        self.replica.publish(lease, len(numbers), self.now)
        self.replica.finish(lease, self.now)
        return lease.found


def loop(rounds: int, size: int) -> Iterator[int]:
    for _ in range(rounds):
        yield from range(1, size + 1)


def moving_on(length: int, first: int = 10_000) -> Iterator[int]:
    """What was new lately, and never again what is old."""
    random = Random(first)  # noqa: S311  # reproducible, not secret
    for at in range(length):
        yield first + at - min(int(random.expovariate(0.05)), at)


# the sample


@given(capacity=st.integers(100, 10**6), first=st.integers(0, 2**40))
def test_the_sample_is_its_share_of_the_names(capacity: int, first: int) -> None:
    """Of consecutive numbers as exactly as can be."""
    names = np.arange(first, first + 20_000, dtype="<u8").tobytes()
    share = len(Sample(100, capacity).of(names)) / len(names)
    assert share == pytest.approx(100 / capacity, abs=0.001)


def test_the_sample_is_its_share_of_hashed_names() -> None:
    names = Random(1).randbytes(50_000 * NAME_BYTES)  # noqa: S311  # reproducible, not secret
    assert len(Sample(1, 4).of(names)) / len(names) == pytest.approx(1 / 4, abs=0.01)


@given(numbers=st.lists(st.integers(0, 2**64 - 1), max_size=30), cut=st.integers(0, 30))
def test_the_beginning_of_a_prompt_stays_one(numbers: list[int], cut: int) -> None:
    sample = Sample(1, 2)
    whole, head = sample.of(names_of(*numbers)), sample.of(names_of(*numbers[:cut]))
    assert whole.startswith(head)
    assert whole == head + sample.of(names_of(*numbers[cut:]))


def test_a_sample_of_everything_is_everything() -> None:
    names = names_of(1, 2**64 - 1, 0)
    assert Sample(5, 5).of(names) == Sample(6, 5).of(names) == names


# the race


def race(contestants: int = 3) -> Race:
    return Race(contestants, half_life=1e9, margin=0.01, chance=4.0)


@pytest.mark.parametrize("best", range(3))
def test_the_one_that_hits_most_is_followed(best: int) -> None:
    judged = race()
    for now in range(100):
        judged.tell(10, [5 if number == best else 4 for number in range(3)], float(now))
    assert judged.followed == best


def test_a_lead_by_chance_changes_nothing() -> None:
    random, judged, changes = Random(1), race(2), 0  # noqa: S311  # reproducible, not secret
    for now in range(5000):
        before = judged.followed
        judged.tell(10, [random.randrange(10), random.randrange(10)], float(now))
        changes += judged.followed != before
    assert changes <= 1


def test_a_lead_within_the_margin_changes_nothing() -> None:
    judged = race(2)
    for now in range(10_000):
        judged.tell(200, [100, 101], float(now))
    assert judged.followed == 0


def test_one_lucky_request_changes_nothing() -> None:
    judged = race(2)
    judged.tell(100, [0, 100], 0.0)
    assert judged.followed == 0


def test_who_was_changed_for_has_to_be_beaten_anew() -> None:
    judged = race(2)
    for now in range(100):
        judged.tell(10, [4, 5], float(now))
    assert judged.followed == 1
    judged.tell(10, [10, 0], 101.0)
    assert judged.followed == 1


def test_what_was_long_ago_counts_little() -> None:
    judged = Race(2, half_life=100.0, margin=0.01, chance=4.0)
    for now in range(1000):
        judged.tell(10, [9, 1], float(now))
    for now in range(2000, 2040):
        judged.tell(10, [1, 9], float(now))
    assert judged.followed == 1


@given(told=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_a_race_goes_on_from_its_state(told: list[tuple[int, int]]) -> None:
    judged, other = race(2), race(2)
    for found in told[:30]:
        judged.tell(10, found, 5.0)
    other.tell(10, [0, 0], 5.0)
    other.load(json.loads(json.dumps(judged.dump(), allow_nan=False)))
    for found in told[30:]:
        judged.tell(10, found, 5.0)
        other.tell(10, found, 5.0)
    assert other.dump() == judged.dump()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("followed", 3),
        ("followed", -1),
        ("followed", "1"),
        ("asked", -1.0),
        ("asked", None),
        ("leads", [0.0, 0.0]),
        ("leads", "abc"),
        ("leads", [0.0, 0.0, float("nan")]),
        ("spreads", [0.0, 0.0, -1.0]),
        ("spreads", [0.0, 0.0, float("inf")]),
    ],
)
def test_a_broken_state_of_a_race_is_refused_and_changes_nothing(name: str, value: Json) -> None:
    judged = race()
    judged.tell(10, [1, 2, 3], 1.0)
    before = judged.dump()
    with pytest.raises((ValueError, TypeError)):
        judged.load({**before, name: value})
    assert judged.dump() == before


def test_after_a_long_time_a_change_takes_no_longer() -> None:
    def turns(before: int) -> int:
        judged, now = Race(2, half_life=1e9, margin=0.0, chance=4.0), 0.0
        for _ in range(before):
            judged.tell(10, [5, 4], now)
        count = 0
        while judged.followed == 0:
            judged.tell(10, [0, 10], now)
            count += 1
        return count

    assert turns(10_000) < 100


# ghost caches


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), make=st.sampled_from([Lru, Arc, S3Fifo, Gittins]))
def test_a_ghost_cache_hits_what_the_cache_would_hit(seed: int, make: Callable[[int], EvictionPolicy]) -> None:
    """Requests that overlap, generate, and are told under names; the same as a cache in which they run."""
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    trial, replica = Trial(make(40), 40), Replica(40, make(40))
    running = {}
    for number in range(120):
        now, path = float(number), random.randrange(8)
        prompt = names_of(*(100 * path + block for block in range(random.randint(1, 8))))
        lease = replica.admit(prompt, 0, now)
        assert trial.ask(number, prompt, now) == (lease.found if lease else 0)
        if lease is not None:
            replica.publish(lease, len(prompt) // NAME_BYTES, now)
            running[number] = lease
        while len(running) > random.randrange(4):
            over, lease = running.popitem()
            answer = names_of(*(10**6 + 10 * over + block for block in range(random.randrange(3))))
            if replica.extend(lease, len(answer) // NAME_BYTES, now):
                lease.names += answer
                replica.publish(lease, len(lease.names) // NAME_BYTES, now)
            replica.finish(lease, now)
            trial.complete(over, lease.names, now)


def test_what_a_fork_leaves_is_in_the_ghost_cache() -> None:
    trial = Trial(Lru(8), 8)
    trial.complete(77, names_of(1, 2, 3), 1.0)
    assert trial.ask(1, names_of(1, 2, 3, 4), 2.0) == 3


def test_a_request_that_is_broken_off_holds_nothing_any_more() -> None:
    trial = Trial(Lru(4), 4)
    trial.ask(1, names_of(1, 2, 3), 1.0)
    trial.complete(1, b"", 2.0)
    assert trial.ask(2, names_of(4, 5, 6, 7), 3.0) == 0
    trial.complete(2, names_of(4, 5, 6, 7), 4.0)
    assert trial.ask(3, names_of(4, 5, 6, 7), 5.0) == 4


def test_requests_larger_than_the_ghost_cache_are_misses() -> None:
    trial = Trial(Lru(4), 4)
    assert trial.ask(1, names_of(*range(9)), 1.0) == 0
    trial.complete(1, names_of(*range(9)), 2.0)
    trial.ask(2, names_of(1, 2), 3.0)
    trial.complete(2, names_of(1, 2), 4.0)
    assert trial.ask(3, names_of(1, 2), 5.0) == 2


# all together


def test_it_follows_what_is_better_for_a_loop() -> None:
    policy = Adaptive(50, (Lru, Mru))
    cache = Cache(policy)
    hits = [cache.use(name) for name in loop(20, 60)]
    assert isinstance(policy.followed, Mru)
    assert sum(hits[-300:]) > 200


def test_it_changes_over_soon_when_the_traffic_does_and_back() -> None:
    policy = Adaptive(50, (Lru, Whichever))
    cache = Cache(policy)
    assert all(isinstance(policy.followed, Lru) for name in moving_on(3000) if cache.use(name) >= 0)
    for expected in (Whichever, Lru, Whichever):
        traffic = moving_on(3000, first=int(cache.now) * 10**6) if expected is Lru else loop(50, 60)
        requests = 0
        while not isinstance(policy.followed, expected):
            cache.use(next(traffic))
            requests += 1
        assert requests < 2500
        for name in traffic:
            cache.use(name)
        assert isinstance(policy.followed, expected)


def test_with_lru_better_it_follows_lru_and_loses_little() -> None:
    alone, policy = Cache(Lru(30)), Adaptive(30, (Mru, Lru))
    cache = Cache(policy)
    expected = sum(alone.use(name) for name in moving_on(3000))
    found = sum(cache.use(name) for name in moving_on(3000))
    assert isinstance(policy.followed, Lru)
    assert found > 0.9 * expected


def test_with_late_returns_it_stays_with_gittins() -> None:
    """The blocks of a loop come back, what passes by does not."""
    policy, alone = Adaptive(100), Cache(Lru(100))
    cache, hits, expected = Cache(policy), 0, 0
    for at in range(2400):
        name = 1 + at // 2 % 60 if at % 2 else 10_000 + at
        hits += cache.use(name)
        expected += alone.use(name)
    assert isinstance(policy.followed, Gittins)
    assert expected == 0
    assert hits > 600


def test_equal_policies_never_change_places() -> None:
    policy = Adaptive(50, (Lru, Lru, Lru))
    cache, first = Cache(policy), policy.followed
    for name in moving_on(1000):
        cache.use(name)
        assert policy.followed is first


def test_a_sampled_race_has_the_same_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "_SAMPLE_BLOCKS", 64)
    policy = Adaptive(500, (Lru, Mru))
    cache = Cache(policy)
    for name in loop(10, 600):
        cache.use(name)
    assert isinstance(policy.followed, Mru)


def test_every_policy_gets_its_own_memory_back() -> None:
    """The histories that Gittins keeps come back through the memory that is shared with the others."""
    policy = Adaptive(4, (Lru, Gittins))
    cache = Cache(policy)
    for _ in range(3):
        cache.use(1, 2)
    for name in range(10, 16):
        cache.use(name)
    cache.use(1, 2)
    [_, learned] = _states(policy)
    assert max(_weights(learned)) > 1.1  # a run that is new has a weight of 1


def test_a_memory_of_somebody_else_is_let_go() -> None:
    model = PrefixModel(Adaptive(8, (Lru, Gittins)))
    walk(model, 1, steps=50)
    model.use(Adaptive(8, (Lru, Gittins, Arc)))
    walk(model, 2, steps=50)
    model.evict_all()
    assert model.entries == []


def test_who_is_followed_is_restored() -> None:
    policy = Adaptive(50, (Lru, Mru))
    cache = Cache(policy)
    for name in loop(20, 60):
        cache.use(name)
    other = Adaptive(50, (Lru, Mru))
    other.load(json.loads(json.dumps(policy.dump(lambda _: 0), allow_nan=False)), lambda _: None)
    assert isinstance(other.followed, Mru)
    with pytest.raises(ValueError, match="other policies"):
        Adaptive(50, (Lru,)).load(policy.dump(lambda _: 0), lambda _: None)


def _states(policy: EvictionPolicy) -> list[dict[str, Json]]:
    state = json.loads(json.dumps(policy.dump(id)))
    assert isinstance(state, dict)
    policies = state["policies"]
    assert isinstance(policies, list)
    return policies


def _weights(state: dict[str, Json]) -> list[float]:
    weights = state["weights"]
    assert isinstance(weights, dict)
    return [weight for weight in weights.values() if isinstance(weight, float)]
