"""Replay against a slow simulator that was written apart from it: sets of prefixes, one block at a time, no tree."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.errors import ContractBroken, InvalidRequest
from octavo.policies.eviction.base import NAME_BYTES, Entry, EvictionPolicy
from octavo.policies.eviction.lru import Lru
from octavo.policies.simulator import (
    ATOMIC,
    CostModel,
    Geometry,
    ListTrace,
    Outcome,
    Request,
    Service,
    TraceInfo,
    replay,
)
from octavo.policies.simulator.costs import pairs

BLOCK = 4
INFO = TraceInfo("test", BLOCK)
Word = tuple[int, ...]


def names(word: Word) -> bytes:
    prefixes = [word[: end + 1] for end in range(len(word))]
    return b"".join(
        sum((letter + 1) * 4**place for place, letter in enumerate(prefix)).to_bytes(NAME_BYTES, "little")
        for prefix in prefixes
    )


class Ask(NamedTuple):
    word: Word
    tail: int
    """Tokens beyond its whole blocks."""
    output: int
    arrival: float

    def request(self) -> Request:
        return Request(self.arrival, len(self.word) * BLOCK + self.tail, self.output, names(self.word))


class Slow:
    """Least recently used, block by block."""

    def __init__(self, capacity: int, service: Service) -> None:
        self.capacity, self.service = capacity, service
        self.last_use: dict[Word, float] = {}  # of what is cached
        self.running: list[tuple[float, int, Ask]] = []
        self.now = self.end = 0.0
        self.hits = self.refused = self.waits = self.evicted = self.hit_tokens = 0
        self.wait_seconds = 0.0
        self.admitted_at: list[float] = []

    def held(self) -> set[Word]:
        return {ask.word[: end + 1] for _, _, ask in self.running for end in range(len(ask.word))}

    def private(self) -> int:
        return sum(math.ceil((ask.tail + ask.output) / BLOCK) for _, _, ask in self.running)

    def take(self, number: int, ask: Ask) -> None:
        own = math.ceil((ask.tail + ask.output) / BLOCK)
        if len(ask.word) + own > self.capacity:
            self.refused += 1
            return
        self.now = max(self.now, ask.arrival)
        while self.running and min(self.running)[0] <= self.now:
            self.release()
        path = [ask.word[: end + 1] for end in range(len(ask.word))]
        while len(self.held() | set(path)) + self.private() + own > self.capacity:
            self.release()
        found = sum(prefix in self.last_use for prefix in path)
        while len(set(self.last_use) | set(path)) + self.private() + own > self.capacity:
            self.evict(set(path))
        for prefix in path:
            self.last_use[prefix] = self.now
        self.hits += found
        self.hit_tokens += found * BLOCK
        self.waits += self.now > ask.arrival
        self.wait_seconds += self.now - ask.arrival
        self.admitted_at.append(self.now)
        computed = (len(path) - found) * BLOCK + ask.tail
        seconds = computed / self.service.prefill_tokens_per_second + ask.output / self.service.decode_tokens_per_second
        self.running.append((self.now + seconds, number, ask))

    def release(self) -> None:
        first = min(self.running)
        self.running.remove(first)
        self.now = max(self.now, first[0])
        self.end = max(self.end, first[0])

    def evict(self, wanted: set[Word]) -> None:
        inner = {prefix[:-1] for prefix in self.last_use}
        leaves = set(self.last_use) - inner - self.held() - wanted
        del self.last_use[min(leaves, key=self.last_use.__getitem__)]
        self.evicted += 1


ASKS = st.lists(
    st.builds(
        Ask,
        word=st.lists(st.integers(0, 2), max_size=5).map(tuple),
        tail=st.integers(0, BLOCK - 1),
        output=st.integers(0, 9),
        arrival=st.floats(0, 20),
    ),
    max_size=25,
)
SERVICES = st.sampled_from([ATOMIC, Service(7.0, 3.0), Service(50.0, 1.0), Service(math.inf, 0.7)])


@settings(max_examples=200, deadline=None)
@given(asks=ASKS, service=SERVICES, capacity=st.integers(1, 14))
def test_a_replay_counts_what_a_slow_simulator_counts(asks: list[Ask], service: Service, capacity: int) -> None:
    asks = sorted(asks, key=lambda ask: ask.arrival)
    slow = Slow(capacity, service)
    for number, ask in enumerate(asks):
        slow.take(number, ask)
    while slow.running:
        slow.release()
    assume(len(set(slow.admitted_at)) == len(slow.admitted_at))  # of those used last at one moment, any may go
    found = replay(ListTrace(INFO, [ask.request() for ask in asks]), Lru(capacity), capacity, service)
    assert found == Outcome(
        requests=len(asks),
        refused=slow.refused,
        uses=sum(len(ask.word) for ask in asks),
        hits=slow.hits,
        hit_tokens=slow.hit_tokens,
        input_tokens=sum(len(ask.word) * BLOCK + ask.tail for ask in asks),
        hit_pairs=found.hit_pairs,
        evicted=slow.evicted,
        wanted_again=found.wanted_again,
        waits=slow.waits,
        wait_seconds=found.wait_seconds,
        end=found.end,
    )
    assert (found.wait_seconds, found.end) == pytest.approx((slow.wait_seconds, slow.end))


def run(*asks: Ask, capacity: int, service: Service = ATOMIC) -> Outcome:
    return replay(ListTrace(INFO, [ask.request() for ask in asks]), Lru(capacity), capacity, service)


def test_a_request_that_is_too_large_is_refused_and_misses_everything() -> None:
    found = run(Ask((0, 1), 0, 0, 0.0), Ask((0, 1), 0, 5, 1.0), Ask((0, 1), 0, 4, 2.0), capacity=3)
    assert (found.requests, found.refused, found.uses, found.hits) == (3, 1, 6, 2)


def test_the_first_in_line_waits_for_room_and_all_behind_it_do() -> None:
    slow = Service(math.inf, 1.0)
    found = run(Ask((0, 0), 0, 4, 0.0), Ask((1, 1), 0, 1, 1.0), Ask((2,), 0, 0, 2.0), capacity=4, service=slow)
    assert found.waits == 2
    assert found.wait_seconds == (4.0 - 1.0) + (4.0 - 2.0)
    assert found.end == 5.0


def test_a_prefix_in_flight_is_a_hit_and_stays() -> None:
    slow = Service(math.inf, 1.0)
    asks = [Ask((0, 0), 0, 40, 0.0), Ask((1,), 0, 0, 1.0), Ask((2,), 0, 0, 2.0), Ask((0, 0), 0, 0, 3.0)]
    assert run(*asks, capacity=13, service=slow).hits == 2


def test_prefill_takes_the_missed_tokens_only() -> None:
    found = run(Ask((0, 0, 0), 0, 0, 0.0), Ask((0, 0, 0), 2, 0, 10.0), capacity=9, service=Service(2.0, 1.0))
    assert found.end == 10.0 + 2 / 2.0


def test_generated_blocks_are_there_once_their_request_is_over() -> None:
    follow = names((0, 1, 1))
    asked = Request(0.0, BLOCK, 8, follow[:NAME_BYTES], follow[NAME_BYTES:])
    early, late = (Request(at, 3 * BLOCK, 0, follow) for at in (1.0, 9.0))
    service = Service(math.inf, 1.0)
    assert replay(ListTrace(INFO, [asked, early]), Lru(9), 9, service).hits == 1
    assert replay(ListTrace(INFO, [asked, late]), Lru(9), 9, service).hits == 3


def test_a_trace_that_names_a_last_block_which_is_not_full_lets_the_answer_begin_there() -> None:
    half = Request(0.0, BLOCK + 1, 3, names((0, 1)))
    assert replay(ListTrace(INFO, [half]), Lru(2), 2, ATOMIC).refused == 0
    assert replay(ListTrace(INFO, [half._replace(output_tokens=4)]), Lru(2), 2, ATOMIC).refused == 1
    assert replay(ListTrace(INFO, [half, half]), Lru(2), 2, ATOMIC).hit_tokens == BLOCK + 1


def test_priorities_of_the_trace_are_kept_whatever_the_policy() -> None:
    dear, cheap, new = ((letter,) for letter in range(3))
    asked = [
        Request(0.0, BLOCK, 0, names(dear), priority=1),
        Request(1.0, BLOCK, 0, names(cheap)),
        Request(2.0, BLOCK, 0, names(new)),
        Request(3.0, BLOCK, 0, names(dear), priority=1),
    ]
    assert replay(ListTrace(INFO, asked), Lru(2), 2, ATOMIC).hits == 1
    plain = [each._replace(priority=0) for each in asked]
    assert replay(ListTrace(INFO, plain), Lru(2), 2, ATOMIC).hits == 0


class Silent(EvictionPolicy):
    def victims(self, count: int, now: float) -> list[Entry]:  # type: ignore[override]  # it breaks the contract
        return []


class Wrong(EvictionPolicy):
    def on_insert(self, entry: Entry, now: float) -> None:
        self.entry = entry

    def victims(self, count: int, now: float) -> list[Entry]:  # type: ignore[override]  # it breaks the contract
        return [Entry(1, 1, 0.0, 0.0)]


@pytest.mark.parametrize(("policy", "what"), [(Silent, "Silent named nothing"), (Wrong, "Wrong named Entry")])
def test_a_policy_that_breaks_its_contract_ends_the_replay(policy: type[EvictionPolicy], what: str) -> None:
    with pytest.raises(ContractBroken, match=what):
        replay(ListTrace(INFO, [Ask((x,), 0, 0, x).request() for x in range(2)]), policy(1), 1, ATOMIC)


class Watching(Lru):
    """Notes whose blocks it gets."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.tenants: list[str] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        self.tenants.append(entry.tenant)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self.tenants.append(upper.tenant)


