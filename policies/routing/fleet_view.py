"""The books of a fleet: who is there, what each has cached, how much each has to do.

A router tells it everything it hears, and routing policies read it. Nothing here waits or knows a network; all calls
come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from .base import ReplicaId, RoutedRequest
from .digest import Digest
from .load_books import Bools, Floats, Ints, LoadBooks
from .prefix_index import IndexLimits, PrefixIndex
from .status import ReplicaStatus

Seeds: TypeAlias = npt.NDArray[np.uint64]


class Placement(NamedTuple):
    """A request that was given to a replica."""

    number: int
    replica: ReplicaId
    request: RoutedRequest
    work: int
    """Tokens that were to be computed, as far as was known."""


@dataclass(slots=True)
class _Member:
    slot: int
    seed: int
    status: ReplicaStatus | None = None
    open: dict[int, Placement] = field(default_factory=dict)

    @property
    def is_draining(self) -> bool:
        return self.status is not None and self.status.is_draining


class _Seats(NamedTuple):
    """All members in the order of ``replicas``, for arithmetic."""

    replicas: tuple[ReplicaId, ...]
    names: npt.NDArray[np.object_]
    """The same, to be ordered at once."""
    slots: Ints
    seeds: Seeds
    draining: Bools


class FleetView:
    """What a router knows of its replicas. Arrays are in the order of ``replicas``.

    What is told of a replica that is not (or no longer) there is ignored: news may come late.
    """

    def __init__(
        self, *, clock: Callable[[], float], half_life: float = 30.0, limits: IndexLimits | None = None
    ) -> None:
        """``clock``: monotonic, seconds. ``half_life``: seconds after which work that was done counts half.

        :raises ValueError: when ``half_life`` is not positive.
        """
        if not half_life > 0:
            raise ValueError(f"half_life must be a positive number of seconds, not {half_life}")
        self._clock = clock
        self._members: dict[ReplicaId, _Member] = {}
        self._free: list[int] = []
        """Slots of those who left."""
        self._index = PrefixIndex(limits or IndexLimits())
        self._loads = LoadBooks(half_life)
        self._seats: _Seats | None = None
        self._placements = 0
        self.digests_refused = 0
        """Digests that could not be read, so far."""

    # who is there

    @property
    def replicas(self) -> Sequence[ReplicaId]:
        """In the order in which they joined."""
        return self._seated.replicas

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, replica: object) -> bool:
        return replica in self._members

    def join(self, replica: ReplicaId) -> None:
        """A new one, with an empty cache until something else is told. It counts as having had its share of the work
        of late, so it is not given everything at first. Who is there already stays as he is.
        """
        if replica in self._members:
            return
        member = _Member(self._free.pop() if self._free else len(self._members), xxh3_64_intdigest(replica.encode()))
        self._loads.open(member.slot, len(self._members))
        self._index.join(member.slot)
        self._members[replica] = member
        self._seats = None

    def leave(self, replica: ReplicaId) -> None:
        """It is gone, and all that was known of it."""
        member = self._members.pop(replica, None)
        if member is not None:
            self._index.leave(member.slot)
            self._loads.close(member.slot)
            self._free.append(member.slot)
            self._seats = None

    # what replicas tell

    def stored(self, replica: ReplicaId, names: Iterable[bytes]) -> None:
        """Exact news: it has these blocks now. From the first news on its digest is not looked at any more."""
        if member := self._members.get(replica):
            self._index.stored(member.slot, names, self._clock())

    def removed(self, replica: ReplicaId, names: Iterable[bytes]) -> None:
        """Exact news: it has these blocks no more."""
        if member := self._members.get(replica):
            self._index.removed(member.slot, names, self._clock())

    def cleared(self, replica: ReplicaId) -> None:
        """Exact news: its cache is empty."""
        if member := self._members.get(replica):
            self._index.cleared(member.slot, self._clock())

    def silenced(self, replica: ReplicaId) -> None:
        """Its news have stopped: what they told is forgotten, and its digest counts again."""
        if member := self._members.get(replica):
            self._index.silenced(member.slot)

    def report(self, replica: ReplicaId, status: ReplicaStatus) -> None:
        """What it says of itself. A digest that cannot be read is counted and ignored."""
        member = self._members.get(replica)
        if member is None:
            return
        if status.is_draining is not member.is_draining:
            self._seats = None
        member.status = status
        now = self._clock()
        self._loads.report(member.slot, status.waiting_tokens, status.running + status.waiting, now)
        self._index.summarized(member.slot, self._digest(status.digest), status.total_blocks, now)

    def _digest(self, data: bytes | None) -> Digest | None:
        if data is None:
            return None
        try:
            return Digest.from_bytes(data)
        except ValueError:
            self.digests_refused += 1
            return None

    # what the router does

    def placed(self, request: RoutedRequest, replica: ReplicaId, matched: int) -> Placement:
        """``request`` goes to ``replica``, which has the first ``matched`` blocks of it: that is work, and its blocks
        are expected to be there. Every placement must be :meth:`finished`, whatever became of it.
        """
        self._placements += 1
        placement = Placement(self._placements, replica, request, request.work(matched))
        if member := self._members.get(replica):
            member.open[placement.number] = placement
            self._loads.begin(member.slot, placement.work)
            self._index.expect(member.slot, request.names, self._clock())
        return placement

    def finished(self, placement: Placement) -> None:
        """It is no longer in flight. A second time, or after its replica left, changes nothing."""
        member = self._members.get(placement.replica)
        if member is not None and member.open.pop(placement.number, None) is not None:
            now = self._clock()
            self._loads.end(member.slot, placement.work, now)
            self._index.confirm(member.slot, placement.request.names, now)

    # what policies read

    def status(self, replica: ReplicaId) -> ReplicaStatus | None:
        """The last report."""
        return self._members[replica].status

    def matched(self, names: Sequence[bytes]) -> Mapping[ReplicaId, int]:
        """Leading blocks by replica, only those that have any."""
        counts = self.matches(names)
        return {self.replicas[at]: int(counts[at]) for at in np.flatnonzero(counts).tolist()}

    def matches(self, names: Sequence[bytes]) -> Ints:
        """Leading blocks of each replica."""
        return self._index.leading(names, len(self._loads), self._clock())[self._seated.slots]

    def load(self, replica: ReplicaId) -> float:
        """As in :attr:`loads`."""
        return float(self._loads.loads(self._clock())[self._members[replica].slot])

    def named(self, order: Ints) -> list[ReplicaId]:
        """Replicas by their positions in ``replicas``."""
        replicas: list[ReplicaId] = self._seated.names[order].tolist()
        return replicas

    @property
    def loads(self) -> Floats:
        """Tokens: in flight, done lately, and those that others have waiting there."""
        return self._loads.loads(self._clock())[self._seated.slots]

    @property
    def requests(self) -> Ints:
        """Requests in flight at each replica, those of others as of its last report."""
        return self._loads.requests()[self._seated.slots]

    @property
    def draining(self) -> Bools:
        """Who should get nothing new."""
        return self._seated.draining

    @property
    def seeds(self) -> Seeds:
        """Of each replica's own hash."""
        return self._seated.seeds

    @property
    def _seated(self) -> _Seats:
        if self._seats is None:
            members = self._members.values()
            self._seats = _Seats(
                tuple(self._members),
                np.array(list(self._members), np.object_),
                np.array([member.slot for member in members], np.int64),
                np.array([member.seed for member in members], np.uint64),
                np.array([member.is_draining for member in members], np.bool_),
            )
        return self._seats
