"""A snapshot whose commit is in doubt, one that was given up before it began, and folders that last."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from octavo.errors import StorageError
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.snapshot.format import MANIFEST
from octavo.storage.snapshot.writer import SnapshotWriter
from octavo.tests.storage.disk_samples import Bench, QuickFilesystem
from octavo.tests.storage.snapshot_samples import SAMPLES, blocks, content, read, settings, write


class FailsAfterTheRename(Filesystem):
    """Once a manifest was put in its place, nothing can be made durable any more."""

    is_broken = False

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.is_broken = self.is_broken or target.name == MANIFEST

    def fsync(self, file: File) -> None:
        self._check()
        super().fsync(file)

    def fsync_folder(self, path: Path) -> None:
        self._check()
        super().fsync_folder(path)

    def _check(self) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize("which", ["old", "new"])
def test_both_generations_stay_when_nobody_knows_which_manifest_the_disk_has(tmp_path: Path, which: str) -> None:
    location = tmp_path / "snap"
    write(location, content(1), settings())
    manifests = {"old": (location / MANIFEST).read_bytes()}
    with pytest.raises(StorageError, match="broken"):
        write(location, content(2), settings(FailsAfterTheRename()))
    manifests["new"] = (location / MANIFEST).read_bytes()
    (location / MANIFEST).write_bytes(manifests[which])  # what a loss of power may leave
    assert read(location) == blocks(content(1 if which == "old" else 2))


def test_the_next_writer_removes_what_the_doubt_has_left(tmp_path: Path) -> None:
    location = tmp_path / "snap"
    write(location, content(1), settings())
    with pytest.raises(StorageError, match="broken"):
        write(location, content(2), settings(FailsAfterTheRename()))
    write(location, content(3), settings())
    assert read(location) == blocks(content(3))
    assert sum(path.is_dir() for path in location.iterdir()) == 1


def test_a_snapshot_that_was_abandoned_before_it_began_does_not_hold_its_place(tmp_path: Path) -> None:
    location = tmp_path / "snap"
    writer = SnapshotWriter(location, SAMPLES.geometry, settings())
    writer.abandon()
    with pytest.raises(StorageError, match="abandoned"):
        writer.begin()
    write(location, content(1), settings())
    assert read(location) == blocks(content(1))


class NotingFilesystem(QuickFilesystem):
    """Remembers which folders' names were made durable."""

    def __init__(self) -> None:
        self.durable: set[Path] = set()

    def fsync_folder(self, path: Path) -> None:
        self.durable.add(path)


@pytest.mark.parametrize("kind", ["disk", "snapshot"])
def test_every_folder_that_was_made_on_the_way_lasts(tmp_path: Path, kind: str) -> None:
    fs, place = NotingFilesystem(), tmp_path / "a" / "b" / "c"
    if kind == "disk":
        with Bench(place, fs=fs).opened():
            pass
    else:
        write(place, content(1), settings(fs))
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", place} <= fs.durable
