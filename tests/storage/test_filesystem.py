from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.storage.files.filesystem import File, Filesystem
from octavo.tests.storage.shim import Crash, RecordingFilesystem

FS = Filesystem()


@pytest.fixture
def open_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    FS.make_folder(tmp_path / "a" / "b")
    FS.create(tmp_path / "a" / "file").close()
    FS.lock(tmp_path / "a" / "lock").close()
    assert [mode(tmp_path / "a"), mode(tmp_path / "a" / "b")] == [0o700, 0o700]
    assert [mode(tmp_path / "a" / "file"), mode(tmp_path / "a" / "lock")] == [0o600, 0o600]


def test_what_is_open_to_others_is_tightened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o777)
    FS.make_folder(tmp_path / "folder")
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    FS.tighten(tmp_path / "file")
    assert [mode(tmp_path / "folder"), mode(tmp_path / "file")] == [0o700, 0o600]


def test_nothing_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder link").symlink_to(tmp_path / "folder")
    for call in (FS.create, FS.open_read, FS.open_write, FS.lock):
        with pytest.raises(OSError):  # noqa: PT011  # which one depends on the call
            call(tmp_path / "link")
    with pytest.raises(NotADirectoryError):
        FS.make_folder(tmp_path / "folder link")
    assert (tmp_path / "real").read_bytes() == b"secret"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        FS.open_read(tmp_path / "pipe")


def test_create_never_takes_over_a_file(tmp_path: Path) -> None:
    FS.create(tmp_path / "file").close()
    with pytest.raises(FileExistsError):
        FS.create(tmp_path / "file")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    with FS.create(tmp_path / "file") as file:
        FS.write(file, 2, [b"", b"abcdefgh", memoryview(b"ij"), b"klmno"])
        buffer = bytearray(20)
        assert FS.read_into(file, 0, memoryview(buffer)) == 17
    assert bytes(buffer[:17]) == b"\x00\x00abcdefghijklmno"


def test_a_small_file_is_read_only_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert FS.read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        FS.read_file(tmp_path / "file", 4)


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    first = FS.lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        FS.lock(tmp_path / "lock")
    first.close()
    first.close()
    FS.lock(tmp_path / "lock").close()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); "
        "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:  # noqa: S603  # our own
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError):
            FS.lock(tmp_path / "lock")
        other.send_signal(signal.SIGKILL)
        other.wait()
    FS.lock(tmp_path / "lock").close()


def test_closing_twice_does_not_close_a_strangers_descriptor(tmp_path: Path) -> None:
    file = FS.create(tmp_path / "a")
    file.close()
    stranger = os.open(tmp_path / "a", os.O_RDONLY)
    file.close()
    os.close(stranger)


class TestShim:
    """What the tests of crashes rest on."""

    def test_only_what_was_synced_is_promised(self, tmp_path: Path) -> None:
        fs = RecordingFilesystem(tmp_path / "disk")
        fs.make_folder(tmp_path / "disk")
        with fs.create(tmp_path / "disk" / "a") as file:
            fs.write(file, 0, [b"old"])
            fs.fsync(file)
            fs.fsync_folder(tmp_path / "disk")
            fs.write(file, 3, [b"newer!"])
        fs.rename(tmp_path / "disk" / "a", tmp_path / "disk" / "b")
        found = {how: self._replayed(fs, tmp_path / how.value, len(fs.operations), how) for how in Crash}
        assert found[Crash.ALL] == {"b": b"oldnewer!"}
        assert found[Crash.SYNCED] == {"a": b"old"}
        assert found[Crash.NAMES] == {"b": b"old" + bytes(6)}
        assert self._replayed(fs, tmp_path / "t", len(fs.operations) - 1, Crash.TORN) == {"a": b"oldnew"}

    def test_a_failure_comes_where_it_is_wanted(self, tmp_path: Path) -> None:
        def fail(kind: str, path: Path) -> None:
            if kind == "write":
                raise OSError(errno.ENOSPC, "full", str(path))

        fs = RecordingFilesystem(tmp_path, fail)
        with fs.create(tmp_path / "a") as file, pytest.raises(OSError, match="full"):
            fs.write(file, 0, [b"x"])
        assert (tmp_path / "a").read_bytes() == b""

    def _replayed(self, fs: RecordingFilesystem, target: Path, count: int, how: Crash) -> dict[str, bytes]:
        fs.replay(count, how, target)
        return {path.name: path.read_bytes() for path in target.iterdir()}


def test_a_file_is_closed_by_its_context(tmp_path: Path) -> None:
    with FS.create(tmp_path / "a") as file:
        assert isinstance(file, File)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)
