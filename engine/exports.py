"""Exports: blocks whose contents are wanted off the device before anything overwrites them.

A block that was evicted is free at once and may be written by the very next step; so all exports of evicted blocks are
made, in the model's thread, before that step runs. Blocks that are still cached cannot change and are exported a few
at a time; the moment one is evicted, it belongs to the first kind. So nothing has to be pinned, and no allocation ever
waits for a tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import EngineClosed
from ..storage.base import Head, Meta
from ..storage.manager.tier_manager import Batch, Outgoing, Target, TierManager
from ..storage.naming import TOKEN_BYTES, BlockName, Shelf
from ..storage.record import RecordCodec
from ..telemetry import names
from ..telemetry.record import NO_TRACK, NOTHING, Attributes, Track
from .model.runner import ModelRunner
from .model_thread import ModelThread

EXPORT_BLOCKS = 64
"""Blocks in one call of the runner, at most; bounds the memory of a batch."""


class Sink(Protocol):
    """Where exported blocks go."""

    @property
    def room(self) -> int:
        """How many blocks that can wait it takes now. Those that cannot are given to it all the same."""

    @property
    def goes_to(self) -> str:
        """Where that is, for a trace."""

    def take(self, batch: Batch) -> None:
        """Take a batch, its payloads in place. Must not block."""


class TierSink:
    """Exported blocks on their way into the tiers."""

    def __init__(self, manager: TierManager, to: Target) -> None:
        self._manager = manager
        self._to: Target = to

    @property
    def room(self) -> int:
        return self._manager.room(self._to)

    @property
    def goes_to(self) -> str:
        return ",".join(self._manager.targets(self._to))

    def take(self, batch: Batch) -> None:
        self._manager.offer(batch, to=self._to)


class Watcher(Protocol):
    """Whoever has an interest in blocks that nobody has promised yet."""

    def evicted(self, blocks: Iterable[int]) -> None:
        """These leave the cache: now is the last moment to promise them."""

    def dropped(self, blocks: Iterable[int]) -> None:
        """The contents of these are bad or not wanted any more."""


class NamedRun(Protocol):
    """Blocks that follow each other, with their names."""

    @property
    def parent(self) -> BlockName: ...
    @property
    def names(self) -> Sequence[BlockName]: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> bytes: ...


class Export(NamedTuple):
    """One block to be copied out."""

    block: int
    shelf: Shelf
    head: Head
    meta: Meta
    sink: Sink
    cause: Track = NO_TRACK
    """Of the request because of which it is copied."""


class Exports:
    """What is still to be copied out. All calls from the loop, except that ``run`` awaits the model's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        thread: ModelThread,
        codec: RecordCodec,
        on_fault: Callable[[str, BaseException | str], None],
        clock: Callable[[], float],
    ) -> None:
        self.blocks = 0
        """Blocks copied out."""
        self.failed = 0
        """Blocks lost because the runner could not copy them."""
        self._runner = runner
        self._thread = thread
        self._codec = codec
        self._on_fault = on_fault
        self._clock = clock
        self._urgent: list[Export] = []
        self._later: dict[int, list[Export]] = {}
        self._outstanding: Counter[Sink] = Counter()
        self._watchers: list[Watcher] = []

    def outstanding(self, sink: Sink) -> int:
        """Blocks that ``sink`` was promised and has neither got nor lost yet."""
        return self._outstanding[sink]

    @property
    def is_due(self) -> bool:
        """Whether some block cannot wait."""
        return bool(self._urgent)

    @property
    def has_ready(self) -> bool:
        """Whether some block that can wait could be copied now."""
        return bool(self._ready(1))

    @property
    def has_waiting(self) -> bool:
        """Whether some block is still to be copied when there is time, ready or not."""
        return bool(self._later)

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` what leaves the cache from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """No longer. Idempotent."""
        self._watchers = [other for other in self._watchers if other is not watcher]

    def now(self, exports: Iterable[Export]) -> None:
        """Copy these before the next step: their blocks are free already."""
        for export in exports:
            self._urgent.append(export)
            self._outstanding[export.sink] += 1

    def later(self, exports: Iterable[Export]) -> None:
        """Copy these when there is time; they are in the prefix tree. Each block once for each sink."""
        for export in exports:
            known = self._later.setdefault(export.block, [])
            if all(other.sink is not export.sink for other in known):
                known.append(export)
                self._outstanding[export.sink] += 1

    def evicted(self, blocks: Sequence[int], sink: Sink) -> set[int]:
        """These blocks are free from now on. Returns those of them that ``sink`` has been promised already."""
        for watcher in self._watchers:
            watcher.evicted(blocks)
        promised = set()
        for block in blocks:
            exports = self._later.pop(block, [])
            self._urgent += exports
            if any(export.sink is sink for export in exports):
                promised.add(block)
        return promised

    def dropped(self, blocks: Sequence[int]) -> None:
        """The contents of these blocks are bad or not wanted any more."""
        for watcher in self._watchers:
            watcher.dropped(blocks)
        for block in blocks:
            for export in self._later.pop(block, ()):
                self._settle(export)

    def withdraw(self, unwanted: Callable[[Export], bool]) -> None:
        """Forget the exports of a sink that wants nothing more, or of a tenant that is erased."""
        urgent, self._urgent = self._urgent, []
        for export in urgent:
            self._keep_unless(unwanted, export, self._urgent)
        for block in list(self._later):
            kept: list[Export] = []
            for export in self._later.pop(block):
                self._keep_unless(unwanted, export, kept)
            if kept:
                self._later[block] = kept

    async def run(self, spare: int) -> int:
        """Copy all that is urgent, and up to ``spare`` blocks of the rest; returns how many were copied.

        :raises EngineClosed: when the model's thread was closed.
        """
        work, self._urgent = self._urgent, []
        for block in self._ready(spare, beside=len(work)):
            work += self._later.pop(block)
        for group in _grouped(work):
            await self._copy(group)
        return len(work)

    def _keep_unless(self, unwanted: Callable[[Export], bool], export: Export, kept: list[Export]) -> None:
        if unwanted(export):
            self._settle(export)
        else:
            kept.append(export)

    def _settle(self, export: Export) -> None:
        self._outstanding[export.sink] -= 1
        if not self._outstanding[export.sink]:
            del self._outstanding[export.sink]

    def _ready(self, count: int, beside: int = 0) -> list[int]:
        """Up to ``count`` blocks for which all their sinks have room, also if one queue takes all, with ``beside``
        others: what found no room would be lost.
        """
        ready: list[int] = []
        rooms = {sink: sink.room - beside for sink in self._outstanding}
        most = min(count, max(rooms.values(), default=0))
        for block, exports in self._later.items():
            if len(ready) >= most:
                break
            if all(rooms[export.sink] > len(ready) for export in exports):
                ready.append(block)
        return ready

    async def _copy(self, group: list[Export]) -> None:
        began = self._clock()
        buffer = self._codec.buffer(len(group))
        blocks = np.array([export.block for export in group], dtype=np.int32)
        try:
            await self._thread.call(self._runner.export_blocks, blocks, self._codec.payloads(buffer))
        except EngineClosed:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a runner raises, the blocks are a miss later
            self.failed += len(group)
            self._on_fault("export", error)
            self._note(group, began, {names.ERROR_TYPE: type(error).__name__})
            return
        finally:
            for export in group:
                self._settle(export)
        self.blocks += len(group)
        self._note(group, began, NOTHING)
        outgoing = [Outgoing(export.head, export.meta) for export in group]
        group[0].sink.take(Batch(group[0].shelf, outgoing, buffer))

    def _note(self, group: list[Export], began: float, more: Attributes) -> None:
        """Show a copy below each request that caused a part of it."""
        parts = Counter(export.cause for export in group if export.cause.is_on)
        for cause, blocks in parts.items():
            shown = {names.BLOCKS: blocks, names.TIER: group[0].sink.goes_to, **more}
            cause.act(names.SWAP_OUT, began, self._clock(), shown)


def heads_of(run: NamedRun) -> list[Head]:
    """What each block of ``run`` is."""
    parents = [run.parent, *run.names[:-1]]
    bytes_each = len(run.tokens) // len(run.names)
    return [
        Head(name, parent, run.start + at // TOKEN_BYTES, run.tokens[at : at + bytes_each])
        for name, parent, at in zip(run.names, parents, range(0, len(run.tokens), bytes_each), strict=True)
    ]


def _grouped(exports: list[Export]) -> Iterator[list[Export]]:
    """Neighbours with one sink and one shelf, in order, at most ``EXPORT_BLOCKS`` together."""
    group: list[Export] = []
    for export in exports:
        if group and (
            len(group) >= EXPORT_BLOCKS or group[0].sink is not export.sink or group[0].shelf != export.shelf
        ):
            yield group
            group = []
        group.append(export)
    if group:
        yield group
