"""Standby: who goes while the policy is of no use. The lowest retention priority first, of one the least recently used;
with quotas, those of the group that is furthest beyond its own.

It goes by what the cache knows itself, never by what policies are shown.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count
from typing import NamedTuple

from .node import Node

_SLACK = 64
"""Stale items that are tolerated whatever the number of candidates."""


class _Item(NamedTuple):
    """A heap item. ``number`` is unique, so nodes themselves are never compared."""

    place: tuple[int, float]
    number: int
    node: Node


class Standby:
    """A view of ``candidates``, in order. O(n) to make; then O(log n) per candidate, amortised.

    Binary heaps, one for each group, with lazy deletion: what was withdrawn, or came back at another place, is passed
    over.
    """

    def __init__(
        self,
        candidates: Mapping[Node, None],
        group: Callable[[Node], str] = lambda _: "",
        excess: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """``candidates`` is read again and again; who is added to it later has to be offered. ``excess``: of the groups
        the one with most goes first."""
        self._candidates = candidates
        self._group, self._excess = group, excess
        self._numbers = count()
        self._fill()

    def offer(self, node: Node) -> None:
        """``node`` has become a candidate."""
        heapq.heappush(self._heaps.setdefault(self._group(node), []), self._item(node))
        if sum(map(len, self._heaps.values())) > 2 * len(self._candidates) + _SLACK:
            self._fill()

    def first(self) -> Node | None:
        """The candidate that goes first; ``None``: there is none."""
        for group in sorted(self._heaps, key=self._excess, reverse=True):
            if (node := self._first_of(self._heaps[group])) is not None:
                return node
        return None

    def _first_of(self, heap: list[_Item]) -> Node | None:
        while heap:
            place, _, node = heap[0]
            if node in self._candidates and place == _place(node):
                return node
            heapq.heappop(heap)
        return None

    def _fill(self) -> None:
        self._heaps: dict[str, list[_Item]] = {}
        for node in self._candidates:
            self._heaps.setdefault(self._group(node), []).append(self._item(node))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def _item(self, node: Node) -> _Item:
        return _Item(_place(node), next(self._numbers), node)


def _place(node: Node) -> tuple[int, float]:
    return node.keep.priority, node.used
