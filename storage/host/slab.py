"""A fixed piece of host memory, cut into slots of one record each, and copies into and out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread
import numpy as np

from ...errors import StorageError, describe
from ..record import UInt8Array

INLINE_BYTES = 1 << 20
"""Copies of less than this are made on the event loop: a thread would cost more."""
PIECE_BYTES = 4 << 20
"""Largest copy that a cancelled caller has to wait for; about a millisecond."""

_T = TypeVar("_T")


class Copy(NamedTuple):
    """One record to copy."""

    source: memoryview
    target: memoryview


class Slab:
    """Memory for ``slots`` records that is reserved once and never grows. The system provides each page at its first
    use, so filling the slab for the first time is slower.
    """

    def __init__(self, slots: int, record_bytes: int, *, pin: bool) -> None:
        """:raises StorageError: when there is not that much memory, or none that can be pinned."""
        self.slots = slots
        self.record_bytes = record_bytes
        memory = _pinned(slots, record_bytes) if pin else _plain(slots, record_bytes)
        self._memory = memory
        self._view = memory.data.cast("B")
        self._free = list(range(slots - 1, -1, -1))
        self._threads = anyio.CapacityLimiter(2)

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return self.slots - len(self._free)

    def take(self) -> int | None:
        """A free slot; ``None``: there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """The slot is free again; nobody reads or writes it any more."""
        self._free.append(slot)

    def wipe(self, slot: int) -> None:
        """Overwrite a slot with zeros."""
        self._memory[slot] = 0

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self._view[slot * self.record_bytes : (slot + 1) * self.record_bytes]

    async def copy(self, copies: Sequence[Copy]) -> None:
        """Make ``copies``, at most ``PIECE_BYTES`` of them, in a thread when they are large. No copy is under way any
        more when this returns or raises, cancelled or not.
        """
        if sum(len(each.source) for each in copies) < INLINE_BYTES:
            _copy_all(copies)
            return
        task = _ThreadTask(lambda: _copy_all(copies))
        try:
            await anyio.to_thread.run_sync(task, abandon_on_cancel=True, limiter=self._threads)
        finally:
            task.end()


class _ThreadTask:
    """A call in a thread that its owner can be sure has ended, even where the wait for it was cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._once = threading.Lock()
        self._ended = threading.Event()

    def __call__(self) -> None:
        """Run, unless the owner has given up before."""
        if not self._once.acquire(blocking=False):
            return
        try:
            self._call()
        finally:
            self._ended.set()

    def end(self) -> None:
        """Keep it from starting, or wait until it has ended: a piece of a copy, not I/O."""
        if not self._once.acquire(blocking=False):
            self._ended.wait()


def pieces(items: Sequence[_T], record_bytes: int) -> Iterator[Sequence[_T]]:
    """``items``, one record each, in runs of at most ``PIECE_BYTES``."""
    step = max(PIECE_BYTES // record_bytes, 1)
    return (items[at : at + step] for at in range(0, len(items), step))


def _copy_all(copies: Iterable[Copy]) -> None:
    for source, target in copies:  # by numpy, which lets other threads run meanwhile
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8), casting="no")


def _plain(slots: int, record_bytes: int) -> UInt8Array:
    try:
        return np.empty((slots, record_bytes), dtype=np.uint8)
    except MemoryError as error:
        raise StorageError(f"no {slots * record_bytes} bytes of memory for the host tier; lower its 'bytes'") from error


def _pinned(slots: int, record_bytes: int) -> UInt8Array:
    try:
        import torch  # noqa: PLC0415  # storage works without it; only pinning needs it

        memory: UInt8Array = torch.empty((slots, record_bytes), dtype=torch.uint8, pin_memory=True).numpy()
    except (ImportError, RuntimeError) as error:
        raise StorageError(f"host memory cannot be pinned ({describe(error)}); set 'pin' to False") from error
    return memory
