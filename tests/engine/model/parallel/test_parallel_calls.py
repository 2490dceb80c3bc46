"""How a call goes on one rank, with a line that leads nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import pytest
import torch

from octavo.engine.model.attention.kv_tensors import LayerGeometry
from octavo.engine.model.parallel.following import Follower
from octavo.engine.model.parallel.line import Line
from octavo.engine.model.parallel.orders import Close, Export, Order, encode, execute_order, packed
from octavo.engine.model.parallel.runner import ParallelRunner
from octavo.engine.model.runner import Int32Array, StepInput, UInt8Array
from octavo.engine.testing import FakeRunner

T = TypeVar("T")
CUDA = torch.device("cuda")
NONE = np.empty(0, dtype=np.int32)
STEP = StepInput(NONE, NONE, np.empty(0, dtype=np.int64), (), NONE.reshape(0, 2))
LAYERS = (LayerGeometry(1, 1, 1),)


class LoneLine(Line):
    """Gives orders, and notes what happens between the ranks."""

    def __init__(self, events: list[str], orders: Sequence[Order] = ()) -> None:
        self.rank, self.size, self.trouble = 0, 1, None
        self._events = events
        self._given = iter((*orders, Close()))

    def next_order(self) -> bytes:
        return encode(next(self._given))

    def send_order(self, order: bytes) -> None:
        """To nobody."""

    def together(self, act: Callable[[], T], *, unhurried: bool = False) -> T:
        assert not unhurried
        try:
            result = act()
        except Exception:
            self._events.append("failed")
            raise
        self._events.append("well")
        return result

    def gather(self, mine: UInt8Array) -> list[UInt8Array]:
        self._events.append("gathered")
        return [mine]

    def leave(self) -> None:
        self._events.append("left")


class NoMemory(FakeRunner):
    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        raise MemoryError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device: found.append("got through"))
    return found


def allocated(runner: FakeRunner) -> FakeRunner:
    runner.allocate(4, 4)
    return runner


def test_rank_0_says_that_a_step_went_well_when_its_device_has_got_through(events: list[str]) -> None:
    runner = ParallelRunner(FakeRunner(), LoneLine(events), CUDA, local=LAYERS, whole=LAYERS, geometry="")
    runner.allocate(4, 4)
    events.clear()
    runner.execute(STEP)
    assert events == ["got through", "well"]


def test_so_do_the_others(events: list[str]) -> None:
    Follower(allocated(FakeRunner()), LoneLine(events, [execute_order(STEP)]), CUDA).follow()
    assert events == ["got through", "well", "left"]


def test_whatever_fails_of_an_order_is_told(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_args: object, **_options: object) -> None:
        raise MemoryError

    shard = allocated(FakeRunner())
    monkeypatch.setattr("octavo.engine.model.parallel.following.np.empty", nothing)
    Follower(shard, LoneLine(events, [Export(packed(NONE))]), CUDA).follow()
    assert events == ["failed", "left"]


def test_blocks_are_sent_when_all_ranks_have_read_theirs(events: list[str]) -> None:
    Follower(allocated(NoMemory()), LoneLine(events, [Export(packed(NONE))]), CUDA).follow()
    Follower(allocated(FakeRunner()), LoneLine(events, [Export(packed(NONE))]), CUDA).follow()
    assert events == ["failed", "left", "well", "gathered", "left"]
