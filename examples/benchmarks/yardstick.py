"""The usual block manager with prefix caching, as a yardstick for ``bookkeeping.py``.

One object per block; a doubly linked list of free blocks in eviction order; a chain of SHA-256 digests, each over its
parent's digest and the block's tokens; a dictionary from digest to block. A freed block keeps its digest until it is
handed out again. Blocks are freed from the tail, so that the head of a prefix is evicted last.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as SequenceOf
from hashlib import sha256

TOKEN_BYTES = 4
ROOT = sha256(b"root").digest()


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
        taken = []
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

    def __init__(self, tokens: bytes) -> None:
        self.tokens = bytearray(tokens)
        self.blocks: list[LinkedBlock] = []
        self.digests: list[bytes] = []
        self.computed = 0
        self.published = 0


class HashChainManager:
    """Admit, commit, decode, finish."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = FreeList([LinkedBlock(i) for i in range(num_blocks)])
        self._cached: dict[bytes, LinkedBlock] = {}

    def admit(self, tokens: bytes) -> ChainedSequence:
        """Find the cached prefix of the prompt (int32 ``tokens``), hold it, and allocate the rest.

        :raises MemoryError: when there are not enough blocks; nothing has changed.
        """
        sequence = ChainedSequence(tokens)
        self._digest(sequence, len(tokens) // TOKEN_BYTES)
        hits = self._hits(sequence, len(tokens) // TOKEN_BYTES - 1)
        missing = -(-len(tokens) // (self.block_size * TOKEN_BYTES)) - len(hits)
        if missing > self._free.count - sum(1 for block in hits if not block.references):
            raise MemoryError("not enough blocks")
        for block in hits:
            if not block.references:
                self._free.remove(block)
            block.references += 1
        sequence.blocks = hits + self._allocate(missing)
        sequence.computed = len(hits) * self.block_size
        sequence.published = len(hits)
        return sequence

    def commit(self, sequence: ChainedSequence, count: int, token: int) -> None:
        """``count`` more tokens are computed and ``token`` came out."""
        sequence.computed += count
        full = sequence.computed // self.block_size
        if full > sequence.published:
            self._digest(sequence, full * self.block_size)
            for index in range(sequence.published, full):
                digest, block = sequence.digests[index], sequence.blocks[index]
                if digest not in self._cached:
                    self._cached[digest] = block
                    block.digest = digest
            sequence.published = full
        sequence.tokens += token.to_bytes(TOKEN_BYTES, "little", signed=True)

    def decode(self, sequence: ChainedSequence, token: int) -> None:
        """One step of one token: a block for it if need be, then the commit."""
        if sequence.computed + 1 > len(sequence.blocks) * self.block_size:
            if not self._free.count:
                raise MemoryError("not enough blocks")
            sequence.blocks += self._allocate(1)
        self.commit(sequence, 1, token)

    def finish(self, sequence: ChainedSequence) -> None:
        """Give all blocks back, the tail first."""
        append = self._free.append
        for block in reversed(sequence.blocks):
            block.references -= 1
            if not block.references:
                append(block)
        sequence.blocks = []

    def _digest(self, sequence: ChainedSequence, tokens: int) -> None:
        """Lengthen the chain to all whole blocks of the first ``tokens`` tokens."""
        digests, size = sequence.digests, self.block_size * TOKEN_BYTES
        parent = digests[-1] if digests else ROOT
        packed = bytes(sequence.tokens[len(digests) * size : tokens * TOKEN_BYTES])
        for start in range(0, len(packed) - size + 1, size):
            parent = sha256(parent + packed[start : start + size]).digest()
            digests.append(parent)

    def _hits(self, sequence: ChainedSequence, limit: int) -> list[LinkedBlock]:
        hits = []
        for digest in sequence.digests[: limit // self.block_size]:
            block = self._cached.get(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def _allocate(self, count: int) -> list[LinkedBlock]:
        taken = self._free.pop_many(count)
        cached = self._cached
        for block in taken:
            if block.digest is not None:
                del cached[block.digest]
                block.digest = None
            block.references = 1
        return taken


def pack(tokens: SequenceOf[int]) -> bytes:
    """Token ids as int32."""
    return struct.pack(f"{len(tokens)}i", *tokens)
