"""KV events: what enters and leaves the cache and its tiers, as a numbered log that several can read.

A router that wants to send a request to where its prefix lies keeps a mirror of each engine: it applies the events in
order. Each event names blocks by digest (see :mod:`octavo.storage.naming`), which say nothing of the tokens to those
who do not have them, and are the same in every process.

Nothing is made while nobody subscribes. Subscribers hold a position in one common log and no queue of their own: one
that is slow costs nothing, and when the log has gone on without it, it begins anew with all that is stored then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeAlias
from weakref import WeakSet

import anyio

DEVICE = "device"
"""What events call the memory in which the model reads blocks; tiers have the names that they were mounted under."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow each other can be had from ``tier`` from now on."""

    names: tuple[bytes, ...]
    """Digests, parents first; each stands for all tokens up to the end of its block."""
    parent: bytes | None
    """Digest of the block before the first one; ``None``: they begin a prompt."""
    tokens: bytes
    """Their tokens, int32, little-endian."""
    block_size: int
    """Tokens of a block."""
    tier: str
    namespace: bytes
    """Digest of model, adapter and tenant, in which alone the blocks are shared."""
    tenant: bytes
    """Digest of the tenant."""
    is_private: bool
    """Whether the tenant has a name or secret of its own, so that requests without it never match."""
    adapter: str | None = None
    """Of the model; not known of what lies in tiers."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks cannot be had from ``tier`` any more. Some may have been removed before."""

    names: tuple[bytes, ...]
    tier: str
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks are gone that fit; of those nothing follows."""

    tier: str | None = None
    """``None``: everywhere."""
    tenant: bytes | None = None
    """Digest; ``None``: of all tenants."""


KvEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What happened in one go, in order; a step makes one or two of them."""

    seq: int
    """One more than that of the batch before. A snapshot has that of the last batch which it covers."""
    time: float
    """Seconds since the epoch."""
    events: tuple[KvEvent, ...]
    is_snapshot: bool = False
    """Whether this is no news but what is stored: the device first, then a batch for each tier."""
    has_gap: bool = False
    """Whether batches before this one were lost. It begins with a ``Cleared`` then, so that a mirror is right again."""


class EventSource(Protocol):
    """What the log asks of those who write it."""

    @property
    def places(self) -> Sequence[str]:
        """The tiers of which a subscriber is told after the device."""

    def turn(self, *, on: bool) -> None:
        """From now on everything that happens is to be noted, or nothing."""

    def standing(self) -> list[KvEvent]:
        """What is stored on the device now."""

    async def survey(self, tier: str, note: Callable[[Sequence[KvEvent]], None]) -> None:
        """Call ``note`` with what is stored in a tier, at a moment when that is so."""


