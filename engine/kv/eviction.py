"""Eviction: asks the policy whom, takes the blocks out of the tree, shows them to the tiers' hook, frees them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from .block_pool import BlockPool
from .containment import ContainedPolicy
from .ghosts import Ghost, Ghosts
from .node import Node
from .prefix_tree import PrefixTree
from .runs import EvictedRun, tail_run

_Told = TypeVar("_Told")


class EvictionHook(Protocol):
    """The seam for storage tiers. Neither method may block; what they raise is counted and reported.

    Blocks that left the cache are free at once: whoever wants their contents copies them before the next step writes.
    """

    def evicted(self, run: EvictedRun) -> None:
        """``run`` is about to leave the tree for want of room."""

    def dropped(self, blocks: array[int]) -> None:
        """These ids left the tree because their contents are bad or were to be forgotten: a copy that is still to be
        made of them must not be made.
        """


class Evictor:
    """Frees cached blocks on demand."""

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        policy: ContainedPolicy,
        *,
        clock: Callable[[], float],
        ghosts: Ghosts,
    ) -> None:
        self.hook: EvictionHook | None = None
        self.hook_faults = 0
        self.policy = policy
        self.evicted: Counter[str] = Counter()
        """Blocks evicted, by reason."""
        self._pool = pool
        self._tree = tree
        self._clock = clock
        self._ghosts = ghosts
        self._policy_name = type(policy.policy).__name__

    def evict(self, count: int, reason: str) -> int:
        """Evict until ``count`` blocks have come free or no candidate is left; returns how many came free.

        Blocks from which a copy is still read leave the cache but come free later; more are evicted in their place. A
        ``count`` of zero or less evicts nothing.
        """
        if count <= 0:
            return 0
        goal = self._pool.free + count
        for node in self._victims(count):
            self._evict_tail(node, min(goal - self._pool.free, len(node.ids)), reason)
            if self._pool.free >= goal:
                break
        return self._pool.free - goal + count

    def drop(self, node: Node, reason: str) -> None:
        """Take a whole candidate out of the cache whose contents are bad or to be forgotten."""
        ids, _ = self._tree.cut_tail(node, len(node.ids))
        self.evicted[reason] += len(ids)
        if self.hook is not None:
            self._tell(self.hook.dropped, ids)
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

    def _evict_tail(self, node: Node, count: int, reason: str) -> None:
        run = tail_run(node, count, reason) if self.hook is not None else None  # names cost: only for who needs them
        ids, tokens = self._tree.cut_tail(node, count)
        self.evicted[reason] += count
        ghost = Ghost(self._clock(), reason, self._policy_name)
        self._ghosts.remember(node.namespace, node.end, tokens[: len(tokens) // count], ghost)
        if self.hook is not None and run is not None:
            self._tell(self.hook.evicted, run)
        self._pool.release(ids)

    def _tell(self, event: Callable[[_Told], None], what: _Told) -> None:
        try:
            event(what)
        except Exception as error:  # noqa: BLE001  # a tier's fault is a miss later, never a failed allocation now
            self.hook_faults += 1
            self.policy.report("eviction hook", error)
