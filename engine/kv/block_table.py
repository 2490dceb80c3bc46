"""BlockTable: logical position in a sequence -> block id."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt


class BlockTable:
    """The blocks of one sequence in logical order.

    The first ``shared`` of them belong to the prefix tree and are read only; the rest are the sequence's own, each with
    one reference in the pool (two tables that both come from a fork hold one reference each).
    """

    __slots__ = ("block_size", "blocks", "shared")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = array("i")
        self.shared = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def capacity(self) -> int:
        """Tokens that the blocks can hold."""
        return len(self.blocks) * self.block_size

    @property
    def own(self) -> array[int]:
        """Ids of the blocks that the sequence holds itself, in order (a copy)."""
        return self.blocks[self.shared :]

    def fork(self) -> BlockTable:
        """A table with the same blocks. References and locks are the caller's to take."""
        child = BlockTable(self.block_size)
        child.blocks = self.blocks[:]
        child.shared = self.shared
        return child

    def covering(self, tokens: int) -> npt.NDArray[np.int32]:
        """Ids of the blocks that hold the first ``tokens`` tokens. Shape [ceil(tokens / block_size)], a copy."""
        return np.array(self.blocks[: -(-tokens // self.block_size)], dtype=np.int32)

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slot (block id * block_size + offset) of each position in ``[start, stop)``. Shape [stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        first = start // self.block_size
        covering = np.array(self.blocks[first : -(-stop // self.block_size)], dtype=np.int64)
        return covering[positions // self.block_size - first] * self.block_size + positions % self.block_size
