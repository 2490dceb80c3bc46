"""Kernels whose calls are counted, and the number of threads for a while."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.engine.model.native.library import Kernels


class WatchedKernels(Kernels):
    """Tells which of its functions were asked for: else a backend that leaves all to torch would pass every test."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: Counter[str] = Counter()

    def function(self, name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
        self.asked[name] += 1
        return super().function(name, dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
