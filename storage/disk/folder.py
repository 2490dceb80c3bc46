"""Layout of the disk tier's folder.

::

    PATH/<first 16 digits of the identity's digest>/identity.json     what the blocks belong to, in parts
                                                    lock              held by the one engine that writes
                                                    used              wall clock of the last use
                                                    notes             what the engine has learned of the blocks
                                                    index.sqlite      which block lies where (and -wal, -shm)
                                                    blocks-<n>.seg    the blocks
                                                    *.broken-<n>      set aside: could not be read

One folder per identity, so that blocks of other weights, another dtype or another tokenizer are never even looked at.
``PATH`` itself may be a link, which is resolved once; a link in the place of an inner folder is refused. File names
hold nothing of what the blocks were computed from. Files that are not ours are never touched.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import xxhash

from ..base import MOST_NOTES
from ..files.filesystem import File, Filesystem, FolderItem
from ..identity import Identity
from .index import FORMAT, SIDE_FILES
from .segments import segment_number

INDEX = "index.sqlite"
IDENTITY = "identity.json"
LOCK = "lock"
USED = "used"
NOTES = "notes"
_SMALL_BYTES = 1 << 20
_CHECK_BYTES = 16
_HOME = re.compile(r"[0-9a-f]{16}(\.newer-\d+)?")
_NAMES = r"(identity\.json|lock|used|notes|index\.sqlite(-wal|-shm|-journal)?|blocks-\d{8,18}\.seg)"
_OURS = re.compile(_NAMES)
_STRAY = re.compile(_NAMES + r"(\.tmp)?(\.tmp|\.broken-\d+)")


class Identified(msgspec.Struct, frozen=True):
    """Content of ``identity.json``."""

    format: int
    identity: Identity
    check: str
    """XXH3-64 over both, so that a damaged number is not taken for a later format."""

    @classmethod
    def of(cls, identity: Identity, version: int = FORMAT) -> Self:
        """What this version of Octavo writes."""
        return cls(version, identity, xxhash.xxh3_64_hexdigest(f"{version} {identity.digest}".encode()))


class OtherHome(NamedTuple):
    """Folder of another identity."""

    path: Path
    bytes: int
    idle: float
    """Seconds since it was last used."""


class DiskFolder:
    """The folder of one identity, and its neighbours. Blocks; one thread at a time. Every method raises ``OSError``."""

    def __init__(self, fs: Filesystem, root: Path, identity: Identity, wall: Callable[[], float]) -> None:
        self.root = Path(os.path.realpath(root))
        self.home = self.root / identity.digest[:16]
        self.newer: Path | None = None
        """Where ``prepare`` has moved what a later version of Octavo wrote."""
        self._fs = fs
        self._identity = identity
        self._wall = wall

    @property
    def index(self) -> Path:
        """The database."""
        return self.home / INDEX

    def prepare(self) -> File:
        """Make what is missing, lock it, and mark it as in use. What a later version of Octavo wrote is set aside.

        :raises BlockingIOError: when another engine has it.
        """
        for folder in (self.root, self.home):
            is_new = not folder.exists()
            if is_new or folder == self.home or (folder == self.root and self._is_root_ours()):
                self._fs.make_folder(folder)
            if is_new:
                self._fs.fsync_folder(folder.parent)
        self._set_strangers_aside({LOCK})
        lock = self._fs.lock(self.home / LOCK)
        if self.is_newer():
            lock.close()
            self._set_home_aside()
            return self.prepare()
        try:
            self._set_strangers_aside()
            self._tighten()
            if read_identity(self._fs, self.home) != Identified.of(self._identity):
                self._replace(self.home / IDENTITY, msgspec.json.encode(Identified.of(self._identity)))
            self.stamp()
        except BaseException:
            lock.close()
            raise
        return lock

    def is_newer(self) -> bool:
        """Whether a later version of Octavo wrote what is there."""
        found = read_identity(self._fs, self.home)
        return found is not None and found.format > FORMAT

    def stamp(self) -> None:
        """Note that it is in use now."""
        self._replace(self.home / USED, repr(self._wall()).encode())

    def note(self, notes: bytes) -> int:
        """Keep ``notes``, or none when they are empty; returns the length of their file."""
        path = self.home / NOTES
        if not notes:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path)
            return 0
        content = xxhash.xxh3_128_digest(notes) + notes
        self._replace(path, content)
        return len(content)

    def notes(self) -> bytes | None:
        """What was noted; ``None``: nothing, or it was altered."""
        try:
            content = self._fs.read_file(self.home / NOTES, MOST_NOTES + _CHECK_BYTES)
        except FileNotFoundError:
            return None
        notes = content[_CHECK_BYTES:]
        return notes if notes and content[:_CHECK_BYTES] == xxhash.xxh3_128_digest(notes) else None

    def notes_bytes(self) -> int:
        """Length of their file."""
        return sum(item.bytes for item in self._fs.list_folder(self.home) if item.name == NOTES)

    def segments(self) -> dict[int, int]:
        """Number and length of the segment files."""
        found = ((segment_number(item.name), item) for item in self._fs.list_folder(self.home) if not item.is_folder)
        return {number: item.bytes for number, item in found if number is not None}

    def strays(self) -> list[FolderItem]:
        """What has no use any more: temporary files and what was set aside."""
        return [item for item in self._fs.list_folder(self.home) if _is_stray(item)]

    def set_aside(self, path: Path) -> Path:
        """Move something unreadable out of the way; returns where it is now. A database takes its side files along."""
        target = free_name(path, "broken")
        self._fs.rename(path, target)
        for suffix in SIDE_FILES:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path.with_name(path.name + suffix))
        self._fs.fsync_folder(path.parent)
        return target

    def _set_home_aside(self) -> None:
        """The same for the whole folder."""
        self.newer = free_name(self.home, "newer")
        self._fs.rename(self.home, self.newer)
        self._fs.fsync_folder(self.root)

    def other_homes(self) -> list[Path]:
        """Folders of all other identities."""
        found = [item.name for item in self._fs.list_folder(self.root) if item.is_folder and _HOME.fullmatch(item.name)]
        return [self.root / name for name in found if self.root / name != self.home]

    def _is_root_ours(self) -> bool:
        """Whether nothing else is in it; otherwise its mode is the user's matter."""
        return all(_HOME.fullmatch(item.name) for item in self._fs.list_folder(self.root))

    def others(self) -> list[OtherHome]:
        """Folders of other identities that no engine holds, the one unused for longest first."""
        found = []
        for path in self.other_homes():
            with contextlib.suppress(OSError), self.held(path):
                found.append(OtherHome(path, self._bytes(path), self._idle(path)))
        return sorted(found, key=lambda other: -other.idle)

    def remove_other(self, other: OtherHome) -> None:
        """Remove another identity's folder.

        :raises BlockingIOError: when an engine has taken it meanwhile.
        """
        with self.held(other.path):
            for item in self._fs.list_folder(other.path):
                if is_ours(item) and item.name != LOCK:
                    remove(self._fs, other.path / item.name, item)
            self._fs.unlink(other.path / LOCK)
        with contextlib.suppress(OSError):  # something that is not ours is in it
            self._fs.remove_folder(other.path)

    def held(self, home: Path) -> File:
        """The lock of another identity's folder.

        :raises BlockingIOError: when an engine has it.
        """
        return self._fs.lock(home / LOCK)

    def _bytes(self, home: Path) -> int:
        return sum(item.bytes for item in self._fs.list_folder(home))

    def _idle(self, home: Path) -> float:
        """A time in the future is put right, so that no folder stays for ever."""
        now = self._wall()
        try:
            used = float(self._fs.read_file(home / USED, 64))
        except (OSError, ValueError):
            used = math.nan
        if used <= now:
            return now - used
        self._replace(home / USED, repr(now).encode())
        return 0.0

    def _replace(self, path: Path, content: bytes) -> None:
        """A small file, whole or not at all."""
        temporary = path.with_name(f"{path.name}.tmp")
        if os.path.lexists(temporary):
            if temporary.is_dir() and not temporary.is_symlink():
                self.set_aside(temporary)
            else:
                self._fs.unlink(temporary)
        with self._fs.create(temporary) as file:
            self._fs.write(file, 0, [content])
            self._fs.fsync(file)
        self._fs.rename(temporary, path)
        self._fs.fsync_folder(path.parent)

    def _set_strangers_aside(self, names: Collection[str] | None = None) -> None:
        """What has the name of one of our files and is none: a folder, a link, a pipe."""
        for item in self._fs.list_folder(self.home):
            is_wanted = is_ours(item) and not _is_stray(item) if names is None else item.name in names
            if is_wanted and not item.is_file:
                self.set_aside(self.home / item.name)

    def _tighten(self) -> None:
        """Files of an earlier time may be open to others."""
        for item in self._fs.list_folder(self.home):
            if is_ours(item) and not item.is_folder:
                self._fs.tighten(self.home / item.name)


def read_identity(fs: Filesystem, home: Path) -> Identified | None:
    """What a folder belongs to; ``None`` when nothing readable says so."""
    try:
        found = msgspec.json.decode(fs.read_file(home / IDENTITY, _SMALL_BYTES), type=Identified)
    except (OSError, msgspec.DecodeError, ValueError):
        return None
    return found if found == Identified.of(found.identity, found.format) else None


def is_ours(item: FolderItem) -> bool:
    """Whether a name is one that the disk tier makes."""
    return _OURS.fullmatch(item.name) is not None or _is_stray(item)


def free_name(path: Path, why: str) -> Path:
    """``path`` with a suffix that is not taken."""
    number = 1
    while (target := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    return target


def remove(fs: Filesystem, path: Path, item: FolderItem) -> None:
    """Remove a file, or an empty folder that was found in the place of one."""
    with contextlib.suppress(FileNotFoundError):
        if item.is_folder:
            fs.remove_folder(path)
        else:
            fs.unlink(path)


def _is_stray(item: FolderItem) -> bool:
    return _STRAY.fullmatch(item.name) is not None
