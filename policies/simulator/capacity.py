"""Capacities as people give them: ``5%`` of the different blocks of a trace, or a number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import InvalidRequest


class Capacity(NamedTuple):
    """Blocks, or a share of those of a trace: one of the two is ``None``."""

    blocks: int | None
    share: float | None = None

    def of(self, unique: int) -> int:
        """Blocks, for a trace with ``unique`` different ones; at least 1."""
        if self.blocks is not None:
            return self.blocks
        return max(1, round(unique * (self.share or 0.0)))


def parse_capacities(texts: Sequence[str]) -> list[Capacity]:
    """``["1%,5%", "4096"]`` and the like, in the order given, each once.

    :raises InvalidRequest: naming the one that is neither a percentage above 0 nor a whole number of blocks above 0.
    """
    given = [part.strip() for text in texts for part in text.split(",")]
    return list(dict.fromkeys(_parsed(text) for text in given))


def _parsed(text: str) -> Capacity:
    try:
        capacity = Capacity(None, float(text[:-1]) / 100) if text.endswith("%") else Capacity(int(text))
    except ValueError as error:
        raise InvalidRequest(_complaint(text)) from error
    if not 0 < (capacity.blocks or capacity.share or 0) < float("inf"):
        raise InvalidRequest(_complaint(text))
    return capacity


def _complaint(text: str) -> str:
    return f"{text!r} is no capacity: give a share of the trace's different blocks (5%) or a number of blocks (4096)"
