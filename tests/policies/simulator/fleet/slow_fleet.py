"""A slow simulator of fleets that was written apart from the fast one: sets of prefixes, one block at a time, no tree.

Requests are over as they come, replicas take turns, caches and store evict what was used least recently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from octavo.policies.simulator.fleet import Kill, TierSetting, TierWrites
from octavo.tests.policies.simulator.fleet.fleet_rig import Ask, Word


class Story(NamedTuple):
    answered: int
    refused: int
    unanswered: int
    hits: int
    tier_hits: int
    evicted: int
    up: int
    down: int


class SlowFleet:
    def __init__(self, replicas: int, capacity: int, tier: TierSetting | None, kills: Sequence[Kill]) -> None:
        self.capacity, self.tier = capacity, tier
        self.alive = list(range(replicas))
        self.caches: list[dict[Word, float]] = [{} for _ in range(replicas)]  # prefix -> last use
        self.store: list[Word] = []  # the least recently used first
        self.stranded: list[Ask] = []
        self.served_at: list[float] = []
        self.plan = [(kill.at, kill) for kill in kills]
        self.turn = 0
        self.answered = self.refused = self.hits = self.tier_hits = self.evicted = self.up = 0

    def story(self) -> Story:
        return Story(
            self.answered,
            self.refused,
            len(self.stranded),
            self.hits,
            self.tier_hits,
            self.evicted,
            self.up,
            self.tier_hits,
        )

    def run(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.pass_time(ask.arrival)
            if len(ask.word) + ask.own > self.capacity:
                self.refused += 1
            else:
                self.send(ask, ask.arrival)
        self.pass_time(math.inf)

    def pass_time(self, until: float) -> None:
        while self.plan and min(self.plan)[0] <= until:
            now, kill = min(self.plan)
            if now == math.inf:
                return
            self.plan.remove((now, kill))
            if now == kill.at and kill.replica in self.alive:
                self.alive.remove(kill.replica)
                self.caches[kill.replica].clear()
                self.plan.append((now + kill.back_after, kill))
            elif now != kill.at and kill.replica not in self.alive:
                self.alive.append(kill.replica)
                stranded, self.stranded = self.stranded, []
                for ask in stranded:
                    self.send(ask, now)

    def send(self, ask: Ask, now: float) -> None:
        if not self.alive:
            self.stranded.append(ask)
            return
        self.serve(self.caches[self.alive[self.turn % len(self.alive)]], ask, now)
        self.turn += 1

    def serve(self, cache: dict[Word, float], ask: Ask, now: float) -> None:
        path = [ask.word[: end + 1] for end in range(len(ask.word))]
        found = sum(prefix in cache for prefix in path)
        loaded = 0
        if self.tier is not None and now >= self.tier.lost_at:
            self.store.clear()
        while found + loaded < len(path) and path[found + loaded] in self.store:
            loaded += 1
        while len(set(cache) | set(path)) + ask.own > self.capacity:
            inner = {prefix[:-1] for prefix in cache}
            gone = min(set(cache) - inner - set(path), key=cache.__getitem__)
            del cache[gone]
            self.evicted += 1
            self.write([gone], now, TierWrites.BACK)
        for prefix in reversed(path[found : found + loaded]):
            if prefix in self.store:
                self.store.remove(prefix)
                self.store.append(prefix)
        self.write(path[found + loaded :], now, TierWrites.THROUGH)
        cache.update(dict.fromkeys(path, now))
        self.hits += found
        self.tier_hits += loaded
        self.answered += 1
        self.served_at.append(now)

    def write(self, prefixes: list[Word], now: float, when: TierWrites) -> None:
        if self.tier is None or self.tier.writes is not when or now >= self.tier.lost_at:
            return
        for prefix in reversed(prefixes):
            if prefix in self.store:
                self.store.remove(prefix)
            else:
                self.up += 1
            self.store.append(prefix)
            if self.tier.capacity is not None:
                del self.store[: max(len(self.store) - self.tier.capacity, 0)]
