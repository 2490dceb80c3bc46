"""PrefixModel: plays the engine for one eviction policy, and checks what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from ..eviction.base import NAME_BYTES, Entry, EvictionPolicy, Returned, Tail


class Evicted(NamedTuple):
    """One act of eviction."""

    entry: Entry
    blocks: int


class Ghost(NamedTuple):
    """A run that was evicted, as long as the model remembers it."""

    above: Entry | None
    """What it followed; ``None``: nothing."""
    depth: int
    """Tokens before it."""
    names: bytes
    when: float
    memory: object
    """What ``on_evict`` returned."""


@dataclass(slots=True, eq=False)
class _Node:
    entry: Entry
    name: int
    """Order of creation: what names an entry across two runs of the same calls."""
    parent: _Node | None
    names: bytes
    """Of its blocks."""
    children: list[_Node] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    """Numbers of the requests that hold it."""


class PrefixModel:
    """A tree of entries that sends a policy the events of the engine, in the engine's order, and checks its answers.

    Its clock is a plain number that each event moves by one second. It remembers as many evicted runs as the pool has
    blocks, and :meth:`bring_back` lets one return.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        block_size: int = 16,
        ranks_priorities: bool = False,
        new_entry: Callable[[int, int, float, float], Entry] = Entry,
    ) -> None:
        """``ranks_priorities``: the policy keeps the order of retention priorities, as the engine's wrapper around all
        policies does, so that is checked. ``new_entry``: another class of entries, to watch what is done to them.
        """
        self.policy = policy
        self.now = 0.0
        self.ghosts: list[Ghost] = []
        """Evicted runs, the oldest first."""
        self._ranks_priorities = ranks_priorities
        self._block_size = block_size
        self._new_entry = new_entry
        self._nodes: dict[Entry, _Node] = {}
        self._created, self._requests, self._named = count(), count(), count(1)

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

    # what requests do

    def insert(self, blocks: int, parent: Entry | None = None, *, priority: int = 0) -> Entry:
        """Cache a new run under ``parent``, held by one request until :meth:`release`."""
        self._tick()
        names = b"".join(next(self._named).to_bytes(NAME_BYTES, "little") for _ in range(blocks))
        return self._insert(names, None if parent is None else self._nodes[parent], priority)

    def bring_back(self, ghost: Ghost) -> Entry:
        """Cache a run again that was evicted. What it followed has to be there still."""
        self._tick()
        self.ghosts.remove(ghost)
        above = None if ghost.above is None else self._nodes[ghost.above]
        blocks = len(ghost.names) // NAME_BYTES
        returned = Returned(ghost.memory, ghost.depth, self.now - ghost.when, 0, blocks)
        entry = self._insert(ghost.names, above, 0)
        self.policy.on_ghost_hit(entry, returned, self.now)
        return entry

    def hit(self, entry: Entry) -> None:
        """A request reuses the path down to ``entry`` and holds it until :meth:`release`."""
        self._tick()
        path = self._path(self._nodes[entry])
        self._request(self._nodes[entry], path, b"")
        for node in path:
            self.policy.on_hit(node.entry, self.now)
            node.entry.hits += 1
            node.entry.last_use = self.now
        self._settle(self._nodes[entry])

    def glance(self, entry: Entry) -> None:
        """A request reuses the path down to ``entry`` without holding it, as one that copies a partial tail."""
        self.hit(entry)
        self.release(entry)

    def release(self, entry: Entry) -> None:
        """One holder of ``entry`` goes. Nothing happens when there is none."""
        self._tick()
        node = self._nodes[entry]
        if node.holders:
            number = node.holders.pop()
            if self.policy.wants_requests:
                self.policy.on_complete(number, _names(self._path(node)), self.now)
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
        node = self._nodes[entry]
        node.names += b"".join(next(self._named).to_bytes(NAME_BYTES, "little") for _ in range(blocks))
        entry.blocks += blocks
        entry.depth += blocks * self._block_size
        self.policy.on_extend(entry, blocks, self.now)

    def split(self, entry: Entry, upper_blocks: int) -> Entry:
        """Cut ``entry`` after ``upper_blocks``, which is less than it has, and return the new entry for the head."""
        self._tick()
        lower, cut = self._nodes[entry], upper_blocks * NAME_BYTES
        upper_depth = entry.depth - (entry.blocks - upper_blocks) * self._block_size
        upper = self._new_entry(upper_blocks, upper_depth, entry.insert_time, entry.last_use)
        upper.hits, upper.recompute_seconds, upper.priority = entry.hits, entry.recompute_seconds, entry.priority
        above = lower.parent
        node = self._add(upper, above, lower.names[:cut])
        if above is not None:
            above.children[above.children.index(lower)] = node
        node.children.append(lower)
        lower.parent, lower.names = node, lower.names[cut:]
        entry.blocks -= upper_blocks
        self.policy.on_split(upper, entry, self.now)
        return upper

    # what the engine does

    def evict(self, count: int, *, most: int | None = None) -> list[Evicted]:
        """Evict ``count`` blocks, or as many as the policy names, at most ``most`` of one entry at a time.

        :raises AssertionError: when the policy names what is no candidate, or, if it ranks priorities, one while others
            have a lower priority.
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

    def evict_all(self) -> list[Evicted]:
        """Release every entry and evict until nothing is left."""
        for entry, node in self._nodes.items():
            while node.holders:
                self.release(entry)
        return self.evict(self.blocks) if self._nodes else []

    def forget(self, entry: Entry) -> None:
        """``entry``, a leaf that is held, is none of this policy's any more, and none of the model's."""
        self._tick()
        node = self._nodes.pop(entry)
        if node.parent is not None:
            node.parent.children.remove(node)
        self.policy.on_forget(entry)
        if node.parent is not None:
            self._settle(node.parent)

    def use(self, policy: EvictionPolicy) -> None:
        """From now on it is ``policy``, as after a switch in a running engine or after a restart: it hears of all that
        is cached, parents first and apart from that in order of last use, then of the candidates. The memories that
        another policy made are gone.
        """
        self._tick()
        self.policy = policy
        self.ghosts = [ghost._replace(memory=None) for ghost in self.ghosts]
        told: set[_Node | None] = {None}
        waiting = sorted(self._nodes.values(), key=lambda node: (node.entry.last_use, node.name))
        while waiting:
            node = next(node for node in waiting if node.parent in told)
            waiting.remove(node)
            told.add(node)
            policy.on_insert(node.entry, self.now)
        for entry in sorted(self.candidates, key=lambda entry: (entry.last_use, self.name(entry))):
            policy.on_candidate(entry, self.now)

    # for states

    def key(self, entry: Entry) -> int:
        """Stays the same in another run of the same calls, as in the engine: from the name of the last block.

        :raises KeyError: when ``entry`` is none of the living ones.
        """
        return int.from_bytes(self._nodes[entry].names[-NAME_BYTES:], "little")

    def find(self, key: int) -> Entry | None:
        """The living entry with a key."""
        return next((entry for entry in self._nodes if self.key(entry) == key), None)

    # inside

    def _insert(self, names: bytes, above: _Node | None, priority: int) -> Entry:
        blocks = len(names) // NAME_BYTES
        depth = (0 if above is None else above.entry.depth) + blocks * self._block_size
        entry = self._new_entry(blocks, depth, self.now, self.now)
        entry.priority = priority
        node = self._add(entry, above, names)
        self._request(node, [] if above is None else self._path(above), names)
        if above is not None:
            above.children.append(node)
            self._settle(above)
        self.policy.on_insert(entry, self.now)
        return entry

    def _request(self, node: _Node, found: list[_Node], rest: bytes) -> None:
        """A new request finds the blocks of ``found``, computes ``rest`` and holds ``node``."""
        number = next(self._requests)
        node.holders.append(number)
        if self.policy.wants_requests:
            self.policy.on_request(number, _names(found) + rest, self.now)

    def _evict_named(self, wanted: int, most: int | None) -> list[Evicted]:
        """Evict what one call of ``victims`` names, up to ``wanted`` blocks."""
        acts: list[Evicted] = []
        victims = self.policy.victims(wanted, self.now)
        for named in victims:
            entry, tail = _understood(named)
            self._check(entry)
            taken = min(wanted, entry.blocks, tail or entry.blocks, most or entry.blocks)
            acts.append(Evicted(entry, taken))
            self._take(self._nodes[entry], taken)
            wanted -= taken
            if not wanted:
                break
        close(victims)
        return acts

    def _check(self, entry: Entry) -> None:
        assert entry in self._nodes, f"victims() named {entry}, which is not cached, or not any more"
        assert entry.candidate, f"victims() named entry {self.name(entry)}, which is no candidate: {entry}"
        if self._ranks_priorities:
            lowest = min(candidate.priority for candidate in self.candidates)
            assert entry.priority == lowest, f"victims() named {entry} while candidates have priority {lowest}"

    def _take(self, node: _Node, blocks: int) -> None:
        entry = node.entry
        entry.blocks -= blocks
        entry.depth -= blocks * self._block_size
        gone = entry.blocks == 0
        names, node.names = node.names[entry.blocks * NAME_BYTES :], node.names[: entry.blocks * NAME_BYTES]
        if gone:
            entry.candidate = False
            del self._nodes[entry]
        memory = self.policy.on_evict(entry, blocks, self.now)
        above = node.parent if gone else node
        self._remember(Ghost(None if above is None else above.entry, entry.depth, names, self.now, memory))
        if gone and node.parent is not None:
            node.parent.children.remove(node)
            self._settle(node.parent)

    def _remember(self, ghost: Ghost) -> None:
        """Only those count that something living, or nothing, comes before: the others cannot come back."""
        known = [*self.ghosts, ghost]
        alive = [each for each in known if each.above is None or each.above in self._nodes]
        self.ghosts = alive[-self.policy.capacity :]

    def _add(self, entry: Entry, parent: _Node | None, names: bytes) -> _Node:
        node = self._nodes[entry] = _Node(entry, next(self._created), parent, names)
        return node

    def _path(self, node: _Node) -> list[_Node]:
        path, part = [node], node.parent
        while part is not None:
            path.append(part)
            part = part.parent
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
        ghosts = [ghost for ghost in model.ghosts if ghost.above is parent]
        if ghosts and amount % 2:
            model.bring_back(ghosts[amount % len(ghosts)])
        else:
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


def walk(model: PrefixModel, seed: int, steps: int) -> None:
    """``steps`` random acts; the same ones for the same ``seed``."""
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    for _ in range(steps):
        play(model, random.randrange(8), random.randrange(1000), random.randrange(1000))


def _understood(named: object) -> tuple[Entry, int | None]:
    """What was named, and at most how many blocks of it are to go."""
    entry, blocks = named if isinstance(named, Tail) else (named, None)
    assert isinstance(entry, Entry), f"victims() named {named!r}, which is no entry"
    assert blocks is None or blocks > 0, f"victims() named a tail of {blocks} blocks"
    return entry, blocks


def close(victims: Iterator[Entry | Tail]) -> None:
    """Tell an iterator that nobody wants more of it."""
    getattr(victims, "close", lambda: None)()


def _names(path: list[_Node]) -> bytes:
    return b"".join(node.names for node in path)
