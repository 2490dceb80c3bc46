from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.kv import BlockTable


def _table(block_size: int, *blocks: int) -> BlockTable:
    table = BlockTable(block_size)
    table.blocks = array("i", blocks)
    return table


@given(block_size=st.integers(1, 9), blocks=st.lists(st.integers(0, 50), unique=True, max_size=6), data=st.data())
def test_slots_are_block_and_offset(block_size: int, blocks: list[int], data: st.DataObject) -> None:
    table = _table(block_size, *blocks)
    stop = data.draw(st.integers(0, table.capacity))
    start = data.draw(st.integers(0, stop))
    expected = [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]
    slots = table.slots(start, stop)
    assert slots.tolist() == expected
    assert slots.dtype == "int64"


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_covering_is_as_long_as_the_written_tokens_need(tokens: int, count: int) -> None:
    """A reader sees no block that holds nothing of its context; an empty table is no error."""
    covering = _table(4, 7, 3, 9).covering(tokens)
    assert covering.tolist() == [7, 3, 9][:count]
    assert covering.dtype == "int32"


def test_an_empty_table_covers_nothing() -> None:
    table = BlockTable(4)
    assert (len(table), table.capacity) == (0, 0)
    assert table.covering(0).tolist() == []
    assert table.slots(0, 0).tolist() == []


def test_covering_is_a_copy() -> None:
    table = _table(4, 1, 2)
    covering = table.covering(8)
    table.blocks[0] = 5
    assert covering.tolist() == [1, 2]


def test_a_fork_has_its_own_list() -> None:
    table = _table(4, 1, 2, 3)
    table.shared = 1
    child = table.fork()
    child.blocks.append(9)
    child.blocks[1] = 8
    assert list(table.blocks) == [1, 2, 3]
    assert (list(child.own), child.shared, child.block_size) == ([8, 3, 9], 1, 4)
    assert list(table.own) == [2, 3]