def test_a_policy_sees_whose_blocks_they_are() -> None:
    asks = [(Ask((0, 0), 0, 0, 0.0), "a"), (Ask((1,), 0, 0, 1.0), "b"), (Ask((0, 1), 0, 0, 2.0), "a")]
    policy = Watching(9)
    replay(ListTrace(INFO, [ask.request()._replace(tenant=tenant) for ask, tenant in asks]), policy, 9, ATOMIC)
    assert policy.tenants == ["a", "b", "a", "a"]  # the first one is cut where the third parts from it


def test_progress_is_told_now_and_then_and_at_the_end() -> None:
    told: list[int] = []
    asks = [Ask((0,), 0, 0, float(at)).request() for at in range(600)]
    replay(ListTrace(INFO, asks), Lru(1), 1, ATOMIC, on_progress=told.append)
    assert told == [256, 512, 600]


def test_an_empty_trace_has_no_ratio_to_speak_of() -> None:
    found = run(capacity=1)
    assert (found.requests, found.hit_ratio, found.end) == (0, 0.0, 0.0)


@pytest.mark.parametrize("service", [Service(0.0, 1.0), Service(1.0, -1.0), Service(math.nan, 1.0)])
def test_rates_are_above_zero(service: Service) -> None:
    with pytest.raises(InvalidRequest, match="must be above 0"):
        run(Ask((0,), 0, 0, 0.0), capacity=1, service=service)


