from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from octavo.engine.kv import Namespace, PrefixTree, encode_tokens
from octavo.engine.kv.integrity import contradictions
from octavo.engine.kv.keep import Keep
from octavo.engine.kv.node import Node, Traits
from octavo.engine.kv.prefix_tree import agreeing_tokens
from octavo.errors import CacheMisuse
from octavo.policies.eviction import Entry, EvictionPolicy

BLOCK = 3
SPACES = (Namespace("w"), Namespace("w", salt="s"))


class Listener(EvictionPolicy):
    """Keeps what the tree says, and checks that it says it in order."""

    def __init__(self) -> None:
        super().__init__(100)
        self.known: dict[Entry, int] = {}
        self.candidates: set[Entry] = set()
        self.hits: list[Entry] = []
        self.evictions: list[tuple[Entry, int]] = []

    def on_insert(self, entry: Entry, now: float) -> None:
        assert entry not in self.known
        self.known[entry] = entry.blocks

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        assert entry not in self.candidates
        self.known[entry] += blocks

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self.known[upper] = upper.blocks
        self.known[lower] -= upper.blocks

    def on_hit(self, entry: Entry, now: float) -> None:
        self.hits.append(entry)

    def on_candidate(self, entry: Entry, now: float) -> None:
        assert entry in self.known
        assert entry not in self.candidates
        self.candidates.add(entry)

    def on_held(self, entry: Entry) -> None:
        self.candidates.remove(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        assert entry in self.candidates
        self.evictions.append((entry, blocks))
        self.known[entry] -= blocks
        if not entry.blocks:
            assert self.known.pop(entry) == 0
            self.candidates.remove(entry)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


class Garden:
    """A tree with what is needed to use it by hand: fresh ids, and a clock that counts."""

    def __init__(self, block_size: int = BLOCK) -> None:
        self.listener = Listener()
        ticks = count(1)
        self.tree = PrefixTree(block_size, self.listener, lambda: float(next(ticks)))
        self.block_size = block_size
        self.ids = count()

    def lease(self, tokens: list[int], space: Namespace = SPACES[0]) -> tuple[Node, int]:
        """A lease on the longest prefix there is, and how many blocks of it."""
        match = self.tree.match(space, encode_tokens(tokens).tobytes(), len(tokens))
        return self.tree.lock_match(space, match), len(match.ids)

    def plant(self, tokens: list[int], space: Namespace = SPACES[0]) -> Node:
        """Publish all whole blocks of ``tokens``; the lease is the caller's."""
        node, blocks = self.lease(tokens, space)
        rest = tokens[blocks * self.block_size : len(tokens) // self.block_size * self.block_size]
        if not rest:
            return node
        fresh = array("i", (next(self.ids) for _ in range(len(rest) // self.block_size)))
        node, known = self.tree.publish(node, encode_tokens(rest).tobytes(), fresh, Traits(0.0))
        assert not known
        return node

    def check(self, *leases: Node) -> None:
        assert contradictions(self.tree, Counter(leases)) == []
        assert self.listener.candidates == set(self.tree.candidates)
        assert self.listener.known == {node: len(node.ids) for node in self.tree.nodes()}


class TreeMachine(RuleBasedStateMachine):
    """Against a dictionary from prefix to block id."""

    def __init__(self) -> None:
        super().__init__()
        self.garden = Garden()
        self.tree = self.garden.tree
        self.blocks: dict[tuple[Namespace, tuple[int, ...]], int] = {}
        self.leases: list[tuple[Node, Namespace, tuple[int, ...]]] = []

    @rule(tokens=st.lists(st.integers(1, 2), max_size=18), space=st.sampled_from(SPACES), data=st.data())
    def match_and_lease(self, tokens: list[int], space: Namespace, data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        match = self.tree.match(space, encode_tokens(tokens).tobytes(), limit)
        expected: list[int] = []
        while (end := (len(expected) + 1) * BLOCK) <= limit and (space, tuple(tokens[:end])) in self.blocks:
            expected.append(self.blocks[space, tuple(tokens[:end])])
        assert list(match.ids) == expected
        start = len(expected) * BLOCK
        rest = tokens[start : min(limit, start + BLOCK)]
        shared = {
            block: _common(prefix[start:], rest)
            for (owner, prefix), block in self.blocks.items()
            if owner == space and len(prefix) == start + BLOCK and prefix[:start] == tuple(tokens[:start])
        }
        assert match.partial_tokens == max(shared.values(), default=0)
        assert not match.partial_tokens or shared[match.partial_block] == match.partial_tokens
        idle = self.tree.idle_blocks
        node = self.tree.lock_match(space, match)
        assert idle - self.tree.idle_blocks == match.idle
        assert list(self.tree.path_ids(node)) == expected
        self.leases.append((node, space, tuple(tokens[:start])))

    @rule(tokens=st.lists(st.integers(1, 2), min_size=BLOCK, max_size=4 * BLOCK), data=st.data())
    def publish(self, tokens: list[int], data: st.DataObject) -> None:
        if not self.leases:
            return
        number = data.draw(st.integers(0, len(self.leases) - 1))
        node, space, prefix = self.leases[number]
        whole = tokens[: len(tokens) // BLOCK * BLOCK]
        ids = array("i", (next(self.garden.ids) for _ in range(len(whole) // BLOCK)))
        node, known = self.tree.publish(node, encode_tokens(whole).tobytes(), ids, Traits(0.0))
        for index, block in enumerate(ids):
            key = (space, prefix + tuple(whole[: (index + 1) * BLOCK]))
            if index < len(known):
                assert self.blocks[key] == known[index]
            else:
                assert key not in self.blocks
                self.blocks[key] = block
        self.leases[number] = (node, space, prefix + tuple(whole))

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.leases:
            node, _, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.tree.unlock(node)

    @rule(data=st.data())
    def lease_again(self, data: st.DataObject) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            self.tree.lock(lease[0])
            self.leases.append(lease)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        if self.tree.candidates:
            node = data.draw(st.sampled_from(list(self.tree.candidates)))
            number = data.draw(st.integers(1, len(node.ids)))
            space = node.namespace
            whole = prefix_of(self.tree, node)
            ids, head, _ = self.tree.cut_tail(node, number)
            kept = prefix_of(self.tree, node)
            assert whole.startswith(kept + head)
            assert len(head) == 4 * BLOCK
            text = tuple(memoryview(whole).cast("i"))
            for back, block in enumerate(reversed(ids)):
                assert self.blocks.pop((space, text[: len(text) - back * BLOCK])) == block

    @invariant()
    def tree_is_sound(self) -> None:
        self.garden.check(*(node for node, _, _ in self.leases))
        assert self.tree.blocks == len(self.blocks)
        for node, space, prefix in self.leases:
            expected = [self.blocks[space, prefix[:end]] for end in range(BLOCK, len(prefix) + 1, BLOCK)]
            assert list(self.tree.path_ids(node)) == expected
            assert prefix_of(self.tree, node) == encode_tokens(prefix).tobytes()


def prefix_of(tree: PrefixTree, node: Node) -> bytes:
    """int32 tokens from the start of the prompt to the end of ``node``, also of one that is gone."""
    return b"".join(reversed([bytes(part.tokens) for part in tree.path(node)]))


def _common(one: tuple[int, ...], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_one_prompt_is_one_node() -> None:
    """Compressed: a node per branching, not per block."""
    garden = Garden()
    garden.plant(list(range(30)))
    assert len(list(garden.tree.nodes())) == 1
    garden.plant([*range(15), *range(50, 65)])
    assert sorted(len(node.ids) for node in garden.tree.nodes()) == [5, 5, 5]


def test_a_growing_leaf_stays_one_node() -> None:
    garden = Garden()
    tokens = list(range(3))
    node = garden.plant(tokens)
    garden.tree.unlock(node)
    for end in (6, 9, 12):
        garden.tree.unlock(garden.plant(list(range(end))))
    assert [len(node.ids) for node in garden.tree.nodes()] == [4]


@pytest.mark.parametrize("other", [1, 2])
def test_a_leaf_that_somebody_else_holds_does_not_grow(other: int) -> None:
    garden = Garden()
    node = garden.plant(list(range(3)))
    for _ in range(other):
        garden.tree.lock(node)
    longer = garden.plant(list(range(6)))
    assert longer is not node
    assert list(garden.tree.path_ids(node)) == [0]
    garden.check(*[node] * (other + 1), longer)


@pytest.mark.parametrize("where", ["below the root", "leaf", "split later"])
def test_what_is_leased_is_no_candidate(where: str) -> None:
    """EVICT-01: the leased node itself is locked, not only what is above it, also when it is split afterwards."""
    garden = Garden()
    tree = garden.tree
    garden.tree.unlock(garden.plant(list(range(12))))
    garden.tree.unlock(garden.plant([*range(6), 90, 91, 92]))
    node, blocks = garden.lease(list(range(6 if where == "below the root" else 12)))
    if where == "split later":
        garden.tree.unlock(garden.plant([*range(9), 70, 71, 72]))
    path = list(tree.path_ids(node))
    while tree.candidates:
        tree.cut_tail(next(iter(tree.candidates)), 1)
    assert list(tree.path_ids(node)) == path
    assert tree.blocks == blocks
    garden.check(node)
    tree.unlock(node)
    evicted: list[int] = []
    while tree.candidates:
        ids = tree.cut_tail(next(iter(tree.candidates)), 1)[0]
        evicted += ids
    assert evicted == path[::-1], "leaf first"
    assert (tree.blocks, tree.idle_blocks) == (0, 0)


def test_a_lease_cannot_be_given_back_twice() -> None:
    """EVICT-02: counts never go below zero."""
    garden = Garden()
    node = garden.plant(list(range(6)))
    garden.tree.unlock(node)
    with pytest.raises(CacheMisuse, match="twice"):
        garden.tree.unlock(node)
    garden.check()


@pytest.mark.parametrize("branch", range(1, 12))
def test_evictable_blocks_are_counted_once_wherever_prompts_part(branch: int) -> None:
    """EVICT-10."""
    garden = Garden(block_size=4)
    tree = garden.tree
    first = garden.plant(list(range(12)))
    second = garden.plant([*range(branch), *range(100, 100 + 16 - branch)])
    whole = branch // 4
    assert tree.blocks == 3 + 4 - whole
    assert tree.idle_blocks == 0
    tree.unlock(second)
    assert tree.idle_blocks == 4 - whole
    garden.check(first)
    tree.unlock(first)
    assert tree.idle_blocks == tree.blocks
    came_free = 0
    while tree.candidates:
        came_free += len(tree.cut_tail(next(iter(tree.candidates)), 1)[0])
    assert came_free == 3 + 4 - whole


def test_inner_nodes_and_held_leaves_cannot_be_cut() -> None:
    garden = Garden()
    upper = garden.plant(list(range(3)))
    garden.tree.lock(upper)  # two holders: the next publication makes a child
    lower = garden.plant(list(range(6)))
    for node in (upper, lower):
        with pytest.raises(CacheMisuse, match="tail of an unreferenced leaf"):
            garden.tree.cut_tail(node, 1)
    for node in (upper, upper, lower):
        garden.tree.unlock(node)
    with pytest.raises(CacheMisuse):
        garden.tree.cut_tail(upper, 1)
    for number in (0, 2, -1):
        with pytest.raises(CacheMisuse):
            garden.tree.cut_tail(lower, number)
    garden.tree.cut_tail(lower, 1)
    garden.tree.cut_tail(upper, 1)
    assert garden.tree._roots == {}


def test_nothing_stays_behind_after_eviction() -> None:
    """GROWTH-01: nodes, keys and roots go with their blocks."""
    garden = Garden()
    tree = garden.tree
    for prompt in range(50):
        tree.unlock(garden.plant([prompt % 3, 0, 0, prompt, 1, 1], Namespace("w", salt=str(prompt % 7))))
    while tree.candidates:
        tree.cut_tail(next(iter(tree.candidates)), 1)
    assert list(tree.nodes()) == []
    assert tree._roots == {}
    assert garden.listener.known == {}


def test_a_whole_match_costs_no_split_and_a_part_costs_one() -> None:
    garden = Garden()
    node = garden.plant(list(range(12)))
    assert garden.lease(list(range(12)))[0] is node
    upper, _ = garden.lease(list(range(6)))
    assert upper is not node
    assert node.parent is upper
    assert (list(upper.ids), list(node.ids)) == ([0, 1], [2, 3])


def test_a_split_hands_the_statistics_on() -> None:
    garden = Garden()
    node = garden.plant(list(range(12)))
    garden.tree.count_hit(node)
    node.seconds, node.tenant = 0.5, "t"
    garden.tree.set_keep(node, Keep(4, 9.0))
    node.reload_seconds, node.tier = 0.25, "host"
    node.show_use()
    upper, _ = garden.lease(list(range(6)))
    for name in (field.name for field in fields(Entry) if field.name not in ("blocks", "depth")):
        assert getattr(upper, name) == getattr(node, name), name
    assert (upper.blocks, upper.depth, node.blocks, node.depth) == (2, 6, 2, 12)


def test_a_hit_is_counted_on_the_whole_path() -> None:
    garden = Garden()
    garden.tree.unlock(garden.plant(list(range(6))))
    garden.tree.unlock(garden.plant([*range(3), 7, 7, 7]))
    node, _ = garden.lease(list(range(6)))
    before = {part: part.last_use for part in garden.tree.nodes()}
    garden.listener.hits.clear()
    garden.tree.count_hit(node)
    assert garden.listener.hits == [node, node.parent]
    assert all((part.hits, part.last_use > before[part]) == (1, True) for part in (node, node.parent) if part)
    assert sum(part.hits for part in garden.tree.nodes()) == 2


def test_a_policy_that_writes_into_an_entry_does_not_get_held_blocks_evicted() -> None:
    garden = Garden()
    node = garden.plant(list(range(6)))
    garden.tree.unlock(node)
    node.candidate = False  # read only for policies, but nothing stops them
    garden.tree.lock(node)
    assert node not in garden.tree.candidates


def test_another_namespace_finds_nothing() -> None:
    garden = Garden()
    garden.plant(list(range(12)), SPACES[0])
    match = garden.tree.match(SPACES[1], encode_tokens(list(range(12))).tobytes(), 12)
    assert (list(match.ids), match.partial_tokens, match.node) == ([], 0, None)


@pytest.mark.parametrize(
    ("block", "rest", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [2, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 3], 1),
        ([1, 2, 3], [], 0),
        ([256, 1, 1], [512, 1, 1], 0),
        ([1, 256, 1], [1, 512, 1], 1),
        ([-1, -1, 0], [-1, -2, 0], 1),
        ([1, 0, 0], [1, 1 << 24, 0], 1),
    ],
)
def test_agreement_is_in_whole_tokens(block: list[int], rest: list[int], expected: int) -> None:
    assert agreeing_tokens(encode_tokens(block).tobytes(), encode_tokens(rest).tobytes()) == expected


def test_tree_under_random_use() -> None:
    chosen = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(TreeMachine, settings=chosen)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tree_under_much_random_use() -> None:
    chosen = settings(max_examples=1500, stateful_step_count=80, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(TreeMachine, settings=chosen)
