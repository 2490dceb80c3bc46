"""The contract of eviction policies as tests: subclass, say how the policy is made, run pytest.

.. code-block:: python

    from octavo.policies.testing import EvictionPolicyContract

    class TestMyPolicy(EvictionPolicyContract):
        def make(self, capacity: int) -> EvictionPolicy:
            return MyPolicy(capacity)

This module needs the standard library only. :class:`PrefixModel` plays the engine and can drive tests of your own.
"""

from __future__ import annotations

import gc
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from .eviction.base import Entry, EvictionPolicy


class Evicted(NamedTuple):
    """One act of eviction."""

    entry: Entry
    blocks: int


@dataclass(slots=True, eq=False)
class _Node:
    entry: Entry
    name: int
    """Order of creation: what names an entry across two runs of the same calls."""
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    holders: int = 0


class PrefixModel:
    """A tree of entries that sends a policy the events of the engine, in the engine's order, and checks its answers.

    Its clock is a plain number that each event moves by one second.
    """

    def __init__(self, policy: EvictionPolicy, *, block_size: int = 16) -> None:
        self.policy = policy
        self.now = 0.0
        self._block_size = block_size
        self._nodes: dict[Entry, _Node] = {}
        self._created = 0

    @property
    def entries(self) -> list[Entry]:
        """All living entries, oldest first."""
        return list(self._nodes)

    @property
    def candidates(self) -> list[Entry]:
        """Entries whose tail may be evicted now."""
        return [entry for entry in self._nodes if entry.candidate]

    @property
    def blocks(self) -> int:
        """Blocks of all entries together."""
        return sum(entry.blocks for entry in self._nodes)

    def name(self, entry: Entry) -> int:
        """Number of ``entry`` in order of creation, the same in every run of the same calls."""
        return self._nodes[entry].name

    def insert(self, blocks: int, parent: Entry | None = None, *, priority: int = 0) -> Entry:
        """Cache a new run under ``parent``, held by one request until :meth:`release`."""
        self._tick()
        above = None if parent is None else self._nodes[parent]
        depth = (0 if parent is None else parent.depth) + blocks * self._block_size
        entry = Entry(blocks=blocks, depth=depth, insert_time=self.now, last_use=self.now, priority=priority)
        node = self._add(entry, above)
        node.holders = 1
        if above is not None:
            above.children.append(node)
            self._settle(above)
        self.policy.on_insert(entry, self.now)
        return entry

    def hit(self, entry: Entry) -> None:
        """A request reuses the path down to ``entry`` and holds it until :meth:`release`."""
        self._tick()
        for node in self._path(entry):
            self.policy.on_hit(node.entry, self.now)
            node.entry.hits += 1
            node.entry.last_use = self.now
        self._nodes[entry].holders += 1
        self._settle(self._nodes[entry])

    def glance(self, entry: Entry) -> None:
        """A request reuses the path down to ``entry`` without holding it, as one that copies a partial tail."""
        self.hit(entry)
        self.release(entry)

    def release(self, entry: Entry) -> None:
        """One holder of ``entry`` goes. Nothing happens when there is none."""
        self._tick()
        node = self._nodes[entry]
        node.holders = max(node.holders - 1, 0)
        self._settle(node)

    def keep(self, entry: Entry, priority: int) -> None:
        """From now on ``entry`` has this retention priority."""
        self._tick()
        if entry.candidate:
            entry.candidate = False
            self.policy.on_held(entry)
        entry.priority = priority
        self._settle(self._nodes[entry])

    def extend(self, entry: Entry, blocks: int) -> None:
        """Grow a leaf at its tail."""
        self._tick()
        entry.blocks += blocks
        entry.depth += blocks * self._block_size
        self.policy.on_extend(entry, blocks, self.now)

    def split(self, entry: Entry, upper_blocks: int) -> Entry:
        """Cut ``entry`` after ``upper_blocks``, which is less than it has, and return the new entry for the head."""
        self._tick()
        lower = self._nodes[entry]
        upper_depth = entry.depth - (entry.blocks - upper_blocks) * self._block_size
        upper = Entry(upper_blocks, upper_depth, entry.insert_time, entry.last_use, entry.hits, entry.recompute_seconds)
        upper.priority = entry.priority
        above = lower.parent
        node = self._add(upper, above)
        if above is not None:
            above.children[above.children.index(lower)] = node
        node.children.append(lower)
        lower.parent = node
        entry.blocks -= upper_blocks
        self.policy.on_split(upper, entry, self.now)
        return upper

    def evict(self, count: int, *, most: int | None = None) -> list[Evicted]:
        """Evict ``count`` blocks, or as many as the policy names, at most ``most`` of one entry at a time.

        :raises AssertionError: when the policy names what is no candidate, or one while others have a lower priority.
        """
        self._tick()
        acts = self._evict_named(count, most)
        wanted = count - sum(act.blocks for act in acts)
        while wanted and self.candidates:  # as the engine does, ask again while something is named
            named = self._evict_named(wanted, most)
            assert named, (
                f"victims() named nothing with {wanted} blocks to go while candidates are left: {self.candidates}"
            )
            acts += named
            wanted -= sum(act.blocks for act in named)
        return acts

    def _evict_named(self, wanted: int, most: int | None) -> list[Evicted]:
        """Evict what one call of ``victims`` names, up to ``wanted`` blocks."""
        acts: list[Evicted] = []
        victims = self.policy.victims(wanted, self.now)
        for entry in victims:
            assert entry in self._nodes, "victims() named an entry that was evicted before"
            assert entry.candidate, f"victims() named entry {self.name(entry)}, which is no candidate: {entry}"
            lowest = min(candidate.priority for candidate in self.candidates)
            assert entry.priority == lowest, f"victims() named {entry} while candidates have priority {lowest}"
            taken = min(wanted, entry.blocks, most or entry.blocks)
            acts.append(Evicted(entry, taken))
            self._take(self._nodes[entry], taken)
            wanted -= taken
            if not wanted:
                break
        getattr(victims, "close", lambda: None)()
        return acts

    def evict_all(self) -> list[Evicted]:
        """Release every entry and evict until nothing is left."""
        for entry, node in self._nodes.items():
            for _ in range(node.holders):
                self.release(entry)
        return self.evict(self.blocks) if self._nodes else []

    def _take(self, node: _Node, blocks: int) -> None:
        entry = node.entry
        entry.blocks -= blocks
        entry.depth -= blocks * self._block_size
        gone = entry.blocks == 0
        if gone:
            entry.candidate = False
            del self._nodes[entry]
        self.policy.on_evict(entry, blocks, self.now)
        if gone and node.parent is not None:
            node.parent.children.remove(node)
            self._settle(node.parent)

    def _add(self, entry: Entry, parent: _Node | None) -> _Node:
        node = _Node(entry, self._created, parent)
        self._created += 1
        self._nodes[entry] = node
        return node

    def _path(self, entry: Entry) -> list[_Node]:
        path: list[_Node] = []
        node: _Node | None = self._nodes[entry]
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _settle(self, node: _Node) -> None:
        """Tell the policy when an entry became a candidate or ceased to be one."""
        evictable = not node.holders and not node.children
        if evictable == node.entry.candidate:
            return
        node.entry.candidate = evictable
        if evictable:
            self.policy.on_candidate(node.entry, self.now)
        else:
            self.policy.on_held(node.entry)

    def _tick(self) -> None:
        self.now += 1.0


