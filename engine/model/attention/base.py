"""What an attention backend is. A new one is one file with one class, and one line in ``make_backend``.

A backend never owns memory: it reads the K and V that :class:`~octavo.engine.model.attention.kv_tensors.KVTensors`
holds. Per step it is asked once for a plan (block tables, indices and masks go to the device here), then the plan is
asked once per layer. All calls come from the one model thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..runner import Row


class AttentionOptions(NamedTuple):
    """What a layer asks for beyond plain causal attention."""

    scaling: float
    """Factor on query times key."""
    window: int | None = None
    """A query at position p sees keys at positions in (p - window, p]; ``None``: all up to p."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2)."""
    sinks: Tensor | None = None
    """One extra logit per query head that takes part in the softmax and carries no value (gpt-oss). Shape [H]."""


class StepAttention(Protocol):
    """Attention of one step's rows; valid for that step only."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Attend in one layer, after the step's own K and V were written.

        Modifies nothing. Must not let slots that lie outside the rows' contexts influence the result, not even when
        they hold NaN. Query head h reads KV head ``h // (H / Hkv)``.

        :param query: shape [T, H, Dk], packed like ``StepInput.tokens``.
        :param keys: the layer's K, shape [num_blocks, block_size, Hkv, Dk].
        :param values: the layer's V, shape [num_blocks, block_size, Hkv, Dv].
        :returns: shape [T, H, Dv] in the dtype of ``query``.
        """


class AttentionBackend(Protocol):
    """Makes plans."""

    def plan(self, rows: Sequence[Row], block_size: int) -> StepAttention:
        """Prepare a step. ``rows`` may mix single tokens and chunks; each has ``context >= length >= 1``."""
