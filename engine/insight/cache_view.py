"""CacheViews: the cache at one moment, for people who look at it while it works.

What is shown is bounded, whatever the size of the cache: the pool as one letter for each block, of the prefix tree the
edges that were used last, and the last evictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count, islice
from typing import Final, NamedTuple

import anyio.to_thread

from ...errors import InvalidRequest
from ...storage.naming import TOKEN_BYTES
from ..counters import EngineStats
from ..kv import CacheManager, EvictedRun, PrefixTree, pool_map
from ..kv.node import Node
from ..model.text import TextCodec

MOST_NODES: Final = 10_000
WIDE: Final = 1024
"""Below one prefix so many edges are looked at, or as many as are to be shown if that is more: those that came last."""
MOST_WIDE: Final = 8
"""In all, so many times as many."""
FIRST_BLOCKS: Final = 16
MOST_EVICTIONS: Final = 64
SAME_MOMENT: Final = 0.1
"""Seconds. Blocks that leave for the same reason within so short a time are told as one."""
TEXT_TOKENS: Final = 24
TEXT_CHARACTERS: Final = 40


class PoolView(NamedTuple):
    """The pool. The five numbers add up to ``total``."""

    map: bytes
    """What each block is, one letter for one block: ``f`` free, ``i`` idle, ``h`` held, ``p`` pinned, ``t`` in
    transfer."""
    free: int
    idle: int
    """Cached and used by nobody."""
    held: int
    """Of requests that run, and not pinned."""
    pinned: int
    in_transfer: int
    total: int


class NodeView(NamedTuple):
    """An edge of the prefix tree: a run of cached blocks that prompts with the same beginning share."""

    id: int
    """Its first block, which is in no other edge."""
    parent: int | None
    """Id of the edge above; ``None``: the prompt begins here."""
    depth: int
    """Tokens from the start of the prompt to the end of the edge."""
    tokens: int
    """Tokens of the edge."""
    blocks: int
    first_blocks: tuple[int, ...]
    """Ids of the first of them, at most ``FIRST_BLOCKS``."""
    children: int
    """Edges below, shown or not."""
    hits: int
    locks: int
    """Requests and pins that hold it."""
    idle_seconds: float
    """Since its last use."""
    tenant: str | None
    priority: int
    text: str | None
    """How the edge begins; ``None``: not asked for, or the engine has no codec."""


class EvictionView(NamedTuple):
    """Blocks that left the cache at about the same time for the same reason."""

    when: float
    """The last of them, on the engine's monotonic clock."""
    blocks: int
    reason: str
    """``allocate``, ``watermark``, ``call``, ``forget`` or ``distrust``."""
    policy: str
    """Class of the eviction policy that was in charge."""


class CacheView(NamedTuple):
    """The cache at one moment."""

    when: float
    """On the engine's monotonic clock."""
    wall: float
    """Seconds since the epoch."""
    block_size: int
    pool: PoolView
    tree_blocks: int
    """Blocks in the prefix tree, shown or not."""
    nodes: tuple[NodeView, ...]
    """Parents before children; if not all, those that were used last."""
    evictions: tuple[EvictionView, ...]
    """The last ones, the newest first."""
    stats: EngineStats


class RecentEvictions:
    """What left the cache last. An :class:`~octavo.engine.kv.EvictionHook`."""

    def __init__(self, policy: Callable[[], str], clock: Callable[[], float], most: int = MOST_EVICTIONS) -> None:
        """``policy``: the name of the one in charge. ``clock``: seconds, monotonic. ``most``: runs to remember."""
        self._policy = policy
        self._clock = clock
        self._last: deque[EvictionView] = deque(maxlen=most)

    def evicted(self, run: EvictedRun) -> None:
        self._note(len(run.blocks), run.reason)

    def dropped(self, run: EvictedRun) -> None:
        self._note(len(run.blocks), run.reason)

    def newest_first(self) -> tuple[EvictionView, ...]:
        """All that is remembered."""
        return tuple(reversed(self._last))

    def _note(self, blocks: int, reason: str) -> None:
        now, policy = self._clock(), self._policy()
        last = self._last[-1] if self._last else None
        if last is not None and last[2:] == (reason, policy) and now - last.when < SAME_MOMENT:
            self._last[-1] = EvictionView(now, last.blocks + blocks, reason, policy)
        else:
            self._last.append(EvictionView(now, blocks, reason, policy))