def play(model: PrefixModel, action: int, pick: int, amount: int) -> list[Evicted]:
    """Do one of the engine's acts, chosen by three numbers of any size: the step of random and of generated tests."""
    entries = model.entries
    if not entries or action % 8 < 2:
        parent = entries[pick % len(entries)] if entries and pick % 3 else None
        model.insert(1 + amount % 4, parent)
        return []
    entry = entries[pick % len(entries)]
    match action % 8:
        case 2:
            model.hit(entry)
        case 4 if amount % 3 == 0:
            model.keep(entry, pick % 3 - 1)
        case 3 | 4:
            model.release(entry)
        case 5 if entry.candidate:
            model.extend(entry, 1 + amount % 3)
        case 6 if entry.blocks > 1:
            model.split(entry, 1 + amount % (entry.blocks - 1))
        case 7:
            return model.evict(1 + amount % 6, most=1 + pick % 3)
        case _:
            model.glance(entry)
    return []


class EvictionPolicyContract(ABC):
    """What every eviction policy must hold. pytest collects subclasses whose name starts with ``Test``."""

    @abstractmethod
    def make(self, capacity: int) -> EvictionPolicy:
        """A new policy for a pool of ``capacity`` blocks."""

    def test_is_written_for_this_version(self) -> None:
        assert self.make(8).api_version[0] == EvictionPolicy.api_version[0]

    def test_names_nothing_when_nothing_is_cached(self) -> None:
        assert list(self.make(8).victims(4, 0.0)) == []

    def test_never_names_what_is_held(self) -> None:
        model = PrefixModel(self.make(8))
        held, free = model.insert(2), model.insert(2)
        model.release(free)
        assert [act.entry for act in model.evict(4)] == [free]
        assert model.entries == [held]

    def test_never_names_what_is_held_again(self) -> None:
        model = PrefixModel(self.make(8))
        entry = model.insert(2)
        model.release(entry)
        model.hit(entry)
        assert model.evict(2) == []

    def test_never_names_what_has_children(self) -> None:
        model = PrefixModel(self.make(8))
        parent = model.insert(2)
        model.release(parent)
        model.insert(1, parent)
        assert model.evict(2) == []

    def test_names_candidates_only_whatever_happens(self) -> None:
        for seed in range(20):
            self._walk(seed, steps=200)

    def test_gives_up_every_candidate(self) -> None:
        for seed in range(20):
            model = self._walk(seed, steps=50)
            model.evict_all()
            assert model.entries == []

    def test_goes_on_to_the_parents(self) -> None:
        model = PrefixModel(self.make(8))
        root = model.insert(1)
        middle = model.insert(1, root)
        leaf = model.insert(1, middle)
        for entry in (root, middle, leaf):
            model.release(entry)
        assert [act.entry for act in model.evict(3)] == [leaf, middle, root]

    def test_goes_on_after_a_part_of_an_entry(self) -> None:
        model = PrefixModel(self.make(8))
        entry = model.insert(4)
        model.release(entry)
        model.evict(1)
        assert entry.blocks == 3
        model.evict(3, most=1)
        assert model.entries == []

    def test_lower_priorities_go_first(self) -> None:
        model = PrefixModel(self.make(16))
        entries = [model.insert(1, priority=priority) for priority in (3, -1, 0, 7, 3)]
        for entry in entries:
            model.release(entry)
        for _ in range(3):
            model.glance(entries[1])  # much used, and yet it goes first
        assert [act.entry.priority for act in model.evict(5)] == [-1, 0, 3, 3, 7]

    def test_a_changed_priority_counts(self) -> None:
        model = PrefixModel(self.make(16))
        entries = [model.insert(1) for _ in range(4)]
        for entry in entries:
            model.release(entry)
        for entry, priority in zip(entries, (2, 1, 2, -1), strict=True):
            model.keep(entry, priority)
        model.keep(entries[0], 0)
        assert [act.entry for act in model.evict(3)] == [entries[3], entries[0], entries[1]]

    def test_a_call_that_is_broken_off_loses_nobody(self) -> None:
        model = PrefixModel(self.make(8))
        for _ in range(4):
            model.release(model.insert(2))
        victims = model.policy.victims(8, model.now)
        next(victims)
        getattr(victims, "close", lambda: None)()
        model.evict(8)
        assert model.entries == []

    def test_the_same_events_give_the_same_victims(self) -> None:
        def run() -> list[tuple[int, int]]:
            model = self._walk(seed=1, steps=300)
            names = {entry: model.name(entry) for entry in model.entries}
            return [(names[entry], blocks) for entry, blocks in model.evict_all()]

        assert run() == run()

    def test_remembers_no_more_the_longer_it_runs(self) -> None:
        """Ghosts are fine: their number is bounded by the pool. A trace of every entry that ever was is not."""
        capacity = 16
        policy = self.make(capacity)
        model = PrefixModel(policy)
        early = self._objects_after(model, rounds=4 * capacity)
        late = self._objects_after(model, rounds=40 * capacity)
        assert late <= early + 32 * capacity, f"{early} objects grew to {late}"

    def _objects_after(self, model: PrefixModel, rounds: int) -> int:
        for _ in range(rounds):
            entry = model.insert(2)
            model.release(entry)
            model.hit(entry)
            model.glance(entry)
            model.release(entry)
            model.extend(entry, 2)
            model.split(entry, 1)
            model.evict_all()
        return _reachable(model.policy)

    def _walk(self, seed: int, steps: int) -> PrefixModel:
        random = Random(seed)  # noqa: S311  # reproducible, not secret
        model = PrefixModel(self.make(32))
        for _ in range(steps):
            play(model, random.randrange(8), random.randrange(1000), random.randrange(1000))
        return model


def _reachable(root: object) -> int:
    """Objects that ``root`` keeps alive, code and classes aside."""
    shared = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)
    seen: set[int] = set()
    todo: list[object] = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, shared):
            continue
        seen.add(id(item))
        todo.extend(gc.get_referents(item))
    return len(seen)
