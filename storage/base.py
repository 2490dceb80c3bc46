"""The contract of storage tiers and persistence backends.

A tier keeps *records* (sealed blocks, see :mod:`octavo.storage.record`) by name, on the shelf of a namespace. It may
refuse any record, forget any record at any time, fail and hang: the engine treats all of that as a miss. It is not
trusted either: what ``get`` returns is checked against its name and checksum before anybody uses it.

All methods are called from one event loop, many at a time. They must not block it: a tier with blocking I/O does it in
threads. Cancelling a call leaves the tier usable, and whatever it had stored by then is stored whole or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from .identity import Identity
from .naming import BlockName, Shelf

if TYPE_CHECKING:
    from .ranking import Rankings


class Head(NamedTuple):
    """What a block is, apart from its K and V."""

    name: BlockName
    parent: BlockName
    """Name of the block before it; the shelf's namespace for the first one."""
    start: int
    """Tokens of the prompt before the block."""
    tokens: bytes
    """Its tokens, int32, little-endian."""


class Meta(NamedTuple):
    """What policies know about a block, in a form that outlives the process. Times are durations: an absolute time of a
    clock that was wrong must not make anything live for ever.
    """

    written: float = 0.0
    """Wall clock, seconds since the epoch, when this was noted. In the future: read as now."""
    idle: float = 0.0
    """Seconds since the last use at that time."""
    hits: int = 0
    priority: int = 0
    ttl: float | None = None
    """Seconds that the priority still held at that time; ``None``: for good."""
    recompute_seconds: float = 0.0
    """Measured seconds to compute the block; 0: not measured."""

    def aged(self, now: float) -> Meta:
        """The same at wall-clock time ``now``."""
        age = max(now - self.written, 0.0)
        ttl = None if self.ttl is None else max(self.ttl - age, 0.0)
        return self._replace(written=now, idle=self.idle + age, ttl=ttl)


class Record(NamedTuple):
    """A sealed block on its way into a tier."""

    head: Head
    data: memoryview
    """Bytes, contiguous, read only by convention: the tier must not write there, and must copy or write out what it
    keeps before ``put`` returns."""
    meta: Meta = Meta()


class Stored(NamedTuple):
    """What a tier gives back for a name."""

    data: memoryview
    """As it was put. Stays valid and unchanged for as long as the caller holds it."""
    meta: Meta


class Listed(NamedTuple):
    """One block in a tier's listing."""

    shelf: Shelf
    head: Head
    meta: Meta


class TierStats(NamedTuple):
    """Where a tier stands; counters since it was opened."""

    blocks: int = 0
    bytes: int = 0
    """Used, with all overhead; never above ``capacity``."""
    capacity: int | None = None
    """``None``: not bounded by the tier."""
    evicted: int = 0
    """Blocks dropped to make room."""
    declined: int = 0
    """Blocks refused."""
    corrupt: int = 0
    """Blocks dropped because their bytes were wrong."""
    healthy: bool = True
    """False: it takes no writes (full disk, no permission) or cannot be reached."""
    problem: str = ""
    """Why it is not healthy."""
    policy: str = ""
    """Who decides what is evicted; empty where a tier does not say."""
    policy_faults: int = 0
    """How often that policy broke its contract, so that the least recently used went instead."""


class TierGeometry(NamedTuple):
    """What a tier may rely on when it is made."""

    identity: Identity
    record_bytes: int
    """Length of every record."""
    rankings: Rankings | None = None
    """Where a tier that evicts by the name of a policy gets its ranking; ``None``: nobody is there who knows names."""


Options = Mapping[str, object]
"""Settings of one tier, as the user gave them."""


MOST_NOTES = 1 << 20
"""Bytes of notes that a tier or a snapshot may be given."""


