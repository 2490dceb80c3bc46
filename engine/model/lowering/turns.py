"""What positions turn Q and K by."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Turns:
    """Cosines and sines by position: a model's own module is asked for each position once.

    :param module: gives (cos, sin), each [1, T, D], for a tensor of the wanted dtype and positions [1, T], each by its
        position alone.
    :param embedding: of the model, shape [V, N]: what the module is shown.
    :param limit: positions that a model can be asked for. What lies beyond might make the module change its mind.
    """

    def __init__(self, module: nn.Module, embedding: Tensor, limit: int) -> None:
        self._module = module
        self._shown = embedding[:1]
        self._limit = limit
        self._cos = self._sin = embedding.new_empty(0, 0)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """:param positions: int64, shape [T], T > 0. :returns: two copies, shape [T, D]."""
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._ask(max(needed, min(2 * needed, self._limit)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _ask(self, count: int) -> None:
        every = torch.arange(count, device=self._shown.device)[None]
        cos, sin = self._module(self._shown.expand(1, count, -1), every)
        self._cos, self._sin = cos[0], sin[0]
