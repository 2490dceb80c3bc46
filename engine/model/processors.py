"""What changes scores before a choice: output formats, bias, bans and penalties.

All rows of a step share one gather and one scatter per processor, however many cells each of them touches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .guided_rows import Masks
from .runner import Float32Array, RowSampling

IntArray: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Cells: TypeAlias = tuple[IntArray, Float64Array]
"""Token ids of one row with a value for each."""

EXACT_BIAS = 100.0
"""A bias of this size is no longer added: plus forces the token, minus bans it."""


def process(raw: Tensor, norm: Tensor, rows: Sequence[RowSampling], masks: Masks) -> Tensor:
    """Logits (log-probabilities for beam rows) after masks, bias, bans and penalties; ``raw`` itself when nothing
    applies.

    :param masks: of the rows with a guide, what it allows.
    """
    beams = [i for i, row in enumerate(rows) if row.beam_candidates > 0]
    edited = [i for i, row in enumerate(rows) if _has_processors(row)]
    if not beams and not edited and not masks:
        return raw
    scores = raw.clone()
    if masks:
        _mask(scores, masks)
    if beams:
        scores[beams] -= norm[beams, None]
    for pick, apply in _PROCESSORS:
        _edit(scores, rows, edited, pick, apply)
    return scores


def _mask(scores: Tensor, masks: Masks) -> None:
    """The bits travel packed and are spread on the device."""
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(scores.device)
    bits = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=scores.device)
    banned = (packed[:, :, None] & bits == 0).flatten(1)[:, : scores.shape[1]]
    if len(masks) == len(scores):
        scores.masked_fill_(banned, -torch.inf)
    else:
        rows = list(masks)
        scores[rows] = scores[rows].masked_fill(banned, -torch.inf)


def _has_processors(row: RowSampling) -> bool:
    p = row.params
    penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return penalties or bool(p.logit_bias) or bool(row.banned)


def _edit(
    scores: Tensor,
    rows: Sequence[RowSampling],
    edited: Sequence[int],
    pick: Callable[[RowSampling, int], Cells],
    apply: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Change the cells that ``pick`` names in all rows with one gather and one scatter. Duplicate cells of a row must
    carry equal values: each is computed from the old score."""
    picked = [(i, *pick(rows[i], scores.shape[1])) for i in edited]
    if not sum(len(ids) for _, ids, _ in picked):
        return
    where = np.concatenate([np.full(len(ids), i) for i, ids, _ in picked])
    at = (to_device(where, scores), to_device(np.concatenate([ids for _, ids, _ in picked]), scores))
    values = to_device(np.concatenate([values for *_, values in picked]), scores).to(scores.dtype)
    scores[at] = apply(scores[at], values)


def _pick_bias(row: RowSampling, limit: int) -> Cells:
    soft = {token: bias for token, bias in row.params.logit_bias.items() if abs(bias) < EXACT_BIAS and token < limit}
    return np.array(list(soft), dtype=np.int64), np.array(list(soft.values()), dtype=np.float64)


def _pick_banned(row: RowSampling, limit: int) -> Cells:
    """Everything that may not come out. Forced tokens (bias +100) ban all others, but a ban is stronger than force."""
    bias = row.params.logit_bias
    banned = {token for token in row.banned if token < limit}
    banned |= {token for token, value in bias.items() if value <= -EXACT_BIAS and token < limit}
    forced = [token for token, value in bias.items() if value >= EXACT_BIAS and token < limit and token not in banned]
    ids = np.delete(np.arange(limit), forced) if forced else np.array(sorted(banned), dtype=np.int64)
    return ids, np.full(len(ids), -np.inf)


def _pick_repeated(row: RowSampling, limit: int) -> Cells:
    if row.params.repetition_penalty == 1.0:
        return _NO_IDS, _NO_VALUES
    ids = row.history[row.history < limit].astype(np.int64)
    return ids, np.full(len(ids), float(row.params.repetition_penalty))


def _pick_counted(row: RowSampling, limit: int) -> Cells:
    p = row.params
    if p.presence_penalty == 0.0 and p.frequency_penalty == 0.0:
        return _NO_IDS, _NO_VALUES
    output = row.history[row.prompt_length :]
    ids, counts = np.unique(output[output < limit], return_counts=True)
    penalties: Float64Array = p.presence_penalty + p.frequency_penalty * counts.astype(np.float64)
    return ids.astype(np.int64), penalties


def _repetition(scores: Tensor, penalty: Tensor) -> Tensor:
    """Keskar et al. 2019 (CTRL), in the form of Hugging Face: negative scores are multiplied, others divided."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


_NO_IDS: IntArray = np.zeros(0, dtype=np.int64)
_NO_VALUES: Float64Array = np.zeros(0, dtype=np.float64)
_PROCESSORS: tuple[tuple[Callable[[RowSampling, int], Cells], Callable[[Tensor, Tensor], Tensor]], ...] = (
    (_pick_bias, torch.add),
    (_pick_banned, lambda _, minus_infinity: minus_infinity),
    (_pick_repeated, _repetition),
    (_pick_counted, torch.sub),
)


def to_device(array: Float64Array | Float32Array | IntArray, like: Tensor) -> Tensor:
    """A tensor with the array's values and dtype on the device of ``like``."""
    return torch.from_numpy(array).to(like.device)
