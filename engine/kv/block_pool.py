"""BlockPool: which blocks exist, who holds them, which are free. Ids and columns, no objects and no memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import CacheMisuse, OutOfBlocks
from .free_runs import FreeRuns

BlockIds = array  # array("i"): ids in logical order; slices and comparisons run at memcpy speed


class Block(NamedTuple):
    """A read-only view of one block, for people and tests."""

    block_id: int
    references: int
    pins: int
    is_free: bool


class BlockPool:
    """Hands out block ids and counts references to them.

    A block is *free*, or *held* by at least one reference (a table entry or the prefix tree), or, with no reference
    left, *in transfer* while a copy still reads it. The last reference or pin to go frees it.
    """

    def __init__(self, num_blocks: int, block_size: int, free: FreeRuns | None = None) -> None:
        """``free``: all blocks, for those who want to hear what becomes free."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.allocations = 0
        """Blocks handed out since the start."""
        self._references = array("i", bytes(4 * num_blocks))
        self._pins: dict[int, int] = {}
        self.free_runs = FreeRuns(num_blocks) if free is None else free
        """Which blocks are free; to be changed by the pool alone."""
        # whole-pool constants whose slices make the run-wise paths memcpy and memcmp
        self._ids = array("i", range(num_blocks))
        self._ones = array("i", [1]) * num_blocks
        self._zeros = array("i", bytes(4 * num_blocks))

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return self.free_runs.count

    @property
    def in_transfer(self) -> int:
        """Blocks that only a pin keeps from being free."""
        return len(self.in_transfer_ids())

    def block(self, block_id: int) -> Block:
        """The state of one block.

        :raises CacheMisuse: when there is no such block.
        """
        self._check_exists(block_id)
        references, pins = self._references[block_id], self._pins.get(block_id, 0)
        return Block(block_id, references, pins, is_free=not references and not pins)

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._references[block_id]

    def all_references(self) -> npt.NDArray[np.int32]:
        """The same of all blocks, by id (a copy)."""
        return np.array(self._references, dtype=np.int32)

    def in_transfer_ids(self) -> list[int]:
        """The blocks that only a pin keeps from being free."""
        return [block for block in self._pins if not self._references[block]]

    def allocate(self, count: int, after: int = -1) -> BlockIds[int]:
        """``count`` fresh blocks with one reference each, in as few runs as there are; next to ``after`` if free.

        :raises OutOfBlocks: when fewer are free; nothing is taken then.
        """
        free = self.free_runs
        if count > free.count:
            raise OutOfBlocks(f"{count} blocks are wanted and {free.count} of {self.num_blocks} are free")
        self.allocations += count
        if count == 1:  # a decoding sequence grows by one
            start, _ = free.take(1, after)
            self._references[start] = 1
            return self._ids[start : start + 1]
        if not count:
            return self._ids[:0]
        start, length = free.take(count, after)
        taken = self._ids[start : start + length]
        self._references[start : start + length] = self._ones[:length]
        while (missing := count - len(taken)) > 0:
            start, length = free.take(missing)
            taken += self._ids[start : start + length]
            self._references[start : start + length] = self._ones[:length]
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference to each block.

        :raises CacheMisuse: when a block is not held by anybody; the blocks before it keep the new reference.
        """
        references = self._references
        for block in blocks:
            if references[block] < 1:
                raise CacheMisuse(f"block {block} is free; a reference to it cannot be taken")
            references[block] += 1

    def release(self, blocks: BlockIds[int]) -> None:
        """One reference less to each block; those without any become free.

        :raises CacheMisuse: when a block has no reference (a double free); the blocks before it are released.
        """
        if not blocks:
            return
        start, length = blocks[0], len(blocks)
        end = start + length
        if (  # the common case at memcpy speed: neighbours that have one holder each
            blocks == self._ids[start:end]
            and self._references[start:end] == self._ones[:length]
            and not (self._pins and any(start <= pinned < end for pinned in self._pins))
        ):
            self._references[start:end] = self._zeros[:length]
            self.free_runs.give(start, length)
            return
        references, pins, give = self._references, self._pins, self.free_runs.give
        for block in blocks:
            held = references[block]
            if held < 1:
                raise CacheMisuse(f"block {block} is released but nobody holds it (double free)")
            references[block] = held - 1
            if held == 1 and block not in pins:
                give(block, 1)

    def pin(self, block: int) -> None:
        """Keep a held block from being reused until ``unpin``, even if all its references go.

        :raises CacheMisuse: when the block is free.
        """
        self._check_exists(block)
        if not self._references[block] and block not in self._pins:
            raise CacheMisuse(f"block {block} is free and cannot be pinned")
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """Undo one ``pin``; frees the block if nothing else holds it.

        :raises CacheMisuse: when the block is not pinned.
        """
        pins = self._pins.get(block, 0)
        if not pins:
            raise CacheMisuse(f"block {block} is not pinned")
        if pins > 1:
            self._pins[block] = pins - 1
            return
        del self._pins[block]
        if not self._references[block]:
            self.free_runs.give(block, 1)

    def free_ids(self) -> list[int]:
        """Every free id as the free list has it, sorted; duplicates would show. O(pool), for the census."""
        return sorted(block for start, length in self.free_runs.runs() for block in range(start, start + length))

    def _check_exists(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise CacheMisuse(f"there is no block {block_id}; the pool has {self.num_blocks}")
