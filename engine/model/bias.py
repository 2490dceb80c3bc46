"""What ``logit_bias`` and bans add to the scores of a row, made once for a request and not again at every step."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ..request import SamplingParams
from .runner import Float32Array, RowSampling

EXACT_BIAS = 100.0
"""A bias of this size is no longer added: plus forces the token, minus bans it."""
DENSE_SHARE = 8
"""From one id in so many on, a bias is kept for the whole vocabulary: that takes less time than picking cells."""


class Bias(NamedTuple):
    """Terms to add; minus infinity is a ban."""

    ids: Tensor | None
    """Shape [n], int64, none twice; ``None`` where term j is that of id j."""
    terms: Tensor
    """Shape [n] or [V], float32."""


class _Key(NamedTuple):
    banned: frozenset[int]
    vocab: int
    device: torch.device


class _Known(NamedTuple):
    params: ref[SamplingParams]
    made: dict[_Key, Bias]


class BiasTable:
    """The biases of the requests that live. What was made for a request goes when its parameters do."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        """For how many parameters something is kept."""
        return len(self._known)

    def of(self, row: RowSampling, like: Tensor) -> Bias:
        """What is added to the scores of ``row``. ``like``: scores, shape [R, V]."""
        made = self._made(row.params)
        key = _Key(row.banned, like.shape[1], like.device)
        bias = made.get(key)
        if bias is None:
            bias = made[key] = _bias(_terms(row, like.shape[1]), like)
        return bias

    def _made(self, params: SamplingParams) -> dict[_Key, Bias]:
        """By identity: equal parameters need not be hashable, and a comparison would take long."""
        known, key = self._known, id(params)
        if key not in known:
            known[key] = _Known(ref(params, lambda _: known.pop(key, None)), {})
        return known[key].made


def _bias(terms: Float32Array, like: Tensor) -> Bias:
    """``terms``: shape [V], 0 where nothing is added."""
    ids = np.flatnonzero(terms)
    if DENSE_SHARE * len(ids) >= len(terms):
        return Bias(None, torch.from_numpy(terms).to(like.device))
    return Bias(torch.from_numpy(ids).to(like.device), torch.from_numpy(terms[ids]).to(like.device))


def _terms(row: RowSampling, vocab: int) -> Float32Array:
    """Forced tokens (bias +100) ban all others, but a ban is stronger than force."""
    ids = np.fromiter(row.params.logit_bias.keys(), dtype=np.int64)
    values = np.fromiter(row.params.logit_bias.values(), dtype=np.float64)
    ids, values = ids[ids < vocab], values[ids < vocab]
    soft = np.abs(values) < EXACT_BIAS
    banned = np.zeros(vocab, dtype=np.bool_)
    banned[ids[values <= -EXACT_BIAS]] = True
    banned[[token for token in row.banned if token < vocab]] = True
    forced = ids[(values >= EXACT_BIAS) & ~banned[ids]]
    if len(forced):
        banned[:] = True
        banned[forced] = False
    terms = np.zeros(vocab, dtype=np.float32)
    terms[ids[soft]] = values[soft]
    terms[banned] = -np.inf
    return terms
