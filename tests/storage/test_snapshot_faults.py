"""Crashes, failing calls and altered bytes: the old snapshot or the new one, and never a wrong byte."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.errors import StorageError
from octavo.storage.files.filesystem import Filesystem
from octavo.storage.files.frame import Frame
from octavo.storage.naming import tenant_digest
from octavo.storage.snapshot.rewrite import erase_tenant
from octavo.storage.snapshot.verify import verify_snapshot
from octavo.storage.snapshot.writer import SnapshotSettings, SnapshotWriter
from octavo.tests.storage.shim import Crash, RecordingFilesystem
from octavo.tests.storage.snapshot_samples import (
    SAMPLES,
    Blocks,
    Content,
    blocks,
    content,
    files,
    read,
    settings,
    write,
)

OLD, NEW = blocks(content(1)), blocks(content(2))
PUBLIC = {at: data for at, data in OLD.items() if at[0] == SAMPLES.shelf()}
Scenario = Callable[[Path, SnapshotSettings], None]


def first(location: Path, how: SnapshotSettings) -> None:
    write(location, content(1), how)


def replace(location: Path, how: SnapshotSettings) -> None:
    first(location, how)
    write(location, content(2), how)


def erase(location: Path, how: SnapshotSettings) -> None:
    first(location, how)
    erase_tenant(how, location, tenant_digest("a"))


SCENARIOS: dict[str, tuple[Scenario, list[Blocks]]] = {
    "first": (first, [OLD]),
    "replace": (replace, [OLD, NEW]),
    "erase": (erase, [OLD, PUBLIC]),
}


def found(location: Path) -> Blocks | None:
    try:
        return read(location)
    except StorageError:
        return None


@pytest.mark.parametrize("how", Crash)
@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_crash_there_is_the_old_or_the_new_one(tmp_path: Path, name: str, how: Crash) -> None:
    """Cut after every operation. States come in order, so no crash goes back behind a snapshot that was committed."""
    scenario, states = SCENARIOS[name]
    fs = RecordingFilesystem(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    committed: list[int] = []
    scenario(tmp_path / "disk" / "snap", settings(fs))
    for at, operation in enumerate(fs.operations):  # a commit has returned only after the folder was synced
        if operation.kind == "fsync_folder" and any(each.kind == "rename" for each in fs.operations[at - 1 : at]):
            committed.append(at + 1)
    assert len(committed) == len(states)
    seen = set()
    for count in range(len(fs.operations) + 1):
        target = tmp_path / "crashed"
        fs.replay(count, how, target)
        state = found(target / "snap")
        least = sum(count >= commit for commit in committed)  # states that were promised by now
        allowed = ([None, *states])[least : least + 2]
        assert state in allowed, f"after {count} operations"
        seen.add([None, *states].index(state))
        _goes_on(target / "snap", state)
        shutil.rmtree(target)
    assert seen == set(range(len(states) + 1))


def _goes_on(location: Path, state: Blocks | None) -> None:
    """Whatever a crash left, the next snapshot is written and no stray file stays."""
    problems = [] if state is None else verify_snapshot(location, Filesystem()).problems
    assert problems == []
    write(location, content(3, ["z"]), settings())
    assert read(location) == blocks(content(3, ["z"]))
    assert sorted(path.name for path in files(location)) == [
        "blocks-00000.seg",
        "blocks-00001.seg",
        "lock",
        "manifest.json",
        "tree",
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_that_fails_leaves_the_old_one(tmp_path: Path, name: str, code: int) -> None:
    scenario, states = SCENARIOS[name]
    for location, failed in _failing_each(tmp_path, scenario, code):
        state = found(location)
        assert state in [None, *states]
        if failed:
            assert state != states[-1]
        write(location, content(3), settings())
        assert read(location) == blocks(content(3))
        assert len(list(location.iterdir())) == 3


def _failing_each(tmp_path: Path, scenario: Scenario, code: int) -> Iterator[tuple[Path, bool]]:
    """Run it with the first call failing, then the second, ...; yields whether it said so."""
    for number in itertools.count(1):
        fault = Fault(number, code)
        root = tmp_path / f"{number}"
        root.mkdir()
        failed = False
        try:
            scenario(root / "snap", settings(RecordingFilesystem(root, before=fault)))
        except StorageError:
            failed = True
        yield root / "snap", failed
        if fault.calls < number:
            return


class Fault:
    """Lets one call fail."""

    def __init__(self, number: int, code: int) -> None:
        self.calls = 0
        self.number = number
        self.code = code

    def __call__(self, kind: str, path: Path) -> None:
        self.calls += 1
        if self.calls == self.number:
            raise OSError(self.code, "injected")


def test_one_failure_after_the_rename_takes_it_back(tmp_path: Path) -> None:
    """The folder could not be synced: the new one may not last, so the old one is put back."""
    location = tmp_path / "snap"
    write(location, content(1), settings())
    fs = RecordingFilesystem(tmp_path)
    armed = False

    def fail(kind: str, path: Path) -> None:
        nonlocal armed
        if kind == "fsync_folder" and armed:
            armed = False
            raise OSError(errno.EIO, "injected")
        armed = armed or kind == "rename"

    broken = RecordingFilesystem(tmp_path, before=fail)
    with pytest.raises(StorageError, match="injected"):
        write(location, content(2), settings(broken))
    assert read(location) == OLD
    assert fs.operations == []


def test_every_altered_byte_is_found(tmp_path: Path) -> None:
    _alter(tmp_path, content(1), stride=97)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_altered_byte_is_found_without_exception(tmp_path: Path) -> None:
    shelf = SAMPLES.shelf()
    _alter(tmp_path, {shelf: SAMPLES.chain(shelf, 2)}, stride=1)


def _alter(tmp_path: Path, of: Content, stride: int) -> None:
    location = tmp_path / "snap"
    write(location, of, settings())
    assert verify_snapshot(location, Filesystem()).problems == []
    for path in files(location):
        if path.name == "lock":
            continue
        good = path.read_bytes()
        for at in range(0, len(good), stride):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([good[at] ^ (1 << at % 8)]))
            assert verify_snapshot(location, Filesystem()).problems, f"byte {at} of {path.name}"
            _assert_nothing_wrong(location, blocks(of))
            with path.open("r+b") as file:
                file.seek(at)
                file.write(good[at : at + 1])
    assert read(location) == blocks(of)


def _assert_nothing_wrong(location: Path, good: Blocks) -> None:
    try:
        state = read(location, bad=lambda _: None)
    except StorageError:
        return
    assert state.items() <= good.items()


@pytest.mark.parametrize("name", ["tree", "blocks-00000.seg", "blocks-00002.seg"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "folder", "gone", "link", "swapped", "pickle"])
def test_a_damaged_file_is_refused_or_a_miss(tmp_path: Path, name: str, damage: str) -> None:
    location, marker = tmp_path / "snap", tmp_path / "marker"
    write(location, content(1), settings())
    write(tmp_path / "other", content(2), settings())
    [path] = location.rglob(name)
    [other] = (tmp_path / "other").rglob(name)
    good = path.read_bytes()
    path.unlink()
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    if damage == "folder":
        path.mkdir()
    elif damage == "link":
        path.symlink_to(other)
    elif damage != "gone":
        changed = {
            "truncated": good[: len(good) // 2],
            "longer": good + bytes(4096),
            "empty": b"",
            "swapped": other.read_bytes(),
            "pickle": payload.ljust(len(good), b"\x00"),
        }
        path.write_bytes(changed[damage])
    _assert_nothing_wrong(location, OLD)
    assert verify_snapshot(location, Filesystem()).problems
    assert not marker.exists()
    write(location, content(2), settings())
    assert read(location) == NEW


def test_a_tree_that_was_altered_in_place_is_refused(tmp_path: Path) -> None:
    """Also where every value in it is possible: what policies know of a block, here."""
    location = tmp_path / "snap"
    write(location, content(1), settings())
    [path] = location.rglob("tree")
    good = path.read_bytes()
    at = good.index(bytes(8 * 6))  # the column of hits, all 0
    path.write_bytes(good[:at] + b"\x07" + good[at + 1 :])
    with pytest.raises(StorageError, match="checksum of its tree"):
        read(location)


def test_a_segment_with_something_after_its_end_is_refused(tmp_path: Path) -> None:
    location = tmp_path / "snap"
    write(location, content(1), settings())
    with next(location.rglob("*.seg")).open("ab") as file:
        file.write(bytes(4096))
    with pytest.raises(StorageError, match="16384 bytes instead of 12288"):
        read(location)


def test_verify_finds_what_does_not_belong(tmp_path: Path) -> None:
    location = tmp_path / "snap"
    write(location, content(1), settings())
    (next(location.rglob("tree")).parent / "blocks-00099.seg").write_bytes(b"x")
    assert verify_snapshot(location, Filesystem()).problems == ["blocks-00099.seg: does not belong to the snapshot"]


def test_verify_finds_a_block_that_the_tree_does_not_have(tmp_path: Path) -> None:
    shelf = SAMPLES.shelf()
    writer = SnapshotWriter(tmp_path / "snap", SAMPLES.geometry, settings(segment_bytes=1 << 20))
    writer.begin()
    writer.add(shelf, SAMPLES.chain(shelf, 1))
    assert writer._segment is not None
    writer._segment.writer.append([Frame.of(shelf, SAMPLES.chain(shelf, 1, seed=9)[0])])
    writer.commit()
    [problem] = verify_snapshot(tmp_path / "snap", Filesystem()).problems
    assert problem.endswith("the block at 8192 is not in the tree")
