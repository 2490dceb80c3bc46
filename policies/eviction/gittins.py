"""Gittins: what is least likely to be used soon, for the room it takes, goes first; learned from the traffic itself.

A conversation comes back after the time that a person needs to read and write, if it comes back at all. LRU throws its
prefix out just before that when the cache turns over faster than people think. This policy learns when blocks come
back: their hazard by age and number of uses, as hit density does (N. Beckmann, H. Chen, A. Cidon, "LHD: improving
cache hit rate by maximizing hit density", NSDI 2018). It ranks by the Gittins index of that hazard: the best rate of
uses that keeping a block for some time promises (see :mod:`~octavo.policies.eviction.hazard`).

Uses are counted with a half-life, as in LRFU (D. Lee et al., "LRFU: a spectrum of policies that subsumes the least
recently used and least frequently used policies", IEEE Transactions on Computers 50(12), 2001), which is learned too:
twice the geometric mean of the times between uses. The count outlives eviction, in the memory of the run: where a cache
turns over quickly, nearly all that is worth keeping was evicted once.

What was not used for 36 hours is worth nothing, however hot it was. Until enough has come back to learn from, all is
worth the same, and the least recently used goes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from random import Random

from .base import Entry, EvictionPolicy, Json, Returned, Tail
from .hazard import EDGES, END, HazardTable, Use
from .stretches import Stretch, Stretches

KINDS = 12
"""Classes of decayed use counts, four to a factor of two."""
_SAMPLE = 160
"""Candidates looked at for one victim. With 64 chance shows in the hit ratio, with more than this nothing is gained."""
_RENEWAL = 256
"""Uses after which the indices are worked out anew, which takes a millisecond or two; more often in the beginning."""
_MEMORY = 50_000.0
"""Blocks used, after which the mean time between uses forgets."""
_AGEING = 1_000_000
"""Uses after which what was learned counts half."""
_MANY = 64
"""Stretches of a run."""
_AGES = (*EDGES, END)
_ENOUGH = 8
"""Requests whose blocks must have come back before indices mean anything."""
_GUESS = 60
"""Requests that a first guess of a hazard weighs."""
_MOST = 1e15
"""What no count of a state exceeds."""
_REQUESTS = 4096
"""After so many the mean of blocks in a request forgets half."""


class Gittins(EvictionPolicy):
    """See the module. O(1) amortised per event, a look at a sample of the candidates per victim."""

    def __init__(self, capacity: int, seed: int = 0) -> None:
        """``seed``: of the samples."""
        super().__init__(capacity)
        self._random = Random(seed)  # noqa: S311  # samples, no secrets
        self._table = HazardTable(KINDS, most_uses=max(32 * capacity, 16384))
        self._worth = [[0.0] * len(_AGES)] * KINDS
        self._runs: dict[Entry, Stretches] = {}
        self._candidates: list[tuple[Entry, Stretches]] = []
        self._places: dict[Entry, int] = {}
        self._begun: Entry | None = None
        self._begun_use: Use | None = None
        """What was evicted last had this use. Whoever begins to take blocks of one use had better go on."""
        self._mean_log_gap = self._gaps = 0.0
        self._half_life = 2.0
        """Of use counts, in seconds."""
        self._uses = self._fresh_uses = 0
        self._requests = self._blocks = 0.0
        self._block_tokens = math.inf

    def on_insert(self, entry: Entry, now: float) -> None:
        self._runs[entry] = Stretches([self._new(entry.blocks, 1.0 + entry.hits, now)])
        self._count(entry, entry.blocks)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._runs[entry].parts.append(self._new(blocks, 1.0, now))
        self._blocks += blocks

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._runs[upper] = self._runs[lower].cut_head(upper.blocks)

    def on_hit(self, entry: Entry, now: float) -> None:
        run = self._runs[entry]
        run.parts = self._use(run.parts, now)
        self._count(entry, entry.blocks)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        memory = returned.memory
        if not isinstance(memory, Stretches):
            return
        back = memory.cut_head(min(returned.blocks, memory.blocks))
        back.parts = self._use(back.parts, now)
        for new in self._runs[entry].replace(returned.at, back):
            self._table.add(new.use, -new.blocks)  # these were no new blocks after all

    def on_candidate(self, entry: Entry, now: float) -> None:
        run = self._runs[entry]
        self._places[entry] = len(self._candidates)
        self._candidates.append((entry, run))
        if self._begun is None and self._begun_use is not None:  # the run below was taken whole: go on with this one?
            if _is_alike(self._begun_use, run.last.use):
                self._begun = entry
            else:
                self._begun_use = None

    def on_held(self, entry: Entry) -> None:
        place = self._places.pop(entry, None)
        if place is None:
            return
        other = self._candidates.pop()
        if other[0] is not entry:
            self._candidates[place] = other
            self._places[other[0]] = place

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        gone = self._runs[entry].cut_tail(blocks)
        self._begun, self._begun_use = entry, gone.parts[0].use
        if not entry.blocks:
            self.on_forget(entry)
        return gone

    def on_forget(self, entry: Entry) -> None:
        self.on_held(entry)
        if self._begun is entry:
            self._begun = None
        for part in self._runs.pop(entry).parts:
            self._table.add(part.use, -part.blocks)

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        self._renew(now)
        passed: set[Entry] = set()
        while len(passed) < len(self._candidates):
            entry = self._choose(now, passed)
            blocks = entry.blocks
            yield Tail(entry, self._runs[entry].last.blocks)
            if entry.blocks == blocks:  # not again in this call
                passed.add(entry)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """Of the weights, that of the tail of each run."""
        return {
            **self._table.dump(),
            "mean_log_gap": self._mean_log_gap,
            "gaps": self._gaps,
            "requests": self._requests,
            "blocks": self._blocks,
            "weights": {str(key(entry)): round(run.last.weight, 3) for entry, run in self._runs.items()},
        }

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        mean, gaps = _number(state["mean_log_gap"], -50.0, 50.0), _number(state["gaps"], 0.0, _MEMORY)
        requests, blocks = _number(state["requests"], 0.0, _MOST), _number(state["blocks"], 0.0, _MOST)
        weights = state["weights"]
        if not isinstance(weights, Mapping):
            raise TypeError("the state of gittins needs the weights of runs by their keys")
        known = [(entry(int(number)), _number(weight, 1.0, _MOST)) for number, weight in weights.items()]
        self._table.load(state)
        self._mean_log_gap, self._gaps, self._requests, self._blocks = mean, gaps, requests, blocks
        self._fresh_uses = _RENEWAL
        for run, weight in known:
            for part in self._runs[run].parts if run in self._runs else ():
                self._weigh(part, weight)

    # inside

    def _new(self, blocks: int, weight: float, now: float) -> Stretch:
        self._fresh_uses += 1
        return Stretch(blocks, weight, self._table.begin(now, _kind(weight), blocks))

    def _use(self, parts: list[Stretch], now: float) -> list[Stretch]:
        """All of them are used. When they are many, neighbours of one class become one: a run that grows block by block
        would have as many stretches as blocks.
        """
        is_crowded, used = len(parts) > _MANY, list[Stretch]()
        for part in parts:
            self._return(part, now)
            kind = _kind(part.weight)
            if is_crowded and used and used[-1].use.kind == kind:
                used[-1].take(part)
                self._table.add(used[-1].use, part.blocks)
            else:
                part.use = self._table.begin(now, kind, part.blocks)
                used.append(part)
        return used

    def _return(self, part: Stretch, now: float) -> None:
        """Learn from it that it came back."""
        gap, blocks = max(now - part.use.when, 0.0), part.blocks
        self._table.returned(part.use, blocks, now)
        part.weight = part.weight * 2.0 ** -(gap / self._half_life) + 1.0
        self._fresh_uses += 1
        if gap:
            self._gaps = min(self._gaps + blocks, _MEMORY)
            self._mean_log_gap += (math.log(gap) - self._mean_log_gap) * min(blocks / self._gaps, 1.0)
            self._half_life = max(2.0 * math.exp(self._mean_log_gap), 1.0)

    def _count(self, entry: Entry, blocks: int) -> None:
        """Learn how many blocks requests have. Of the runs that one uses, one begins the prompt."""
        self._block_tokens = min(self._block_tokens, entry.depth / entry.blocks)
        self._blocks += blocks
        if entry.depth <= entry.blocks * self._block_tokens:
            self._requests += 1
            if self._requests >= _REQUESTS:
                self._requests, self._blocks = self._requests / 2, self._blocks / 2

    def _weigh(self, part: Stretch, weight: float) -> None:
        self._table.add(part.use, -part.blocks)
        part.weight, part.use = weight, self._table.begin(part.use.when, _kind(weight), part.blocks)

    def _renew(self, now: float) -> None:
        """Work the indices out anew when enough has been learned since the last time."""
        if self._fresh_uses < min(_RENEWAL, 16 + self._uses // 32):
            return
        before, self._uses, self._fresh_uses = self._uses, self._uses + self._fresh_uses, 0
        if before // _AGEING < self._uses // _AGEING:
            self._table.halve()
        self._table.advance(now)
        blocks_per_request = max(self._blocks / max(self._requests, 1.0), 1.0)
        if self._gaps >= _ENOUGH * blocks_per_request:
            self._worth = _until_the_end(self._table.indices(_GUESS * blocks_per_request))

    def _choose(self, now: float, passed: set[Entry]) -> Entry:
        begun, use = self._begun, self._begun_use
        if begun is not None and use is not None and begun not in passed and begun in self._places:
            last = self._runs[begun].parts[-1].use
            if last is use or _is_alike(last, use):
                return begun
        return self._least(self._sample(passed), now)

    def _sample(self, passed: set[Entry]) -> list[tuple[Entry, Stretches]]:
        candidates, size, draw = self._candidates, len(self._candidates), self._random.random
        if size > _SAMPLE:
            drawn = [candidates[int(draw() * size)] for _ in range(_SAMPLE)]
            if fresh := [one for one in drawn if one[0] not in passed] if passed else drawn:
                return fresh
        return [one for one in candidates if one[0] not in passed] if passed else candidates

    def _least(self, sample: list[tuple[Entry, Stretches]], now: float) -> Entry:
        """The one whose tail is worth least; of equals the one that was used longest ago, and of these the deepest.
        Written out, since most of the time of this policy is spent here.
        """
        worth, least, edges = self._worth, sample[0], _AGES
        lowest, oldest = math.inf, math.inf
        for one in sample:
            use = one[1].parts[-1].use
            when = use.when
            value = worth[use.kind][bisect_right(edges, now - when, 1) - 1]  # step_of
            if value > lowest:
                continue
            if value < lowest or when < oldest or (when == oldest and one[0].depth > least[0].depth):
                least, lowest, oldest = one, value, when
        return least[0]


def _kind(weight: float) -> int:
    return min(int(4.0 * math.log2(weight) + 0.01), KINDS - 1)


def _until_the_end(indices: list[list[float]]) -> list[list[float]]:
    """What is older than the table knows is worth nothing, however much it was used: it goes first."""
    return [[*row, 0.0] for row in indices]


def _is_alike(one: Use, other: Use) -> bool:
    return one.when == other.when and one.kind == other.kind


def _number(value: Json, least: float, most: float) -> float:
    if not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"the state of gittins has {value!r} where a number from {least} to {most} belongs")
    return float(value)
