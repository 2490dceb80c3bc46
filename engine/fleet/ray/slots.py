"""Folders that replicas take over from each other, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

from ....errors import StorageError, describe
from ....storage.files.filesystem import File, Filesystem

SNAPSHOT: Final = "snapshot"
"""What a slot calls the snapshot that was left in it."""


@contextmanager
def claimed(root: Path) -> Iterator[Path]:
    """The first folder below ``root`` that nobody uses; those with a snapshot come first, the newest before the others.

    It is free again when the context is left, or when the process dies, however that happens: nothing is ever moved,
    so nothing is lost on the way, and there are never more folders than there were users at the same time.

    :raises StorageError: when ``root`` cannot be used.
    """
    try:
        folder, lock = _first_free(root)
    except OSError as error:
        raise StorageError(f"the folder {root} cannot be used: {describe(error)}") from error
    try:
        yield folder
    finally:
        lock.close()


def _first_free(root: Path) -> tuple[Path, File]:
    filesystem = Filesystem()
    filesystem.make_folder(root)
    return next(claim for folder in _candidates(root) if (claim := _claim(filesystem, folder)) is not None)


def _claim(filesystem: Filesystem, folder: Path) -> tuple[Path, File] | None:
    filesystem.make_folder(folder)
    try:
        return folder, filesystem.lock(folder / "lock")
    except BlockingIOError:
        return None


def _candidates(root: Path) -> Iterator[Path]:
    known = [folder for folder in root.iterdir() if folder.name.isdecimal()]
    yield from sorted(known, key=_left_at, reverse=True)
    names = {folder.name for folder in known}
    yield from (root / str(number) for number in count() if str(number) not in names)


def _left_at(folder: Path) -> float:
    """When its snapshot was written, seconds since the epoch; 0: it has none."""
    try:
        return (folder / SNAPSHOT).stat().st_mtime
    except FileNotFoundError:
        return 0.0
