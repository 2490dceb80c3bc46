"""Eviction: asks the policy whom, takes the blocks out of the tree, shows them to the tiers' hook, frees them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from ...policies.eviction.base import Entry, EvictionPolicy
from .block_pool import BlockPool
from .prefix_tree import Node, PrefixTree
from .sequence import Namespace


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
    """``allocate`` or ``watermark`` or ``call``."""


class EvictionHook(Protocol):
    """The seam for storage tiers. Called before the blocks can be reused; must not block.

    A hook that needs the contents longer pins the blocks (``BlockPool.pin``) and unpins them when it has copied them:
    until then they are in transfer, not free.
    """

    def __call__(self, run: EvictedRun) -> None: ...


class ContainedPolicy(EvictionPolicy):
    """A policy in a box: what it raises is counted and reported, never passed on."""

    def __init__(self, policy: EvictionPolicy, on_fault: Callable[[str, BaseException | str], None]) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self.faults = 0
        self._on_fault = on_fault

    def fault(self, where: str, error: BaseException | str) -> None:
        """Count and report one breach of the contract."""
        self.faults += 1
        self._on_fault(where, error)

    def on_insert(self, entry: Entry, now: float) -> None:
        try:
            self.policy.on_insert(entry, now)
        except Exception as error:
            self.fault("on_insert", error)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        try:
            self.policy.on_extend(entry, blocks, now)
        except Exception as error:
            self.fault("on_extend", error)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        try:
            self.policy.on_split(upper, lower, now)
        except Exception as error:
            self.fault("on_split", error)

    def on_hit(self, entry: Entry, now: float) -> None:
        try:
            self.policy.on_hit(entry, now)
        except Exception as error:
            self.fault("on_hit", error)

    def on_candidate(self, entry: Entry, now: float) -> None:
        try:
            self.policy.on_candidate(entry, now)
        except Exception as error:
            self.fault("on_candidate", error)

    def on_held(self, entry: Entry) -> None:
        try:
            self.policy.on_held(entry)
        except Exception as error:
            self.fault("on_held", error)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        try:
            self.policy.on_evict(entry, blocks, now)
        except Exception as error:
            self.fault("on_evict", error)

    def on_ghost_hit(self, depth: int, idle: float, now: float) -> None:
        try:
            self.policy.on_ghost_hit(depth, idle, now)
        except Exception as error:
            self.fault("on_ghost_hit", error)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        try:
            yield from self.policy.victims(count, now)
        except Exception as error:
            self.fault("victims", error)


class Ghosts:
    """Remembers what was evicted, so that it shows when it is wanted again. Bounded; the oldest is forgotten first.

    A ghost is known by namespace, depth and the tokens of its first evicted block, not by its whole prefix: good enough
    for statistics, and small.
    """

    def __init__(self, bound: int) -> None:
        self.hits = 0
        self.gap_seconds = 0.0
        """Sum over the hits of the time between eviction and the new wish."""
        self._bound = bound
        self._evicted: OrderedDict[tuple[Namespace, int, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evicted)

    def remember(self, namespace: Namespace, depth: int, block: bytes, now: float) -> None:
        """``block``, which began at ``depth`` tokens, was evicted."""
        self._evicted[namespace, depth, block] = now
        if len(self._evicted) > self._bound:
            self._evicted.popitem(last=False)

    def recall(self, namespace: Namespace, depth: int, block: bytes, now: float) -> float | None:
        """Seconds since ``block`` was evicted, if it was; it is no ghost afterwards."""
        since = self._evicted.pop((namespace, depth, block), None)
        if since is None:
            return None
        self.hits += 1
        self.gap_seconds += now - since
        return now - since


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
        self._ghosts.remember(node.namespace, node.depth, first_block, self._clock())
        if self.hook is not None:
            self._show(EvictedRun(node.namespace, self._tree.prefix(node), tokens, tuple(ids), node, reason))
        self._pool.release(ids)

    def _show(self, run: EvictedRun) -> None:
        try:
            self.hook(run) if self.hook is not None else None
        except Exception as error:  # a tier's fault is a miss later, never a failed allocation now
            self.policy.fault("eviction hook", error)
