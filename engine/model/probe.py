"""Finds out by running a model whether it can live on a paged cache, and what it caches per token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import ModelError, UnsupportedModel
from .attention.forward_context import ATTENTION_NAME, AttentionCall, forward_context
from .attention.kv_tensors import LayerGeometry
from .attention.torch_backend import TorchBackend
from .runner import Row

_PROBE_TOKENS = 8
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def probe(model: PreTrainedModel) -> tuple[LayerGeometry, ...]:
    """Run ``model`` twice on a few tokens, by its own attention and through the interface, and compare.

    Leaves the model set to call :func:`~octavo.engine.model.attention.forward_context.paged_attention`.

    :returns: the geometry of each layer, in layer order.
    :raises UnsupportedModel: when its attention is not (wholly) in the interface, when it keeps state beyond K and V,
        or when the two results differ; the message names the model class and the reason.
    """
    name = type(model).__name__
    _refuse_by_declaration(model, name)
    tokens = torch.arange(_PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        expected = _logits(model, "eager", tokens)
        recorder = _Recorder(model.device)
        with forward_context(recorder):
            got = _logits(model, ATTENTION_NAME, tokens)
    geometry = recorder.geometry(model.config, name)
    _require_equal(got, expected, 1e-3 if model.dtype == torch.float32 else 0.1, name)
    return geometry


def usable_context(config: PreTrainedConfig) -> int:
    """Most tokens that ``config`` has positions for and that a batch can compute independently of each other.

    "dynamic" and "longrope" position encodings switch frequencies by the longest sequence of the forward pass once it
    passes the original length: one sequence of a batch would then change the others, and the K that are cached already.
    Up to that length they are constant.

    :raises ModelError: when the config names no length.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError(f"{type(config).__name__}: max_position_embeddings must be a positive number, not {limit!r}")
    for rope in _rope_parameters(text):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings")
        if kind in _LENGTH_DEPENDENT_ROPE and isinstance(original, int):
            limit = min(limit, original)
    return limit


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, object]]:
    """The position encoding's parameters; some families have one set per layer type."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _refuse_by_declaration(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    if not model.is_backend_compatible():  # type: ignore[no-untyped-call]  # as Transformers has it
        raise UnsupportedModel(f"{name}: its attention does not go through Transformers' attention interface")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        raise UnsupportedModel(
            f"{name}: it has layers of type {', '.join(strange)}, which a paged K/V cache cannot hold"
        )


def _logits(model: PreTrainedModel, attention: str, tokens: Tensor) -> Tensor:
    model.set_attn_implementation(attention)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    if not isinstance(logits, Tensor):
        raise UnsupportedModel(f"{type(model).__name__}: its forward returns no logits")
    return logits[0].float()


class _Recorder:
    """Forward context of the probe: plain causal attention over the tokens at hand, and notes on what came by."""

    def __init__(self, device: torch.device) -> None:
        self._backend = TorchBackend(device)
        self._calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self._calls.append(call)
        length = call.query.shape[2]
        row = Row(start=0, length=length, context=length, blocks=np.zeros(1, dtype=np.int32), sampling=None)
        step = self._backend.plan([row], block_size=length)  # the tokens at hand are a cache of one block
        query = call.query[0].transpose(0, 1)
        return step.attend(query, call.key.transpose(1, 2), call.value.transpose(1, 2), call.options).unsqueeze(0)

    def geometry(self, config: PreTrainedConfig, name: str) -> tuple[LayerGeometry, ...]:
        layers = list(range(config.get_text_config().num_hidden_layers))
        called = sorted(call.layer for call in self._calls)
        if called != layers:
            raise UnsupportedModel(
                f"{name}: attention ran in layers {called} where {layers} were expected once each; "
                "the others keep no K and V (recurrent or hybrid), or bypass the attention interface"
            )
        for call in self._calls:
            self._check(call, config, name)
        ordered = sorted(self._calls, key=lambda call: call.layer)
        return tuple(LayerGeometry(c.key.shape[1], c.key.shape[3], c.value.shape[3]) for c in ordered)

    def _check(self, call: AttentionCall, config: PreTrainedConfig, name: str) -> None:
        if call.surprises:
            raise UnsupportedModel(f"{name}: its attention depends on {', '.join(call.surprises)}")
        if not call.causal:
            raise UnsupportedModel(f"{name}: its attention is not causal in layer {call.layer}")
        types = getattr(config.get_text_config(), "layer_types", None)
        slides = types is not None and types[call.layer] == "sliding_attention"
        if slides and call.options.window is None:
            raise UnsupportedModel(f"{name}: layer {call.layer} has a sliding window that it does not pass on")


def _require_equal(got: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Compare by the median token: a wrong attention shows in nearly all, a flip among a router's experts in few."""
    worst = (got - expected).abs().amax(dim=-1).median()
    scale = expected.std() + expected.abs().mean()
    if not worst <= tolerance * scale:
        raise UnsupportedModel(
            f"{name}: through the attention interface its logits differ from its own by {worst:.2g}; "
            "its attention holds something that the interface does not carry"
        )
