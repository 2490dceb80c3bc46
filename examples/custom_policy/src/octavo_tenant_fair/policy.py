"""TenantFairLru: the tenant with most blocks in the cache gives first, what it has not used for longest.

Under plain LRU one tenant that reads a hundred documents once flushes what all others use every minute. Here its own
documents go: a tenant loses blocks only while nobody has more of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from octavo.policies.eviction.base import Entry, EvictionPolicy
from octavo.policies.eviction.candidates import CandidateQueue

SLACK = 64
"""Outdated items of the heap that are tolerated whatever the number of tenants."""


class TenantFairLru(EvictionPolicy):
    """O(log n) per event and per victim.

    Blocks are counted whether or not they can go now: a tenant whose requests hold much of the pool gives the rest
    first. Of two tenants with as many blocks the one whose name comes first gives.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: Counter[str] = Counter()
        self._queues: dict[str, CandidateQueue] = {}
        """Candidates of each tenant that has blocks, the least recently used first."""
        self._heap: list[tuple[int, str]] = []
        """Tenants, the largest first; an item counts while the number in it is right."""

    def on_insert(self, entry: Entry, now: float) -> None:
        self._count(entry.tenant, entry.blocks)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._count(entry.tenant, blocks)

    def on_hit(self, entry: Entry, now: float) -> None:
        queue = self._queues[entry.tenant]
        if entry in queue:
            queue.push(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._queues[entry.tenant].push(entry, entry.last_use)
        self._count(entry.tenant, 0)

    def on_held(self, entry: Entry) -> None:
        self._queues[entry.tenant].discard(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        if entry.blocks == 0:
            self._queues[entry.tenant].discard(entry)
        self._count(entry.tenant, -blocks)

    def on_forget(self, entry: Entry) -> None:
        self._count(entry.tenant, -entry.blocks)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        while (entry := self._first()) is not None:
            yield entry

    def _first(self) -> Entry | None:
        while self._heap:
            blocks, tenant = self._heap[0]
            entry = self._queues[tenant].first() if self._blocks.get(tenant) == -blocks else None
            if entry is not None:
                return entry
            heapq.heappop(self._heap)
        return None

    def _count(self, tenant: str, blocks: int) -> None:
        """``tenant`` has so many blocks more; its place in the heap is another one now."""
        self._blocks[tenant] += blocks
        if not self._blocks[tenant]:
            del self._blocks[tenant], self._queues[tenant]
            return
        self._queues.setdefault(tenant, CandidateQueue())
        heapq.heappush(self._heap, (-self._blocks[tenant], tenant))
        if len(self._heap) > 2 * len(self._blocks) + SLACK:
            self._heap = [(-own, each) for each, own in self._blocks.items()]
            heapq.heapify(self._heap)
