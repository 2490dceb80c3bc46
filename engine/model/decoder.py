"""What computes the logits of a step: a Transformers model as it is, or the same computation lowered."""

from __future__ import annotations

import inspect
from typing import NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from .attention import StepAttention
from .attention.forward_context import forward_context
from .attention.kv_tensors import KVTensors
from .attention.paged_context import PagedContext


class PackedTokens(NamedTuple):
    """The tokens of a step on the model's device, all int64 and of shape [T]."""

    ids: Tensor
    positions: Tensor
    """Position of each token in its own sequence."""
    slots: Tensor
    """Where the K and V of each go; distinct."""


class Decoder(Protocol):
    """A decoder without a cache of its own."""

    def logits(self, tokens: PackedTokens, kv: KVTensors, attention: StepAttention, keep: Tensor) -> Tensor:
        """Compute all layers, write the step's K and V to ``kv``.

        :param keep: indices of the tokens whose logits are wanted, int64, shape [N]; N may be 0.
        :returns: shape [N, V] in the model's dtype.
        """


class ModuleDecoder:
    """The model's own forward pass, of shape [1, T] and without Transformers' cache.

    :param model: set to call the paged attention, as :func:`~octavo.engine.model.probe.probe` leaves it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logits(self, tokens: PackedTokens, kv: KVTensors, attention: StepAttention, keep: Tensor) -> Tensor:
        with forward_context(PagedContext(kv, attention, tokens.slots)):
            output = self._model(
                input_ids=tokens.ids[None],
                position_ids=tokens.positions[None],
                use_cache=False,
                **({"logits_to_keep": keep} if self._keeps_logits else {}),
            )
        logits: Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[keep]
