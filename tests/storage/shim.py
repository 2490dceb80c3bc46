"""A file system that records what is asked of it, replays the disk as after a crash, and fails on request.

``RecordingFilesystem`` does every operation for real and notes it in ``operations``. ``replay(count, how, target)``
then builds in another folder what the disk may hold after a crash right after the first ``count`` operations:

* ``ALL``: everything, as after SIGKILL.
* ``SYNCED``: after a loss of power, the least that was promised: bytes by ``fsync``, names by ``fsync_folder``.
* ``NAMES``: after a loss of power, all names, but of the bytes only the promised ones (zeros up to the length).
* ``TORN``: everything, but of the last write only the first half.

A commit of a database is one operation: SQLite keeps it whole, and with ``synchronous=FULL`` it is durable. Its image
is noted, not its pages. The recording must begin with an empty ``root``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from octavo.storage.files.filesystem import File, Filesystem


class Crash(Enum):
    ALL = "all"
    SYNCED = "synced"
    NAMES = "names"
    TORN = "torn"


class Operation(NamedTuple):
    kind: str
    path: Path
    target: Path | None = None
    """Of a rename."""
    inode: int = -1
    offset: int = 0
    data: bytes = b""


class RecordingFilesystem(Filesystem):
    database_sync = "OFF"  # what a crash leaves is built from the recording

    def __init__(self, root: Path, before: Callable[[str, Path], None] | None = None) -> None:
        """``before(kind, path)`` is called ahead of each operation that changes something, ``commit`` and ``lock``
        included; what it raises comes out.
        """
        self.root = root
        self.operations: list[Operation] = []
        self._before = before
        self._inodes: dict[Path, int] = {}
        self._files = 0

    def make_folder(self, path: Path) -> None:
        self._ask("make_folder", path)
        super().make_folder(path)
        self.operations.append(Operation("make_folder", path))

    def create(self, path: Path) -> File:
        self._ask("create", path)
        file = super().create(path)
        self._inodes[path] = self._files
        self._files += 1
        self._note("create", path)
        return file

    def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        self._ask("write", file.path)
        super().write(file, offset, buffers)
        self._note("write", file.path, offset, b"".join(bytes(each) for each in buffers))

    def fsync(self, file: File) -> None:
        self._ask("fsync", file.path)
        self._note("fsync", file.path)

    def fsync_folder(self, path: Path) -> None:
        self._ask("fsync_folder", path)
        self.operations.append(Operation("fsync_folder", path))

    def rename(self, source: Path, target: Path) -> None:
        self._ask("rename", source)
        super().rename(source, target)
        for path in [each for each in self._inodes if each == source or source in each.parents]:
            self._inodes[target / path.relative_to(source)] = self._inodes.pop(path)
        self.operations.append(Operation("rename", source, target))

    def unlink(self, path: Path) -> None:
        self._ask("unlink", path)
        super().unlink(path)
        self._note("unlink", path)
        self._inodes.pop(path, None)

    def truncate(self, file: File, length: int) -> None:
        self._ask("truncate", file.path)
        super().truncate(file, length)
        self._note("truncate", file.path, length)

    def remove_folder(self, path: Path) -> None:
        self._ask("remove_folder", path)
        super().remove_folder(path)
        self.operations.append(Operation("remove_folder", path))

    def commit(self, connection: sqlite3.Connection, path: Path) -> None:
        self._ask("commit", path)
        super().commit(connection, path)
        self.operations.append(Operation("commit", path, data=connection.serialize()))

    def lock(self, path: Path) -> File:
        self._ask("lock", path)
        return super().lock(path)

    def replay(self, count: int, how: Crash, target: Path) -> None:
        """Build under ``target``, which must be empty, what may be left under ``root`` after ``count`` operations."""
        disk = _Disk(self.root)
        done = self.operations[:count]
        for number, operation in enumerate(done):
            torn = how is Crash.TORN and number == count - 1 and operation.kind == "write"
            half = operation.data[: len(operation.data) // 2]
            disk.apply(operation._replace(data=half) if torn else operation)
        disk.write_out(target, how)

    def _ask(self, kind: str, path: Path) -> None:
        if self._before is not None:
            self._before(kind, path)

    def _note(self, kind: str, path: Path, offset: int = 0, data: bytes = b"") -> None:
        self.operations.append(Operation(kind, path, None, self._inodes.get(path, -1), offset, data))


class _Folder(NamedTuple):
    """Names in a folder: as the system shows them, and as the disk was promised to hold them."""

    now: dict[str, int]
    durable: dict[str, int]
    databases: dict[str, bytes]


class _Disk:
    """Files and folders by number, each with what is seen and what is durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders = {0: _Folder({}, {}, {})}
        self.bytes: dict[int, bytearray] = {}
        self.durable_bytes: dict[int, bytes] = {}
        self._next = -1  # folders are numbered downwards, files upwards

    def apply(self, operation: Operation) -> None:
        if operation.inode >= 0 or operation.kind not in {
            "write",
            "truncate",
            "fsync",
        }:  # else older than the recording
            getattr(self, f"_{operation.kind}")(operation)

    def write_out(self, target: Path, how: Crash, number: int = 0) -> None:
        folder = self.folders[number]
        target.mkdir(parents=True, exist_ok=True)
        for name, child in (folder.durable if how is Crash.SYNCED else folder.now).items():
            if child in self.folders:
                self.write_out(target / name, how, child)
            else:
                (target / name).write_bytes(self._content(child - 1, how))
        for name, image in folder.databases.items():
            (target / name).write_bytes(image)

    def _content(self, inode: int, how: Crash) -> bytes:
        content = bytes(self.bytes[inode])
        if how in {Crash.ALL, Crash.TORN}:
            return content
        durable = self.durable_bytes.get(inode, b"")
        return durable if how is Crash.SYNCED else durable[: len(content)].ljust(len(content), b"\x00")

    def _folder(self, path: Path) -> _Folder:
        number = 0
        for name in path.relative_to(self.root).parts:
            number = self._child(self.folders[number], name)
        return self.folders[number]

    def _child(self, folder: _Folder, name: str) -> int:
        if name not in folder.now:
            self.folders[self._next] = _Folder({}, {}, {})
            folder.now[name] = self._next
            self._next -= 1
        return folder.now[name]

    def _make_folder(self, operation: Operation) -> None:
        self._folder(operation.path)

    def _remove_folder(self, operation: Operation) -> None:
        self._folder(operation.path.parent).now.pop(operation.path.name, None)

    def _create(self, operation: Operation) -> None:
        self._folder(operation.path.parent).now[operation.path.name] = operation.inode + 1
        self.bytes[operation.inode] = bytearray()

    def _write(self, operation: Operation) -> None:
        content = self.bytes[operation.inode]
        end = operation.offset + len(operation.data)
        content.extend(bytes(max(end - len(content), 0)))
        content[operation.offset : end] = operation.data

    def _truncate(self, operation: Operation) -> None:
        content = self.bytes[operation.inode]
        del content[operation.offset :]
        content.extend(bytes(operation.offset - len(content)))

    def _fsync(self, operation: Operation) -> None:
        self.durable_bytes[operation.inode] = bytes(self.bytes[operation.inode])

    def _fsync_folder(self, operation: Operation) -> None:
        folder = self._folder(operation.path)
        folder.durable.clear()
        folder.durable.update(folder.now)

    def _unlink(self, operation: Operation) -> None:
        folder = self._folder(operation.path.parent)
        folder.now.pop(operation.path.name, None)
        folder.databases.pop(operation.path.name, None)

    def _rename(self, operation: Operation) -> None:
        assert operation.target is not None
        source, target = self._folder(operation.path.parent), self._folder(operation.target.parent)
        for old, new in ((source.now, target.now), (source.databases, target.databases)):
            if operation.path.name in old:
                new[operation.target.name] = old.pop(operation.path.name)  # type: ignore[assignment]  # same kind

    def _commit(self, operation: Operation) -> None:
        self._folder(operation.path.parent).databases[operation.path.name] = operation.data
