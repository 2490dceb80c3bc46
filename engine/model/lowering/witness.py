"""Watches a model compute, layer by layer, so that each piece of a program can be held against its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention import AttentionOptions, StepAttention
from ..attention.kv_tensors import KVTensors, LayerGeometry
from ..attention.torch_backend import TorchBackend
from ..decoder import Decoder, PackedTokens
from ..probe import usable_context
from ..runner import Row
from .anatomy import NotLowered

_LENGTH = 16


class Testimony(NamedTuple):
    """What passed through a model in one step."""

    entered: tuple[Tensor, ...]
    """What each watched module was given, shape [T, N]."""
    options: tuple[AttentionOptions, ...]
    """What each layer asked of the attention, in layer order."""
    logits: Tensor
    """Shape [T, V]."""


class Bench(NamedTuple):
    """A small cache with room for one text, and that text."""

    tokens: PackedTokens
    kv: KVTensors
    row: Row

    def attention(self) -> StepAttention:
        """A plan for the text, by the reference backend."""
        return TorchBackend(self.tokens.ids.device).plan([self.row], self.kv.block_size)


def lay_out(model: PreTrainedModel, layers: Sequence[LayerGeometry]) -> Bench:
    """A text of some tokens on a cache of one block. It stands at the end of the context, where whatever grows with the
    position shows; the trial of the whole decoder looks at the beginning."""
    vocab = int(model.config.get_text_config().vocab_size)
    slots = torch.arange(_LENGTH, device=model.device)
    positions = slots + max(usable_context(model.config) - _LENGTH, 0)
    kv = KVTensors(layers, 1, _LENGTH, dtype=model.dtype, device=model.device)
    row = Row(0, _LENGTH, _LENGTH, np.zeros(1, dtype=np.int32), None)
    return Bench(PackedTokens((slots * 7 + 5) % vocab, positions, slots), kv, row)


def observe(decoder: Decoder, watched: Sequence[nn.Module], bench: Bench) -> Testimony:
    """Let ``decoder`` compute the text of ``bench`` while listening at modules of it.

    :raises NotLowered: when one of ``watched`` was not called.
    """
    listener = _Listener(bench.attention())
    with _listening(watched) as heard:
        logits = decoder.logits(bench.tokens, bench.kv, listener, bench.tokens.slots)
    silent = [type(module).__name__ for module in watched if module not in heard]
    if silent:
        raise NotLowered(f"its {silent[0]} is not called")
    return Testimony(tuple(heard[module] for module in watched), tuple(listener.options), logits)


@contextmanager
def _listening(watched: Sequence[nn.Module]) -> Iterator[Mapping[nn.Module, Tensor]]:
    heard: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        heard[module] = (*args, *kwargs.values())[0][0].clone()

    with ExitStack() as stack:
        for module in watched:
            stack.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield heard


class _Listener:
    """A :class:`~octavo.engine.model.attention.base.StepAttention` that notes the options of each call."""

    def __init__(self, attention: StepAttention) -> None:
        self._attention = attention
        self.options: list[AttentionOptions] = []

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        self.options.append(options)
        return self._attention.attend(query, keys, values, options)
