from __future__ import annotations

import pytest

from octavo.engine.kv import CacheManager, EvictedRun, Namespace, Sequence, encode_tokens
from octavo.policies.eviction import Lru
from octavo.storage.naming import BlockName, names_after

SPACE = Namespace("m", salt="a")
BLOCK = 4
SYSTEM = [1] * 8


class Cache:
    """A manager that is its own hook."""

    def __init__(self, blocks: int = 32) -> None:
        self.gone: list[int] = []
        self.manager = CacheManager(blocks, BLOCK, Lru(blocks), clock=lambda: 0.0, on_fault=lambda *_: None)
        self.manager.watch(self)
        self._ids = 0

    def evicted(self, run: EvictedRun) -> None:
        raise AssertionError("what is forgotten is not offered to tiers")

    def dropped(self, run: EvictedRun) -> None:
        self.gone += run.blocks

    def admit(self, tokens: list[int], space: Namespace = SPACE) -> Sequence:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), space, block_size=BLOCK)
        self.manager.copied(self.manager.admit(sequence).copies)
        self.manager.commit(sequence, sequence.uncomputed, 0)
        return sequence

    def serve(self, tokens: list[int], space: Namespace = SPACE) -> None:
        self.manager.finish(self.admit(tokens, space))

    def cached(self, tokens: list[int], space: Namespace = SPACE) -> int:
        return len(self.manager.tree.match(space, encode_tokens(tokens).tobytes(), len(tokens)).ids)

    def forget(self, tokens: list[int]) -> list[BlockName]:
        names = self.manager.forget(SPACE, encode_tokens(tokens))
        self.manager.census()
        return names


def names(tokens: list[int]) -> list[BlockName]:
    return names_after(SPACE.shelf().namespace, encode_tokens(tokens).tobytes(), BLOCK)


def test_a_prefix_goes_with_all_that_continues_it() -> None:
    cache = Cache()
    for turn in (2, 3):
        cache.serve([*SYSTEM, *[turn] * 8])
    found = cache.forget(SYSTEM)
    assert cache.manager.tree.blocks == 0
    assert found[:2] == names(SYSTEM), "parents first"
    assert set(found) == {*names([*SYSTEM, *[2] * 8]), *names([*SYSTEM, *[3] * 8])}
    assert len(cache.gone) == len(set(cache.gone)) == len(found) == 6
    assert cache.manager.census().free == 32
    assert cache.manager.stats().evictions == {"forget": 6}


def test_what_another_prompt_shares_stays() -> None:
    cache = Cache()
    document = [*SYSTEM, *[2] * 8]
    cache.serve([*document, *[4] * 4])
    cache.serve([*SYSTEM, *[3] * 8])
    assert set(cache.forget(document)) == set(names([*document, *[4] * 4])[2:])
    assert cache.cached(document) == 2
    assert cache.cached([*SYSTEM, *[3] * 8]) == 4


@pytest.mark.parametrize("length", [9, 10, 11])
def test_a_prefix_may_end_inside_a_block(length: int) -> None:
    cache = Cache()
    cache.serve([*SYSTEM, 5, 6, 7, 8])
    cache.serve([*SYSTEM, 5, 9, 9, 9])
    prefix = [*SYSTEM, 5, 6, 7][:length]
    forgotten = cache.forget(prefix)
    assert cache.cached([*SYSTEM, 5, 6, 7, 8]) == (0 if length == 9 else 2)
    assert cache.cached([*SYSTEM, 5, 9, 9, 9]) == (0 if length == 9 else 3)
    assert len(forgotten) == (4 if length == 9 else 1)


def test_what_is_left_of_a_prefix_goes_too() -> None:
    cache = Cache()
    cache.serve(SYSTEM)
    assert cache.forget([*SYSTEM, *[2] * 8]) == names(SYSTEM)
    assert cache.manager.tree.blocks == 0


@pytest.mark.parametrize("prefix", [[9], [1] * 5 + [2] * 20, [*SYSTEM[:6], 2, 2], [*SYSTEM, 2, 3]])
def test_what_is_not_there_leaves_everything_alone(prefix: list[int]) -> None:
    cache = Cache()
    cache.serve([*SYSTEM, *[2] * 8])
    assert cache.forget(prefix) == []
    assert cache.manager.forget(Namespace("other"), encode_tokens(SYSTEM)) == []
    assert cache.manager.tree.blocks == 4


def test_what_is_held_stays_but_is_named() -> None:
    cache = Cache()
    running = cache.admit([*SYSTEM, *[2] * 8])
    cache.serve([*SYSTEM, *[2] * 8, *[3] * 4])
    lease = cache.manager.pin(SPACE, encode_tokens(SYSTEM))
    assert lease is not None
    assert set(cache.forget(SYSTEM)) == set(names([*SYSTEM, *[2] * 8, *[3] * 4]))
    assert cache.cached([*SYSTEM, *[2] * 8, *[3] * 4]) == 4
    cache.manager.finish(running)
    cache.forget(SYSTEM)
    assert cache.manager.tree.blocks == 2
    cache.manager.unpin(lease)
    cache.forget([])
    assert cache.manager.census().free == 32


def test_a_tenant_goes_from_every_model_and_nobody_else() -> None:
    """TENANT-01, and nothing of its tokens stays in the memory of what was evicted."""
    spaces = {
        "mine": (SPACE, Namespace("n", salt="a"), Namespace("m", "adapter", "a")),
        "theirs": (Namespace("m", salt="b"), Namespace("m"), Namespace("m", salt=""), Namespace("m", adapter="a")),
    }
    manager = CacheManager(32, BLOCK, Lru(32), clock=lambda: 0.0, on_fault=lambda *_: None)
    cache = Cache()
    cache.manager = manager
    for space in (spaces["theirs"][0], *spaces["mine"], *spaces["theirs"][1:]):
        cache.serve([*SYSTEM, *[2] * 4], space)
    manager.evict(7)
    left = manager.tree.blocks
    dropped = manager.forget_tenant("a")
    assert dropped > 0
    assert manager.tree.blocks == left - dropped
    assert {space.salt for space in manager.tree.namespaces()} <= {"b", None, ""}
    assert all(key[0].salt != "a" for key in manager._ghosts._evicted)
    assert len(manager._ghosts) > 0
    manager.census()
    assert manager.forget_tenant("a") == 0
