"""CacheControl: what can be done with the cache as a whole, beside running sequences on it. Pin, keep, forget, explain,
copy out. The upper half of :class:`~octavo.engine.kv.cache_manager.CacheManager`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from ...errors import InvalidRequest
from ...policies.eviction.base import EvictionPolicy
from ...storage.naming import BlockName, Namespace
from ...telemetry.record import NO_TRACK, Track
from .block_pool import BlockPool
from .containment import ContainedPolicy
from .eviction import Evictor
from .explain import DeviceExplanation, explain
from .forget import region
from .ghosts import Ghosts
from .image import ImageRun, take_image
from .keep import PLAIN, Keep
from .leases import Lease, Leases
from .moment import Moment
from .names import names_of, naming
from .narrator import Narrator
from .node import Node
from .prefix_tree import PrefixTree
from .quotas import OwnedRuns, Quotas
from .residency import Residency
from .retention import Span, raise_path
from .runs import CachedRun, runs_above, tail_run
from .standby import Standby
from .stats import CacheCounts, CacheStats
from .watching import EvictionHook, PublicationHook, RequestHook, Watchers

NOBODY = 0
"""Holds a prefix for a moment only, while it is changed; sequences and leases have other numbers, or it is over before
they are told of."""


class CacheControl:
    """Owns pool, tree, policy and the books about them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        *,
        clock: Callable[[], float],
        on_fault: Callable[[str, BaseException | str], None],
        background: Track = NO_TRACK,
        policy_timeout: float = math.inf,
        quotas: Quotas | None = None,
    ) -> None:
        self.block_size = block_size
        self.quotas = quotas
        self.pool = BlockPool(num_blocks, block_size, None if quotas is None else OwnedRuns(num_blocks, quotas))
        self.policy = ContainedPolicy(
            policy,
            on_fault,
            clock=clock,
            timeout=policy_timeout,
            background=background,
            standby=Standby if quotas is None else partial(Standby, group=quotas.group_of, excess=quotas.excess),
        )
        self._clock, self._moment = clock, Moment(clock)
        self.tree = PrefixTree(block_size, self.policy, self._moment)
        self.residency = Residency()
        self._ghosts = Ghosts(bound=4 * num_blocks)
        self._watchers = Watchers(self.policy.report)
        self._narrator = Narrator(self._watchers, self.policy, self._moment)
        self._evictor = Evictor(
            self.pool,
            self.tree,
            self.policy,
            narrator=self._narrator,
            ghosts=self._ghosts,
            residency=self.residency,
            background=background,
            quotas=quotas,
        )
        self._counts = CacheCounts()
        self._leases = Leases(self.tree, self._narrator, most_blocks=num_blocks // 2)

    # watching

    def watch(self, hook: EvictionHook, *, names: bool = True) -> None:
        """From now on ``hook`` hears of every block that leaves the cache. ``names``: whether it reads their names."""
        self._watchers.add(hook, names=names)

    def unwatch(self, hook: EvictionHook) -> None:
        """No longer. Idempotent."""
        self._watchers.remove(hook)

    def watch_publication(self, hook: PublicationHook) -> None:
        """From now on ``hook`` hears of every block that enters the cache."""
        self._watchers.add_publication(hook)

    def unwatch_publication(self, hook: PublicationHook) -> None:
        """No longer. Idempotent."""
        self._watchers.remove_publication(hook)

    def watch_requests(self, hook: RequestHook, alias: Callable[[bytes], bytes] | None = None) -> None:
        """From now on ``hook`` hears of all that decides what the policy sees. ``alias``: the names under which the
        policy is to know blocks from now on, ``NAME_BYTES`` each; one hook at most may want that.
        """
        self._watchers.add_request(hook)
        if alias is not None:
            self._watchers.alias = alias

    def unwatch_requests(self, hook: RequestHook) -> None:
        """No longer. What the policy calls blocks stays. Idempotent."""
        self._watchers.remove_request(hook)

    # room

    @property
    def available(self) -> int:
        """Blocks that are free or can be made so by eviction."""
        return self.pool.free + self.tree.idle_blocks

    def evict(self, count: int) -> int:
        """Evict cached blocks until ``count`` came free or none is left; returns how many did."""
        self._moment.begin()
        return self._evictor.evict(count, "call")

    def maybe_evict(self, low: int, high: int) -> int:
        """The background tick: when less than ``low`` blocks are free, evict until ``high`` are."""
        if self.pool.free >= low:
            return 0
        self._moment.begin()
        count = high - self.pool.free
        if self.quotas is not None:  # nobody gives what is his for room that nobody has asked for
            count = min(count, self.quotas.borrowed)
        return self._evictor.evict(count, "watermark")

    # who chooses

    def use_policy(self, policy: EvictionPolicy) -> None:
        """From now on ``policy`` says what goes. It hears of all that is cached: of each run, parents first and apart
        from that the one unused for longest first, and then of the candidates, in the order of their last use. Nothing
        is evicted. What the policy before it remembers of evicted runs is forgotten. O(n log n) in the runs cached.
        """
        self.policy.use(policy)
        self._ghosts.forget_memories()
        now = self._moment.begin()
        if self._watchers.requests:
            self._narrator.switched(self.policy.name)
        for node in self.tree.by_last_use():
            node.show_all()
            self.policy.on_insert(node, now)
        for node in sorted(self.tree.candidates, key=lambda node: node.used):
            self.policy.on_candidate(node, now)

    # keeping

    @property
    def pinned_blocks(self) -> int:
        """Blocks that leases hold; one that several hold counts once. At most half of the pool."""
        return self._leases.blocks

    def pin(self, namespace: Namespace, tokens: array[int]) -> Lease | None:
        """Hold the whole blocks of a prefix until ``unpin``; ``None``: not all of them are cached.

        :raises InvalidRequest: for a prefix that is shorter than a block.
        :raises OutOfBlocks: when leases would hold more than half of the pool.
        """
        blocks = len(tokens) // self.block_size
        if not blocks:
            raise InvalidRequest(f"a prefix must have at least {self.block_size} tokens, a block, to be pinned")
        self._moment.begin()
        match = self.tree.match(namespace, tokens.tobytes(), len(tokens))
        return self._leases.take(namespace, match) if len(match.ids) == blocks else None

    def unpin(self, lease: Lease) -> None:
        """Give a lease back.

        :raises CacheMisuse: when it was given back before, or belongs to another cache.
        """
        self._moment.begin()
        self._leases.give_back(lease)

    def keep(self, namespace: Namespace, tokens: array[int], priority: int, expires: float | None) -> int:
        """Raise the retention priority of what is cached of a prefix until ``expires`` (monotonic clock; ``None``: for
        good); returns how many tokens that covers. Blocks that are dearer stay so.
        """
        keep = Keep.until(priority, expires, self._moment.begin())
        match = self.tree.match(namespace, tokens.tobytes(), len(tokens))
        if match.ids and keep is not PLAIN:
            node = self.tree.lock_match(namespace, match)
            if self._watchers.requests:
                self._narrator.locked(NOBODY, node, len(match.ids))
            try:
                raised = raise_path(self.tree, node, Span(0, len(match.ids), keep))
                if self._watchers.requests:
                    self._narrator.kept(raised, keep)
            finally:
                self._unlock(NOBODY, node)
        return len(match.ids) * self.block_size

    def expire(self, now: float) -> int:
        """Let all retention end whose time has come; returns how many blocks are concerned. O(1) when none is."""
        self._moment.begin()
        expired = self.tree.expire(now)
        if self._watchers.requests:
            self._narrator.kept(expired, PLAIN)
        return sum(len(node.ids) for node in expired)

    # forgetting

    def forget(self, namespace: Namespace, tokens: array[int]) -> list[BlockName]:
        """Drop every block of a prefix, and of what continues it, that nobody holds. What other prompts share stays;
        an empty prefix stands for all of the namespace.

        Returns the names of these blocks, parents first, the held ones included: tiers may have copies of either.
        """
        return self._forget(region(self.tree, namespace, tokens.tobytes()))

    def forget_tenant(self, salt: str | None) -> int:
        """Drop every block of a tenant that nobody holds, whatever the model or adapter; returns how many."""
        before = self.tree.blocks
        for namespace in self.tree.namespaces():
            if namespace.salt == salt:
                self._forget(region(self.tree, namespace, b""))
        self._ghosts.forget(salt)
        self._narrator.forget_tenant(salt)
        return before - self.tree.blocks

    # looking

    def stats(self) -> CacheStats:
        """A snapshot; O(1)."""
        counts = self._counts
        return CacheStats(
            allocations=self.pool.allocations,
            evictions=_by_reason(self._evictor.evicted),
            evictions_by_policy=dict(self._evictor.evicted),
            prefix_hits=counts.prefix_hits,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            prefix_query_tokens=counts.prefix_query_tokens,
            tier_hit_tokens=counts.tier_hit_tokens.total(),
            hit_tokens_by_tier=dict(counts.tier_hit_tokens),
            resume_hit_tokens=counts.resume_hit_tokens,
            loaded_blocks=counts.loaded_blocks,
            loaded_tokens=counts.loaded_tokens,
            cow_forks=counts.cow_forks,
            partial_copies=counts.partial_copies,
            duplicates_freed=counts.duplicates_freed,
            evicted_then_wanted=self._ghosts.hits,
            evicted_then_wanted_seconds=self._ghosts.gap_seconds,
            policy=self.policy.name,
            policy_set_aside=self.policy.discarded,
            policy_faults=self.policy.all_faults,
            faults_by_policy=dict(self.policy.faults),
            hook_faults=self._watchers.faults,
            free=self.pool.free,
            idle=self.tree.idle_blocks,
            pinned=self._leases.blocks,
            total=self.pool.num_blocks,
        )

    def explain(self, namespace: Namespace, tokens: array[int], *, others: bool = False) -> DeviceExplanation:
        """What an admission would find on the device, and why not more. Changes nothing. ``others``: also whether
        another tenant, adapter or model has more of it, which is not for the ears of tenants.

        :raises InvalidRequest: for an empty prompt.
        """
        if not tokens:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        return explain(self.tree, self._ghosts, namespace, tokens, now=self._clock(), others=others)

    def image(self, wall_now: float) -> list[ImageRun]:
        """Everything in the tree, parents before children. O(tree). ``wall_now``: seconds since the epoch."""
        return take_image(self.tree, self._clock(), wall_now)

    def runs_above(self, node: Node) -> Iterator[CachedRun]:
        """The cached path that ends at ``node``, an edge at a time, from there up. Valid until the tree changes."""
        return runs_above(self.tree, node)

    def runs(self) -> Iterator[CachedRun]:
        """All that is cached, an edge at a time, parents first; names all of it. Valid until the tree changes."""
        return (tail_run(node, len(node.ids)) for node in self.tree.nodes())

    def naming(self) -> Iterator[None]:
        """Name all that is cached, a part of it at each step, so that :meth:`runs` need not. The tree may change."""
        return naming(self.tree.nodes())

    # inside

    def _unlock(self, number: int, node: Node) -> None:
        self.tree.unlock(node)
        if self._watchers.requests:
            self._narrator.unlocked(number)

    def _forget(self, nodes: list[Node]) -> list[BlockName]:
        self._moment.begin()
        names = [name for node in nodes for name in names_of(node)]
        self._evictor.drop(reversed(nodes), "forget")
        return names


def _by_reason(evicted: Counter[tuple[str, str]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (reason, _), blocks in evicted.items():
        found[reason] += blocks
    return dict(found)
