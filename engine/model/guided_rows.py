"""What the guides of a step's rows say, each fault kept to its row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ...errors import CannotContinue, ModelError, describe
from .guides import UInt32Array
from .runner import RowSampling

Masks: TypeAlias = dict[int, UInt32Array]
"""Index of a row -> what its guide allows, packed as in ``AllowedTokens.allowed``, shape [ceil(V / 32)]. Bits beyond
the vocabulary are 0."""


class Consulted(NamedTuple):
    """The rows of a step as their guides want them."""

    rows: Sequence[RowSampling]
    """Without bans of all that the guide allows: where a text can only end, or can only go on with a stop token, it
    does, however short it is."""
    masks: Masks
    faults: dict[int, str]
    """Index of a row -> why its guide cannot say."""
    refusals: dict[int, str]
    """Index of a row -> why its format cannot be followed any further."""


def consult(rows: Sequence[RowSampling], vocab: int) -> Consulted:
    """Ask every guide once. ``vocab``: how many ids there are to choose from."""
    guided = [i for i, row in enumerate(rows) if row.guide is not None]
    if not guided:
        return Consulted(rows, {}, {}, {})
    masks: Masks = {}
    faults: dict[int, str] = {}
    refusals: dict[int, str] = {}
    eased = list(rows)
    for i in guided:
        try:
            masks[i] = _mask(rows[i], vocab)
        except CannotContinue as error:
            refusals[i] = str(error)
        except ModelError as error:
            faults[i] = str(error)
        except Exception as error:  # noqa: BLE001  # a guide is foreign code
            faults[i] = f"the output format cannot be followed: {describe(error)}"
        else:
            if rows[i].banned and not _without(masks[i], rows[i].banned).any():
                eased[i] = rows[i]._replace(banned=frozenset())
    return Consulted(eased, masks, faults, refusals)


def _mask(row: RowSampling, vocab: int) -> UInt32Array:
    """What the guide allows of the first ``vocab`` ids."""
    words = np.zeros(-(-vocab // 32), dtype=np.uint32)
    if row.guide is not None:
        allowed = row.guide.allowed()[: len(words)]
        words[: len(allowed)] = allowed
    if vocab % 32:
        words[-1] &= np.uint32((1 << vocab % 32) - 1)
    return words


def _without(words: UInt32Array, ids: Iterable[int]) -> UInt32Array:
    left = words.copy()
    for token in ids:
        if token // 32 < len(left):
            left[token // 32] &= ~np.uint32(1 << token % 32)
    return left
