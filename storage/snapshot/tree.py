"""The tree of a snapshot: which blocks it has, after which others, what policies knew of them, where their records lie.

Kept in columns, in memory and in the file: 100,000 blocks are a few arrays and one dictionary. Names are not stored at
all. They follow from the tokens, so a tree cannot call a block what it is not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import StorageError, describe
from ..base import Head, Listed, Meta
from ..files.segment import Location
from ..naming import NAME_BYTES, TOKEN_BYTES, BlockName, Shelf

FIRST: Final = -1
"""As parent: the block is the first one of its namespace."""
ORPHAN: Final = -2
"""As parent: the block before it is not in the snapshot."""
_Number = TypeVar("_Number", np.uint32, np.int32, np.uint64, np.int64, np.float64)
_MOST = 2**62
_LONGEST = 1e300
_SHELF_BYTES = 2 * NAME_BYTES


class _Columns(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The file: one msgpack array of byte strings, each a column, little-endian. Byte strings only: their length is
    compared with what is left of the file before anything is allocated.
    """

    shelves: bytes
    """Namespace and tenant, 64 bytes each."""
    shelf: bytes
    """u32: which of them."""
    parent: bytes
    """i32: an earlier row, ``FIRST`` or ``ORPHAN``."""
    orphans: bytes
    """For each orphan, in order, the name of its parent: 32 bytes."""
    orphan_starts: bytes
    """u64: the tokens before each orphan."""
    tokens: bytes
    """i32: ``block_size`` for each block."""
    written: bytes
    """f64, as the next ones: see :class:`~octavo.storage.base.Meta`."""
    idle: bytes
    ttl: bytes
    """Not a number: none."""
    recompute: bytes
    hits: bytes
    """i64"""
    priority: bytes
    """i64"""
    segment: bytes
    """u32"""
    offset: bytes
    """u64"""
    length: bytes
    """u64"""


class TreeWriter:
    """Collects the blocks of a snapshot that is being written."""

    def __init__(self) -> None:
        self._shelves: dict[Shelf, int] = {}
        self._rows: dict[tuple[int, BlockName], int] = {}
        self._orphans = bytearray()
        self._tokens = bytearray()
        self._shelf = array("I")
        self._parent = array("i")
        self._starts = array("Q")
        self._times = (array("d"), array("d"), array("d"), array("d"))
        self._counts = (array("q"), array("q"), array("I"), array("Q"), array("Q"))

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, at: tuple[Shelf, BlockName]) -> bool:
        shelf, name = at
        return (self._shelves.get(shelf, -1), name) in self._rows

    def add(self, shelf: Shelf, head: Head, meta: Meta, place: Location) -> None:
        """Note a block that is not there yet."""
        number = self._shelves.setdefault(shelf, len(self._shelves))
        self._rows[number, head.name] = len(self)
        self._shelf.append(number)
        self._parent.append(self._parent_of(number, shelf, head))
        self._tokens += head.tokens
        ttl = np.nan if meta.ttl is None else meta.ttl
        times = (meta.written, meta.idle, ttl, meta.recompute_seconds)
        for times_column, time in zip(self._times, times, strict=True):
            times_column.append(time)
        counts = (_whole(meta.hits), _whole(meta.priority), *place)
        for counts_column, count in zip(self._counts, counts, strict=True):
            counts_column.append(count)

    def encode(self) -> bytes:
        """The file ``tree``."""
        shelves = b"".join(namespace + tenant for namespace, tenant in self._shelves)
        links = (self._shelf, self._parent, self._starts)
        shelf, parent, starts, *rest = (_little(column) for column in (*links, *self._times, *self._counts))
        columns = _Columns(shelves, shelf, parent, bytes(self._orphans), starts, bytes(self._tokens), *rest)
        return msgspec.msgpack.encode(columns)

    def _parent_of(self, number: int, shelf: Shelf, head: Head) -> int:
        if head.start == 0 and head.parent == shelf.namespace:
            return FIRST
        row = self._rows.get((number, head.parent))
        if row is not None:
            return row
        self._orphans += head.parent
        self._starts.append(head.start)
        return ORPHAN


