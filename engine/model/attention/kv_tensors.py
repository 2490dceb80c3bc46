"""The device memory of the cache: one K and one V tensor per layer, cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ....errors import ModelError
from ..huge_pages import prefer_huge_pages
from ..runner import Int32Array, UInt8Array
from .block_transfer import checked_payloads, make_transfer, require_room


class LayerGeometry(NamedTuple):
    """Shape of what one layer caches per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVTensors:
    """K and V of all layers, each ``[num_blocks, block_size, kv_heads, head_dim]``.

    A slot is ``block id * block_size + offset``. Only the model thread touches it.

    :param poison: fill the memory with NaN instead of zeros, so that a read of an unwritten slot shows (tests).
    :param available: bytes that may be used; ``None``: ask the device.
    :raises ModelError: when the memory would not fit; the message says how much is needed and how much there is.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
        available: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = block_size * sum(g.kv_heads * (g.key_dim + g.value_dim) for g in layers) * dtype.itemsize
        self._require_memory(device, available)
        shapes = [(num_blocks, block_size, g.kv_heads, dim) for g in layers for dim in (g.key_dim, g.value_dim)]
        try:
            memory = torch.empty(sum(map(prod, shapes)), dtype=dtype, device=device)  # in one piece, for large pages
        except RuntimeError as error:  # torch raises it, or its OutOfMemoryError, when an allocation fails
            raise ModelError(f"allocating {self._need()} failed: {error}") from error
        prefer_huge_pages(memory)
        memory.fill_(float("nan") if poison else 0.0)
        parts = list(_parts(memory, shapes))
        self._keys, self._values = parts[0::2], parts[1::2]
        self._transfer = make_transfer(parts, device)

    def keys(self, layer: int) -> Tensor:
        """The layer's K itself, not a copy."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """The layer's V itself, not a copy."""
        return self._values[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one K and V per slot.

        :param slots: int64, shape [T], no slot twice.
        :param key: shape [T, kv_heads, key_dim]; ``value``: shape [T, kv_heads, value_dim].
        """
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def copy(self, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers, all at once: every source is read before any destination is written.

        :param pairs: (source, destination), shape [C, 2], no destination twice.
        """
        if not len(pairs):
            return
        ids = torch.from_numpy(pairs.astype("int64")).to(self._keys[0].device)
        sources, destinations = ids[:, 0], ids[:, 1]
        for tensor in (*self._keys, *self._values):
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        """Copy whole blocks into the rows of ``out``, shape [n, bytes_per_block], for each layer K, then V.

        :raises ModelError: for ids or a shape that do not fit; ``out`` was not touched then.
        """
        require_room(blocks, out, self.num_blocks, self.bytes_per_block)
        self._transfer.read(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        """Fill whole blocks with what ``export_blocks`` wrote.

        :raises ModelError: for ids or lengths that do not fit; nothing was changed then.
        """
        self._transfer.write(blocks, checked_payloads(blocks, payloads, self.num_blocks, self.bytes_per_block))

    def _require_memory(self, device: torch.device, available: int | None) -> None:
        free = available_memory(device) if available is None else available
        if free is not None and self.bytes_per_block * self.num_blocks > free:
            raise ModelError(
                f"the cache needs {self._need()} on {device}, but only {_gib(free)} are free: lower num_blocks "
                f"(at most {free // self.bytes_per_block} would fit) or use a narrower dtype"
            )

    def _need(self) -> str:
        total = self.bytes_per_block * self.num_blocks
        return f"{_gib(total)} ({self.num_blocks} blocks of {self.bytes_per_block} bytes)"


def available_memory(
    device: torch.device, *, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that can be allocated on ``device`` now; ``None`` where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [amount for amount in (_host_memory(meminfo), _cgroup_memory(cgroup)) if amount is not None]
    return min(known, default=None)


def _host_memory(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    amounts = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return amounts[0] if amounts else None


def _cgroup_memory(folder: Path) -> int | None:
    """What a container's limit (cgroup v2) leaves. The page cache counts as used there, so it is given back here."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("file", 0))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _parts(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """Tensors side by side in ``memory``; views would be watched by autograd."""
    offset = 0
    for shape in shapes:
        strides = torch.empty(shape, device="meta").stride()
        yield memory.new_empty(0).set_(memory.untyped_storage(), offset, shape, strides)
        offset += prod(shape)
