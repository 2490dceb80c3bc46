"""Ghosts: what was evicted, so that it shows when it is wanted again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from ...policies.returning import Return
from ...storage.naming import Namespace

Tokens: TypeAlias = "bytes | bytearray | memoryview[int]"


class Ghost(NamedTuple):
    """How a run of blocks left the cache."""

    when: float
    """On the engine's monotonic clock."""
    reason: str
    """``allocate``, ``watermark`` or ``call``."""
    policy: str
    """Class of the eviction policy."""
    memory: object = None
    """What that policy remembers of it."""
    number: int = 0
    """Counted over all runs that were evicted."""
    blocks: int = 1


class Ghosts:
    """Remembers what was evicted, so that it shows when it is wanted again. Bounded; the oldest is forgotten first.

    A ghost is known by its namespace and a digest (XXH3, 64 bits) of all tokens up to the end of its first block; no
    token is kept.
    """

    def __init__(self, bound: int) -> None:
        self.hits = 0
        self.gap_seconds = 0.0
        """Sum over the hits of the time between eviction and the new wish."""
        self._bound = bound
        self._evicted: OrderedDict[tuple[Namespace, int], Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evicted)

    def remember(self, namespace: Namespace, prefix: Iterable[Tokens], ghost: Ghost) -> None:
        """A run was evicted. ``prefix``: int32 tokens, in pieces, from the start of the prompt to the end of its first
        block. O(tokens), some microseconds for thousands.
        """
        self._evicted[namespace, xxh3_64_intdigest(b"".join(prefix))] = ghost
        if len(self._evicted) > self._bound:
            self._evicted.popitem(last=False)

    def wanted(self, namespace: Namespace, tokens: array[int], first: int, block_size: int) -> list[tuple[int, Ghost]]:
        """The ghosts that a prompt meets one after the other, with the numbers of the blocks at which they begin, from
        number ``first`` on, the first one that it lacks. They stay ghosts.
        """
        return self._met(namespace, tokens, first, block_size, self._evicted.get)

    def recall(self, namespace: Namespace, tokens: array[int], first: int, block_size: int, now: float) -> list[Return]:
        """The same, counted; they are no ghosts afterwards."""
        returns: list[Return] = []
        whole = len(tokens) // block_size
        for number, ghost in self._met(namespace, tokens, first, block_size, self._evicted.pop):
            idle = now - ghost.when
            self.hits += 1
            self.gap_seconds += idle
            returns.append(Return(ghost.memory, number, min(ghost.blocks, whole - number), idle))
        return returns

    def peek(self, namespace: Namespace, prefix: Tokens) -> Ghost | None:
        """How the run whose first block ends ``prefix`` was evicted, if it was. Nothing is counted."""
        return self._evicted.get((namespace, xxh3_64_intdigest(prefix)))

    def forget_memories(self) -> None:
        """The policy whose memories these are is no longer in use. O(bound)."""
        for key, ghost in self._evicted.items():
            self._evicted[key] = ghost._replace(memory=None)

    def forget(self, salt: str | None) -> None:
        """Keep nothing of a tenant. O(bound)."""
        for key in [key for key in self._evicted if key[0].salt == salt]:
            del self._evicted[key]

    def _met(
        self,
        namespace: Namespace,
        tokens: array[int],
        first: int,
        block_size: int,
        find: Callable[[tuple[Namespace, int], None], Ghost | None],
    ) -> list[tuple[int, Ghost]]:
        """Numbers of blocks, and what ``find`` gives of the ghosts that begin there."""
        met: list[tuple[int, Ghost]] = []
        number, end = first, (first + 1) * block_size
        if end > len(tokens):
            return met
        shown = memoryview(tokens)
        hashed = xxh3_64(shown[:end])
        while (ghost := find((namespace, hashed.intdigest()), None)) is not None:
            met.append((number, ghost))
            number += ghost.blocks
            start, end = end, (number + 1) * block_size
            if end > len(tokens):
                break
            hashed.update(shown[start:end])
        return met
