"""The usual block manager with prefix caching, as a yardstick for ``bookkeeping.py``.

Built as the engines of the field build it: one object per block; a doubly linked list of free blocks in eviction order;
per block a SHA-256 digest over the pickled triple of parent digest, token ids and extra keys; a dictionary from
digest to block. A freed block keeps its digest until it is handed out again; blocks are freed from the tail, so that
the head of a prefix is evicted last. Plain Python, no step left out and none added.

With ``packed=True`` it hashes int32 bytes instead of pickles, which no engine does by default but a careful one could.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from hashlib import sha256

ROOT = sha256(b"root").digest()
BlockHash = Callable[[bytes, SequenceOf[int]], bytes]


class LinkedBlock:
    """One block, and its place in the free list."""

    __slots__ = ("after", "before", "block_id", "digest", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.digest: bytes | None = None
        self.before = self.after = self


class FreeList:
    """Free blocks, the one to evict first in front. Every operation is O(1) per block."""

    def __init__(self, blocks: SequenceOf[LinkedBlock]) -> None:
        self.count = 0
        self._ring = LinkedBlock(-1)  # its successor is the first, its predecessor the last
        for block in blocks:
            self.append(block)

    def append(self, block: LinkedBlock) -> None:
        """Put ``block`` at the end."""
        ring = self._ring
        last = ring.before
        last.after = ring.before = block
        block.before, block.after = last, ring
        self.count += 1

    def remove(self, block: LinkedBlock) -> None:
        """Take ``block`` out, wherever it is."""
        block.before.after = block.after
        block.after.before = block.before
        self.count -= 1

    def pop_many(self, count: int) -> list[LinkedBlock]:
        """Take the first ``count`` blocks."""
        taken: list[LinkedBlock] = []
        block = self._ring.after
        for _ in range(count):
            taken.append(block)
            block = block.after
        self._ring.after = block
        block.before = self._ring
        self.count -= count
        return taken


class ChainedSequence:
    """What the yardstick keeps for a sequence."""

    __slots__ = ("blocks", "computed", "digests", "published", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.blocks: list[LinkedBlock] = []
        self.digests: list[bytes] = []
        self.computed = 0
        self.published = 0


class HashChainManager:
    """Admit, commit, decode, finish."""

    def __init__(self, num_blocks: int, block_size: int, *, packed: bool = False) -> None:
        self.block_size = block_size
        self._hash: BlockHash = hash_packed if packed else hash_pickled
        self._free = FreeList([LinkedBlock(i) for i in range(num_blocks)])
        self._cached: dict[bytes, LinkedBlock] = {}

    def admit(self, tokens: list[int]) -> ChainedSequence:
        """Find the cached prefix of the prompt, hold it, and allocate the rest.

        :raises MemoryError: when there are not enough blocks; nothing has changed.
        """
        sequence = ChainedSequence(tokens)
        self._lengthen_chain(sequence)
        hits = self._hits(sequence, len(tokens) - 1)
        missing = -(-len(tokens) // self.block_size) - len(hits)
        if missing > self._free.count - sum(1 for block in hits if not block.references):
            raise MemoryError("not enough blocks")
        self._touch(hits)
        sequence.blocks = hits + self._allocate(missing)
        sequence.computed = len(hits) * self.block_size
        sequence.published = len(hits)
        return sequence

    def commit(self, sequence: ChainedSequence, count: int, token: int) -> None:
        """``count`` more tokens are computed and ``token`` came out."""
        sequence.computed += count
        full = sequence.computed // self.block_size
        if full > sequence.published:
            self._publish(sequence, full)
        sequence.tokens.append(token)
        self._lengthen_chain(sequence)

    def decode(self, sequence: ChainedSequence, token: int) -> None:
        """One step of one token: a block for it if need be, then the commit."""
        if sequence.computed + 1 > len(sequence.blocks) * self.block_size:
            if not self._free.count:
                raise MemoryError("not enough blocks")
            sequence.blocks += self._allocate(1)
        self.commit(sequence, 1, token)

    def finish(self, sequence: ChainedSequence) -> None:
        """Give all blocks back, the tail first."""
        for block in reversed(sequence.blocks):
            block.references -= 1
            if not block.references:
                self._free.append(block)
        sequence.blocks = []

    def _lengthen_chain(self, sequence: ChainedSequence) -> None:
        """A digest for every whole block that has none yet."""
        tokens, digests = sequence.tokens, sequence.digests
        start = len(digests) * self.block_size
        while start + self.block_size <= len(tokens):
            parent = digests[-1] if digests else ROOT
            digests.append(self._hash(parent, tokens[start : start + self.block_size]))
            start += self.block_size

    def _hits(self, sequence: ChainedSequence, limit: int) -> list[LinkedBlock]:
        hits = []
        for digest in sequence.digests[: limit // self.block_size]:
            block = self._cached.get(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _touch(self, blocks: Iterable[LinkedBlock]) -> None:
        for block in blocks:
            if not block.references:
                self._free.remove(block)
            block.references += 1

    def _allocate(self, count: int) -> list[LinkedBlock]:
        taken = self._free.pop_many(count)
        for block in taken:
            self._forget(block)
            block.references += 1
        return taken

    def _forget(self, block: LinkedBlock) -> None:
        """A block that is handed out loses what it was cached for."""
        if block.digest is not None:
            del self._cached[block.digest]
            block.digest = None

    def _publish(self, sequence: ChainedSequence, full: int) -> None:
        for index in range(sequence.published, full):
            digest, block = sequence.digests[index], sequence.blocks[index]
            if digest not in self._cached:
                self._cached[digest] = block
                block.digest = digest
        sequence.published = full


def hash_pickled(parent: bytes, tokens: SequenceOf[int]) -> bytes:
    """Digest of a block, from its parent's, its tokens and the extra keys (adapter, salt: here none)."""
    return sha256(pickle.dumps((parent, tuple(tokens), None), protocol=pickle.HIGHEST_PROTOCOL)).digest()


def hash_packed(parent: bytes, tokens: SequenceOf[int]) -> bytes:
    """The same over int32 bytes."""
    return sha256(parent + struct.pack(f"{len(tokens)}i", *tokens)).digest()
