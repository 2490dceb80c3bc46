"""Workloads: conversations by their number, the same ones for the same seed, in whatever order they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import NamedTuple, Protocol

from .settings import Prompts
from .vocabulary import Piece, Vocabulary


class Turn(NamedTuple):
    """One question."""

    user: Piece | None
    """``None``: ``fields`` hold it."""
    output_tokens: int | None
    """``None``: as many as the server likes."""
    think: float = 0.0
    """Seconds before it, after the answer to the one before."""
    fields: Mapping[str, object] = {}
    """More fields of the request."""


class Conversation(NamedTuple):
    """Questions, each asked with all that came before."""

    system: Piece
    """Empty: none."""
    turns: tuple[Turn, ...]


class Workload(Protocol):
    """Where conversations come from."""

    @property
    def conversations(self) -> int | None:
        """How many there are before they repeat; ``None``: without end."""

    def conversation(self, number: int) -> Conversation:
        """Each number has its own. Those below 0 are for warming up."""


class Synthetic:
    """Conversations of drawn words. Shared prefixes are the same for the whole run, all else is its own."""

    conversations: int | None = None

    def __init__(self, prompts: Prompts, vocabulary: Vocabulary, seed: int) -> None:
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._seed = seed
        draws = (_random(seed, f"prefix {number}") for number in range(prompts.prefix.prefixes))
        self._shared = [vocabulary.piece(draw, prompts.prefix_tokens) for draw in draws]

    def conversation(self, number: int) -> Conversation:
        draw = _random(self._seed, f"conversation {number}")
        system = self._prefix(draw)
        return Conversation(system, tuple(self._turn(draw, turn) for turn in range(self._prompts.turns_each)))

    def _prefix(self, draw: Random) -> Piece:
        if draw.random() < self._prompts.prefix.share:
            return draw.choice(self._shared)
        return self._vocabulary.piece(draw, self._prompts.prefix_tokens)

    def _turn(self, draw: Random, turn: int) -> Turn:
        think, lengths = self._prompts.think, self._prompts.lengths
        tokens = length(draw, lengths.prompt_tokens, lengths.prompt_spread)
        pause = draw.expovariate(1 / think) if turn and think else 0.0
        output = length(draw, lengths.output_tokens, lengths.output_spread)
        return Turn(self._vocabulary.piece(draw, tokens), output, pause)


def length(draw: Random, mean: int, spread: float) -> int:
    """A whole number, uniform around ``mean``, at least 1."""
    low, high = math.ceil(mean * (1 - spread)), math.floor(mean * (1 + spread))
    return max(1, draw.randint(low, high))


def _random(seed: int, what: str) -> Random:
    return Random(f"octavo bench {seed} {what}")  # noqa: S311  # a workload, no secret
