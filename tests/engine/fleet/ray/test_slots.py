from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.engine.fleet.ray.slots import SNAPSHOT, claimed
from octavo.errors import StorageError

HOLD = """
import sys, time
from pathlib import Path
from octavo.engine.fleet.ray.slots import claimed
with claimed(Path(sys.argv[1])) as folder:
    print(folder.name, flush=True)
    time.sleep(60)
"""


def test_no_two_have_the_same_folder(tmp_path: Path) -> None:
    with ExitStack() as users:
        folders = [users.enter_context(claimed(tmp_path / "root")) for _ in range(5)]
        assert len(set(folders)) == 5


def test_folders_are_used_again(tmp_path: Path) -> None:
    for _ in range(3):
        with claimed(tmp_path) as first, claimed(tmp_path) as second:
            assert {first.name, second.name} == {"0", "1"}


def test_what_was_left_is_taken_up_the_newest_first(tmp_path: Path) -> None:
    for number, age in (("1", 20), ("2", 10), ("3", None)):
        (tmp_path / number).mkdir()
        if age is not None:
            (tmp_path / number / SNAPSHOT).mkdir()
            os.utime(tmp_path / number / SNAPSHOT, (1e9 - age, 1e9 - age))
    with claimed(tmp_path) as first, claimed(tmp_path) as second, claimed(tmp_path), claimed(tmp_path) as fourth:
        assert (first.name, second.name, fourth.name) == ("2", "1", "0")


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with claimed(tmp_path) as folder:
        assert folder.name == "0"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_killed_process_leaves_its_folder_to_others(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # ours
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        with claimed(tmp_path) as mine:
            assert mine.name == "1"
        process.kill()
        process.wait()
    with claimed(tmp_path) as mine:
        assert mine.name == "0"


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"), claimed(tmp_path / "file"):
        pass
