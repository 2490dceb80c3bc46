"""Pools whose owner knows the future: what is used furthest in the future goes first."""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .future import NEVER, Future, NextUses
from .timeline import Demand
from .trace import Request


class _Held(NamedTuple):
    prompt: list[int]
    """Edges, the deepest first."""
    private: int
    generated: list[int]
    next_uses: array[int]
    """Of ``generated``."""


class _Item(NamedTuple):
    """Of a heap: what is used furthest in the future comes first."""

    minus_next: int
    edge: int


class _Furthest:
    """Edges by their next use, furthest first. Memory stays O(edges): what is stale goes when it comes up, and all of
    it once it outnumbers the edges.
    """

    def __init__(self, edges: int) -> None:
        self.next = array("q", [0]) * edges
        """Number of the request that uses each edge next; 0 for one that was never cached."""
        self._heap: list[_Item] = []
        self._most = 2 * edges

    def push(self, edge: int) -> None:
        heappush(self._heap, _Item(-self.next[edge], edge))
        if len(self._heap) > self._most:
            self._heap = [item for item in set(self._heap) if self._is_fresh(item)]
            heapify(self._heap)

    def pop(self) -> int:
        """An edge that was pushed, and has not been used since."""
        while not self._is_fresh(item := heappop(self._heap)):
            pass
        return item.edge

    def _is_fresh(self, item: _Item) -> bool:
        return self.next[item.edge] == -item.minus_next


class ClairvoyantPool:
    """Edges of the tree of all prompts, each cached from its start as far as ``cached`` says.

    A leaf is an edge of which something is cached, and nothing below it. Only leaves can go, so of the edges of one
    path that are used next at one time the deepest goes first.
    """

    wanted_again = 0

    def __init__(self, future: Future, next_uses: NextUses, capacity: int) -> None:
        self.capacity = capacity
        self.evicted = 0
        edges = len(future.blocks)
        self._future = future
        self._next_uses = next_uses
        self._free = capacity
        self._idle = 0  # cached blocks that nobody holds
        self._cached = array("q", [0]) * edges
        self._holders = array("q", [0]) * edges
        self._children = array("q", [0]) * edges  # that have something cached
        self._leaves = _Furthest(edges)

    def admit(self, request: Request, demand: Demand, now: float) -> tuple[_Held, int] | None:
        prompt = self._future.path(self._future.prompts[demand.number])
        found, idle = self._match(prompt)
        needed = demand.blocks - found + demand.private
        if self._free + self._idle - idle < needed:
            return None
        holders, cached = self._holders, self._cached
        for edge in prompt:
            if not holders[edge]:
                self._idle -= cached[edge]
            holders[edge] += 1
        if needed > self._free:
            self._evict(needed - self._free)
        self._free -= needed
        generated = self._future.path(self._future.answers[demand.number], self._future.prompts[demand.number])
        next_uses = self._next_uses.of(demand.number)
        for edge, next_use in zip(prompt, next_uses[len(generated) :], strict=True):
            self._fill(edge)
            self._leaves.next[edge] = next_use
        return _Held(prompt, demand.private, generated, next_uses[: len(generated)]), found

    def finish(self, held: _Held, now: float) -> None:
        self._free += held.private
        for edge, next_use in zip(held.generated, held.next_uses, strict=True):
            new = self._fill(edge)
            self._free -= new
            self._idle += 0 if self._holders[edge] else new
            self._leaves.next[edge] = max(self._leaves.next[edge], next_use)  # it may have been used meanwhile
        for edge in held.prompt:
            self._holders[edge] -= 1
            if not self._holders[edge]:
                self._idle += self._cached[edge]
        for edge in (*held.generated[:1], *held.prompt[:1]):
            self._offer(edge)

    def _match(self, prompt: list[int]) -> tuple[int, int]:
        """Leading blocks that are cached, and how many of them nobody holds."""
        found = idle = 0
        for edge in reversed(prompt):
            blocks = self._cached[edge]
            found += blocks
            idle += 0 if self._holders[edge] else blocks
            if blocks < self._future.blocks[edge]:
                break
        return found, idle

    def _fill(self, edge: int) -> int:
        """Cache all of an edge; returns how many blocks are new."""
        before = self._cached[edge]
        if not before:
            self._children[self._future.parents[edge]] += 1
        self._cached[edge] = self._future.blocks[edge]
        return self._cached[edge] - before

    def _offer(self, edge: int) -> None:
        if self._cached[edge] and not self._holders[edge] and not self._children[edge]:
            self._leaves.push(edge)

    def _evict(self, count: int) -> None:
        while count:
            edge = self._leaves.pop()
            if self._holders[edge] or self._children[edge] or not self._cached[edge]:
                continue
            part = min(count, self._cached[edge])
            self._cached[edge] -= part
            self._free += part
            self._idle -= part
            self.evicted += part
            count -= part
            if not self._cached[edge]:
                edge = self._future.parents[edge]
                self._children[edge] -= 1
            self._offer(edge)


class UnboundPool:
    """What the bound counts: blocks stay on their own, not as prefixes, and requests hold them for a moment only.

    All blocks that are used next by the same request are alike, so it is enough to count them.
    """

    evicted = wanted_again = 0

    def __init__(self, future: Future, next_uses: NextUses, capacity: int) -> None:
        """``next_uses``: renewed ones."""
        self.capacity = capacity
        self._future = future
        self._next_uses = next_uses
        self._kept: dict[int, int] = {}  # blocks that stay until a request comes, by its number
        self._all = 0
        self._furthest: list[int] = []  # heap of the numbers in ``_kept``, negative, and of some that have come

    def admit(self, request: Request, demand: Demand, now: float) -> tuple[None, int]:
        found = self._kept.pop(demand.number, 0)
        self._all -= found
        self._drop(self._all - (self.capacity - demand.blocks - demand.private))
        future = self._future
        path = future.path(future.answers[demand.number])
        for edge, next_use in zip(path, self._next_uses.of(demand.number), strict=True):
            if next_use != NEVER:
                self._keep(future.blocks[edge], next_use)
        return None, found

    def finish(self, held: None, now: float) -> None:
        """Nothing was held."""

    def _keep(self, blocks: int, until: int) -> None:
        if until not in self._kept:
            self._kept[until] = 0
            heappush(self._furthest, -until)
        self._kept[until] += blocks
        self._all += blocks

    def _drop(self, count: int) -> None:
        while count > 0:
            last = -self._furthest[0]
            part = min(count, self._kept[last])
            self._kept[last] -= part
            self._all -= part
            count -= part
            if not self._kept[last]:
                del self._kept[last]
                heappop(self._furthest)
