"""Whole blocks between device memory and host memory.

A block's bytes lie apart on the device, one piece per layer for K and one for V. In host memory they are one row: the
pieces in the order of the tensors. Only the model thread calls in here, between steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ....errors import ModelError
from ..runner import Int32Array, UInt8Array, require_range

STAGING_BYTES = 64 * 2**20
_UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockTransfer(Protocol):
    """Moves blocks that were checked before: ids in range, rows of the right length."""

    def read(self, blocks: Int32Array, out: UInt8Array) -> None:
        """Copy ``blocks``, shape [n], into the rows of ``out``, which is complete on return."""

    def write(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> None:
        """Copy ``rows`` into ``blocks``, none of them twice. The rows are free again on return."""


def make_transfer(tensors: Sequence[Tensor], device: torch.device) -> BlockTransfer:
    """For contiguous tensors whose first axis is the block, all on ``device``; they are used in place."""
    return HostTransfer(tensors) if device.type == "cpu" else DeviceTransfer(tensors, device)


class HostTransfer:
    """Device memory is host memory. Copies tensor by tensor, all blocks at once, at the speed of memory and without the
    interpreter's lock: whoever reads the next blocks meanwhile goes on.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._pieces: list[tuple[UInt8Array, slice]] = []  # a tensor's memory, shape [blocks, bytes]; place in the row
        at = 0
        for tensor in tensors:
            memory: UInt8Array = tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
            self._pieces.append((memory, slice(at, at + memory.shape[1])))
            at += memory.shape[1]

    def read(self, blocks: Int32Array, out: UInt8Array) -> None:
        for memory, columns in self._pieces:
            out[:, columns] = memory[blocks]

    def write(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> None:
        if not rows:
            return
        source = _in_one(rows)
        for memory, columns in self._pieces:
            memory[blocks] = source[:, columns]


def _in_one(rows: Sequence[UInt8Array]) -> UInt8Array:
    """Rows of one length as one array: in place where they lie at equal distances, as what was read in one go does."""
    places = np.array([row.__array_interface__["data"][0] for row in rows])
    steps = np.diff(places)
    if len(steps) and (steps == steps[0]).all():
        return as_strided(rows[0], (len(rows), len(rows[0])), (int(steps[0]), 1), writeable=False)
    return np.stack(rows)


class DeviceTransfer:
    """Gathers and scatters on the device, and crosses the bus in one piece, by way of staging memory of bounded size.

    Gather and scatter run on the current stream, so they see what steps before have written, and steps after see what
    they write. The way to the host runs on a stream of its own, which waits for the gather.

    :param staging_bytes: bound of one round; a single block may exceed it.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, *, staging_bytes: int = STAGING_BYTES) -> None:
        sizes = [tensor.nbytes // len(tensor) for tensor in tensors]
        self._unit = next(unit for unit in _UNITS if math.gcd(*sizes) % unit.itemsize == 0)
        self._pieces = [tensor.flatten(1).view(self._unit) for tensor in tensors]
        self._widths = [size // self._unit.itemsize for size in sizes]
        self._device = device
        self._at_once = max(1, staging_bytes // sum(sizes))
        is_cuda = device.type == "cuda"
        self._outwards = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]  # as torch has it

    def read(self, blocks: Int32Array, out: UInt8Array) -> None:
        for part, ids in self._rounds(blocks):
            staged = torch.cat([piece.index_select(0, ids) for piece in self._pieces], dim=1)
            out[part] = self._fetched(staged).view(torch.uint8).numpy()

    def write(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> None:
        for part, ids in self._rounds(blocks):
            host = self._host(len(ids))
            np.stack(rows[part], out=host.view(torch.uint8).numpy())
            # torch keeps the pinned memory from being given out again until this copy is done
            staged = host.to(self._device, non_blocking=self._outwards is not None)
            for piece, columns in zip(self._pieces, torch.split(staged, self._widths, dim=1), strict=True):
                piece.index_copy_(0, ids, columns)

    def _rounds(self, blocks: Int32Array) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, len(blocks), self._at_once):
            part = slice(start, start + self._at_once)
            yield part, torch.from_numpy(blocks[part].astype(np.int64)).to(self._device)

    def _fetched(self, staged: Tensor) -> Tensor:
        """``staged`` in host memory, complete."""
        host = self._host(len(staged))
        if self._outwards is None:
            return host.copy_(staged)
        self._outwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outwards):
            host.copy_(staged, non_blocking=True)
        self._outwards.synchronize()
        return host

    def _host(self, count: int) -> Tensor:
        """Memory for ``count`` rows; pinned for CUDA, where torch keeps such memory for the next time."""
        pinned = self._outwards is not None
        return torch.empty((count, sum(self._widths)), dtype=self._unit, pin_memory=pinned)


def require_room(blocks: Int32Array, out: UInt8Array, num_blocks: int, bytes_per_block: int) -> None:
    """The check of ``ModelRunner.export_blocks``.

    :raises ModelError: unless ``blocks`` exist and ``out`` has a writable row of ``bytes_per_block`` bytes for each.
    """
    require_range("block", blocks, num_blocks)
    shape = (len(blocks), bytes_per_block)
    if out.dtype != np.uint8 or out.shape != shape or not out.flags.writeable:
        raise ModelError(
            f"blocks are exported into a writable uint8 array of shape {shape}, not {out.dtype} {out.shape}"
        )
    if out.size and out.strides[1] != 1:
        raise ModelError("blocks are exported into rows whose bytes follow each other; these do not")


def checked_payloads(
    blocks: Int32Array, payloads: Sequence[memoryview], num_blocks: int, bytes_per_block: int
) -> list[UInt8Array]:
    """The check of ``ModelRunner.import_blocks``; the payloads as arrays, not copied.

    :raises ModelError: unless ``blocks`` exist, none twice, each with ``bytes_per_block`` contiguous bytes of payload.
    """
    require_range("block", blocks, num_blocks)
    if len(payloads) != len(blocks):
        raise ModelError(f"{len(blocks)} blocks cannot be imported from {len(payloads)} payloads")
    if len(np.unique(blocks)) != len(blocks):
        raise ModelError("a block cannot be imported twice at once")
    for payload in payloads:
        if payload.nbytes != bytes_per_block or not payload.c_contiguous:
            raise ModelError(f"a payload must be {bytes_per_block} contiguous bytes; this one is {payload.nbytes} long")
    return [np.frombuffer(payload, dtype=np.uint8) for payload in payloads]
