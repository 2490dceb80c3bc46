from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.policies.eviction import Entry, EvictionPolicy, Lru, Returned, gittins
from octavo.policies.eviction.base import NAME_BYTES, Json, Tail
from octavo.policies.eviction.gittins import Gittins
from octavo.policies.eviction.hazard import END
from octavo.policies.replica import Replica
from octavo.policies.testing import EvictionPolicyContract, PrefixModel, walk
from octavo.tests.policies.eviction.comparison import ACTS, Act, Traffic
from octavo.tests.policies.eviction.gittins_reference import Block, GittinsReference


class TestGittins(EvictionPolicyContract):
    def make(self, capacity: int) -> EvictionPolicy:
        return Gittins(capacity)


class _Pair(NamedTuple):
    policy: object
    reference: list[Block]


class Compared(Gittins):
    """With its reference beside it, and indices that are new for each call, however little was learned."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.reference = GittinsReference()
        self.returns = self.named = 0

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self.reference.insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_extend(entry, blocks, now)
        self.reference.extend(entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        super().on_split(upper, lower, now)
        self.reference.split(upper, lower)

    def on_hit(self, entry: Entry, now: float) -> None:
        super().on_hit(entry, now)
        self.reference.hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        super().on_candidate(entry, now)
        self.reference.offered(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        return _Pair(super().on_evict(entry, blocks, now), self.reference.evict(entry, blocks))

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        pair = returned.memory
        assert isinstance(pair, _Pair)
        self.returns += 1
        super().on_ghost_hit(entry, returned._replace(memory=pair.policy), now)
        self.reference.back(entry, pair.reference, returned.at, returned.blocks, now)

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        self.reference.renew(now)
        for named in super().victims(count, now):
            assert isinstance(named, Tail)
            assert named.entry is self.reference.pick(now)
            tail = self.reference.runs[named.entry][-named.blocks :]
            assert len({(block.when, block.kind) for block in tail}) == 1
            self.named += 1
            yield named


@pytest.fixture
def _renewed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gittins, "_RENEWAL", 0)


@pytest.mark.usefixtures("_renewed_each_time")
@settings(max_examples=25)
@given(acts=ACTS, capacity=st.integers(1, 24))
def test_each_victim_is_that_of_the_reference(acts: list[Act], capacity: int) -> None:
    traffic = Traffic(Replica(capacity, Compared(capacity)))
    for act in acts:
        traffic.act(*act)


@pytest.mark.usefixtures("_renewed_each_time")
def test_the_comparison_sees_returns_and_many_victims() -> None:
    policy, random = Compared(20), Random(1)  # noqa: S311  # reproducible, not secret
    traffic = Traffic(Replica(20, policy))
    for _ in range(300):
        traffic.act(random.randrange(10), random.randrange(1000), random.randrange(1000))
    assert policy.returns > 10
    assert policy.named > 100


class Cache:
    """Requests that are over at once, at times that the test says."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.replica = Replica(policy.capacity, policy)

    def use(self, now: float, *names: int) -> int:
        """How many were there."""
        wanted = b"".join(name.to_bytes(NAME_BYTES, "little") for name in names)
        lease = self.replica.admit(wanted, 0, now)
        assert lease is not None
        self.replica.publish(lease, len(names), now)
        self.replica.finish(lease, now)
        return lease.found


def conversations(policy: EvictionPolicy) -> int:
    """Half of the prompts come back after 100 s, thrice; the others never. Six hundred pass by in that time, and there
    is room for two hundred. Returns hits."""
    cache, hits = Cache(policy), 0
    due: dict[int, list[int]] = {}
    for tick in range(4000):
        now = tick / 4
        for name in due.pop(tick, []):
            hits += cache.use(now, name)
        name = 10 + tick
        cache.use(now, name)
        if tick % 8 == 0:
            for turn in (1, 2, 3):
                due.setdefault(tick + 400 * turn, []).append(name)
    return hits


def test_what_comes_back_late_stays_although_much_passes_by() -> None:
    """Even the least recently used of all is kept, once it was seen that such things come back."""
    assert conversations(Lru(200)) == 0
    assert conversations(Gittins(200)) > 300


