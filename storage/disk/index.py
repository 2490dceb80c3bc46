"""The disk tier's index: an SQLite database that says which block lies where.

It is read once, in one pass, when the tier opens; afterwards memory answers and the database only takes changes. In WAL
mode with ``synchronous=FULL``: one commit per batch of blocks, and its fsync is small beside that of the data. (NORMAL
would be consistent too, but a deletion could come back after a loss of power.) ``secure_delete`` overwrites what is
deleted. Each row has a checksum of its own, so that a flipped byte costs one block.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import xxhash

from ...errors import CorruptBlock, StorageError, describe
from ..base import Head, Meta
from ..files.filesystem import Filesystem
from ..files.segment import Location
from ..meta_codec import pack_meta, unpack_meta
from ..naming import NAME_BYTES, Shelf

FORMAT = 1
WAL_BYTES = 256 << 10
"""The log is emptied when it is longer."""
SIDE_FILES = ("-wal", "-shm", "-journal")
_APPLICATION = 0x4F435442
_TABLE = (
    "CREATE TABLE blocks (id INTEGER PRIMARY KEY, namespace BLOB, tenant BLOB, name BLOB, parent BLOB, start INTEGER, "
    "tokens BLOB, segment INTEGER, offset INTEGER, length INTEGER, meta BLOB, sum INTEGER)"
)
_NUMBERS = struct.Struct("<5q")
_ROW_BYTES = 640  # more than a row of one block takes, tokens aside

_FAULTS = (sqlite3.Error, UnicodeDecodeError)  # the latter when SQLite quotes what is damaged

_SqlRow = tuple[int, bytes, bytes, bytes, bytes, int, bytes, int, int, int, bytes, int]


class BrokenIndex(StorageError):
    """The database cannot be used; set it aside and make another from the segments."""


class Row(NamedTuple):
    """One block in the index."""

    id: int
    shelf: Shelf
    head: Head
    location: Location
    meta: Meta


class DiskIndex:
    """One open database. One thread at a time. Errors of SQLite come out as they are, except from ``open``."""

    def __init__(self, fs: Filesystem, path: Path, connection: sqlite3.Connection, *, is_new: bool) -> None:
        self.path = path
        self.is_new = is_new
        """Whether it was made just now."""
        self.bytes = 0
        """Of all its files, as of the last change."""
        self.dropped: list[int] = []
        """Numbers of the rows that ``load`` found damaged."""
        self._fs = fs
        self._connection = connection
        self._measure()

    @classmethod
    def open(cls, fs: Filesystem, path: Path, *, read_only: bool) -> DiskIndex:
        """The database at ``path``, made if it is not there (not when ``read_only``). A new one is to be filled with
        what the segments hold, and then to be called ``complete``.

        :raises BrokenIndex: when it is damaged, empty, no database, or somebody else's.
        :raises OSError: when it cannot be made or reached.
        """
        is_new = not read_only and _make(fs, path)
        connection = None
        try:
            fs.open_read(path).close()
            connection = _connect(path, fs.database_sync, read_only=read_only)
            if is_new:
                _create(fs, path, connection)
            else:
                _check_kind(connection)
            return cls(fs, path, connection, is_new=is_new)
        except (*_FAULTS, BrokenIndex) as err:
            if connection is not None:
                connection.close()
            if isinstance(err, BrokenIndex):
                raise
            raise BrokenIndex(f"{path.name} cannot be used: {describe(err)}") from err

    def load(self) -> Iterator[Row]:
        """All rows, in the order in which they were written; damaged ones are left out and noted in ``dropped``.

        :raises BrokenIndex: when the database is damaged; what came before is good.
        """
        shelves: dict[tuple[bytes, bytes], Shelf] = {}
        names: dict[bytes, bytes] = {}  # a child's parent and its parent's name need not be two objects
        try:
            for raw in self._connection.execute("SELECT * FROM blocks ORDER BY id"):
                row = _unpack(raw, shelves, names)
                if row is None:
                    self.dropped.append(raw[0])
                else:
                    yield row
        except _FAULTS as err:
            raise BrokenIndex(f"{self.path.name} cannot be read: {describe(err)}") from err

    def complete(self) -> None:
        """From now on it counts: until then, a new database is taken for a broken one when it is opened again.

        :raises sqlite3.Error: when that cannot be written.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(f"PRAGMA user_version = {FORMAT}")
        self._fs.commit(self._connection, self.path)

    def room(self, rows: int, tokens_bytes: int) -> int:
        """The most bytes its files may have after a change of ``rows`` blocks with ``tokens_bytes`` each."""
        growth = rows * (_ROW_BYTES + tokens_bytes) + (64 << 10)
        database = self._fs.file_bytes(self.path)
        return 2 * (database + growth) + WAL_BYTES + (32 << 10)

    def commit(
        self, *, put: Iterable[Row] = (), removed: Sequence[int] = (), noted: Iterable[tuple[int, Meta]] = ()
    ) -> None:
        """Make these changes, all or none, durably: rows to add or replace, numbers to remove, metas to replace.

        :raises sqlite3.Error: nothing was changed then.
        """
        database = self._connection
        try:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("DELETE FROM blocks WHERE id = ?", [(each,) for each in removed])
            database.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_pack, put)
            )
            changes = [(pack_meta(meta), number) for number, meta in noted]
            database.executemany("UPDATE blocks SET meta = ? WHERE id = ?", changes)
            self._fs.commit(database, self.path)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.rollback()
            raise
        finally:
            self._measure()

    def tidy(self, *, always: bool = False) -> None:
        """Empty the log when it has grown long (``always``: in any case), so that deleted rows are nowhere any more.

        :raises sqlite3.Error: when that fails; nothing is lost then.
        """
        if always or self._fs.file_bytes(self._side("-wal")) > WAL_BYTES:
            self._checkpoint()

    def _checkpoint(self) -> bool:
        """Whether the log is empty now: it is not while somebody else reads the database."""
        [(is_busy, *_)] = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._measure()
        return not is_busy

    def scrub(self) -> None:
        """Write the whole database anew: what was deleted may have left traces where rows were moved.

        :raises sqlite3.Error: when that fails, also because somebody else reads the database, so that its log keeps
            what was deleted; nothing is lost then.
        """
        self._connection.execute("VACUUM")
        if not self._checkpoint():
            raise sqlite3.OperationalError(f"another process reads {self.path}; end it and erase again")

    def close(self) -> None:
        """Give it back. Idempotent; raises nothing, since all that counts was committed."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _side(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _measure(self) -> None:
        self.bytes = sum(self._fs.file_bytes(self._side(suffix)) for suffix in ("", *SIDE_FILES))


def _make(fs: Filesystem, path: Path) -> bool:
    """SQLite would make the file with the mode of the umask, and its side files with the mode of the file."""
    if path.is_symlink() or path.exists():
        return False
    fs.create(path).close()
    return True


def _connect(path: Path, sync: str, *, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rw"
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=5.0,
    )
    connection.text_factory = bytes  # a damaged row may claim to be text
    settings = ("trusted_schema = OFF", "cell_size_check = ON", f"synchronous = {sync}", "secure_delete = ON")
    try:
        for each in (*settings, "wal_autocheckpoint = 0"):
            connection.execute(f"PRAGMA {each}").fetchall()
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
    except _FAULTS:
        connection.close()
        raise
    return connection


def _create(fs: Filesystem, path: Path, connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(_TABLE)
    fs.commit(connection, path)


def _check_kind(connection: sqlite3.Connection) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()
    version = connection.execute("PRAGMA user_version").fetchone()
    if application != (_APPLICATION,):
        raise BrokenIndex("the database is empty or not Octavo's")
    if version == (0,):
        raise BrokenIndex("the database was never completed")
    if version != (FORMAT,):  # that a later Octavo was here would be in ``identity.json`` too
        raise BrokenIndex(f"the database has format {version[0]} instead of {FORMAT}")
    # nothing but our table: no trigger or view of a stranger is ever run
    if connection.execute("SELECT sql FROM sqlite_schema").fetchall() != [(_TABLE.encode(),)]:
        raise BrokenIndex("the database has other tables than Octavo's")


def _pack(row: Row) -> _SqlRow:
    shelf, head, place = row.shelf, row.head, row.location
    blobs = (shelf.namespace, shelf.tenant, head.name, head.parent)
    check = _sum(row.id, head.start, place, blobs, head.tokens)
    return row.id, *blobs, head.start, head.tokens, *place, pack_meta(row.meta), check


def _unpack(raw: _SqlRow, shelves: dict[tuple[bytes, bytes], Shelf], names: dict[bytes, bytes]) -> Row | None:
    """``None`` for a row that anything in is wrong with, its types included."""
    number, namespace, tenant, name, parent, start, tokens, segment, offset, length, meta, check = raw
    place = Location(segment, offset, length)
    try:
        if _sum(number, start, place, (namespace, tenant, name, parent), tokens) != check or len(name) != NAME_BYTES:
            return None
        if (shelf := shelves.get((namespace, tenant))) is None:
            shelf = shelves[namespace, tenant] = Shelf(namespace, tenant)
        names[name] = name
        return Row(number, shelf, Head(name, names.get(parent, parent), start, tokens), place, unpack_meta(meta))
    except (TypeError, struct.error, CorruptBlock):
        return None


def _sum(number: int, start: int, place: Location, blobs: tuple[bytes, ...], tokens: bytes) -> int:
    data = b"".join((_NUMBERS.pack(number, start, *place), *blobs, tokens))
    value = xxhash.xxh3_64_intdigest(data)
    return value - (1 << 64) if value >> 63 else value  # SQLite's numbers have a sign
