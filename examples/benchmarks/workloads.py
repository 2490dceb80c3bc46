"""What ``engines.py`` asks of each engine, W1 to W8, as plain data: lanes of turns made of token ids.

A *lane* is one user: its turns run one after another, all lanes run at the same time. The prompt of a turn is
everything that was said in its lane before, answers included, and the turn's own tokens. Most workloads have lanes of a
single turn. The token ids are random and the same for all engines; each round has others, so that no engine finds in
its cache what an earlier round left there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeAlias

BLOCK_SIZE = 32
"""Tokens; pools are whole blocks."""
POOL_TOKENS = 32_768
"""Of the cache, wherever it is to be no limit: the largest of these workloads needs two thirds of it."""
SMALLEST_POOL = 128
"""Tokens; the drivers warm up with fewer."""
FIRST_TOKEN_ID = 16
"""Smaller ids are control tokens in many vocabularies."""


class Turn(NamedTuple):
    """One request."""

    own: Sequence[int]
    """Token ids that follow what was said before."""
    out: int
    """Tokens to generate for each sample, neither more nor fewer."""
    samples: int = 1
    """Independent continuations; above 1 they are drawn at temperature 1 (several greedy ones would be the same)."""
    beams: int = 1
    """Above 1: beam search, and all beams are asked for."""


Lanes: TypeAlias = Sequence[Sequence[Turn]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Lanes that look alike. Lengths in tokens."""

    lanes: int = 1
    turns: int = 1
    shared: int = 0
    """The first tokens of the first turn, the same in all lanes."""
    own: tuple[int, int] = (0, 0)
    """What each turn adds to them, from the smallest to the largest."""
    out: tuple[int, int] = (1, 1)
    samples: int = 1
    beams: int = 1

    def draw(self, lengths: Random, tokens: Random, vocabulary: int) -> Lanes:
        """Token ids below ``vocabulary``."""
        ids = range(min(FIRST_TOKEN_ID, vocabulary - 1), vocabulary)
        shared = tokens.choices(ids, k=self.shared)
        return [list(self._lane(shared, lengths, tokens, ids)) for _ in range(self.lanes)]

    def _lane(self, shared: Sequence[int], lengths: Random, tokens: Random, ids: Sequence[int]) -> Iterator[Turn]:
        for at in range(self.turns):
            own = tokens.choices(ids, k=lengths.randint(*self.own))
            yield Turn([*shared, *own] if at == 0 else own, lengths.randint(*self.out), self.samples, self.beams)

    @property
    def cached_tokens(self) -> int:
        """At most, once everything was said: shared tokens counted once."""
        own, out = self.own[1], self.out[1] * self.samples * self.beams
        return self.shared + self.lanes * self.turns * (own + out)

    @property
    def longest_lane(self) -> int:
        """Tokens of one lane, at most."""
        return self.shared + self.turns * (self.own[1] + self.out[1])

    def smaller(self, by: int) -> Shape:
        """Fewer lanes and shorter ones, but still several where there are several."""
        lanes, turns = (min(each, max(2, each // by)) for each in (self.lanes, self.turns))
        own = max(1, self.own[0] // by), max(1, self.own[1] // by)
        out = max(1, self.out[0] // by), max(1, self.out[1] // by)
        return Shape(lanes, turns, self.shared // by, own, out, self.samples, self.beams)


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is opened. Engines that cannot do one of these go without it."""

    pool_tokens: int = POOL_TOKENS
    """What the cache holds."""
    caching: bool = True
    """Whether prefixes are shared."""
    tiers: bool = False
    """Whether evicted blocks go to the memory of the host."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of the table."""

    name: str
    title: str
    shape: Shape
    setting: Setting = Setting()
    repeats: bool = False
    """Run it twice and take the time of each: what counts is the first token, cold and cached."""
    goal: float = 1.0
    """Octavo's tokens per second over those of the best peer, at least; of times to first token their inverse."""

    def lanes(self, turn: int, vocabulary: int) -> Lanes:
        """What everyone is asked in round ``turn``: other tokens in each, lengths that stay."""
        name = self.name.split()[0]  # both kinds of W8 are asked the same
        lengths, tokens = Random(name), Random(f"{name} {turn}")  # noqa: S311  # not for secrets
        return self.shape.draw(lengths, tokens, vocabulary)

    def smaller(self, by: int) -> Workload:
        """The same in small."""
        shape = self.shape.smaller(by)
        tight = self.setting.pool_tokens < POOL_TOKENS
        pool = third(shape) if tight else self.setting.pool_tokens
        setting = Setting(pool, self.setting.caching, self.setting.tiers)
        return Workload(self.name, self.title, shape, setting, self.repeats, self.goal)


def third(shape: Shape) -> int:
    """A pool for a third of what ``shape`` needs, but for one lane, in whole blocks and one more."""
    blocks = max(shape.cached_tokens // 3, shape.longest_lane, SMALLEST_POOL - BLOCK_SIZE) // BLOCK_SIZE
    return (blocks + 1) * BLOCK_SIZE


def workloads() -> list[Workload]:
    """All of them, in order."""
    shared = Shape(lanes=32, shared=512, own=(32, 32), out=(64, 64))
    chats = Shape(lanes=8, turns=6, shared=256, own=(64, 64), out=(32, 32))
    tight = third(chats)
    return [
        Workload("W1", "32 requests, 512 shared + 32 own tokens, 64 out", shared, goal=1.5),
        Workload("W2", "the same, nothing shared", shared, Setting(caching=False)),
        Workload("W3", "one stream, 128 in, 128 out", Shape(own=(128, 128), out=(128, 128))),
        Workload("W4", "4 prompts of 256, n = 8, 64 out", Shape(4, own=(256, 256), out=(64, 64), samples=8), goal=1.5),
        Workload("W5", "48 requests, 32 to 768 in, 16 to 128 out", Shape(48, own=(32, 768), out=(16, 128))),
        Workload("W6", "first token of 2,048, cold and cached", Shape(own=(2048, 2048)), repeats=True),
        Workload("W7", "beam search, 4 beams, 256 in, 64 out", Shape(own=(256, 256), out=(64, 64), beams=4), goal=1.5),
        Workload("W8", "8 chats of 6 turns, a third of the pool", chats, Setting(tight), goal=1.5),
        Workload("W8 tiers", "the same, tiers on", chats, Setting(tight, tiers=True), goal=1.5),
    ]
