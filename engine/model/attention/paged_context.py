"""One step's forward context: what attention calls do to the cache."""

from __future__ import annotations

from torch import Tensor

from .base import StepAttention
from .forward_context import AttentionCall
from .kv_tensors import KVTensors


class PagedContext:
    """Stores the new K and V of a layer, then attends over the cache.

    :param slots: where the step's tokens go, int64, shape [T].
    """

    def __init__(self, kv: KVTensors, attention: StepAttention, slots: Tensor) -> None:
        self._kv = kv
        self._attention = attention
        self._slots = slots

    def attend(self, call: AttentionCall) -> Tensor:
        layer, options = call.layer, call.options
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value))
        self._kv.write(layer, self._slots, key, value)
        return self._attention.attend(query, self._kv.keys(layer), self._kv.values(layer), options).unsqueeze(0)
