"""The few operations on files that everything durable goes through.

All of them are here and nowhere else, so that a test can record them, cut them off at any point, and make any one
fail. Files are made with mode 0600 and folders with 0700, whatever the umask. Nothing here follows a symbolic link in
the last part of a path. Every method blocks and raises :class:`OSError` as the system gave it; callers run it in
threads and map its errors. Network file systems are not supported: locks and ``fsync`` mean too little there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_BUFFERS_PER_CALL = 512  # below every system's limit of buffers in one call
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW


class File:
    """An open file. Close it, or use it as a context manager."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self.path = path
        self._open = True

    def close(self) -> None:
        """Give the descriptor back, and with it a lock. Idempotent; an error of the system is of no use here."""
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FolderItem(NamedTuple):
    """One name in a folder."""

    name: str
    is_folder: bool
    """False for links, too, wherever they lead."""
    bytes: int
    is_file: bool
    """A regular one."""


class Filesystem:
    """The real one. Safe in any thread."""

    database_sync: ClassVar[str] = "FULL"
    """SQLite's ``synchronous``: a commit is durable, as an ``fsync`` is."""

    def make_folder(self, path: Path) -> None:
        """See to it that ``path`` is a folder of mode 0700. Missing parents are made, durably. One that is
        there is tightened.

        :raises OSError: also ``ENOTDIR`` when there is a file or a link.
        """
        for folder in reversed(path.parents):
            if not folder.exists():
                folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
                self.fsync_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        if stat.S_IMODE(found.st_mode) != FOLDER_MODE:
            path.chmod(FOLDER_MODE)

    def tighten(self, path: Path) -> None:
        """Give a file mode 0600. A link is left alone."""
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != FILE_MODE:
            path.chmod(FILE_MODE)

    def create(self, path: Path) -> File:
        """A new file for reading and writing.

        :raises FileExistsError: when the name is taken, by whatever.
        """
        return self._new(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, FILE_MODE))

    def open_read(self, path: Path) -> File:
        """A file that is there; it must be a regular one."""
        return self._regular(path, os.O_RDONLY)

    def open_write(self, path: Path) -> File:
        """The same, to overwrite parts of it."""
        return self._regular(path, os.O_RDWR)

    def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        """All of ``buffers``, one after the other, at ``offset`` bytes. After an error any part may be written."""
        left = [memoryview(each).cast("B") for each in buffers if len(each)]
        at = 0
        while at < len(left):
            written = os.pwritev(file.descriptor, left[at : at + _BUFFERS_PER_CALL], offset)
            offset += written
            while at < len(left) and written >= len(left[at]):
                written -= len(left[at])
                at += 1
            if written:
                left[at] = left[at][written:]

    def read_into(self, file: File, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; returns how many bytes there were, fewer only at the end of the file."""
        done = 0
        while done < len(buffer):
            got = os.preadv(file.descriptor, [buffer[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def read_file(self, path: Path, limit: int) -> bytes:
        """A whole small file.

        :raises OSError: ``EFBIG`` when it has more than ``limit`` bytes.
        """
        with self.open_read(path) as file:
            length = self.size(file)
            if length > limit:
                raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
            buffer = bytearray(length)
            return bytes(buffer[: self.read_into(file, 0, memoryview(buffer))])

    def size(self, file: File) -> int:
        """Length in bytes."""
        return os.fstat(file.descriptor).st_size

    def fsync(self, file: File) -> None:
        """Return when the file's bytes are on the disk. After an error none since the last success can be relied on."""
        os.fsync(file.descriptor)

    def fsync_folder(self, path: Path) -> None:
        """Return when the names in the folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move, replacing what is at ``target`` in one step."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name. Who has it open can go on reading."""
        path.unlink()

    def truncate(self, file: File, length: int) -> None:
        """Cut the file off after ``length`` bytes."""
        os.ftruncate(file.descriptor, length)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def commit(self, connection: sqlite3.Connection, path: Path) -> None:
        """Commit the open transaction of the database at ``path``.

        :raises sqlite3.Error: as SQLite gave it; the transaction is still open then.
        """
        connection.commit()

    def list_folder(self, path: Path) -> list[FolderItem]:
        """What is in a folder, sorted by name. Names that go meanwhile are left out."""
        items = []
        with os.scandir(path) as found:
            for each in found:
                with contextlib.suppress(FileNotFoundError):
                    stats = each.stat(follow_symlinks=False)
                    kinds = stat.S_ISDIR(stats.st_mode), stat.S_ISREG(stats.st_mode)
                    items.append(FolderItem(each.name, kinds[0], stats.st_size, kinds[1]))
        return sorted(items)

    def file_bytes(self, path: Path) -> int:
        """Length of the file at ``path``; 0 when there is none."""
        try:
            return path.lstat().st_size
        except FileNotFoundError:
            return 0

    def free_bytes(self, folder: Path) -> int:
        """What an ordinary user may still write on the file system of ``folder``."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def lock(self, path: Path) -> File:
        """Hold ``path``, made if need be, alone among all processes until the result is closed. The system releases it
        when the process dies, however that happens.

        :raises BlockingIOError: when somebody else holds it, in this process or another.
        """
        file = self._new(path, os.open(path, os.O_RDWR | os.O_CREAT | _SAFE, FILE_MODE))
        try:
            fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.descriptor), path.lstat()):
                raise BlockingIOError(errno.EWOULDBLOCK, "the lock was removed while it was taken", str(path))
        except OSError:
            file.close()
            raise
        return file

    def _new(self, path: Path, descriptor: int) -> File:
        file = File(descriptor, path)
        try:
            os.fchmod(descriptor, FILE_MODE)
        except OSError:
            file.close()
            raise
        return file

    def _regular(self, path: Path, access: int) -> File:
        # without O_NONBLOCK, opening a pipe that somebody put there would wait for ever
        file = File(os.open(path, access | _SAFE | os.O_NONBLOCK), path)
        if stat.S_ISREG(os.fstat(file.descriptor).st_mode):
            return file
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
