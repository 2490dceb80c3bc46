from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.policies.eviction.base import NAME_BYTES, EvictionPolicy
from octavo.policies.eviction.lru import Lru
from octavo.policies.simulator import (
    ATOMIC,
    ListTrace,
    Request,
    Service,
    TraceInfo,
    optimum_at,
    replay,
    survey,
)

BLOCK = 4
INFO = TraceInfo("test", BLOCK)
Word = tuple[int, ...]


@cache
def name(prefix: Word) -> bytes:
    """Of three letters at most 12 of which make a prefix: base 4 has room for them."""
    number = sum([(letter + 1) << 2 * place for place, letter in enumerate(prefix)])
    return number.to_bytes(NAME_BYTES, "little")


def names(word: Word, start: int = 0) -> bytes:
    return b"".join(name(word[: end + 1]) for end in range(start, len(word)))


def request(word: Word, *, arrival: float = 0.0, output: int = 0, generated: Word = ()) -> Request:
    whole = word + generated
    return Request(arrival, len(word) * BLOCK, output, names(word), names(whole, len(word)))


def trace(words: list[Word], output: int = 0) -> ListTrace:
    return ListTrace(INFO, [request(word, arrival=float(i), output=output) for i, word in enumerate(words)])


def brute_force(words: list[Word], private: int, capacity: int) -> int:
    """Most hits that any sequence of decisions gives: every prefix-closed subset is tried at every request."""
    states: dict[frozenset[Word], int] = {frozenset(): 0}
    for word in words:
        path = frozenset(word[: end + 1] for end in range(len(word)))
        if len(path) + private > capacity:
            continue
        after: dict[frozenset[Word], int] = {}
        for cached, hits in states.items():
            for kept in closed_subsets(cached - path, capacity - private - len(path)):
                now = kept | path
                after[now] = max(after.get(now, 0), hits + len(cached & path))
        states = after
    return max(states.values())


def closed_subsets(others: frozenset[Word], room: int) -> Iterator[frozenset[Word]]:
    """Subsets of at most ``room`` blocks from which no block is missing that comes before another one."""
    ordered = sorted(others, key=len)

    def extend(index: int, chosen: frozenset[Word]) -> Iterator[frozenset[Word]]:
        if index == len(ordered):
            yield chosen
            return
        yield from extend(index + 1, chosen)
        block = ordered[index]
        if len(chosen) < room and (block[:-1] not in others or block[:-1] in chosen):
            yield from extend(index + 1, chosen | {block})

    return extend(0, frozenset())


WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(words=st.lists(WORDS, min_size=1, max_size=7), output=st.integers(0, 8), capacity=st.integers(1, 6))
def test_atomic_optimum_and_bound_are_what_trying_everything_finds(
    words: list[Word], output: int, capacity: int
) -> None:
    (found,) = optimum_at(trace(words, output), [capacity], ATOMIC)
    best = brute_force(words, -(-output // BLOCK), capacity)
    assert found.outcome.hits == best
    assert found.bound.hits == best


def installed() -> dict[str, Callable[[int], EvictionPolicy]]:
    return {point.name: point.load() for point in entry_points(group="octavo.eviction_policies")}


@st.composite
def traces(draw: st.DrawFn, *, generated: bool = True) -> ListTrace:
    word = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(tuple)
    answer = st.lists(st.integers(0, 2), max_size=2 if generated else 0).map(tuple)
    parts = draw(st.lists(st.tuples(word, answer, st.integers(0, 12), st.floats(0, 10)), max_size=25))
    return ListTrace(
        INFO, [request(word, arrival=at, output=output, generated=more) for word, more, output, at in parts]
    )


SERVICES = st.sampled_from([ATOMIC, Service(10.0, 5.0), Service(100.0, 1.0), Service(float("inf"), 3.0)])


@settings(max_examples=120, deadline=None)
@given(requests=traces(), service=SERVICES, capacity=st.integers(1, 16))
def test_no_policy_exceeds_the_bound_and_the_bound_not_the_limit(
    requests: ListTrace, service: Service, capacity: int
) -> None:
    (found,) = optimum_at(requests, [capacity], service)
    limit = survey(requests).limit
    assert found.outcome.hits <= found.bound.hits <= limit.hits
    for make in installed().values():
        outcome = replay(requests, make(capacity), capacity, service)
        assert outcome.hits <= found.bound.hits
        assert outcome.refused == found.outcome.refused == found.bound.refused
        assert outcome.uses == found.outcome.uses == found.bound.uses == limit.uses


@settings(max_examples=80, deadline=None)
@given(requests=traces(generated=False), capacities=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_several_capacities_are_as_each_alone_and_more_room_is_never_worse(
    requests: ListTrace, capacities: list[int]
) -> None:
    together = optimum_at(requests, capacities, ATOMIC)
    assert [each.capacity for each in together] == capacities
    assert together == [optimum_at(requests, [capacity], ATOMIC)[0] for capacity in capacities]
    assert all(each.outcome.hits == each.bound.hits for each in together)
    ordered = sorted(together, key=lambda each: each.capacity)
    hits = [each.bound.hits for each in ordered if not each.bound.refused]
    assert hits == sorted(hits)


@settings(max_examples=60, deadline=None)
@given(requests=traces(), service=SERVICES)
def test_where_everything_fits_the_optimum_has_what_the_timeline_of_lru_has(
    requests: ListTrace, service: Service
) -> None:
    capacity = 1000
    (found,) = optimum_at(requests, [capacity], service)
    outcome = replay(requests, Lru(capacity), capacity, service)
    assert found.outcome == outcome
    assert not outcome.evicted
    if all(not each.published for each in requests):
        assert outcome.hits == survey(requests).limit.hits


class Slow:
    """Furthest next use, written apart from the other: block by block, with all requests at hand."""

    def __init__(self, requests: list[Request], capacity: int, service: Service) -> None:
        self.requests, self.capacity, self.service = requests, capacity, service
        self.prompts = [split(each.names) for each in requests]
        self.answers = [split(each.published) for each in requests]
        self.private = [
            max(math.ceil((each.input_tokens + each.output_tokens) / BLOCK) - len(prompt), len(answer))
            for each, prompt, answer in zip(requests, self.prompts, self.answers, strict=True)
        ]
        self.parents = {
            block: before
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
            for before, block in pairwise([b"", *prompt, *answer])
        }
        self.cached: set[bytes] = set()
        self.running: list[tuple[float, int]] = []
        self.now = self.end = self.wait_seconds = 0.0
        self.hits = self.evicted = 0

    def fits(self, number: int) -> bool:
        return len(self.prompts[number]) + self.private[number] <= self.capacity

    def run(self) -> None:
        for number in filter(self.fits, range(len(self.requests))):
            self.take(number)
        while self.running:
            self.release()

    def taken(self, number: int, cached: set[bytes]) -> int:
        """Blocks that are not free once request ``number`` runs too and no more than ``cached`` is kept."""
        running = [other for _, other in self.running] + [number]
        held = {block for other in running for block in self.prompts[other]}
        return len(held | cached) + sum(self.private[other] for other in running)

    def take(self, number: int) -> None:
        request, prompt = self.requests[number], self.prompts[number]
        self.now = max(self.now, request.arrival)
        while self.running and min(self.running)[0] <= self.now:
            self.release()
        while self.taken(number, set()) > self.capacity:
            self.release()
        found = len(self.cached & set(prompt))
        while self.taken(number, self.cached) > self.capacity:
            self.evict(number)
        self.cached |= set(prompt)
        self.hits += found
        self.wait_seconds += self.now - request.arrival
        computed = request.input_tokens - found * BLOCK
        self.running.append((self.now + self.service.seconds(computed, request.output_tokens), number))

    def release(self) -> None:
        first = min(self.running)
        self.running.remove(first)
        self.cached |= set(self.answers[first[1]])
        self.now, self.end = max(self.now, first[0]), max(self.end, first[0])

    def evict(self, number: int) -> None:
        held = {block for _, other in [*self.running, (0.0, number)] for block in self.prompts[other]}
        leaves = self.cached - {self.parents[block] for block in self.cached} - held
        self.cached.remove(max(leaves, key=lambda block: (self.next_use(block, number), block)))
        self.evicted += 1

    def next_use(self, block: bytes, number: int) -> float:
        later = filter(self.fits, range(number + 1, len(self.requests)))
        return min((other for other in later if block in self.prompts[other]), default=math.inf)


def split(run: bytes) -> list[bytes]:
    return [run[at : at + NAME_BYTES] for at in range(0, len(run), NAME_BYTES)]


@settings(max_examples=200, deadline=None)
@given(requests=traces(), service=SERVICES, capacity=st.integers(1, 16))
def test_with_requests_in_flight_it_chooses_as_a_slow_one_does(
    requests: ListTrace, service: Service, capacity: int
) -> None:
    (found,) = optimum_at(requests, [capacity], service)
    slow = Slow(list(requests), capacity, service)
    slow.run()
    assert found.outcome.hits == slow.hits
    if not any(each.published for each in requests):  # of blocks never asked for, any may go, but some come in anew
        assert found.outcome.evicted == slow.evicted
    assert (found.outcome.wait_seconds, found.outcome.end) == pytest.approx((slow.wait_seconds, slow.end))


def test_survey_counts_different_blocks_once() -> None:
    found = survey(trace([(0, 1), (0, 1, 2), (0, 2), (0,)]))
    assert (found.requests, found.unique, found.limit.uses, found.limit.hits) == (4, 4, 8, 4)


def test_the_one_used_last_goes_first() -> None:
    words: list[Word] = [(0,), (1,), (2,), (1,), (0,)]
    (found,) = optimum_at(trace(words), [2], ATOMIC)
    assert found.outcome.hits == 1
    assert replay(trace(words), Lru(2), 2, ATOMIC).hits == 1
    assert optimum_at(trace([(0,), (1,), (0,), (2,), (0,)]), [2], ATOMIC)[0].outcome.hits == 2


def test_what_runs_is_not_evicted_though_it_is_never_wanted_again() -> None:
    requests = [
        request((0, 0, 0), arrival=0.0, output=BLOCK),
        request((1,), arrival=1.0),
        request((2,), arrival=2.0),
        request((1,), arrival=3.0),
    ]
    slow = Service(float("inf"), 0.1)
    (found,) = optimum_at(ListTrace(INFO, requests), [5], slow)
    assert (found.outcome.hits, found.bound.hits) == (0, 1)


def test_progress_counts_on_over_the_capacities() -> None:
    told: list[int] = []
    optimum_at(trace([(0,), (1,)]), [1, 2], ATOMIC, on_progress=told.append)
    assert told == [2, 4]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_pool_has_a_block(capacity: int) -> None:
    with pytest.raises(InvalidRequest, match=f"a capacity of {capacity} blocks"):
        optimum_at(trace([(0,)]), [3, capacity], ATOMIC)
