"""The names that the tree keeps are those of a chain worked out from scratch, whatever happened to the nodes."""

from __future__ import annotations

from array import array
from itertools import count
from random import Random

import pytest

from octavo.engine.kv import Namespace, PrefixTree, encode_tokens
from octavo.engine.kv import names as names_module
from octavo.engine.kv.integrity import contradictions
from octavo.engine.kv.names import end_name, names_of, parent_name
from octavo.engine.kv.node import Node, Traits
from octavo.engine.kv.runs import runs_above, tail_run
from octavo.policies.eviction import Lru
from octavo.storage.naming import BlockName, names_after

SPACE = Namespace("m", salt="s")
BLOCK = 2


class Garden:
    def __init__(self) -> None:
        ticks = count()
        self.tree = PrefixTree(BLOCK, Lru(100), lambda: float(next(ticks)))
        self._ids = count()

    def plant(self, tokens: list[int], space: Namespace = SPACE) -> Node:
        """Publish the whole blocks of ``tokens`` and give the lease back."""
        match = self.tree.match(space, encode_tokens(tokens).tobytes(), len(tokens))
        node = self.tree.lock_match(space, match)
        rest = tokens[len(match.ids) * BLOCK : len(tokens) // BLOCK * BLOCK]
        if rest:
            ids = array("i", [next(self._ids) for _ in range(len(rest) // BLOCK)])
            node, _ = self.tree.publish(node, encode_tokens(rest).tobytes(), ids, Traits(0.0))
        self.tree.unlock(node)
        return node

    def text(self, node: Node) -> bytes:
        return b"".join(reversed([bytes(part.tokens) for part in self.tree.path(node)]))


def chain(tokens: bytes, space: Namespace = SPACE) -> list[BlockName]:
    return names_after(space.shelf().namespace, tokens, BLOCK)


def test_a_name_stands_for_everything_before_it() -> None:
    garden = Garden()
    node = garden.plant([1, 2, 3, 4, 5, 6])
    assert names_of(node) == chain(encode_tokens([1, 2, 3, 4, 5, 6]).tobytes())
    assert names_of(node, 2) == names_of(node)[2:]
    assert end_name(node) == names_of(node)[-1]
    assert parent_name(node) == SPACE.shelf().namespace
    other = garden.plant([1, 2, 3, 4, 5, 6], Namespace("m", salt="t"))
    assert not set(names_of(node)) & set(names_of(other)), "TENANT-01: nor do tenants share names"


@pytest.mark.parametrize("seed", range(20))
def test_splits_growth_and_eviction_leave_names_right(seed: int) -> None:
    rng = Random(seed)  # noqa: S311  # not for secrets
    garden = Garden()
    for _ in range(60):
        garden.plant([rng.randint(1, 2) for _ in range(rng.randint(2, 16))])
        nodes = list(garden.tree.nodes())
        some = rng.choice(nodes)
        assert names_of(some) == chain(garden.text(some))[-len(some.ids) :]
        if rng.random() < 0.4:
            victim = next(iter(garden.tree.candidates))
            garden.tree.cut_tail(victim, rng.randint(1, len(victim.ids)))
        assert contradictions(garden.tree, {}) == []


def test_each_block_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[int] = []

    def counting(parent: BlockName, tokens: bytes, block_size: int) -> list[BlockName]:
        found = names_after(parent, tokens, block_size)
        named.append(len(found))
        return found

    monkeypatch.setattr(names_module, "names_after", counting)
    garden = Garden()
    garden.plant(list(range(40)))
    garden.plant([*range(20), *range(100, 120)])
    assert not named, "nobody has asked yet"
    garden.plant(list(range(60)))
    for _ in range(3):
        for node in garden.tree.nodes():
            names_of(node)
    garden.plant(list(range(10)))
    leaf = garden.plant(list(range(60)))
    end_name(leaf)
    assert sum(named) == garden.tree.blocks == 40


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_says_what_it_follows(count: int) -> None:
    garden = Garden()
    garden.plant([1, 1, 2, 2])
    garden.plant([1, 1, 3, 3])
    node = garden.plant([1, 1, 2, 2, 4, 4, 5, 5])
    names = chain(garden.text(node))
    run = tail_run(node, count, "call")
    assert run.names == tuple(names[-count:])
    assert run.parent == names[-count - 1]
    assert run.start == 8 - count * BLOCK
    assert run.tokens == garden.text(node)[-count * BLOCK * 4 :]
    assert (run.blocks, run.reason, run.entry) == (tuple(node.ids[-count:]), "call", node)


def test_a_path_is_told_an_edge_at_a_time_from_below() -> None:
    garden = Garden()
    garden.plant([1, 1, 3, 3])
    node = garden.plant([1, 1, 2, 2, 4, 4])
    lower, upper = runs_above(garden.tree, node)
    names = chain(garden.text(node))
    assert (lower.names, lower.parent, lower.start) == (tuple(names[1:]), names[0], 2)
    assert (upper.names, upper.parent, upper.start) == (tuple(names[:1]), SPACE.shelf().namespace, 0)
