"""Image: all of the tree at one moment, for snapshots, and in which order its parts are worth saving."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ...policies.eviction.base import Entry
from ...storage.base import Meta
from ...storage.naming import BlockName, Namespace
from .prefix_tree import PrefixTree
from .runs import tail_run


class ImageRun(NamedTuple):
    """One edge of the tree, as it was."""

    namespace: Namespace
    start: int
    """Tokens of the prompt before the run."""
    parent: BlockName
    """Name of the block before the run; for the first one, that of the shelf."""
    names: tuple[BlockName, ...]
    tokens: bytes
    """int32 tokens of the run."""
    ids: array[int]
    """Where the blocks were. They cannot change while they are cached."""
    meta: Meta


def meta_of(entry: Entry, now: float, wall_now: float) -> Meta:
    """What outlives the process of what is known of a run. ``now`` is on the monotonic clock."""
    ttl = None if entry.expires is None else max(entry.expires - now, 0.0)
    idle = max(now - entry.last_use, 0.0)
    return Meta(wall_now, idle, entry.hits, entry.priority, ttl, entry.recompute_seconds)


def take_image(tree: PrefixTree, now: float, wall_now: float) -> list[ImageRun]:
    """Every run of the tree, parents before children. O(tree); blocks that have no name yet are named."""
    image = []
    for node in tree.nodes():
        run = tail_run(node, len(node.ids))
        image.append(ImageRun(*run[:5], array("i", node.ids), meta_of(node, now, wall_now)))
    return image


def most_valuable(image: Sequence[ImageRun]) -> list[int]:
    """Indices into ``image``, the most valuable run first, but no run before the one that it continues.

    The value of a run is its retention priority; within one priority ``(1 + hits) * seconds / (1 + idle)``: how often
    it was used, times what it takes to compute one of its blocks again, and less the longer nobody used it. Where no
    time was measured, the mean of those that were stands in. A run is worth at least as much as what continues it,
    which is of no use without it. O(n log n).
    """
    measured = [run.meta.recompute_seconds for run in image if run.meta.recompute_seconds > 0]
    typical = sum(measured) / len(measured) if measured else 1.0
    values = [_value(run.meta, typical) for run in image]
    ends = {(run.namespace, run.names[-1]): index for index, run in enumerate(image)}
    for index in range(len(image) - 1, -1, -1):  # children come after their parents
        above = ends.get((image[index].namespace, image[index].parent))
        if above is not None:
            values[above] = max(values[above], values[index])
    return sorted(range(len(image)), key=lambda index: (-values[index][0], -values[index][1], index))


def _value(meta: Meta, typical: float) -> tuple[int, float]:
    priority = 0 if meta.ttl == 0.0 else meta.priority
    return priority, (1 + meta.hits) * (meta.recompute_seconds or typical) / (1.0 + meta.idle)