class EventLog:
    """The last events of one engine. All calls from one event loop."""

    def __init__(
        self,
        source: EventSource,
        *,
        most: int,
        wall: Callable[[], float],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """``most``: batches that are kept. ``wall``: seconds since the epoch. ``soon(call)`` calls back when what goes
        on now is over: what was noted until then makes one batch.
        """
        self.counts = Counter(stored=0, removed=0, cleared=0)
        """Events by kind. Those of snapshots are not among them."""
        self.source = source
        self.is_closed = False
        self._most = most
        self._wall = wall
        self._soon = soon
        self._pending: list[KvEvent] = []
        self._batches: dict[int, EventBatch] = {}  # by number, the oldest first
        self._next = 0
        self._readers: WeakSet[Subscription] = WeakSet()
        self._news = anyio.Event()

    @property
    def is_on(self) -> bool:
        """Whether events are made."""
        return bool(self._readers) and not self.is_closed

    @property
    def next_seq(self) -> int:
        """Number of the batch that comes next."""
        return self._next

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that is kept; ``next_seq`` when none is."""
        return self._next - len(self._batches)

    def get(self, seq: int) -> EventBatch | None:
        """A batch, if it is kept."""
        return self._batches.get(seq)

    def note(self, event: KvEvent) -> None:
        """Something has happened."""
        if not self._pending:
            self._soon(self.flush)
        self._pending.append(event)

    def flush(self) -> None:
        """Make a batch of what was noted so far."""
        if not self._pending:
            return
        events, self._pending = tuple(self._pending), []
        self.counts.update(type(event).__name__.lower() for event in events)
        self._batches[self._next] = EventBatch(self._next, self._wall(), events)
        self._next += 1
        if len(self._batches) > self._most:
            del self._batches[self.oldest]
        self.wake()
        self._rest()

    def snapshot(self, *, has_gap: bool) -> EventBatch:
        """All that is stored on the device, as of the batch before the next one."""
        self.flush()
        events = (Cleared(), *([] if self.is_closed else self.source.standing()))
        return EventBatch(self._next - 1, self._wall(), events, is_snapshot=True, has_gap=has_gap)

    def survey(self, events: Sequence[KvEvent], seq: int) -> EventBatch:
        """What is stored in a tier."""
        return EventBatch(seq, self._wall(), tuple(events), is_snapshot=True)

    def subscribe(self, replay_from: int | None = None) -> Subscription:
        """See :class:`Subscription`."""
        if not self.is_on:
            self._begin()
        reader = Subscription(self, replay_from)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Subscription) -> None:
        """``reader`` reads no more. Idempotent."""
        self._readers.discard(reader)
        self.wake()
        self._rest()

    def close(self) -> None:
        """Nothing comes after what was noted so far."""
        if self.is_closed:
            return
        self.flush()
        self.is_closed = True
        self.source.turn(on=False)
        self.wake()

    async def news(self) -> None:
        """Until there is another batch, or somebody leaves, or the log is closed."""
        await self._news.wait()

    def wake(self) -> None:
        """Let those who wait for news look again."""
        news, self._news = self._news, anyio.Event()
        news.set()

    def _begin(self) -> None:
        """One number is left out: what happened while nobody listened is in no batch."""
        self._pending, self._batches = [], {}
        self._next += 1
        if not self.is_closed:
            self.source.turn(on=True)

    def _rest(self) -> None:
        """When nobody listens any more, also because a subscription was forgotten, no events are made."""
        if not self._readers and not self.is_closed:
            self.source.turn(on=False)
            self._pending, self._batches = [], {}


class Subscription:
    """An asynchronous iterator over the batches of one log, for one reader.

    It begins with what is stored when it is made: a batch that is a snapshot of the device, then one for each tier that
    this engine alone writes. Everything after that follows, in order. With ``replay_from``, the number of a batch that
    is kept still, it begins with that batch instead; where that one is not kept, with a snapshot that ``has_gap``.

    A reader that falls behind what the log keeps loses whole batches and gets a snapshot that ``has_gap``. It ends when
    the engine is closed; the last event is a ``Cleared``. Leave it with ``async with``, ``aclosing`` or ``aclose``; one
    that is dropped costs nothing from the next batch on.
    """

    def __init__(self, log: EventLog, replay_from: int | None) -> None:
        self._log = log
        self._next = log.next_seq
        self._first: deque[EventBatch] = deque()
        self._places: deque[str] = deque()
        self._is_closed = False
        if replay_from is not None and log.oldest <= replay_from <= log.next_seq:
            self._next = replay_from
        else:
            self._start(has_gap=replay_from is not None)

    def restart(self) -> None:
        """Begin anew with what is stored now. An iteration that waits goes on with it."""
        self._start(has_gap=False)
        self._log.wake()

    def next_nowait(self) -> EventBatch | None:
        """The next batch, if there is one; tiers are not asked. With it everything that happened so far is told."""
        self._log.flush()
        if self._is_closed:
            return None
        if not self._first and self._next < self._log.oldest:
            self._start(has_gap=True)
        if self._first:
            return self._first.popleft()
        batch = self._log.get(self._next)
        self._next += batch is not None
        return batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        """One task at a time."""
        while not self._is_closed:
            if self._places and not self._first:
                await self._survey()
            batch = self.next_nowait()
            if batch is not None:
                return batch
            if self._log.is_closed:
                break
            if not self._places:
                await self._log.news()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        """As ``close``."""
        self.close()

    def close(self) -> None:
        """Read no more. Idempotent; ends an iteration that waits."""
        self._is_closed = True
        self._first.clear()
        self._log.leave(self)

    def _start(self, *, has_gap: bool) -> None:
        self._first = deque([self._log.snapshot(has_gap=has_gap)])
        self._places = deque(self._log.source.places)
        self._next = self._log.next_seq

    async def survey(self) -> None:
        """Have all tiers told that are to be told and were not yet, for those who read with ``next_nowait``."""
        while self._places and not self._is_closed:
            await self._survey()

    async def _survey(self) -> None:
        """Have one tier told. What was noted before and is read afterwards leads to the same, since the last that is
        said of a block is what holds.
        """

        def note(events: Sequence[KvEvent]) -> None:
            if events:
                self._first.append(self._log.survey(events, self._next - 1))

        places = self._places  # others, with all tiers to be told again, once it has begun anew meanwhile
        if not self._log.is_closed:
            await self._log.source.survey(places[0], note)
        places.popleft()
