"""The replica of the cache against the engine's own cache: the same calls, the same policy, the same events.

A block has one token, and the token is the number of the whole prefix that it ends, so that the two caches name the
same things: in the engine's a prefix is a row of tokens, in the replica's a row of names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from importlib.metadata import entry_points
from random import Random
from typing import NamedTuple, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.kv import CacheManager, Namespace, Retention, Sequence, encode_tokens
from octavo.engine.kv.node import Node
from octavo.errors import CacheMisuse, ContractBroken, OutOfBlocks
from octavo.policies.eviction.base import NAME_BYTES, Entry, EvictionPolicy, Returned, Tail
from octavo.policies.eviction.lru import Lru
from octavo.policies.eviction.priority_ttl import PriorityTtl
from octavo.policies.replica import Lease, Replica, Run

POOL = 12
SPACE = Namespace("w")
Word: TypeAlias = tuple[int, ...]  # letters of a prefix
Make: TypeAlias = Callable[[int], EvictionPolicy]


class Numbers:
    """A number for each prefix."""

    def __init__(self) -> None:
        self._of: dict[Word, int] = {}

    def tokens(self, word: Word) -> list[int]:
        return [self._of.setdefault(word[: end + 1], len(self._of) + 1) for end in range(len(word))]


def names(tokens: SequenceOf[int]) -> bytes:
    return b"".join(token.to_bytes(NAME_BYTES, "little") for token in tokens)


def tokens_of(entry: Entry) -> tuple[int, ...]:
    """The whole path down to the end of an entry, of either cache."""
    if isinstance(entry, Node):
        above = () if entry.parent is None else tokens_of(entry.parent)
        return above + tuple(memoryview(bytes(entry.tokens)).cast("i"))
    assert isinstance(entry, Run)
    above = () if entry.parent is None else tokens_of(entry.parent)
    return above + tuple(memoryview(entry.names).cast("q"))


class Event(NamedTuple):
    what: str
    entries: tuple[object, ...]
    more: tuple[object, ...]


def seen(entry: Entry) -> tuple[object, ...]:
    """All that a policy can see of an entry, and which one it is."""
    return (
        tokens_of(entry),
        entry.blocks,
        entry.depth,
        entry.insert_time,
        entry.last_use,
        entry.hits,
        entry.recompute_seconds,
        entry.reload_seconds,
        entry.reload_tier,
        entry.priority,
        entry.expires,
        entry.tenant,
        entry.candidate,
    )


class Noting(EvictionPolicy):
    """Writes down every call and passes it on. What it remembers of an evicted run is numbered, so that a memory that
    comes back to the wrong run shows.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self.log: list[Event] = []
        self._memories: list[object] = []

    def _note(self, what: str, *entries: Entry, more: tuple[object, ...] = ()) -> None:
        self.log.append(Event(what, tuple(seen(entry) for entry in entries), more))

    def on_insert(self, entry: Entry, now: float) -> None:
        self._note("insert", entry, more=(now,))
        self.policy.on_insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._note("extend", entry, more=(blocks, now))
        self.policy.on_extend(entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._note("split", upper, lower, more=(now,))
        self.policy.on_split(upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._note("hit", entry, more=(now,))
        self.policy.on_hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._note("candidate", entry, more=(now,))
        self.policy.on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self._note("held", entry)
        self.policy.on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        self._note("evict", entry, more=(blocks, now))
        self._memories.append(self.policy.on_evict(entry, blocks, now))
        return len(self._memories) - 1

    def on_forget(self, entry: Entry) -> None:
        self._note("forget", entry)
        self.policy.on_forget(entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._note("ghost", entry, more=(returned, now))
        assert isinstance(returned.memory, int)
        self.policy.on_ghost_hit(entry, returned._replace(memory=self._memories[returned.memory]), now)

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        self._note("victims", more=(count, now))
        for named in self.policy.victims(count, now):
            entry, most = named if isinstance(named, Tail) else (named, named.blocks)
            self._note("named", entry, more=(most,))
            yield named
        self._note("no more")


class Pair:
    """One request, on both sides."""

    def __init__(self, number: int, word: Word, tokens: list[int], priority: int) -> None:
        retention = (Retention(0, None, priority),) if priority else ()
        self.sequence = Sequence(number, encode_tokens(tokens), SPACE, block_size=1, retention=retention)
        self.word = word
        self.priority = priority
        self.lease: Lease | None = None
        self.seen = False

    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease


class Twins:
    """The two caches, driven by the same calls and compared after each."""

    def __init__(self, make: Make, pool: int = POOL) -> None:
        self.now = 0.0
        self.faults: list[object] = []
        self.numbers = Numbers()
        self.live, self.replayed = Noting(make(pool)), Noting(make(pool))
        self.manager = CacheManager(
            pool, 1, self.live, clock=lambda: self.now, on_fault=lambda *fault: self.faults.append(fault)
        )
        self.replica = Replica(pool, self.replayed, block_tokens=1)
        self.running: list[Pair] = []
        self.waiting: list[Pair] = []
        self._count = 0

    def check(self) -> None:
        assert not self.faults
        assert self.live.log == self.replayed.log
        assert self.manager.pool.free == self.replica.free
        assert self.manager.tree.idle_blocks == self.replica.idle
        assert self.manager.tree.blocks == self.replica.cached
        engine = {tokens_of(node): seen(node) for node in self.manager.tree.nodes()}
        assert {tokens_of(run): seen(run) for run in self.replica.runs()} == engine
        self.manager.census()

    def create(self, word: Word, priority: int = 0) -> None:
        self._count += 1
        self.waiting.append(Pair(self._count, word, self.numbers.tokens(word), priority))

    def admit(self, pair: Pair) -> bool:
        """The last token of a prompt is computed in any case."""
        tokens = list(pair.sequence.tokens)
        match = self.replica.match(names(tokens[:-1]))
        admission = self.manager.try_admit(pair.sequence, resumed=pair.seen)
        pair.lease = self.replica.admit(
            names(tokens), 0, self.now, used=not pair.seen, priority=pair.priority, reusable=len(tokens) - 1
        )
        assert (admission is None) == (pair.lease is None)
        if admission is None or pair.lease is None:
            return False
        assert admission.cached_tokens == pair.lease.found == match.blocks
        pair.seen = True
        self.waiting.remove(pair)
        self.running.append(pair)
        return True

    def prefill(self, pair: Pair, count: int) -> None:
        count = min(count, pair.sequence.uncomputed)
        self.manager.commit(pair.sequence, count)
        self.replica.publish(pair.held(), pair.sequence.computed, self.now)

    def decode(self, pair: Pair, letter: int) -> bool:
        """One more token, published once the next step has computed it."""
        word = (*pair.word, letter)
        token = self.numbers.tokens(word)[-1]
        lease, sequence = pair.held(), pair.sequence
        try:
            if sequence.uncomputed:
                self.manager.commit(sequence, sequence.uncomputed)
                self.replica.publish(lease, sequence.computed, self.now)
            self.manager.extend(sequence, 1)
        except OutOfBlocks:
            assert not self.replica.extend(lease, 1, self.now)
            return False
        assert self.replica.extend(lease, 1, self.now)
        sequence.tokens.append(token)
        pair.word, lease.names = word, lease.names + names([token])
        return True

    def leave(self, pair: Pair, how: str) -> None:
        lease = pair.held()
        self.running.remove(pair)
        match how:
            case "finish":
                self.manager.finish(pair.sequence)
                self.replica.finish(lease, self.now)
            case "preempt":
                self.manager.preempt(pair.sequence)
                self.replica.finish(lease, self.now, over=False)
                self.waiting.append(pair)
            case "discard":
                self.manager.discard(pair.sequence)
                self.replica.finish(lease, self.now)
                self.replica.drop(lease.names[: lease.published * NAME_BYTES], self.now)

    def evict(self, count: int) -> None:
        assert self.manager.evict(count) == self.replica.evict(count, self.now)


LEAVING = ("finish", "preempt", "discard")
LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=POOL + 1).map(tuple)
ACTIONS = st.one_of(
    st.tuples(st.just("create"), LETTERS, st.sampled_from([0, 0, 0, 2, -1])),
    st.tuples(st.just("admit"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("admit"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("prefill"), st.integers(0, 9), st.integers(1, 6)),
    st.tuples(st.just("decode"), st.integers(0, 9), st.integers(0, 1)),
    st.tuples(st.sampled_from(LEAVING[:1] * 3 + LEAVING), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("evict"), st.integers(0, 4), st.just(0)),
)
Action: TypeAlias = tuple[str, int | Word, int]


def act(twins: Twins, action: Action) -> None:
    what, which, more = action
    if what == "create":
        assert isinstance(which, tuple)
        twins.create(which, more)
    elif what == "evict":
        assert isinstance(which, int)
        twins.evict(which)
    else:
        assert isinstance(which, int)
        pairs = twins.waiting if what == "admit" else twins.running
        if not pairs:
            return
        pair = pairs[which % len(pairs)]
        if what == "admit" and twins.admit(pair) and more:
            twins.prefill(pair, POOL)
        elif what == "prefill":
            twins.prefill(pair, more)
        elif what == "decode":
            twins.decode(pair, more)
        elif what in LEAVING:
            twins.leave(pair, what)


def policies() -> Mapping[str, Make]:
    """Those that are installed."""
    found: dict[str, Make] = {}
    for point in entry_points(group="octavo.eviction_policies"):
        found[point.name] = point.load()
    return found


POLICIES = policies()


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=25, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=20, max_size=70), tick=st.sampled_from([0.0, 1.0]))
def test_policies_cannot_tell_the_replica_from_the_cache(name: str, actions: list[Action], tick: float) -> None:
    make = POLICIES[name]
    plain = all(action[0] != "create" or not action[2] for action in actions)
    twins = Twins(make if plain or make is PriorityTtl else lambda capacity: PriorityTtl(capacity, make))
    for action in actions:
        twins.now += tick
        act(twins, action)
        twins.check()


def walk(make: Make, seed: int, steps: int) -> Twins:
    """A long life with more reuse than chance would give."""
    rng = Random(seed)  # noqa: S311  # no secret
    twins = Twins(make, pool=20)
    kinds = ("create", "create", "admit", "admit", "prefill", "decode", *LEAVING[:1] * 3, *LEAVING[1:], "evict")
    for _ in range(steps):
        twins.now += rng.choice([0.0, 0.5, 1.0])
        what = rng.choice(kinds)
        which: int | Word = rng.randrange(100) if what != "evict" else rng.randrange(6)
        if what == "create":
            which = tuple(rng.choice([0, 0, 1]) for _ in range(rng.randint(1, 9)))
        act(twins, (what, which, rng.randrange(1, 5) if what == "prefill" else rng.randrange(2) * (what != "create")))
        twins.check()
    return twins


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_over_a_long_life_with_every_kind_of_event(name: str) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(3):
        twins = walk(POLICIES[name], seed, 350)
        kinds.update(event.what for event in twins.live.log)
    wanted = ("insert", "extend", "split", "hit", "candidate", "held", "evict", "ghost", "victims", "named")
    assert min(kinds[what] for what in wanted) > 8, kinds


def words(*letters: str) -> list[bytes]:
    """Names for the blocks of texts, one for each letter."""
    numbers = Numbers()
    return [names(numbers.tokens(tuple(map(ord, text)))) for text in letters]


def cached_after(replica: Replica, *texts: bytes) -> None:
    for now, text in enumerate(texts):
        lease = replica.admit(text, 0, float(now))
        assert lease is not None
        replica.publish(lease, len(text) // NAME_BYTES, float(now))
        replica.finish(lease, float(now))


def test_a_refused_admission_changes_nothing() -> None:
    """EVICT-05: 3 idle cached blocks are the prefix of a request that needs 4 more of 6."""
    prefix, large, fitting = words("abc", "abcdefg", "abcdef")
    policy = Noting(Lru(6))
    replica = Replica(6, policy)
    cached_after(replica, prefix)
    before = list(policy.log)
    for _ in range(100):
        assert replica.admit(large, 0, 2.0) is None
    assert (policy.log, replica.free, replica.idle) == (before, 3, 3)
    assert replica.admit(fitting, 0, 3.0) is not None
    assert (replica.free, replica.idle) == (0, 0)


def test_an_extension_without_room_changes_nothing() -> None:
    (text,) = words("abcd")
    replica = Replica(4, Lru(4))
    lease = replica.admit(text, 0, 0.0)
    assert lease is not None
    assert not replica.extend(lease, 1, 0.0)
    assert (lease.held, replica.free) == (4, 0)


def test_more_than_a_request_has_cannot_be_published() -> None:
    (text,) = words("abcd")
    replica = Replica(4, Lru(4))
    lease = replica.admit(text, 0, 0.0)
    assert lease is not None
    with pytest.raises(CacheMisuse, match="has not got 5 blocks"):
        replica.publish(lease, 5, 0.0)
    replica.publish(lease, 2, 0.0)
    lease.names += names([99])
    with pytest.raises(CacheMisuse, match="has not got 5 blocks"):
        replica.publish(lease, 5, 0.0)


def test_what_leaves_is_told_with_its_place() -> None:
    prefix, one = words("ab", "abcd")
    gone: list[tuple[bytes, int]] = []
    replica = Replica(4, Lru(4), block_tokens=16, on_evicted=lambda run, depth: gone.append((run, depth)))
    cached_after(replica, prefix, one)
    replica.evict(1, 2.0)
    replica.evict(2, 2.0)
    assert gone == [(one[3 * NAME_BYTES :], 48), (one[NAME_BYTES : 3 * NAME_BYTES], 16)]
    assert (replica.evicted, replica.cached, replica.free) == (3, 1, 3)


def test_a_run_that_was_evicted_is_remembered_and_one_that_was_dropped_is_not() -> None:
    one, two = words("ab", "cd")
    replica = Replica(8, Lru(8))
    cached_after(replica, one, two)
    assert replica.drop(two, 2.0) == 2
    assert replica.evict(8, 2.0) == 2
    cached_after(replica, one, two)
    assert replica.wanted_again == 1


@pytest.mark.parametrize("most", [0, 1, 2])
def test_no_more_runs_are_remembered_than_asked_for(most: int) -> None:
    one, two = words("a", "b")
    replica = Replica(4, Lru(4), most_ghosts=most)
    cached_after(replica, one, two)
    replica.evict(2, 2.0)
    cached_after(replica, one, two)
    assert replica.wanted_again == most


def test_what_is_held_or_continued_is_not_dropped() -> None:
    prefix, long = words("ab", "abcd")
    replica = Replica(8, Lru(8))
    cached_after(replica, prefix, long)
    assert replica.drop(prefix, 2.0) == 0
    lease = replica.admit(long, 0, 2.0)
    assert lease is not None
    assert replica.drop(long, 2.0) == 0
    replica.finish(lease, 3.0)
    assert replica.drop(long, 3.0) == 4


class Asking(Lru):
    """Wants to hear of requests."""

    wants_requests = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.heard: list[tuple[str, int, bytes]] = []

    def on_request(self, number: int, names: bytes, now: float) -> None:
        self.heard.append(("request", number, names))

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        self.heard.append(("complete", number, names))

    def on_hit(self, entry: Entry, now: float) -> None:
        self.heard.append(("hit", entry.blocks, b""))


def test_a_request_is_told_before_its_hits_and_once() -> None:
    text, prefix = words("abcd", "ab")
    policy = Asking(8)
    replica = Replica(8, policy)
    cached_after(replica, prefix)
    lease = replica.admit(text, 0, 1.0)
    assert lease is not None
    replica.publish(lease, 3, 1.0)
    replica.finish(lease, 2.0, over=False)
    again = replica.admit(text, 0, 3.0, used=False)
    assert again is not None
    replica.finish(again, 4.0)
    heard = [("request", 1, prefix), ("complete", 1, prefix)]
    assert policy.heard[:2] == heard
    assert [what for what, _, _ in policy.heard[2:]] == ["request", "hit", "complete"]
    assert policy.heard[2][2] == text
    assert policy.heard[-1][2] == text[: 3 * NAME_BYTES]


@pytest.mark.parametrize("named", [[], [Entry(1, 1, 0.0, 0.0)]])
def test_a_policy_that_names_nothing_or_anything_breaks_its_contract(named: list[Entry]) -> None:
    class Odd(EvictionPolicy):
        def victims(self, count: int, now: float) -> Iterator[Entry]:
            yield from named

    replica = Replica(4, Odd(4))
    cached_after(replica, *words("ab"))
    with pytest.raises(ContractBroken, match="Odd named"):
        replica.evict(1, 1.0)
    assert (replica.free, replica.idle) == (2, 2)


def test_nothing_to_evict_is_no_breach() -> None:
    assert Replica(4, Lru(4)).evict(3, 0.0) == 0
