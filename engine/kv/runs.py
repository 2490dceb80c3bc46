"""Runs: stretches of cached blocks with the names under which tiers know them, for those who copy or move them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ...policies.eviction.base import Entry
from ...storage.naming import BlockName, Namespace
from ...telemetry.record import NO_TRACK, Track
from .names import names_of, parent_name
from .node import Node
from .prefix_tree import PrefixTree


class CachedRun(NamedTuple):
    """Neighbouring blocks of one edge, as they were at one moment."""

    namespace: Namespace
    start: int
    """Tokens of the prompt before the run."""
    parent: BlockName
    """Name of the block before the run; for the first one, that of the shelf."""
    names: tuple[BlockName, ...]
    """Empty, and ``parent`` too, in a run that leaves the cache while nobody reads them."""
    tokens: bytes
    """int32 tokens of the run."""
    blocks: tuple[int, ...]
    entry: Entry
    """Statistics of the edge."""
    reason: str = ""
    """Why the run leaves the cache: ``allocate``, ``watermark``, ``call``, ``forget`` or ``distrust``; empty while it
    stays."""
    cause: Track = NO_TRACK
    """Of the request for which it leaves."""


EvictedRun: TypeAlias = CachedRun
"""One that is about to leave."""


def tail_run(node: Node, count: int, reason: str = "", cause: Track = NO_TRACK, *, named: bool = True) -> CachedRun:
    """The last ``count`` blocks of ``node``, which is no root. O(count), and once the naming of its path, if it is to
    be ``named``.
    """
    node.show_all()
    first = len(node.ids) - count
    block_bytes = len(node.tokens) // len(node.ids)
    above = node.end if node.parent is None else node.parent.end
    start = node.end - (node.end - above) // len(node.ids) * count
    parent, *names = (b"",)
    if named:
        parent, *names = names_of(node, first - 1) if first else (parent_name(node), *names_of(node))
    tokens = bytes(node.tokens[first * block_bytes :])
    ids = tuple(node.ids[first:])
    return CachedRun(node.namespace, start, parent, tuple(names), tokens, ids, node, reason, cause)


def last_runs(tree: PrefixTree, node: Node, count: int) -> list[CachedRun]:
    """The last ``count`` blocks of the path that ends at ``node``, an edge at a time, parents first."""
    found: list[CachedRun] = []
    for part in tree.path(node):
        if count <= 0:
            break
        found.append(tail_run(part, min(count, len(part.ids))))
        count -= len(part.ids)
    return found[::-1]


def runs_above(tree: PrefixTree, node: Node) -> Iterator[CachedRun]:
    """The path that ends at ``node``, an edge at a time, from there up to the root."""
    for part in tree.path(node):
        yield tail_run(part, len(part.ids))
