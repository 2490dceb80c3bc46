"""The runner of a model that is split: what rank 0 shows the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch

from ....errors import ModelError
from ..attention.block_transfer import STAGING_BYTES, checked_payloads, require_room
from ..attention.kv_tensors import LayerGeometry
from ..runner import Int32Array, ModelInfo, ModelRunner, StepInput, StepOutput, UInt8Array
from .heads import HeadLayout
from .job import get_through
from .line import Line
from .orders import Allocate, Close, Export, Import, Order, encode, execute_order, packed

T = TypeVar("T")


class ParallelRunner:
    """A :class:`~octavo.engine.model.runner.ModelRunner` whose calls all ranks carry out together.

    A call that fails on one rank fails, and the runner stays usable as long as all ranks came out of it. If one did
    not, because it died or waits for another in the middle of a step, this call and all later ones raise
    ``ModelError``; only ``close`` does not.

    :param shard: this rank's share of the model, on ``device``.
    :param local: the layers of a rank; ``whole``: those of the model.
    :param geometry: of the whole model, as its identity says it.
    """

    def __init__(
        self,
        shard: ModelRunner,
        line: Line,
        device: torch.device,
        *,
        local: Sequence[LayerGeometry],
        whole: Sequence[LayerGeometry],
        geometry: str,
    ) -> None:
        self._shard = shard
        self._line = line
        self._device = device
        self._local = local
        self._whole = whole
        self._num_blocks = 0
        self._layout: HeadLayout | None = None
        self._is_closed = False
        identity = MappingProxyType({**shard.info.identity, "geometry": geometry})
        self._info = shard.info._replace(identity=identity)

    @property
    def info(self) -> ModelInfo:
        """That of the whole model: the same as of one rank that has all of it."""
        return self._info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the K/V memory on all ranks.

        :raises ModelError: when one has not enough of it, or when called twice.
        """
        self._together(Allocate(num_blocks, block_size), lambda: self._shard.allocate(num_blocks, block_size))
        self._num_blocks = num_blocks
        self._layout = layout_of(self._shard.info, self._local, self._whole, self._line.size, block_size)
        self._info = self._info._replace(bytes_per_block=self._layout.whole_bytes)

    def execute(self, step: StepInput) -> StepOutput:
        """Run one step; tokens are chosen here.

        :raises ModelError: before ``allocate``, after ``close``, and when it failed on a rank.
        :raises DeviceOutOfMemory: when a rank had too little memory for it; a smaller one may work.
        """
        self._opened()
        return self._together(execute_order(step), lambda: self._execute(step))

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        """Copy whole blocks, the heads of all ranks, to host memory.

        :raises ModelError: before ``allocate``, after ``close``, and for ids or shapes that do not fit.
        """
        layout = self._opened()
        require_room(blocks, out, self._num_blocks, layout.whole_bytes)
        for rows in _rounds(len(blocks), layout.whole_bytes):
            ids = blocks[rows]
            mine = np.empty((len(ids), layout.local_bytes), dtype=np.uint8)
            self._together(Export(packed(ids)), lambda: self._shard.export_blocks(ids, mine))  # noqa: B023  # called now
            layout.join(self._line.gather(mine), out[rows])

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        """Fill whole blocks on all ranks, each with its heads.

        :raises ModelError: before ``allocate``, after ``close``, and for ids or lengths that do not fit (nothing was
            changed then).
        """
        layout = self._opened()
        found = checked_payloads(blocks, payloads, self._num_blocks, layout.whole_bytes)
        for rows in _rounds(len(blocks), layout.whole_bytes):
            whole = np.stack(found[rows])
            parts = [layout.part(whole, rank) for rank in range(self._line.size)]
            self._together(Import(packed(blocks[rows])), lambda: self._import(blocks[rows], parts))  # noqa: B023  # called now

    def close(self) -> None:
        """Free the memory and let the other ranks go. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._line.trouble is None:
                self._line.send_order(encode(Close()))
        finally:
            self._layout = None
            self._shard.close()
            self._line.leave()

    def _execute(self, step: StepInput) -> StepOutput:
        output = self._shard.execute(step)
        get_through(self._device)
        return output

    def _import(self, blocks: Int32Array, parts: Sequence[UInt8Array]) -> None:
        mine = np.empty_like(parts[0])
        self._line.scatter(parts, mine)
        self._shard.import_blocks(blocks, [memoryview(row) for row in mine])

    def _opened(self) -> HeadLayout:
        self._line.require_whole()
        if self._layout is None:
            raise ModelError("the runner has no cache: it was closed, or allocate was not called")
        return self._layout

    def _together(self, order: Order, act: Callable[[], T]) -> T:
        self._line.send_order(encode(order))
        return self._line.together(act)


def layout_of(
    info: ModelInfo, local: Sequence[LayerGeometry], whole: Sequence[LayerGeometry], ranks: int, block_size: int
) -> HeadLayout:
    """Where the bytes of a rank's blocks lie in whole ones.

    :param info: of a rank whose cache is allocated.
    """
    numbers = block_size * sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in local)
    return HeadLayout(whole, local, ranks=ranks, block_size=block_size, itemsize=info.bytes_per_block // numbers)


def _rounds(count: int, size: int) -> Iterator[slice]:
    """Blocks of ``size`` bytes, in as many rounds as it takes to need little memory."""
    at_once = max(1, STAGING_BYTES // size)
    for start in range(0, count, at_once):
        yield slice(start, min(start + at_once, count))
