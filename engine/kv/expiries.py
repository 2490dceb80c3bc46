"""Expiries: whose retention ends when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from .node import Node

_SLACK = 64
"""Stale items that are tolerated whatever the number of live ones."""


class _Item(NamedTuple):
    """A heap item. ``number`` is unique, so nodes themselves are never compared."""

    expires: float
    number: int
    node: Node


class Expiries:
    """Nodes by the end of their retention. O(log n) per change, O(1) to see that nothing is due.

    A binary heap with lazy deletion; memory stays O(live nodes), for it is rebuilt when more than half of it is stale.
    """

    def __init__(self) -> None:
        self._heap: list[_Item] = []
        self._live: dict[Node, _Item] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, node: Node) -> bool:
        return node in self._live

    def note(self, node: Node) -> None:
        """File ``node`` under the end of its ``keep``, or not at all where that has none."""
        self.forget(node)
        if node.keep.expires is not None:
            item = self._live[node] = _Item(node.keep.expires, next(self._numbers), node)
            heapq.heappush(self._heap, item)

    def forget(self, node: Node) -> None:
        """``node`` is gone, or is kept otherwise. Nothing happens when it is not filed."""
        if self._live.pop(node, None) is not None and len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def due(self, now: float) -> Iterator[Node]:
        """Take out, one after the other, the nodes whose retention has ended at ``now``."""
        while self._heap and self._heap[0].expires <= now:
            item = heapq.heappop(self._heap)
            if self._live.get(item.node) is item:
                del self._live[item.node]
                yield item.node
