"""What ranks above 0 do: the calls of rank 0, on their share of the model."""

from __future__ import annotations

import numpy as np
import torch

from ....errors import ModelError, describe
from ....telemetry.logging import get_logger
from ..runner import ModelRunner, UInt8Array
from .job import get_through
from .line import Line
from .orders import Allocate, Close, Execute, Export, Import, Order, decode, ids, step_of


class Follower:
    """Carries out orders until there are no more.

    :param shard: this rank's share of the model, on ``device``.
    """

    def __init__(self, shard: ModelRunner, line: Line, device: torch.device) -> None:
        self._shard = shard
        self._line = line
        self._device = device

    def follow(self) -> None:
        """Return when rank 0 closes its runner. What fails here alone is told to rank 0, which goes on.

        :raises ModelError: when rank 0 is gone, or the ranks are no longer at the same point.
        """
        try:
            while not isinstance(order := decode(self._line.next_order()), Close):
                self._attempt(order)
        finally:
            self._shard.close()
            self._line.leave()

    def _attempt(self, order: Order) -> None:
        try:
            self._carry_out(order)
        except Exception as error:  # noqa: BLE001  # rank 0 was told, and says what comes next
            self._line.require_whole()
            get_logger("octavo.model").warning("a_call_failed", rank=self._line.rank, error=describe(error))

    def _carry_out(self, order: Order) -> None:
        match order:
            case Allocate(num_blocks, block_size):
                self._line.together(lambda: self._shard.allocate(num_blocks, block_size))
            case Execute():
                self._line.together(lambda: self._execute(order))
            case Export(blocks):
                self._line.gather(self._line.together(lambda: self._exported(blocks)))
            case Import(blocks):
                self._line.together(lambda: self._import(blocks))
            case _:
                raise ModelError(f"there is no order {order!r:.80}")

    def _execute(self, order: Execute) -> None:
        self._shard.execute(step_of(order))
        get_through(self._device)

    def _exported(self, blocks: bytes) -> UInt8Array:
        mine = self._room(blocks)
        self._shard.export_blocks(ids(blocks), mine)
        return mine

    def _import(self, blocks: bytes) -> None:
        mine = self._room(blocks)
        self._line.scatter((), mine)
        self._shard.import_blocks(ids(blocks), [memoryview(row) for row in mine])

    def _room(self, blocks: bytes) -> UInt8Array:
        return np.empty((len(ids(blocks)), self._shard.info.bytes_per_block), dtype=np.uint8)
