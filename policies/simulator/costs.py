"""What the hits of a replay are worth: seconds of prefill and floating-point operations.

The operations of one token at depth d are ``2 * parameters + 4 * layers * hidden * d``: two for each weight, and two
matrix products (scores and their mix of values) of 2 * hidden operations each per layer and token before it
(J. Kaplan et al., "Scaling laws for neural language models", arXiv 2001.08361, 2020, section 2.1; A. Chowdhery et al.,
"PaLM: scaling language modeling with pathways", JMLR 24, 2023, appendix B).
"""

from __future__ import annotations

from typing import NamedTuple

from .results import Outcome


class Geometry(NamedTuple):
    """Of the model that would have served the trace. The default is an 8B-class one: that of Llama 3 8B."""

    parameters: float = 8.03e9
    layers: int = 32
    hidden: int = 4096
    """Heads times their width."""

    def flops(self, tokens: float, pairs: float) -> float:
        """Of a prefill of ``tokens`` tokens whose depths sum to ``pairs``."""
        return 2.0 * self.parameters * tokens + 4.0 * self.layers * self.hidden * pairs


class CostModel(NamedTuple):
    """Turns hits into savings."""

    geometry: Geometry = Geometry()
    prefill_tokens_per_second: float = 20_000.0

    def saved_flops(self, outcome: Outcome) -> float:
        """Operations that the hits made unnecessary."""
        return self.geometry.flops(outcome.hit_tokens, outcome.hit_pairs)

    def saved_seconds(self, outcome: Outcome) -> float:
        """Seconds of prefill that the hits made unnecessary, at the rate of the model whatever the depth."""
        return outcome.hit_tokens / self.prefill_tokens_per_second


def pairs(tokens: int, start: int = 0) -> float:
    """Sum of the depths of ``tokens`` tokens in a row of which the first has ``start`` tokens before it."""
    return tokens * (2 * start + tokens - 1) / 2
