"""Which replica has how much of a prompt.

Three things are known of a replica: names that its news told exactly, names that are expected because a request was
placed there, and its digest. Exact news make a digest superfluous. Replicas are called by slots here, small numbers
that are used again, so that who holds a name is one integer with a bit for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from .digest import Digest, Geometry, Positions, name_hashes
from .load_books import Ints


class IndexLimits(NamedTuple):
    """How much is remembered of each replica, and how long."""

    known: int = 262_144
    """Names from its news. What it has beyond is passed over: the oldest are what most prompts begin with."""
    expected: int = 65_536
    """Names from placements, or its ``total_blocks`` if those are fewer; the deepest of the oldest go first."""
    told_seconds: float = 30.0
    """How long a placement is believed to have left its blocks there, where news or digests should confirm it."""
    untold_seconds: float = 600.0
    """The same for a replica that tells nothing."""


@dataclass(slots=True)
class _Book:
    """What is known of one replica."""

    slot: int
    bit: int
    room: int
    """Most names in ``expected``."""
    known: dict[bytes, float] = field(default_factory=dict)
    """Since when, in the order of the news."""
    expected: dict[bytes, float] = field(default_factory=dict)
    """Until when; the first ends first. None of them is known."""
    digest: Digest | None = None
    is_exact: bool = False
    """There are news."""
    look_at: float | None = None
    """When it will be looked at for expectations that have ended; ``None``: there are none."""

    def has(self, name: bytes) -> bool:
        return name in self.known or name in self.expected


class PrefixIndex:
    """Leading blocks of a prompt by slot. Times are those of one monotonic clock, in seconds."""

    def __init__(self, limits: IndexLimits) -> None:
        self._limits = limits
        self._books: dict[int, _Book] = {}
        self._holders: dict[bytes, int] = {}
        """Slots that have a name, known or expected: ``~slot`` for a single one, otherwise a bit for each."""
        self._summarized: dict[int, _Book] = {}
        """Those whose digest counts."""
        self._ends: list[tuple[float, int]] = []
        """Heap of when the first expectation of a slot ends, an item for each that has any; some may be out of date."""

    def __len__(self) -> int:
        """Names, known or expected."""
        return len(self._holders)

    def join(self, slot: int) -> None:
        """``slot`` must be free."""
        self._books[slot] = _Book(slot, 1 << slot, self._limits.expected)

    def leave(self, slot: int) -> None:
        self._forget_all(self._books.pop(slot))
        self._summarized.pop(slot, None)

    # what replicas tell

    def stored(self, slot: int, names: Iterable[bytes], now: float) -> None:
        book = self._exact(slot, now)
        for name in names:
            if name in book.known or len(book.known) >= self._limits.known:
                continue
            if book.expected.pop(name, None) is None:
                self._hold(book, name)
            book.known[name] = now

    def removed(self, slot: int, names: Iterable[bytes], now: float) -> None:
        book = self._exact(slot, now)
        for name in filter(book.has, names):
            book.known.pop(name, None)
            book.expected.pop(name, None)
            self._drop(book, name)

    def cleared(self, slot: int, now: float) -> None:
        self._forget_all(self._exact(slot, now))

    def silenced(self, slot: int) -> None:
        """Its news can be relied on no more: what they told is forgotten, and its digest counts again."""
        book = self._books[slot]
        self._shorten(book, book.known, 0)
        book.is_exact = False
        if book.digest is not None:
            self._summarized[slot] = book

    def summarized(self, slot: int, digest: Digest | None, total_blocks: int, now: float) -> None:
        """A new digest, or that there is none; ``total_blocks`` bounds what is expected of it, unless it is 0."""
        book = self._books[slot]
        if book.digest is None and digest is not None:
            self._hasten(book, now)
        book.digest = digest
        book.room = min(self._limits.expected, total_blocks or self._limits.expected)
        self._shorten(book, book.expected, book.room)
        if digest is None or book.is_exact:
            self._summarized.pop(slot, None)
        else:
            self._summarized[slot] = book

    # what the router does

    def expect(self, slot: int, names: Sequence[bytes], now: float) -> None:
        """A request with these blocks was placed there. The deepest will be forgotten first, as caches do."""
        book = self._books[slot]
        until = now + self._life(book)
        for name in reversed(names):
            if name in book.known:
                continue
            if book.expected.pop(name, None) is None:
                self._hold(book, name)
            book.expected[name] = until
        self._shorten(book, book.expected, book.room)
        self._time(book)

    def confirm(self, slot: int, names: Sequence[bytes], now: float) -> None:
        """The request is through: they are there now. Where there are news, these say so."""
        if not self._books[slot].is_exact:
            self.expect(slot, names, now)

    def leading(self, names: Sequence[bytes], slots: int, now: float) -> Ints:
        """How many of ``names``, from the first on, each of ``slots`` slots has, as far as is known."""
        self._expire(now)
        counts = np.zeros(slots, np.int64)
        alive, depth = -1, 0
        for depth, name in enumerate(names):
            still = alive & _mask(self._holders.get(name, 0))
            if still != alive:
                if depth:
                    counts[_slots(alive ^ still)] = depth
                alive = still
            if not still:
                break
        else:
            if names:
                counts[_slots(alive)] = depth + 1
        if self._summarized and names:
            self._ask_digests(names, counts)
        return counts

    def _ask_digests(self, names: Sequence[bytes], counts: Ints) -> None:
        """A name that is missing ends a prefix: caches evict from the leaves, so bisection would find others' names."""
        hashes = name_hashes(names)
        places: dict[Geometry, Positions] = {}
        for slot, book in self._summarized.items():
            digest = book.digest
            if digest is None:
                continue
            positions = places.get(digest.geometry)
            if positions is None:
                positions = places[digest.geometry] = digest.geometry.positions(hashes)
            if counts[slot] or digest.has(positions[:1])[0]:
                missing = np.flatnonzero(~digest.has(positions))
                others = (at for at in missing.tolist() if names[at] not in book.expected)
                counts[slot] = next(others, len(names))

    # the books

    def _exact(self, slot: int, now: float) -> _Book:
        """The book of a replica that has just told exact news; the first time, expectations get short."""
        book = self._books[slot]
        if not book.is_exact:
            book.is_exact = True
            self._summarized.pop(slot, None)
            self._hasten(book, now)
        return book

    def _hasten(self, book: _Book, now: float) -> None:
        """It has begun to tell what it has, so expectations need not last long any more."""
        latest = now + self._limits.told_seconds
        book.expected = {name: min(until, latest) for name, until in book.expected.items()}
        book.look_at = None
        self._time(book)

    def _life(self, book: _Book) -> float:
        tells = book.is_exact or book.digest is not None
        return self._limits.told_seconds if tells else self._limits.untold_seconds

    def _hold(self, book: _Book, name: bytes) -> None:
        held = self._holders.get(name)
        self._holders[name] = ~book.slot if held is None else _mask(held) | book.bit

    def _drop(self, book: _Book, name: bytes) -> None:
        left = _mask(self._holders[name]) & ~book.bit
        if not left:
            del self._holders[name]
        else:
            self._holders[name] = left if left & (left - 1) else ~(left.bit_length() - 1)

    def _forget_all(self, book: _Book) -> None:
        self._shorten(book, book.known, 0)
        self._shorten(book, book.expected, 0)

    def _shorten(self, book: _Book, names: dict[bytes, float], room: int) -> None:
        self._forget(book, names, list(islice(names, max(len(names) - room, 0))))

    def _forget(self, book: _Book, names: dict[bytes, float], gone: Iterable[bytes]) -> None:
        for name in gone:
            del names[name]
            self._drop(book, name)

    def _time(self, book: _Book) -> None:
        if book.expected and book.look_at is None:
            book.look_at = next(iter(book.expected.values()))
            heapq.heappush(self._ends, (book.look_at, book.slot))

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            when, slot = heapq.heappop(self._ends)
            book = self._books.get(slot)
            if book is not None and book.look_at == when:  # else out of date
                over = takewhile(lambda item: item[1] <= now, book.expected.items())
                self._forget(book, book.expected, [name for name, _ in over])
                book.look_at = None
                self._time(book)


def _mask(held: int) -> int:
    return 1 << ~held if held < 0 else held


def _slots(mask: int) -> Ints:
    """The bits of ``mask``; one at least."""
    last = mask.bit_length() - 1
    if mask == 1 << last:
        return np.array([last])
    data = np.frombuffer(mask.to_bytes(last // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))
