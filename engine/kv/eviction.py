"""Eviction: asks the policy whom, takes the blocks out of the tree, shows them to those who watch, frees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ...storage.naming import BlockName
from ...telemetry import names
from ...telemetry.record import MOST_LINKS, Link, Origin, Track, Value
from .block_pool import BlockPool
from .containment import ContainedPolicy
from .ghosts import Ghost, Ghosts
from .names import names_of
from .node import Node
from .prefix_tree import PrefixTree
from .residency import Residency
from .runs import EvictedRun, tail_run
from .watching import Watchers


class EvictionNote:
    """What one eviction took from whom, for a trace."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.blocks = self.victims = 0
        self._owners: dict[tuple[int, int], Origin] = {}  # by what identifies a span: an origin itself has no hash

    def add(self, node: Node, blocks: int) -> None:
        self.blocks += blocks
        self.victims += 1
        if node.owner is not None and len(self._owners) < MOST_LINKS:
            self._owners[node.owner.trace_id, node.owner.span_id] = node.owner

    def links(self) -> list[Link]:
        """To the requests that used the victims last."""
        return [Link(owner, "victim_owner") for owner in self._owners.values()]


class Evictor:
    """Frees cached blocks on demand."""

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        policy: ContainedPolicy,
        *,
        watchers: Watchers,
        clock: Callable[[], float],
        ghosts: Ghosts,
        residency: Residency,
        background: Track,
    ) -> None:
        """``background``: where evictions are noted that no request caused."""
        self.policy = policy
        self.evicted: Counter[str] = Counter()
        """Blocks evicted, by reason."""
        self._pool = pool
        self._tree = tree
        self._watchers = watchers
        self._clock = clock
        self._ghosts = ghosts
        self._residency = residency
        self._policy_name = type(policy.policy).__name__
        self._background = background

    def evict(self, count: int, reason: str, cause: Track | None = None) -> int:
        """Evict until ``count`` blocks have come free or no candidate is left; returns how many came free.

        Blocks from which a copy is still read leave the cache but come free later; more are evicted in their place. A
        ``count`` of zero or less evicts nothing. ``cause``: of the request that wants the room, if one does.
        """
        if count <= 0:
            return 0
        track = cause or self._background
        note = EvictionNote(self._clock()) if track.is_on else None
        goal = self._pool.free + count
        for node in self._victims(count):
            part = min(goal - self._pool.free, len(node.ids))
            if note is not None:
                note.add(node, part)
            self._evict_tail(node, part, reason, track)
            if self._pool.free >= goal:
                break
        if note is not None:
            self._write(note, track, reason)
        return self._pool.free - goal + count

    def drop(self, nodes: Iterable[Node], reason: str, cause: Track | None = None) -> list[BlockName]:
        """Take whole nodes out of the cache whose contents are bad or to be forgotten: those of ``nodes`` that are
        candidates when their turn comes, so children come first. Returns their names, if anybody reads names.
        """
        track, gone = cause or self._background, list[BlockName]()
        note = EvictionNote(self._clock()) if track.is_on else None
        for node in nodes:
            if node not in self._tree.candidates:
                continue
            if self._watchers.of_names:
                gone += names_of(node)
            if note is not None:
                note.add(node, len(node.ids))
            self._drop(node, reason, track)
        if note is not None:
            self._write(note, track, reason)
        return gone

    def _drop(self, node: Node, reason: str, track: Track) -> None:
        run = self._run(node, len(node.ids), reason, track)
        ids = self._tree.cut_tail(node, len(node.ids)).ids
        self.evicted[reason] += len(ids)
        if run is not None:
            self._watchers.dropped(run)
        self._pool.release(ids)

    def _victims(self, count: int) -> Iterator[Node]:
        """The policy's choice while it keeps its contract; then the lowest priority, the least recently used first."""
        trusted, faults = True, self.policy.faults
        while trusted and self._tree.candidates:
            trusted = False
            for entry in self.policy.victims(count, self._clock()):
                trusted = isinstance(entry, Node) and entry in self._tree.candidates
                if not trusted:
                    break
                yield entry  # type: ignore[misc]  # mypy does not carry the isinstance through the flag
        if self._tree.candidates and self.policy.faults == faults:  # one that raised was reported
            self.policy.fault("victims", "named nothing, or something that cannot be evicted")
        while self._tree.candidates:
            yield min(self._tree.candidates, key=lambda node: (node.keep.priority, node.last_use))

    def _write(self, note: EvictionNote, track: Track, reason: str) -> None:
        if note.blocks:
            why: dict[str, Value] = {names.REASON: reason, names.POLICY: self._policy_name, names.TIER: "device"}
            shown = {**why, names.BLOCKS: note.blocks, names.VICTIMS: note.victims}
            track.act(names.EVICT, note.began, self._clock(), shown, note.links())

    def _evict_tail(self, node: Node, count: int, reason: str, cause: Track) -> None:
        run = self._run(node, count, reason, cause)
        now = self._clock()
        self._residency.evicted(count, node.insert_time, node.last_use, now)
        cut = self._tree.cut_tail(node, count)
        self.evicted[reason] += count
        ghost = Ghost(now, reason, self._policy_name, cut.memory)
        self._ghosts.remember(node.namespace, node.end, cut.tokens[: len(cut.tokens) // count], ghost)
        if run is not None:
            self._watchers.evicted(run)
        self._pool.release(cut.ids)

    def _run(self, node: Node, count: int, reason: str, cause: Track) -> EvictedRun | None:
        """What is going to be told of the last ``count`` blocks of ``node``, if anybody listens."""
        watchers = self._watchers
        return tail_run(node, count, reason, cause, named=watchers.of_names) if watchers.of_leaving else None
