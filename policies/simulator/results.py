"""What a replay counts."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """One trace through one policy at one capacity. Blocks are whole ones of prompts."""

    requests: int
    """That were in the trace, the refused ones included."""
    refused: int
    """Larger than the pool: never admitted, and all their blocks count as asked for and missed."""
    uses: int
    """Blocks asked for."""
    hits: int
    """Blocks that were there."""
    hit_tokens: int
    """Tokens in these: prefill that was not necessary."""
    input_tokens: int
    """Tokens of all prompts."""
    hit_pairs: float
    """Sum over the tokens that were there of their depth (tokens before them), for the cost of attention."""
    evicted: int
    """Blocks evicted."""
    wanted_again: int
    """Evicted runs that were asked for while they were remembered."""
    waits: int
    """Requests that had to wait for room, or behind one that did."""
    wait_seconds: float
    """Sum of their waits."""
    end: float
    """When the last request was over, in seconds of the trace."""

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked for that were there; 0 for an empty trace."""
        return self.hits / self.uses if self.uses else 0.0