class Tree:
    """The blocks of a snapshot, in memory. Read only; safe in any thread."""

    def __init__(self, columns: _Columns, block_size: int) -> None:
        """Use :func:`decode_tree`. Linear in the number of blocks.

        :raises StorageError: when the columns contradict each other.
        """
        self._step = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._tokens = columns.tokens
        count, rest = divmod(len(columns.tokens), self._step)
        _require(rest == 0, "holds a part of a block")
        self.shelves = _shelves(columns.shelves)
        self._shelf = _column(columns.shelf, np.uint32, count)
        self._parent = _column(columns.parent, np.int32, count)
        self._written, self._idle, self._ttl, self._recompute = (
            _column(column, np.float64, count)
            for column in (columns.written, columns.idle, columns.ttl, columns.recompute)
        )
        self._hits, self._priority = (_column(column, np.int64, count) for column in (columns.hits, columns.priority))
        self._segment = _column(columns.segment, np.uint32, count)
        self._offset, self._length = (_column(column, np.uint64, count) for column in (columns.offset, columns.length))
        self._check_links()
        self._orphans = np.flatnonzero(self._parent == ORPHAN)
        self._orphan_parents = columns.orphans
        _require(len(columns.orphans) == NAME_BYTES * len(self._orphans), "has other orphans than it says")
        self._starts = self._all_starts(_column(columns.orphan_starts, np.uint64, len(self._orphans)))
        self._names = self._all_names()
        self._index = self._by_name()
        self._order, self._sorted = self._by_parent()
        self._tops = self._without_parent()

    def __len__(self) -> int:
        return len(self._names)

    def row(self, shelf: Shelf, name: BlockName) -> int | None:
        """Where a block stands, if there is one of this name."""
        rows = self._index.get(shelf)
        return None if rows is None else rows.get(name)

    def rows(self, shelf: Shelf | None = None) -> Iterator[int]:
        """All blocks (of one shelf), parents before their children."""
        if shelf is None:
            return iter(range(len(self)))
        return iter(self._index.get(shelf, {}).values())  # filled in order of rows

    def shelf(self, row: int) -> Shelf:
        return self.shelves[int(self._shelf[row])]

    def name(self, row: int) -> BlockName:
        return self._names[row]

    def head(self, row: int) -> Head:
        at = row * self._step
        return Head(
            self._names[row], self._parent_name(row), int(self._starts[row]), self._tokens[at : at + self._step]
        )

    def meta(self, row: int) -> Meta:
        ttl = float(self._ttl[row])
        return Meta(
            written=_clamped(float(self._written[row])),
            idle=_clamped(float(self._idle[row])),
            hits=max(int(self._hits[row]), 0),
            priority=int(self._priority[row]),
            ttl=None if ttl != ttl else _clamped(ttl),  # noqa: PLR0124  # only "not a number" differs from itself
            recompute_seconds=_clamped(float(self._recompute[row])),
        )

    def place(self, row: int) -> Location:
        return Location(int(self._segment[row]), int(self._offset[row]), int(self._length[row]))

    def listed(self, row: int) -> Listed:
        return Listed(self.shelf(row), self.head(row), self.meta(row))

    def children(self, shelf: Shelf, parent: BlockName) -> list[int]:
        """The rows right after ``parent``, which need not be in the snapshot itself."""
        row = self.row(shelf, parent)
        apart = self._tops.get((shelf, parent), [])
        if row is None:
            return apart
        low, high = np.searchsorted(self._sorted, [row, row + 1])
        return [*self._order[low:high].tolist(), *apart]

    def check_places(self, lengths: list[int]) -> None:
        """:raises StorageError: when a record would lie outside of the segments, which are ``lengths`` bytes long."""
        ends = np.asarray(lengths, dtype=np.float64)
        _require(bool((self._segment < len(lengths)).all()), "names a segment that there is not")
        last = self._offset.astype(np.float64) + self._length
        _require(bool((last <= ends[self._segment]).all()), "has a record beyond the end of its segment")

    def _parent_name(self, row: int) -> BlockName:
        parent = int(self._parent[row])
        if parent >= 0:
            return self._names[parent]
        if parent == FIRST:
            return self.shelf(row).namespace
        at = int(np.searchsorted(self._orphans, row)) * NAME_BYTES
        return self._orphan_parents[at : at + NAME_BYTES]

    def _check_links(self) -> None:
        rows = np.arange(len(self._parent))
        _require(bool((self._shelf < len(self.shelves)).all()), "names a shelf that there is not")
        _require(bool(((self._parent >= ORPHAN) & (self._parent < rows)).all()), "has a block before its parent")
        inner = self._parent >= 0
        same = self._shelf[inner] == self._shelf[self._parent[inner]]
        _require(bool(same.all()), "has a block on another shelf than its parent")

    def _all_starts(self, orphans: npt.NDArray[np.uint64]) -> array[int]:
        starts, own = array("q"), iter(orphans.tolist())
        for parent in self._parent.tolist():
            start = starts[parent] + self._block_size if parent >= 0 else 0 if parent == FIRST else next(own)
            _require(start < _MOST, "has a block too far from the beginning")
            starts.append(start)
        return starts

    def _all_names(self) -> list[BlockName]:
        names: list[BlockName] = []
        tokens, step, sha256 = memoryview(self._tokens), self._step, hashlib.sha256
        roots = [shelf.namespace for shelf in self.shelves]
        orphan = 0
        for row, (parent, shelf) in enumerate(zip(self._parent.tolist(), self._shelf.tolist(), strict=True)):
            if parent >= 0:
                before = names[parent]
            elif parent == FIRST:
                before = roots[shelf]
            else:
                before = self._orphan_parents[orphan * NAME_BYTES : (orphan + 1) * NAME_BYTES]
                orphan += 1
            names.append(sha256(before + tokens[row * step : (row + 1) * step]).digest())
        return names

    def _by_name(self) -> dict[Shelf, dict[BlockName, int]]:
        index: dict[Shelf, dict[BlockName, int]] = {shelf: {} for shelf in self.shelves}
        _require(len(index) == len(self.shelves), "has a shelf twice")
        shelves = [index[shelf] for shelf in self.shelves]
        for row, (name, shelf) in enumerate(zip(self._names, self._shelf.tolist(), strict=True)):
            shelves[shelf][name] = row
        _require(sum(map(len, shelves)) == len(self), "has a block twice")
        return index

    def _by_parent(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        order = np.argsort(self._parent, kind="stable")
        return order, self._parent[order]

    def _without_parent(self) -> dict[tuple[Shelf, BlockName], list[int]]:
        tops: dict[tuple[Shelf, BlockName], list[int]] = {}
        for row in np.flatnonzero(self._parent < 0).tolist():
            tops.setdefault((self.shelf(row), self._parent_name(row)), []).append(row)
        return tops


def decode_tree(data: bytes, block_size: int) -> Tree:
    """The file ``tree`` of a snapshot with blocks of ``block_size`` tokens.

    :raises StorageError: when it is no such file.
    """
    try:
        columns = msgspec.msgpack.decode(data, type=_Columns)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StorageError(f"the tree of the snapshot cannot be read: {describe(error)}") from error
    return Tree(columns, block_size)


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise StorageError(f"the tree of the snapshot {problem}; delete the snapshot")


def _column(data: bytes, kind: type[_Number], count: int) -> npt.NDArray[_Number]:
    dtype = np.dtype(kind).newbyteorder("<")
    _require(len(data) == count * dtype.itemsize, "has columns of different lengths")
    return np.frombuffer(data, dtype=dtype)


def _shelves(data: bytes) -> list[Shelf]:
    _require(len(data) % _SHELF_BYTES == 0, "holds a part of a shelf")
    return [
        Shelf(data[at : at + NAME_BYTES], data[at + NAME_BYTES : at + _SHELF_BYTES])
        for at in range(0, len(data), _SHELF_BYTES)
    ]


def _little(column: array[int] | array[float]) -> bytes:
    values = np.asarray(column)
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


def _whole(value: int) -> int:
    return max(-_MOST, min(int(value), _MOST))


def _clamped(value: float) -> float:
    """A time or duration that can be reckoned with, whatever was stored."""
    return min(max(value, 0.0), _LONGEST) if value == value else 0.0  # noqa: PLR0124  # false for "not a number" alone
