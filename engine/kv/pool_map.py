"""The pool map: what each block of the pool is now, one byte for one block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

import numpy as np

from .block_pool import BlockPool

FREE: Final = b"f"
IDLE: Final = b"i"
"""Cached and used by nobody: it may be evicted."""
HELD: Final = b"h"
"""Of sequences that run."""
PINNED: Final = b"p"
"""Of leases, whether a sequence uses it too or not."""
IN_TRANSFER: Final = b"t"
"""Out of use, but a copy still reads it."""


def pool_map(pool: BlockPool, tables: Iterable[array[int]], leases: Iterable[array[int]]) -> bytes:
    """A letter for each block. ``tables``: the blocks of all sequences, ``leases``: those of all leases.

    The tree is not walked: what is referenced and neither in a table nor under a lease is cached and idle. O(pool), at
    memory speed, and O(tables).
    """
    references = pool.all_references()
    states = np.where(references > 0, IDLE[0], FREE[0]).astype(np.uint8)
    states[pool.in_transfer_ids()] = IN_TRANSFER[0]
    for letter, groups in ((HELD, tables), (PINNED, leases)):
        for blocks in groups:
            states[np.frombuffer(blocks, dtype=np.int32)] = letter[0]
    return states.tobytes()