class CacheViews:
    """Makes the views of one engine. All calls from its event loop."""

    def __init__(
        self,
        cache: CacheManager,
        stats: Callable[[], EngineStats],
        codec: TextCodec | None,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """``clock``: seconds, monotonic; ``wall``: seconds since the epoch."""
        self._cache = cache
        self._stats = stats
        self._codec = codec
        self._clock = clock
        self._wall = wall
        self._evictions = RecentEvictions(lambda: cache.policy.name, clock)
        cache.watch(self._evictions, names=False)

    async def view(self, *, max_nodes: int, text: bool) -> CacheView:
        """The cache as it is now, all of it at one moment; only the text is decoded afterwards, in another thread.

        :raises InvalidRequest: when ``max_nodes`` is no integer from 0 to ``MOST_NODES``.
        """
        if isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or not 0 <= max_nodes <= MOST_NODES:
            raise InvalidRequest(f"max_nodes must be an integer from 0 to {MOST_NODES}, not {max_nodes!r:.40}")
        now, cache = self._clock(), self._cache
        shown = list(last_used(cache.tree, max_nodes))
        view = CacheView(
            now,
            self._wall(),
            cache.block_size,
            _pool_view(cache.pool_map()),
            cache.tree.blocks,
            tuple(_node_view(node, cache.block_size, now) for node in shown),
            self._evictions.newest_first(),
            self._stats(),
        )
        if not text or self._codec is None:
            return view
        beginnings = [_beginning(node) for node in shown]
        texts = await anyio.to_thread.run_sync(_decoded, self._codec, beginnings)
        named = zip(view.nodes, texts, strict=True)
        return view._replace(nodes=tuple(node._replace(text=found) for node, found in named))


def last_used(tree: PrefixTree, most: int) -> Iterator[Node]:
    """Up to ``most`` edges, parents before children, and apart from that the one used last first.

    Where a prefix has very many continuations only those that came last are looked at, so that the work is bounded
    whatever the tree: see ``WIDE``.
    """
    waiting: list[tuple[float, int, Node]] = []
    numbers, width = count(), max(most, WIDE)
    left = MOST_WIDE * width

    def look_below(node: Node) -> int:
        before = len(waiting)
        for child in islice(reversed(node.children.values()), min(width, left)):
            heappush(waiting, (-child.used, next(numbers), child))
        return len(waiting) - before

    for namespace in islice(reversed(tree.namespaces()), width):
        root = tree.root(namespace)
        left -= 0 if root is None else look_below(root)
    for _ in range(most):
        if not waiting:
            return
        _, _, node = heappop(waiting)
        yield node
        left -= look_below(node)


def _node_view(node: Node, block_size: int, now: float) -> NodeView:
    above = node.parent
    return NodeView(
        id=node.ids[0],
        parent=above.ids[0] if above is not None and above.parent is not None else None,
        depth=node.end,
        tokens=len(node.ids) * block_size,
        blocks=len(node.ids),
        first_blocks=tuple(node.ids[:FIRST_BLOCKS]),
        children=len(node.children),
        hits=node.uses,
        locks=node.locks,
        idle_seconds=max(now - node.used, 0.0),
        tenant=node.namespace.salt,
        priority=node.keep.priority,
        text=None,
    )


def _pool_view(states: bytes) -> PoolView:
    return PoolView(
        map=states,
        free=states.count(pool_map.FREE),
        idle=states.count(pool_map.IDLE),
        held=states.count(pool_map.HELD),
        pinned=states.count(pool_map.PINNED),
        in_transfer=states.count(pool_map.IN_TRANSFER),
        total=len(states),
    )


def _beginning(node: Node) -> list[int]:
    """The first tokens of an edge (a copy)."""
    return memoryview(bytes(node.tokens[: TEXT_TOKENS * TOKEN_BYTES])).cast("i").tolist()


def _decoded(codec: TextCodec, beginnings: list[list[int]]) -> list[str]:
    return [codec.decode(ids, skip_special_tokens=False)[:TEXT_CHARACTERS] for ids in beginnings]
