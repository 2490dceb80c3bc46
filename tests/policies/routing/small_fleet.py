"""A fleet in a few lines: replicas that answer one request after the other, and chats that are sent to them."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from random import Random
from typing import NamedTuple

from octavo.policies.routing import FleetView, Placement, RoutedRequest, RoutingPolicy

BLOCK = 16
TOKENS_PER_SECOND = 4000.0


def chain(*blocks: object) -> list[bytes]:
    """Names of blocks with such content, each of which stands for those before it as well."""
    names, name = [], b""
    for block in blocks:
        name = sha256(name + repr(block).encode()).digest()
        names.append(name)
    return names


class Chats(NamedTuple):
    """Chats that begin with one system prompt; each turn says everything again and something new."""

    chats: int = 200
    fewest_turns: int = 4
    most_turns: int = 4
    system_blocks: int = 16
    turn_blocks: int = 8
    answer_blocks: int = 2
    per_second: float = 4.0
    think: float = 5.0
    seed: int = 0

    def names(self, chat: int, turn: int) -> list[bytes]:
        """The whole prompt of a turn; the answers before it are in it."""
        own = self.turn_blocks + turn * (self.turn_blocks + self.answer_blocks)
        system = (("system", number) for number in range(self.system_blocks))
        return chain(*system, *((chat, number) for number in range(own)))


@dataclass
class Replica:
    capacity: int
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0

    def serve(self, names: Sequence[bytes], answer: int, now: float) -> tuple[float, int, list[bytes]]:
        """When the answer is there, the tokens that were found, and what was evicted."""
        hit = len(list(takewhile(self.cache.__contains__, names)))
        for name in reversed(names):
            self.cache[name] = None
            self.cache.move_to_end(name)
        gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.capacity)]
        work = (len(names) - hit) * BLOCK + answer
        self.free_at = max(now, self.free_at) + work / TOKENS_PER_SECOND
        return self.free_at, hit * BLOCK, gone


@dataclass
class Tally:
    work: Counter[str] = field(default_factory=Counter)
    """Tokens computed by replica."""
    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    longest: float = 0.0
    """Seconds that the slowest answer took."""

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """The most work of a replica, in means."""
        return max(self.work.values()) * len(self.work) / sum(self.work.values())


class SmallFleet:
    """Runs chats through a policy. ``with_news``: the books hear exactly what is stored and evicted, at once."""

    def __init__(self, policy: RoutingPolicy, replicas: int, *, capacity: int = 10**6, with_news: bool = True) -> None:
        self.now = 0.0
        self.view = FleetView(clock=lambda: self.now)
        self.policy, self.capacity, self.with_news = policy, capacity, with_news
        self.replicas: dict[str, Replica] = {}
        self.tally = Tally()
        for number in range(replicas):
            self.join(f"r{number}")

    def join(self, name: str) -> None:
        self.replicas[name] = Replica(self.capacity)
        self.view.join(name)
        self.tally.work[name] += 0

    def leave(self, name: str) -> None:
        del self.replicas[name]
        self.view.leave(name)

    def send(self, names: Sequence[bytes], answer: int = 32) -> tuple[float, Placement]:
        """Route one request; when it will be answered, and its placement."""
        request = RoutedRequest(names, len(names) * BLOCK, answer, BLOCK)
        choice = self.policy.choose(request, self.view)
        name = choice.replicas[0]
        placement = self.view.placed(request, name, choice.matched)
        end, hit, gone = self.replicas[name].serve(names, answer, self.now)
        if self.with_news:
            self.view.stored(name, names)
            self.view.removed(name, gone)
        self.tally.work[name] += len(names) * BLOCK - hit + answer
        self.tally.requests[name] += 1
        self.tally.prompt_tokens += len(names) * BLOCK
        self.tally.hit_tokens += hit
        self.tally.longest = max(self.tally.longest, end - self.now)
        return end, placement

    def run(self, chats: Chats, at: Mapping[float, Callable[[], None]] | None = None) -> Tally:
        """All chats, open to their ends. ``at``: what else happens, by time."""
        random = Random(chats.seed)  # noqa: S311  # not for secrets
        ends: list[tuple[float, int, Placement]] = []
        turns = list(_starts(chats, random))
        heapq.heapify(turns)
        others = sorted((at or {}).items())
        number = 0
        while turns:
            self.now, chat, turn, most = heapq.heappop(turns)
            while others and others[0][0] <= self.now:
                others.pop(0)[1]()
            while ends and ends[0][0] <= self.now:
                self.view.finished(heapq.heappop(ends)[2])
            end, placement = self.send(chats.names(chat, turn), chats.answer_blocks * BLOCK)
            number += 1
            heapq.heappush(ends, (end, number, placement))
            if turn + 1 < most:
                think = random.expovariate(1 / chats.think) if chats.think else 0.0
                heapq.heappush(turns, (end + think, chat, turn + 1, most))
        return self.tally


def _starts(chats: Chats, random: Random) -> Iterable[tuple[float, int, int, int]]:
    now = 0.0
    for chat in range(chats.chats):
        now += random.expovariate(chats.per_second)
        yield now, chat, 0, random.randint(chats.fewest_turns, chats.most_turns)
