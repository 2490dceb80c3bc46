"""What changes scores before a choice: output formats, bias, bans and penalties.

All rows of a step share one gather and one scatter per processor, however many cells each of them touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from .bias import BiasTable
from .guided_rows import Masks
from .peaks import Float32Array, Float64Array, IntArray
from .runner import Int32Array, RowSampling

_Change: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def process(
    raw: Tensor, logprobs: Callable[[], Tensor], rows: Sequence[RowSampling], masks: Masks, biases: BiasTable
) -> Tensor:
    """Logits (log-probabilities for beam rows) after masks, bias, bans and penalties. The logits themselves, or the
    log-probabilities, when nothing applies.

    :param raw: the logits, shape [R, V], float32.
    :param logprobs: makes their logarithmic softmax, which only beams need.
    :param masks: of the rows with a guide, what it allows.
    """
    beams = [i for i, row in enumerate(rows) if row.beam_candidates > 0]
    plain = len(beams) in (0, len(rows))
    start = logprobs() if beams and plain else raw
    if plain and not masks and not any(_has_processors(row) for row in rows):
        return start
    scores = start.clone(memory_format=torch.contiguous_format)
    if not plain:
        scores[beams] = logprobs()[beams]
    if masks:
        _mask(scores, masks)
    _add_biases(scores, rows, biases)
    _punish_repetition(scores, rows)
    _punish_counts(scores, rows)
    return scores


def _mask(scores: Tensor, masks: Masks) -> None:
    """The bits travel packed and are spread on the device, a byte at a time: each has 8 terms to add."""
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(scores.device)
    bits = torch.arange(256, device=scores.device)[:, None] >> torch.arange(8, device=scores.device) & 1
    terms = torch.where(bits > 0, 0.0, -torch.inf)
    spread = embedding(packed.int(), terms).flatten(1)[:, : scores.shape[1]]
    scores.index_add_(0, torch.tensor(list(masks), device=scores.device), spread)


def _has_processors(row: RowSampling) -> bool:
    return _has_bias(row) or _has_repetition(row) or _has_counts(row)


def _has_bias(row: RowSampling) -> bool:
    return bool(row.banned) or bool(row.params.logit_bias)


def _has_repetition(row: RowSampling) -> bool:
    return row.params.repetition_penalty != 1.0


def _has_counts(row: RowSampling) -> bool:
    return row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0


def _add_biases(scores: Tensor, rows: Sequence[RowSampling], biases: BiasTable) -> None:
    cells: list[tuple[Tensor, Tensor]] = []
    for i, row in enumerate(rows):
        if _has_bias(row):
            ids, terms = biases.of(row, scores)
            if ids is None:
                scores[i] += terms
            else:
                cells.append((ids + i * scores.shape[1], terms))
    if cells:
        at, terms = (torch.cat(column) for column in zip(*cells, strict=True))
        _change(scores, at, terms, torch.add)


def _punish_repetition(scores: Tensor, rows: Sequence[RowSampling]) -> None:
    seen = {i: _below(scores.shape[1], row.history) for i, row in enumerate(rows) if _has_repetition(row)}
    penalties = [np.full(len(ids), rows[i].params.repetition_penalty, dtype=np.float32) for i, ids in seen.items()]
    _change_cells(scores, seen, penalties, _repetition)


def _punish_counts(scores: Tensor, rows: Sequence[RowSampling]) -> None:
    outputs = {
        i: _below(scores.shape[1], row.history[row.prompt_length :]) for i, row in enumerate(rows) if _has_counts(row)
    }
    _change_cells(scores, outputs, [_count_penalties(rows[i], ids) for i, ids in outputs.items()], torch.sub)


def _count_penalties(row: RowSampling, ids: Int32Array) -> Float64Array:
    """One for each of the ids; one that came twice is named twice, which is cheaper than to sort them."""
    counts = np.bincount(ids)[ids].astype(np.float64)
    return row.params.presence_penalty + row.params.frequency_penalty * counts


def _below(vocab: int, ids: Int32Array) -> Int32Array:
    return ids[ids < vocab]


def _change_cells(
    scores: Tensor, ids: Mapping[int, Int32Array], values: Sequence[Float64Array | Float32Array], change: _Change
) -> None:
    """Change the cells ``ids`` by row with a value for each."""
    if ids:
        owners = np.repeat(np.array(list(ids), dtype=np.int64), [len(each) for each in ids.values()])
        at = owners * scores.shape[1] + np.concatenate(list(ids.values()))
        terms = np.concatenate(values, dtype=np.float32, casting="same_kind")
        _change(scores, to_device(at, scores), to_device(terms, scores), change)


def _change(scores: Tensor, at: Tensor, values: Tensor, change: _Change) -> None:
    """Change cells of all rows with one gather and one scatter: each is computed from the old score, and one that is
    named twice has equal values.

    :param at: row * V + id, shape [n].
    """
    flat = scores.view(-1)
    flat.scatter_(0, at, change(flat.index_select(0, at), values))


def _repetition(scores: Tensor, penalty: Tensor) -> Tensor:
    """Keskar et al. 2019 (CTRL), in the form of Hugging Face: negative scores are multiplied, others divided."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def to_device(array: Float64Array | Float32Array | IntArray, like: Tensor) -> Tensor:
    """A tensor with the array's values and dtype on the device of ``like``."""
    return torch.from_numpy(array).to(like.device)


def to_index(rows: Iterable[int], like: Tensor) -> Tensor:
    """Row numbers as an index on the device of ``like``."""
    return torch.tensor(list(rows), dtype=torch.int64, device=like.device)
