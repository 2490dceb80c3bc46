"""How a tenant's blocks are made unreadable, and how everything on the disk is checked."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import CorruptBlock, FingerprintMismatch, StorageError, describe
from ..files.filesystem import Filesystem
from ..files.frame import Frame
from ..files.segment import SegmentReader, wipe
from .entries import Entry
from .folder import IDENTITY, LOCK, USED, is_ours, read_identity, remove
from .reader import read_frames
from .room import DiskRoom
from .segments import by_segment, segment_number
from .state import DiskState
from .writer import DiskWriter, writable

_BATCH = 64  # blocks that are read at once


class VerifyReport(NamedTuple):
    """Result of checking every byte that counts."""

    segments: int
    blocks: int
    bytes: int
    problems: tuple[str, ...]
    """What is wrong, one line each; empty when nothing is."""


def erase(state: DiskState, writer: DiskWriter, room: DiskRoom, tenant: bytes) -> int:
    """Overwrite all blocks of ``tenant`` in every segment, whether the index knows them or not, and in the folders of
    other identities; their rows, too. Returns how many blocks there were.

    :raises StorageError: when something could not be overwritten, or another engine holds one of the folders; as much
        as possible is erased then.
    """
    index = writable(state)
    state.segments.seal()
    shelves = [shelf for shelf in state.entries.shelves() if shelf.tenant == tenant]
    gone = sum(state.forget(entry) for shelf in shelves for entry in state.entries.all(shelf))
    state.entries.forget_tenant(tenant)
    problems: list[str] = []
    for number in list(state.segments.sizes):
        with _noting(problems):
            wipe_tenant(state.fs, state.segments.reader(number), state.segments.path(number), tenant)
    with _noting(problems):
        room.remove_dead()
        room.remove_strays()  # what was set aside may hold anything
    with _noting(problems):
        state.notes_bytes = state.folder.note(b"")  # what was learned of the blocks may tell of this tenant's
    with _noting(problems):
        writer.flush()
        index.scrub()
        state.fs.fsync_folder(state.folder.home)
    gone += _erase_others(state, tenant, problems)
    if problems:
        raise StorageError(f"not everything of the tenant could be erased from disk: {'; '.join(problems)}")
    return gone


def wipe_tenant(fs: Filesystem, reader: SegmentReader, path: Path, tenant: bytes) -> int:
    """Overwrite a tenant's frames in one segment, and whatever in it cannot be told; returns how many frames it was.

    :raises OSError: when it cannot be done.
    """
    with reader:
        found = [(at, head) for at, head in reader.walk() if head is None or head.shelf.tenant == tenant]
    if found:
        with fs.open_write(path) as file:
            for location, _ in found:
                wipe(fs, file, location)
            fs.fsync(file)
    return sum(head is not None for _, head in found)


def verify(state: DiskState) -> VerifyReport:
    """Read every block that the index knows, and the header of every segment."""
    problems: list[str] = []
    for number in state.segments.sizes:
        try:
            with state.segments.reader(number) as reader:
                reader.check()
        except (CorruptBlock, FingerprintMismatch, OSError) as err:
            problems.append(f"segment {number}: {describe(err)}")
    entries = {entry.location: entry for entry in state.entries.all()}
    for number, locations in by_segment(entries).items():
        with _noting(problems):
            for at in range(0, len(locations), _BATCH):
                some = locations[at : at + _BATCH]
                frames = zip(some, read_frames(state.segments, number, some), strict=True)
                problems += [text for at, frame in frames if (text := _wrong(entries[at], frame))]
    return VerifyReport(len(state.segments.sizes), len(entries), state.bytes, tuple(problems))


def _wrong(entry: Entry, frame: Frame | CorruptBlock) -> str:
    where = f"block {entry.head.name.hex()[:16]} in segment {entry.location.segment}"
    if isinstance(frame, CorruptBlock):
        return f"{where}: {frame}"
    return "" if (frame.shelf, frame.head) == (entry.shelf, entry.head) else f"{where}: another block is there"


def _erase_others(state: DiskState, tenant: bytes, problems: list[str]) -> int:
    """Segments of other identities are wiped, their databases removed: the next engine that opens them makes new ones.
    Folders in use are left to their engines, and said to be.
    """
    gone = 0
    for home in state.folder.other_homes():
        try:
            with state.folder.held(home):
                gone += _erase_home(state.fs, home, tenant)
        except BlockingIOError:
            problems.append(f"another engine uses {home}")
        except OSError as err:
            problems.append(describe(err))
    return gone


def _erase_home(fs: Filesystem, home: Path, tenant: bytes) -> int:
    identified = read_identity(fs, home)
    gone = 0
    for item in fs.list_folder(home):
        path = home / item.name
        number = segment_number(item.name)
        if number is None or identified is None:
            if item.name not in {IDENTITY, LOCK, USED} and is_ours(item):
                remove(fs, path, item)
            continue
        reader = SegmentReader(fs, path, number=number, identity=identified.identity.digest)
        gone += wipe_tenant(fs, reader, path, tenant)
    fs.fsync_folder(home)
    return gone


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Go on with the rest whatever fails."""
    try:
        yield
    except (OSError, sqlite3.Error) as err:
        problems.append(describe(err))
