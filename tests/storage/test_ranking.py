"""Rankings of tiers: the default one against a list that is searched from end to end."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.storage.base import Head, Meta
from octavo.storage.naming import Shelf
from octavo.storage.ranking import Ranked, Recency, rankings
from octavo.storage.testing.contract import SampleBlocks

SHELF = Shelf(b"n" * 32, b"t" * 32)
HIT_SECONDS = 100.0


@dataclass(eq=False)
class Block:
    number: int
    meta: Meta
    last_use: float
    expires: float | None = None
    shelf: Shelf = SHELF

    @property
    def head(self) -> Head:
        return Head(bytes([self.number]) * 32, SHELF.namespace, 0, b"")


def worth(block: Block, now: float) -> tuple[int, float]:
    """What the order goes by, as it is said."""
    holds = block.expires is None or block.expires > now
    return block.meta.priority if holds else 0, block.last_use + HIT_SECONDS * math.log2(1 + block.meta.hits)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "withdraw", "use", "touch", "remove", "look", "evict"]),
        st.integers(0, 2),
        st.integers(-1, 2),
        st.sampled_from([None, 1.0, 5.0]),
    ),
    min_size=10,
    max_size=60,
)


class Side:
    """The ranking and the list beside it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ranking = Recency(HIT_SECONDS)
        self.blocks = [Block(number, Meta(), float(-number)) for number in range(4)]
        self.offered: set[Block] = set()

    def act(self, what: str, number: int, priority: int, ttl: float | None) -> None:
        self.now += 1.0
        block = self.blocks[number]
        if what == "offer" and block not in self.offered:
            self.ranking.added(block, self.now)
            self.ranking.offered(block, self.now)
            self.offered.add(block)
        elif what in ("withdraw", "remove") and block in self.offered:
            self.offered.remove(block)
            self.ranking.withdrawn(block)
            if what == "remove":
                self.ranking.removed(block, self.now, evicted=False)
        elif what == "use":
            block.last_use = self.now
            self.ranking.used(block, self.now)
        elif what == "touch":
            block.meta = Meta(hits=number, priority=priority)
            block.expires = None if ttl is None else self.now + ttl
            self.ranking.changed(block, self.now)
        elif what in ("look", "evict"):
            self.check(evict=what == "evict", passing=number)

    def check(self, *, evict: bool, passing: int) -> None:
        """Pass over some, and evict one or look at all."""
        named: list[Ranked] = []
        expected = sorted(worth(block, self.now) for block in self.offered)
        with closing(self.ranking.leaving(1, self.now)) as leaving:
            for block in leaving:
                named.append(block)
                if evict and len(named) > passing:
                    self.ranking.removed(block, self.now, evicted=True)
                    self.offered.remove(next(each for each in self.blocks if each is block))
                    break
        worths = [worth(each, self.now) for each in self.blocks for block in named if each is block]
        assert sorted(worths) == expected[: len(named)]
        assert len(named) == (min(passing + 1, len(expected)) if evict else len(expected))
        assert [worth(each, self.now) for block in named for each in self.blocks if each is block] == sorted(worths)


EXPIRY = [("offer", 0, 0, None), ("touch", 0, 2, 1.0), ("offer", 1, 0, None), ("use", 1, 0, None), ("use", 1, 0, None)]


@example(EXPIRY)
@given(ACTS)
def test_the_order_is_that_of_a_list(acts: list[tuple[str, int, int, float | None]]) -> None:
    side = Side()
    for act in acts:
        side.act(*act)
    side.check(evict=False, passing=0)


def test_it_does_not_grow_with_use() -> None:
    side = Side()
    for number in range(4):
        side.act("offer", number, 0, None)
    for turn in range(2000):
        side.act("touch", turn % 4, 1, 1e6 + turn)
        side.act("use", turn % 4, 0, None)
    assert side.ranking.load <= 2 * (2 * 4 + 64)
    side.check(evict=False, passing=0)


def test_no_name_of_a_policy_is_known_without_an_engine() -> None:
    geometry = SampleBlocks().geometry
    assert rankings(None, Recency, geometry, blocks=4, what="host tier") is Recency
    with pytest.raises(InvalidRequest, match="'eviction_policy' of host tier"):
        rankings("lru", Recency, geometry, blocks=4, what="host tier")
