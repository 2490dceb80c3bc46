"""The line between the ranks: orders from rank 0, reports from all to all, and bytes of blocks.

It is beside the group in which the model computes: always in host memory, and with times of its own. An idle engine may
be silent for days, but who was told something answers. What breaks the line breaks it for good: the ranks would no
longer agree on which operation is the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import DeviceOutOfMemory, ModelError, describe
from ..runner import UInt8Array
from .job import Notes, part

SILENCE = timedelta(days=365)
"""How long rank 0 may have nothing to say."""
_FIRST = 8192
"""Bytes that an order is sent in, if it is not longer; else the rest follows."""
_LENGTH = 8
_REPORT = 512
_NOTE = "trouble"

T = TypeVar("T")


class Patience(NamedTuple):
    """How long to wait for the others."""

    answer: timedelta = timedelta(seconds=60)
    """For those that were told to do what was done here. Ranks that died show at once."""
    failure: timedelta = timedelta(seconds=5)
    """After a failure here that may have come in the middle of a step, where they wait for this rank, and would for
    ever."""


class Ending(IntEnum):
    """How a call went on a rank."""

    WELL = 0
    FAILED = 1
    OUT_OF_MEMORY = 2


class Report(NamedTuple):
    """What a rank says of a call."""

    ending: Ending
    reason: str = ""

    @classmethod
    def of(cls, error: Exception | None) -> Report:
        """``None``: it went well."""
        if error is None:
            return cls(Ending.WELL)
        is_memory = isinstance(error, DeviceOutOfMemory)
        reason = str(error) if isinstance(error, ModelError) else describe(error)
        return cls(Ending.OUT_OF_MEMORY if is_memory else Ending.FAILED, reason)


class Line:
    """One rank's end. All calls from one thread, and in the same order on all ranks.

    :param store: for notes on what went wrong.
    :raises ModelError: when the others are gone.
    """

    def __init__(self, rank: int, size: int, store: Notes, patience: Patience) -> None:
        self.rank = rank
        self.size = size
        self.trouble: str | None = None
        """Why the line is broken."""
        self._store = store
        self._patience = patience
        with self._unbroken():
            self._orders = dist.new_group(backend="gloo", timeout=SILENCE)
            self._answers = dist.new_group(backend="gloo", timeout=patience.answer)

    def require_whole(self) -> None:
        """:raises ModelError: when the line is broken."""
        if self.trouble is not None:
            raise ModelError(self.trouble)

    def send_order(self, order: bytes) -> None:
        """From rank 0 to all others.

        :raises ModelError: when one of them is gone, or does not take it.
        """
        first = np.zeros(_FIRST, dtype=np.uint8)
        first[:_LENGTH] = np.frombuffer(len(order).to_bytes(_LENGTH, "little"), dtype=np.uint8)
        beginning = order[: _FIRST - _LENGTH]
        first[_LENGTH : _LENGTH + len(beginning)] = np.frombuffer(beginning, dtype=np.uint8)
        with self._unbroken():
            self._send(first)
            if len(order) > len(beginning):
                self._send(np.frombuffer(order[len(beginning) :], dtype=np.uint8).copy())

    def next_order(self) -> bytes:
        """Wait for rank 0.

        :raises ModelError: when it is gone.
        """
        with self._unbroken():
            first = torch.zeros(_FIRST, dtype=torch.uint8)
            dist.broadcast(first, 0, group=self._orders)
            found = first.numpy().tobytes()
            length = int.from_bytes(found[:_LENGTH], "little")
            rest = torch.zeros(max(length - (_FIRST - _LENGTH), 0), dtype=torch.uint8)
            if len(rest):
                dist.broadcast(rest, 0, group=self._orders)
        return (found[_LENGTH:] + rest.numpy().tobytes())[:length]

    def together(self, act: Callable[[], T], *, unhurried: bool = False) -> T:
        """Do this rank's part of what all ranks do, then tell and hear how it went.

        :param unhurried: others may be far behind, as with the loading of weights.
        :raises ModelError: when it went well here, but not elsewhere; or when others cannot be heard any more, and then
            the line is broken.
        :raises Exception: whatever ``act`` raised, unless the line is broken by it.
        """
        self.require_whole()
        try:
            result = act()
        except Exception as error:
            self.require_whole()  # it may be the line that failed
            self._reports(Report.of(error), self._time_after(error), unhurried=unhurried)
            if self._note() is not None:  # a rank gave up before it heard of this one
                raise self._broken(error) from error
            raise
        for rank, report in enumerate(self._reports(Report.of(None), self._patience.answer, unhurried=unhurried)):
            if report.ending is not Ending.WELL:
                kind = DeviceOutOfMemory if report.ending is Ending.OUT_OF_MEMORY else ModelError
                raise kind(f"rank {rank}: {report.reason}")
        return result

    def require_same(self, what: str, mine: str) -> None:
        """Check that all ranks have the same; they are at the same point.

        :param mine: at most 500 bytes.
        :raises ModelError: on all ranks, when they have not; or when others cannot be heard any more.
        """
        self.require_whole()
        found = self._reports(Report(Ending.WELL, mine), self._patience.answer, unhurried=False)
        if any(report.reason != mine for report in found):
            told = ", ".join(f"rank {rank}: {report.reason}" for rank, report in enumerate(found))
            raise ModelError(
                f"the ranks have not the same {what}; give all of them the same model and settings ({told})"
            )

    def gather(self, mine: UInt8Array) -> list[UInt8Array]:
        """Bytes of all ranks, of one shape, on rank 0; nothing on others.

        :raises ModelError: when one of them is gone.
        """
        with self._unbroken():  # without memory for the parts, too: the others send theirs already
            parts = [torch.empty(mine.shape, dtype=torch.uint8) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(torch.from_numpy(mine), parts, dst=0, group=self._answers)
        return [part.numpy() for part in parts or ()]

    def scatter(self, parts: Sequence[UInt8Array], out: UInt8Array) -> None:
        """To each rank's ``out`` its part of ``parts``, which only rank 0 has.

        :raises ModelError: when one of them is gone.
        """
        sent = [torch.from_numpy(part) for part in parts] if self.rank == 0 else None
        with self._unbroken():
            dist.scatter(torch.from_numpy(out), sent, src=0, group=self._answers)

    def leave(self) -> None:
        """Close all groups of the process."""
        self.trouble = self.trouble or "the ranks have parted"
        part()

    def _send(self, part: UInt8Array) -> None:
        """Others take it at once, who did all that they were told before; a machine that froze never does."""
        self._orders.broadcast(torch.from_numpy(part), 0, self._patience.answer).wait()

    def _reports(self, own: Report, time: timedelta, *, unhurried: bool) -> list[Report]:
        """Of all ranks, which have ``time`` for it, unless they are unhurried.

        :raises ModelError: when others cannot be heard, because they are gone or wait for this rank elsewhere.
        """
        mine = _written(own)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(found, mine, group=self._orders if unhurried else self._answers, async_op=True)
            if work is not None:
                work.wait(SILENCE if unhurried else time)
        except RuntimeError as error:
            if own.ending is not Ending.WELL:
                self._leave_note(own.reason)
            raise self._broken(error) from error
        return [_read(each) for each in found]

    def _time_after(self, error: Exception) -> timedelta:
        """A check that failed here comes before or after the operations in which ranks wait for each other."""
        is_check = isinstance(error, ModelError) and not isinstance(error, DeviceOutOfMemory)
        return self._patience.answer if is_check else self._patience.failure

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        self.require_whole()
        try:
            yield
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ModelError:
        told = self._note() or f"a rank is gone or does not answer ({str(error).splitlines()[0]:.200})"
        self.trouble = f"the ranks are no longer together, start all of them again: {told}"
        return ModelError(self.trouble)

    def _leave_note(self, reason: str) -> None:
        """The first one stays: what comes later comes of it."""
        if self._note() is None:
            with suppress(RuntimeError):
                self._store.set(_NOTE, f"rank {self.rank}: {reason}")

    def _note(self) -> str | None:
        try:
            return self._store.get(_NOTE).decode() if self._store.check([_NOTE]) else None
        except RuntimeError:  # it was kept by a rank that is gone
            return None


def _written(report: Report) -> Tensor:
    """The ending, and as much of the reason as there is room for."""
    text = bytes((report.ending,)) + report.reason.encode()
    return torch.frombuffer(bytearray(text[:_REPORT].ljust(_REPORT, b"\0")), dtype=torch.uint8)


def _read(written: Tensor) -> Report:
    ending, *text = written.tolist()
    return Report(Ending(ending), bytes(text).decode(errors="ignore").rstrip("\0"))