def new_sets(order: str) -> Iterator[int]:
    """Sets of 32 blocks, each used six times: block by block, or pass by pass."""
    for first in count(1000, 32):
        for place in range(6 * 32):
            yield first + (place // 6 if order == "one by one" else place % 32)


@pytest.mark.parametrize(("order", "most_misses"), [("pass by pass", 64), ("one by one", 64 + int(END / 60 / 6))])
def test_a_hot_prefix_that_nobody_wants_any_more_goes(order: str, most_misses: int) -> None:
    """EVICT-08. Where it pays to keep it, it goes soon. Where it does not matter, since every block is used up when the
    next one comes, and is known to be so, it goes when it is older than the table knows."""
    cache, hot = Cache(Gittins(64)), tuple(range(1, 9))
    for turn in range(1000):
        cache.use(float(turn), *hot)
    names = b"".join(name.to_bytes(NAME_BYTES, "little") for name in hot)
    now, misses, sets = 1000.0, 0, new_sets(order)
    while cache.replica.match(names).blocks == len(hot):
        now += 60.0
        misses += 1 - cache.use(now, next(sets))
        assert misses <= most_misses
    later = sum(cache.use(now + 60.0 * number, name) for number, name in zip(range(1920), sets, strict=False))
    assert later > 0.8 * 1920


def test_only_the_blocks_of_one_history_are_named() -> None:
    model = PrefixModel(Gittins(16))
    entry = model.insert(3)
    model.hit(entry)
    model.extend(entry, 2)
    for _ in range(2):
        model.release(entry)
    assert next(iter(model.policy.victims(5, model.now))) == Tail(entry, 2)


def test_it_goes_on_with_a_run_that_it_began() -> None:
    model = PrefixModel(Gittins(16))
    one, other = model.insert(3), model.insert(3)
    for entry in (one, other):
        model.release(entry)
    first = [act.entry for act in model.evict(2, most=1)]
    assert first[0] is first[1]
    assert model.evict(1)[0].entry is first[0]


def test_looking_does_not_choose() -> None:
    model = PrefixModel(Gittins(16))
    entries = [model.insert(2) for _ in range(5)]
    for entry in entries:
        model.release(entry)
    looks = [list(model.policy.victims(10, model.now)) for _ in range(3)]
    assert looks[0] == looks[1] == looks[2] == [Tail(entry, 2) for entry in entries]


def test_samples_of_many_are_the_same_under_a_seed_and_others_under_another() -> None:
    def gone(seed: int) -> list[int]:
        model = PrefixModel(Gittins(300, seed))
        for entry in [model.insert(1) for _ in range(300)]:
            model.release(entry)
        names = {entry: model.name(entry) for entry in model.entries}
        return [names[act.entry] for act in model.evict(50)]

    assert gone(1) == gone(1)
    assert gone(1) != gone(2)


def test_a_run_that_grows_block_by_block_keeps_few_stretches() -> None:
    policy = Gittins(2000)
    entry = Entry(1, 16, 0.0, 0.0)
    policy.on_insert(entry, 0.0)
    for number in range(1, 1001):
        entry.blocks, entry.depth = number + 1, 16 * (number + 1)
        policy.on_extend(entry, 1, number * 0.3)
    for turn in range(1, 4):
        policy.on_hit(entry, 300.0 + 100 * turn)
    entry.candidate = True
    policy.on_candidate(entry, 700.0)
    [named] = policy.victims(1, 700.0)
    assert isinstance(named, Tail)
    assert named.blocks > 20


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e6, 1e12])
def test_any_gap_between_uses_is_taken(gap: float) -> None:
    cache = Cache(Gittins(1))
    for turn in range(200):
        cache.use(gap * turn, 1)
        cache.use(gap * turn, 2 + turn % 2)
    json.dumps(cache.replica.policy.dump(lambda _: 0), allow_nan=False)
    assert cache.replica.cached == 1


def test_a_run_that_it_lost_is_no_sign_that_runs_do_not_come_back() -> None:
    policy, twin = Gittins(8), Gittins(8)
    stays = Entry(1, 16, 0.0, 0.0)
    lost = Entry(3, 48, 0.0, 0.0)
    for one in (policy, twin):
        one.on_insert(stays, 0.0)
    policy.on_insert(lost, 0.0)
    policy.on_forget(lost)
    for one in (policy, twin):
        list(one.victims(1, 1000.0))
        one.on_hit(stays, 2000.0)
    states = [one.dump(lambda _: 0) for one in (policy, twin)]
    assert (states[0]["returns"], states[0]["weights"]) == (states[1]["returns"], states[1]["weights"])
    policy.on_forget(stays)
    assert list(policy.victims(1, 3000.0)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_one_has_learned_the_same(seed: int) -> None:
    model = PrefixModel(Gittins(32))
    walk(model, seed, steps=200)
    state = json.loads(json.dumps(model.policy.dump(model.name), allow_nan=False))
    entries = {model.name(entry): entry for entry in model.entries}
    other = Gittins(32)
    for entry in model.entries:
        other.on_insert(entry, model.now)
    other.load(state, entries.get)
    assert json.loads(json.dumps(other.dump(model.name))) == state


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean_log_gap", 1e6),
        ("mean_log_gap", math.nan),
        ("gaps", -1.0),
        ("gaps", "many"),
        ("requests", math.inf),
        ("blocks", None),
        ("weights", [1.0]),
        ("weights", {"0": math.inf}),
        ("weights", {"0": 0.5}),
        ("weights", {"x": 1.0}),
        ("returns", [[1.0]]),
    ],
)
def test_a_broken_state_is_refused_and_changes_nothing(name: str, value: Json) -> None:
    model = PrefixModel(Gittins(32))
    walk(model, 3, steps=100)
    before = model.policy.dump(model.name)
    entries = {model.name(entry): entry for entry in model.entries}
    with pytest.raises((ValueError, TypeError)):
        model.policy.load({**before, name: value}, entries.get)
    assert model.policy.dump(model.name) == before
