"""Acceleration: the switches of what makes a step fast. Each leaves the outputs as they are."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """What may be done to make steps fast, all of it by default. Off is for comparing and for hunting a bug: the same
    tokens come out (greedy, float32), later.

    :raises InvalidRequest: when a value is not true or false.
    """

    native: bool = True
    """Kernels in C++, built just in time where a compiler is there: attention that reads the blocks in place,
    matrix products, and with ``fused`` and ``packed`` a decoder's whole step. Without a compiler, or off: torch."""
    shared_prefix: bool = True
    """Rows that share blocks (chats over one system prompt, samples, beams) read and score them once."""
    fused: bool = True
    """Decoders whose structure is recognised run as a flat program of fused operations, others as they are."""
    packed: bool = True
    """Weights are kept in the layout that the kernels' matrix products read, or oneDNN's where those are not there."""
    overlap: bool = True
    """Outputs of a step are delivered while the next one runs."""
    polite: bool = True
    """The model's threads leave a processor to the event loop as soon as that wants one (Linux: they have a niceness of
    5). Off where other programs compute on the same processors and shall get no larger share than the model."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not isinstance(getattr(self, each.name), bool):
                raise InvalidRequest(f"Acceleration: {each.name} must be true or false")
