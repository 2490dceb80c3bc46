"""Pages of 2 MiB for the cache and for weights.

Blocks lie anywhere in the pool. With pages of 4 KiB nearly each of them costs walks through the page tables before the
first byte comes, which takes as long as the bytes themselves; with large pages the processor has them all at hand.
Weights are read from end to end, and where one page ends the processor stops to call what comes next.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

HUGE = 2 << 20
"""Bytes of a large page where there are any: x86-64, and ARM with pages of 4 KiB."""


def prefer_huge_pages(tensor: Tensor) -> None:
    """Ask the system to put large pages below a tensor on the CPU. To be called before anything is written there.

    It is a wish: nothing happens where the system has no such pages, or none left.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    begin = -(-tensor.data_ptr() // HUGE) * HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
