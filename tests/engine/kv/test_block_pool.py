from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from octavo.engine.kv import BlockPool
from octavo.engine.kv.block_pool import Block
from octavo.errors import CacheMisuse, OutOfBlocks

TOTAL = 12


def _ids(*blocks: int) -> array[int]:
    return array("i", blocks)


class PoolMachine(RuleBasedStateMachine):
    """Against a model of two counters."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, 4)
        self.references: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.allocated = 0

    @rule(count=st.integers(0, TOTAL), after=st.integers(-1, TOTAL - 1))
    def allocate(self, count: int, after: int) -> None:
        free = TOTAL - len(self.used)
        if count > free:
            with pytest.raises(OutOfBlocks, match=f"{count} blocks are wanted and {free} of {TOTAL}"):
                self.pool.allocate(count, after)
            return
        got = list(self.pool.allocate(count, after))
        assert len(set(got)) == count
        assert not self.used.intersection(got)
        self.references.update(got)
        self.allocated += count

    @rule(block=st.integers(0, TOTAL - 1))
    def retain(self, block: int) -> None:
        if self.references[block]:
            self.pool.retain([block])
            self.references[block] += 1
        else:
            with pytest.raises(CacheMisuse, match="cannot be taken"):
                self.pool.retain([block])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(block for block, count in self.references.items() if count)
        if held:
            blocks = data.draw(st.lists(st.sampled_from(held), unique=True, max_size=6))
            blocks = sorted(blocks) if data.draw(st.booleans()) else blocks
            self.pool.release(_ids(*blocks))
            self.references.subtract(blocks)

    @rule(block=st.integers(0, TOTAL - 1))
    def release_free(self, block: int) -> None:
        if not self.references[block]:
            with pytest.raises(CacheMisuse, match="double free"):
                self.pool.release(_ids(block))

    @rule(block=st.integers(0, TOTAL - 1))
    def pin(self, block: int) -> None:
        if block in self.used:
            self.pool.pin(block)
            self.pins[block] += 1
        else:
            with pytest.raises(CacheMisuse, match="cannot be pinned"):
                self.pool.pin(block)

    @rule(block=st.integers(0, TOTAL - 1))
    def unpin(self, block: int) -> None:
        if self.pins[block]:
            self.pool.unpin(block)
            self.pins[block] -= 1
        else:
            with pytest.raises(CacheMisuse, match="not pinned"):
                self.pool.unpin(block)

    @property
    def used(self) -> set[int]:
        return set(+self.references) | set(+self.pins)

    @invariant()
    def books_agree(self) -> None:
        used = self.used
        assert self.pool.free_ids() == [block for block in range(TOTAL) if block not in used]
        assert self.pool.free == TOTAL - len(used)
        assert self.pool.in_transfer == len(set(+self.pins) - set(+self.references))
        assert self.pool.allocations == self.allocated
        for block in range(TOTAL):
            expected = Block(block, self.references[block], self.pins[block], is_free=block not in used)
            assert self.pool.block(block) == expected
            assert self.pool.references(block) == self.references[block]


def test_allocation_is_one_run_where_there_is_one() -> None:
    pool = BlockPool(TOTAL, 4)
    assert list(pool.allocate(5)) == [0, 1, 2, 3, 4]
    pool.release(_ids(1, 2))
    assert list(pool.allocate(3)) == [5, 6, 7]


def test_allocation_continues_a_run() -> None:
    pool = BlockPool(TOTAL, 4)
    pool.allocate(3)
    pool.release(_ids(0))
    assert list(pool.allocate(1, after=2)) == [3]


def test_allocation_gathers_scattered_blocks() -> None:
    pool = BlockPool(TOTAL, 4)
    pool.allocate(TOTAL)
    for block in (1, 4, 5, 9):
        pool.release(_ids(block))
    assert sorted(pool.allocate(4)) == [1, 4, 5, 9]
    assert pool.free == 0


def test_no_block_twice_after_repeated_release() -> None:
    """The free list never has an id twice, however often somebody tries."""
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    for _ in range(3):
        with pytest.raises(CacheMisuse):
            pool.release(blocks)
    taken = [block for _ in range(4) for block in pool.allocate(1)]
    assert sorted(taken) == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


@pytest.mark.parametrize("block", [-1, TOTAL])
def test_there_is_no_such_block(block: int) -> None:
    pool = BlockPool(TOTAL, 4)
    pool.allocate(TOTAL)
    with pytest.raises(CacheMisuse, match="there is no block"):
        pool.block(block)
    with pytest.raises(CacheMisuse, match="there is no block"):
        pool.pin(block)


def test_releasing_a_run_with_one_shared_block_keeps_that_one() -> None:
    pool = BlockPool(TOTAL, 4)
    run = pool.allocate(4)
    pool.retain([run[2]])
    pool.release(run)
    assert pool.free_ids() == [block for block in range(TOTAL) if block != run[2]]


def test_releasing_a_run_with_one_pinned_block_keeps_that_one() -> None:
    pool = BlockPool(TOTAL, 4)
    run, other = pool.allocate(4), pool.allocate(2)
    pool.pin(run[3])
    pool.pin(other[0])
    pool.release(run)
    assert pool.in_transfer == 1
    assert pool.free_ids() == [block for block in range(TOTAL) if block not in (run[3], *other)]


def test_pool_under_random_use() -> None:
    chosen = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(PoolMachine, settings=chosen)
