"""Retention: what a request wants to be kept longer or shorter than the rest, range by range of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from ...errors import InvalidRequest
from .keep import PLAIN, Keep
from .node import Node
from .prefix_tree import PrefixTree

MAX_PRIORITY = 2**31


@dataclass(frozen=True, slots=True)
class Retention:
    """The blocks that hold tokens ``start ... end - 1`` of a request, prompt and output, get a priority of their own.

    :raises InvalidRequest: when a field has the wrong type or is out of range.
    """

    start: int
    end: int | None
    """``None``: to the end of the text, with all that is generated."""
    priority: int
    """Lower goes first; what nobody asked for has 0. Below 2**31 in size."""
    ttl: float | None = None
    """Seconds from the admission of the request, and anew with each request that asks for it; ``None``: for good."""

    def __post_init__(self) -> None:
        if not _is_int(self.start) or self.start < 0:
            raise InvalidRequest(f"a retention starts at a token number, 0 or more, not at {self.start!r}")
        if self.end is not None and (not _is_int(self.end) or self.end <= self.start):
            raise InvalidRequest(f"a retention from token {self.start} must end after it or be None, not {self.end!r}")
        if not _is_int(self.priority) or abs(self.priority) >= MAX_PRIORITY:
            raise InvalidRequest(f"a retention priority must be an integer of 32 bits, not {self.priority!r}")
        if self.ttl is not None and not _is_duration(self.ttl):
            raise InvalidRequest(f"a retention's ttl must be a number of seconds above 0 or None, not {self.ttl!r}")


class Span(NamedTuple):
    """Neighbouring blocks that are kept alike."""

    start: int
    """Number of the first block, counted from the start of the prompt."""
    stop: int
    keep: Keep


def spans(retention: Sequence[Retention], start: int, stop: int, block_size: int, since: float) -> list[Span]:
    """How ``retention`` wants blocks ``start ... stop - 1`` to be kept, in order and without gaps.

    ``since``: when the request was admitted, on the monotonic clock. A block touched by several ranges gets the highest
    priority, of equal ones the longest time.
    """
    wishes = [_wish(each, stop, block_size, since) for each in retention]
    borders = sorted({start, stop, *(b for wish in wishes for b in (wish.start, wish.stop) if start < b < stop)})
    found: list[Span] = []
    for first, end in pairwise(borders):
        asked = [wish.keep for wish in wishes if wish.start <= first < wish.stop]
        keep = reduce(Keep.raised, asked) if asked else PLAIN
        found.append(Span(first, end, keep))
    return found


def raise_path(tree: PrefixTree, node: Node, span: Span) -> list[Node]:
    """Raise the retention of the blocks of ``span`` on the path that ends at ``node``; nothing is lowered.

    Edges are split where only a part of one is dearer than before. Returns those that are dearer now, the lowest first.
    """
    raised = []
    part = node
    while part.parent is not None:
        above = part.parent
        first = part.end // tree.block_size - len(part.ids)
        start, stop = max(span.start - first, 0), min(span.stop - first, len(part.ids))
        if start < stop and part.keep.raised(span.keep) is not part.keep:
            if stop < len(part.ids):
                part = tree.split(part, stop)
            if start:
                tree.split(part, start)  # ``part`` stays the lower half
            tree.set_keep(part, span.keep)
            raised.append(part)
        part = above
    return raised


def _wish(retention: Retention, stop: int, block_size: int, since: float) -> Span:
    end = stop if retention.end is None else -(-retention.end // block_size)
    expires = None if retention.ttl is None else since + retention.ttl
    return Span(retention.start // block_size, end, Keep(retention.priority, expires) if retention.priority else PLAIN)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
