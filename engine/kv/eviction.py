"""Eviction: asks the policy whom, takes the blocks out of the tree, shows them to the tiers' hook, frees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from ...policies.eviction.base import Entry
from .block_pool import BlockPool
from .containment import ContainedPolicy
from .ghosts import Ghosts
from .namespace import Namespace
from .prefix_tree import Node, PrefixTree


class EvictedRun(NamedTuple):
    """A run of blocks that leaves the tree, as the hook sees it."""

    namespace: Namespace
    prefix: bytes
    """int32 tokens from the start of the prompt to the run."""
    tokens: bytes
    """int32 tokens of the run."""
    blocks: tuple[int, ...]
    entry: Entry
    """Statistics of the edge it came from."""
    reason: str
    """``allocate``, ``watermark`` or ``call``."""


class EvictionHook(Protocol):
    """The seam for storage tiers. Called before the blocks can be reused; must not block.

    A hook that needs the contents longer pins the blocks (``BlockPool.pin``) and unpins them when it has copied them:
    until then they are in transfer, not free.
    """

    def __call__(self, run: EvictedRun) -> None: ...


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
        hook: EvictionHook | None = None,
    ) -> None:
        self.hook = hook
        self.hook_faults = 0
        self.policy = policy
        self.evicted: Counter[str] = Counter()
        """Blocks evicted, by reason."""
        self._pool = pool
        self._tree = tree
        self._clock = clock
        self._ghosts = ghosts

    def evict(self, count: int, reason: str) -> int:
        """Evict until ``count`` blocks have come free or no candidate is left; returns how many came free.

        Blocks that the hook pins leave the cache but come free later; more are evicted in their place. A ``count`` of
        zero or less evicts nothing.
        """
        if count <= 0:
            return 0
        goal = self._pool.free + count
        for node in self._victims(count):
            self._evict_tail(node, min(goal - self._pool.free, len(node.ids)), reason)
            if self._pool.free >= goal:
                break
        return self._pool.free - goal + count

    def drop(self, node: Node) -> None:
        """Take a whole candidate out of the cache because its contents are bad: no hook sees it."""
        ids, _ = self._tree.cut_tail(node, len(node.ids))
        self.evicted["distrust"] += len(ids)
        self._pool.release(ids)

    def _victims(self, count: int) -> Iterator[Node]:
        """The policy's choice while it keeps its contract, the least recently used candidates after that."""
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
            yield min(self._tree.candidates, key=lambda node: node.last_use)

    def _evict_tail(self, node: Node, count: int, reason: str) -> None:
        ids, tokens = self._tree.cut_tail(node, count)
        self.evicted[reason] += count
        first_block = tokens[: len(tokens) // count]
        self._ghosts.remember(node.namespace, node.end, first_block, self._clock())
        if self.hook is not None:
            run = EvictedRun(node.namespace, self._tree.prefix(node), tokens, tuple(ids), node, reason)
            self._show(self.hook, run)
        self._pool.release(ids)

    def _show(self, hook: EvictionHook, run: EvictedRun) -> None:
        try:
            hook(run)
        except Exception as error:  # noqa: BLE001  # a tier's fault is a miss later, never a failed allocation now
            self.hook_faults += 1
            self.policy.report("eviction hook", error)