def test_a_pool_has_a_block_at_least() -> None:
    with pytest.raises(InvalidRequest, match="the capacity is 0"):
        run(Ask((0,), 0, 0, 0.0), capacity=0)


# what hits are worth


@given(hits=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=5))
def test_flops_saved_are_the_sum_over_the_tokens_that_were_there(hits: list[tuple[int, int]]) -> None:
    geometry = Geometry(parameters=1000.0, layers=3, hidden=7)
    one_by_one = sum(2 * 1000.0 + 4 * 3 * 7 * depth for start, count in hits for depth in range(start, start + count))
    tokens = sum(count for _, count in hits)
    closed = geometry.flops(tokens, sum(pairs(count, start) for start, count in hits))
    assert closed == pytest.approx(one_by_one)


def test_savings_are_those_of_the_hit_tokens() -> None:
    found = run(Ask((0, 0, 0), 0, 0, 0.0), Ask((0, 0, 1), 0, 0, 1.0), capacity=9)
    model = CostModel(Geometry(parameters=10.0, layers=1, hidden=2), prefill_tokens_per_second=4.0)
    assert model.saved_seconds(found) == 2 * BLOCK / 4.0
    assert model.saved_flops(found) == sum(20.0 + 8.0 * depth for depth in range(2 * BLOCK))
