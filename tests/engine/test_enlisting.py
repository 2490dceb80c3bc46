"""Enlisting: a whole image gets into the exports, each block once, in its order, and what leaves early is not lost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.engine.enlisting import SLICE_BLOCKS, Enlistment
from octavo.engine.exports import Export, Exports, heads_of
from octavo.engine.kv import ImageRun
from octavo.engine.testing import FakeRunner
from octavo.storage.base import Meta
from octavo.storage.manager.tier_manager import Batch
from octavo.storage.naming import Namespace, names_after
from octavo.storage.record import RecordCodec
from octavo.tests.engine.conftest import InlineThread

B = 4
SPACE = Namespace("m")
CODEC = RecordCodec(block_size=B, payload_bytes=8 * B, run=b"run 0001")


class Sink:
    room = 1 << 20

    def __init__(self) -> None:
        self.names: list[bytes] = []

    goes_to = "here"

    def take(self, batch: Batch) -> None:
        self.names += [block.head.name for block in batch.blocks]


class Rig:
    """Exports over a fake model, and the enlistment of runs of these lengths, whose blocks are 0, 1, 2, ..."""

    def __init__(self, *lengths: int) -> None:
        runner = FakeRunner()
        runner.allocate(sum(lengths), B)
        self.exports = Exports(runner, InlineThread(), CODEC, _fail, lambda: 0.0)  # type: ignore[arg-type]  # stands in for a thread
        self.sink = Sink()
        self.asked: list[list[int]] = []
        """Blocks, each time that exports were asked for."""
        ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
        self.runs = [_run(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
        self.names = [name for run in self.runs for name in run.names]
        self.enlistment = Enlistment(self.runs, self.exports, self._exported)

    def _exported(self, run: ImageRun, indices: Sequence[int]) -> list[Export]:
        self.asked.append([run.ids[index] for index in indices])
        heads = heads_of(run)
        return [Export(run.ids[at], SPACE.shelf(), heads[at], run.meta, self.sink) for at in indices]

    def finish(self) -> None:
        while self.enlistment.advance():
            pass


def _run(blocks: range) -> ImageRun:
    tokens = np.arange(blocks.start * B, blocks.stop * B, dtype=np.int32).tobytes()
    shelf = SPACE.shelf()
    names = tuple(names_after(shelf.namespace, tokens, B))
    return ImageRun(SPACE, 0, shelf.namespace, names, tokens, array("i", blocks), Meta())


def _fail(where: str, error: BaseException | str) -> None:
    pytest.fail(f"{where}: {error}")


@pytest.mark.parametrize("lengths", [(), (1,), (3, 5, 2), (SLICE_BLOCKS,), (SLICE_BLOCKS + 1, 3), (700, 900, 2500)])
@pytest.mark.asyncio
async def test_every_block_is_exported_once_and_in_order(lengths: tuple[int, ...]) -> None:
    rig = Rig(*lengths)
    rig.finish()
    await rig.exports.run(1 << 20)
    assert rig.sink.names == rig.names
    assert not rig.exports.outstanding(rig.sink)


def test_no_slice_is_longer_than_a_step_may_wait() -> None:
    rig = Rig(700, 900, 2500)
    while True:
        before = len(rig.asked)
        more = rig.enlistment.advance()
        assert 0 < sum(map(len, rig.asked[before:])) <= SLICE_BLOCKS
        if not more:
            break
    assert sum(map(len, rig.asked)) == 4100


@pytest.mark.asyncio
async def test_what_is_evicted_before_its_turn_is_copied_before_the_next_step() -> None:
    rig = Rig(4, SLICE_BLOCKS)
    rig.enlistment.advance()  # all but the last four
    late = list(range(SLICE_BLOCKS, SLICE_BLOCKS + 4))
    assert rig.exports.evicted(late[2:], rig.sink) == set(late[2:])
    await rig.exports.run(0)
    assert rig.sink.names == rig.names[-2:]
    rig.finish()
    await rig.exports.run(1 << 20)
    assert sorted(rig.sink.names) == sorted(rig.names)
    assert rig.asked[-2:] == [late[2:], late[:2]]


@pytest.mark.asyncio
async def test_what_is_dropped_before_its_turn_is_never_copied() -> None:
    rig = Rig(3, 3)
    rig.exports.dropped([1, 4])
    rig.finish()
    await rig.exports.run(1 << 20)
    assert rig.sink.names == [name for at, name in enumerate(rig.names) if at not in (1, 4)]


@pytest.mark.asyncio
async def test_a_closed_one_wants_nothing_more() -> None:
    rig = Rig(3)
    rig.enlistment.close()
    rig.enlistment.close()
    assert rig.exports.evicted([0, 1], rig.sink) == set()
    assert not rig.enlistment.advance()
    await rig.exports.run(1 << 20)
    assert rig.asked == []
    assert rig.sink.names == []
