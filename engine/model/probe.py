"""Finds out by running a model whether it can live on a paged cache, and what it caches per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import ModelError, UnsupportedModel
from .attention import AttentionBackend
from .attention.forward_context import ATTENTION_NAME, AttentionCall, forward_context
from .attention.kv_tensors import KVTensors, LayerGeometry
from .attention.torch_backend import TorchBackend
from .decoder import Decoder, ModuleDecoder, PackedTokens
from .runner import Row

_BLOCK_SIZE = 4
_FIRST = (5, 6, 7, 8, 9, 10, 11, 12)
_SECOND = (12, 3, 9, 4)
_SPLIT = 2
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def probe(model: PreTrainedModel) -> tuple[LayerGeometry, ...]:
    """Let ``model`` compute two short texts by its own attention and on a small paged cache, and compare.

    On the cache the first text comes in two chunks and the second one shares a step with it. A model that keeps state
    beyond K and V, or mixes tokens in a way that the attention interface does not carry, gives other logits there.
    Leaves the model set to call :func:`~octavo.engine.model.attention.forward_context.paged_attention`.

    :returns: the geometry of each layer, in layer order.
    :raises UnsupportedModel: when its attention is not (wholly) in the interface, when it keeps other state, or when
        the two results differ; the message names the model class and the reason.
    """
    name = type(model).__name__
    _refuse_by_declaration(model.config.get_text_config(), name)
    try:
        with torch.inference_mode():
            return _compare(model, name)
    except ModelError:
        raise
    except Exception as error:  # a family that the interface does not fit fails in whatever way it likes
        raise UnsupportedModel(f"{name}: it does not run on a paged cache: {error!r}") from error


def _compare(model: PreTrainedModel, name: str) -> tuple[LayerGeometry, ...]:
    texts = _texts(model)
    expected = torch.cat([_own_logits(model, text) for text in texts])
    model.set_attn_implementation(ATTENTION_NAME)
    recorder = _Recorder(model.device)
    with forward_context(recorder):
        _logits(model, texts[0], range(len(texts[0])))
    geometry = recorder.geometry(model.config.get_text_config(), name)
    error = difference(trial(ModuleDecoder(model), model, geometry), expected)
    if error is not None:
        raise UnsupportedModel(
            f"{name}: on a paged cache its logits differ from its own by {error:.2g}; "
            "it keeps state beyond K and V, or mixes tokens outside the attention interface"
        )
    return geometry


def trial(
    decoder: Decoder,
    model: PreTrainedModel,
    layers: Sequence[LayerGeometry],
    attention: AttentionBackend | None = None,
) -> Tensor:
    """Logits of two short texts on a small paged cache, the first in two chunks, the second beside its second chunk.

    :param model: says which dtype, device and vocabulary.
    :param attention: who attends; ``None``: the reference.
    :returns: of every token, in order, shape [T, V].
    """
    first, second = _texts(model)
    kv = KVTensors(layers, 3, _BLOCK_SIZE, dtype=model.dtype, device=model.device, poison=True)
    backend = attention or TorchBackend(model.device)
    head = _paged_logits(decoder, kv, backend, [(first, 0, _SPLIT, (2, 0))])
    both = _paged_logits(decoder, kv, backend, [(first, _SPLIT, len(first), (2, 0)), (second, 0, len(second), (1,))])
    return torch.cat((head, both))


def difference(got: Tensor, expected: Tensor) -> float | None:
    """How far two sets of logits, shape [T, V], are apart; ``None`` when it is what rounding in the dtype of ``got``
    explains.

    Compared by the median token: a wrong attention shows in nearly all, a flip among a router's experts in few.
    """
    error = (got.float() - expected.float()).abs().amax(dim=-1).median()
    scale = expected.float().std() + expected.float().abs().mean()
    tolerance = 1e-3 if got.dtype == torch.float32 else 0.1
    return None if error <= tolerance * scale else float(error)


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


def _refuse_by_declaration(config: PreTrainedConfig, name: str) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        raise UnsupportedModel(
            f"{name}: it has layers of type {', '.join(strange)}, which a paged K/V cache cannot hold"
        )


def _own_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    model.set_attn_implementation("eager")
    return _logits(model, tokens, range(len(tokens)))


def _paged_logits(
    decoder: Decoder,
    kv: KVTensors,
    backend: AttentionBackend,
    parts: Sequence[tuple[Sequence[int], int, int, tuple[int, ...]]],
) -> Tensor:
    """Logits of one step over (text, from, to, blocks)."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[Row] = []
    for text, start, stop, blocks in parts:
        table = np.array(blocks, dtype=np.int32)[: -(-stop // _BLOCK_SIZE)]
        rows.append(Row(len(tokens), stop - start, stop, table, None))
        tokens += text[start:stop]
        positions += range(start, stop)
        slots += [blocks[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for p in range(start, stop)]
    device = kv.keys(0).device
    packed = PackedTokens(*(torch.tensor(numbers, device=device) for numbers in (tokens, positions, slots)))
    plan = backend.plan(rows, _BLOCK_SIZE)
    return decoder.logits(packed, kv, plan, torch.arange(len(tokens), device=device))


def _texts(model: PreTrainedModel) -> tuple[list[int], list[int]]:
    vocab = int(model.config.get_text_config().vocab_size)
    return [token % vocab for token in _FIRST], [token % vocab for token in _SECOND]


def _logits(model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
    ids, places = (torch.tensor([list(numbers)], device=model.device) for numbers in (tokens, positions))
    logits: Tensor = model(input_ids=ids, position_ids=places, use_cache=False).logits
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
        """What came by, in layer order.

        :raises UnsupportedModel: unless there was one plain causal call for each layer.
        """
        if not self._calls:
            raise UnsupportedModel(f"{name}: its attention does not go through Transformers' attention interface")
        layers = list(range(config.num_hidden_layers))
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
        types = getattr(config, "layer_types", None)
        slides = types is not None and types[call.layer] == "sliding_attention"
        if slides and call.options.window is None:
            raise UnsupportedModel(f"{name}: layer {call.layer} has a sliding window that it does not pass on")