class Tier(ABC):
    """Keeps blocks. See the module for what the engine expects and what it does not."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the engine's is refused; minor ones only add methods with defaults."""
    persistent: ClassVar[bool] = False
    """Whether what was flushed is there again after a restart of the process."""
    shared: ClassVar[bool] = False
    """Whether other engines read and write it too."""
    read_only: ClassVar[bool] = False
    """Whether it declines everything, so that it is not offered anything."""
    evicts_by_name: ClassVar[bool] = False
    """Whether it has the option ``eviction_policy``, the name of one, for which it asks ``TierGeometry.rankings``. Such
    a name is checked before anything is opened."""

    @classmethod
    @abstractmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """A tier that is not open yet.

        :raises InvalidRequest: for an unknown option or a value out of range; the message names it and what is known.
        """

    async def open(self) -> None:
        """Get ready. Called once, before anything else.

        :raises StorageError: when the tier cannot be used at all. One that can be read but not written opens, and says
            so in ``stats``.
        """

    @abstractmethod
    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Keep ``records``, evicting older ones if need be; for each, whether it is kept. A name that is there already
        is kept as it is (its bytes can only be the same) and its ``meta`` is taken.

        :raises StorageError: when the whole batch failed. Foreign errors are mapped to it.
        """

    @abstractmethod
    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """What is kept under ``names`` on ``shelf``, in order; ``None`` where nothing is.

        :raises StorageError: when nothing can be read now.
        """

    @abstractmethod
    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """Which of ``names`` a ``get`` would find, as far as the tier knows.

        :raises StorageError: when that cannot be told now.
        """

    def peek(self, shelf: Shelf, names: Sequence[BlockName]) -> int | None:
        """How many leading ``names`` are there, answered from memory in microseconds; ``None``: ``contains`` has to be
        asked. Never blocks, never raises.
        """
        return None

    @abstractmethod
    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Forget ``names``; returns how many were there. They must not come back after a restart."""

    @abstractmethod
    async def erase(self, tenant: bytes) -> int:
        """Forget all blocks of a tenant (``Shelf.tenant``), on every shelf, so that their bytes cannot be read any more
        from what the tier controls; returns how many there were.
        """

    @abstractmethod
    def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """Every block (of one shelf), a parent before its children where both are there. May miss what is put or
        deleted meanwhile.
        """

    async def children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        """The blocks right after ``parent``; empty where the tier cannot tell without a long search."""
        return []

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Note what policies know by now of blocks that are there; names that are not are ignored."""
        return

    async def note(self, notes: bytes) -> None:
        """Keep ``notes`` (at most ``MOST_NOTES`` bytes) beside the blocks, in place of those before; empty ones forget
        them. What the engine has learned of the blocks is in them: erasing a tenant forgets them as well. Only tiers
        that are persistent and not shared are asked, and those that keep none lose nothing but time.

        :raises StorageError: when they could not be written; what was noted before may be lost then.
        """
        return

    async def notes(self) -> bytes | None:
        """What was noted last and is there still, unaltered.

        :raises StorageError: when that cannot be read now.
        """
        return None

    async def spill(self, count: int) -> list[tuple[Shelf, Record]]:
        """Take out up to ``count`` blocks, the least valuable first, for the next tier; their data is the caller's.
        Empty where a tier keeps what it has.
        """
        return []

    @abstractmethod
    async def flush(self) -> None:
        """Return when everything that ``put`` has accepted is as durable as the tier can make it.

        :raises StorageError: when it is not.
        """

    @abstractmethod
    async def close(self) -> None:
        """Flush what can be flushed and give everything back. Idempotent; raises nothing."""

    @abstractmethod
    def stats(self) -> TierStats:
        """A snapshot, from memory."""


class SnapshotSink(ABC):
    """A snapshot that is being written. Until ``commit`` returns, whoever looks at its location sees the old one, or
    none.
    """

    @abstractmethod
    async def add(self, shelf: Shelf, records: Sequence[Record]) -> None:
        """Take more blocks; parents come before their children.

        :raises StorageError: when they cannot be written; ``abandon`` then.
        """

    async def note(self, notes: bytes) -> None:
        """Keep ``notes`` beside the blocks, as :meth:`Tier.note`. A backend that keeps none may do without.

        :raises StorageError: when they cannot be kept.
        """
        return

    @abstractmethod
    async def commit(self) -> int:
        """Make it the snapshot at its location, durably and all at once; returns how many blocks it has.

        :raises StorageError: when it cannot be completed; the old one is untouched then.
        """

    @abstractmethod
    async def abandon(self) -> None:
        """Drop what was written so far. Idempotent, also after ``commit`` (does nothing then); raises nothing."""


class PersistenceBackend(ABC):
    """Where snapshots are kept. Knows their format; the engine knows what goes in."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    @classmethod
    @abstractmethod
    def create(cls, options: Options) -> Self:
        """:raises InvalidRequest: for an unknown option or a value out of range."""

    @abstractmethod
    async def begin(self, location: str, geometry: TierGeometry) -> SnapshotSink:
        """Start a snapshot at ``location`` that replaces the one there, if any, when it is committed.

        :raises StorageError: when nothing can be written there.
        """

    @abstractmethod
    async def open(self, location: str, geometry: TierGeometry) -> Tier:
        """The snapshot at ``location`` as an open tier that takes no writes.

        :raises FingerprintMismatch: when it belongs to another model, geometry or format; the message says what.
        :raises StorageError: when there is none or it cannot be read.
        """

    @abstractmethod
    async def erase(self, location: str, tenant: bytes) -> int:
        """Rewrite the snapshot at ``location`` without the blocks of a tenant (``Shelf.tenant``); returns their number.
        Whoever looks sees the old one or the new one; afterwards the bytes are gone.

        :raises StorageError: when it cannot be read or written; it is as it was then.
        """
