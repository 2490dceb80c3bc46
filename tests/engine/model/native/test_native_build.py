"""How the kernels come to be on a machine, with compilers that are small scripts."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.engine.model.native import build
from octavo.engine.model.native.build import CannotBuild, built
from octavo.engine.model.native.library import Kernels, kernels
from octavo.errors import ModelError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the compilers of these tests are shell scripts")

FakeCompiler = Callable[..., Path]
TO_TARGET = 'while [ "$1" != -o ]; do shift; done; '
"""Afterwards ``$2`` is the file to write."""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Make a script the only compiler; returns the file that has one line for each time it compiled."""

    def install(body: str, version: str = "1") -> Path:
        log, folder = tmp_path / "log", tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        lines = ["#!/bin/sh", f'case "$*" in *--version*) echo {version}; exit;; esac', f"echo x >> {log}", body]
        (folder / "g++").write_text("\n".join(lines) + "\n")
        (folder / "g++").chmod(0o755)
        log.touch()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        return log

    return install


def times(log: Path) -> int:
    return len(log.read_text().splitlines())


def copies(library: Path) -> str:
    return f'{TO_TARGET}cp {library} "$2"'


def made_from(source: str, folder: Path) -> Path:
    real = next((found for name in build._COMPILERS if (found := shutil.which(name))), None)
    if real is None:
        pytest.skip("no C++ compiler")
    (folder / "other.cpp").write_text(source)
    command = [real, "-shared", "-fPIC", str(folder / "other.cpp"), "-o", str(folder / "other.so")]
    subprocess.run(command, check=True)  # noqa: S603  # ours
    return folder / "other.so"


def test_without_a_compiler_it_is_said_which_would_do(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler.*\(\)"):
        built(tmp_path, ())
    with pytest.raises(CannotBuild, match="no-such-compiler, nor-this"):
        built(tmp_path, ("no-such-compiler", "nor-this"))
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_there_are_no_kernels_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.model")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernels(tmp_path / "native") is None
    assert kernels(tmp_path / "native") is None
    (line,) = caplog.messages
    assert "no_native_kernels" in line
    assert "compiler" in line


def test_the_first_compiler_that_is_there_is_taken(tmp_path: Path, compiler: FakeCompiler) -> None:
    log = compiler("exit 1")
    with pytest.raises(CannotBuild, match=r"/g\+\+ failed"):
        built(tmp_path / "native", ("no-such-compiler", "g++"))
    assert times(log) > 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo it is wrong: error: lines.h >&2; exit 1", "error: lines.h"),
        ("printf 'error: \\377\\n' >&2; exit 1", "error: "),
        ("exit 1", "no message"),
        (f'{TO_TARGET}echo garbage > "$2"', "do not compute right"),
        ("exit 0", "do not compute right"),
        ("kill -9 $$", "failed"),
    ],
    ids=["refuses", "speaks another tongue", "is silent", "writes garbage", "writes nothing", "dies"],
)
def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, compiler: FakeCompiler, body: str, reason: str
) -> None:
    compiler(body)
    with pytest.raises(CannotBuild, match=reason):
        built(tmp_path / "native")
    assert list((tmp_path / "native").iterdir()) == []
    assert kernels(tmp_path / "native") is None


@pytest.mark.parametrize("trial", ["return 1;", "__builtin_trap();"], ids=["computes wrong", "crashes"])
def test_a_library_that_fails_its_trial_is_never_loaded(tmp_path: Path, compiler: FakeCompiler, trial: str) -> None:
    library = made_from(f'extern "C" int octavo_selftest() {{ {trial} }}', tmp_path)
    compiler(copies(library))
    with pytest.raises(CannotBuild, match="do not compute right on this processor"):
        built(tmp_path / "native")
    assert list((tmp_path / "native").iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_PATIENCE", 0.3)
    compiler("exec sleep 60")
    with pytest.raises(CannotBuild, match="timed out"):
        built(tmp_path / "native")


def test_a_compiler_without_openmp_does(tmp_path: Path, compiler: FakeCompiler, library_file: Path) -> None:
    log = compiler(f'case "$*" in *-fopenmp*) exit 1;; esac; {copies(library_file)}')
    assert built(tmp_path / "native").exists()
    assert times(log) == 2


def test_one_thread_is_better_than_none_and_is_said(
    tmp_path: Path, compiler: FakeCompiler, caplog: pytest.LogCaptureFixture, library_file: Path
) -> None:
    """The real compiler, as if it knew no OpenMP; without the wide registers it is done sooner."""
    real = next(path for name in build._COMPILERS if (path := shutil.which(name)))
    compiler(f'case "$*" in *-fopenmp*) exit 1;; esac; exec {real} $(echo "$@" | sed s/-O3/-O1/)')
    found = kernels(tmp_path / "native")
    assert found is not None
    assert not found.is_threaded
    assert Kernels(library_file).is_threaded
    (line,) = caplog.messages
    assert "kernels_single_threaded" in line
    assert str(tmp_path / "native" / "kernels-") in line


@pytest.mark.parametrize(
    ("body", "level"), [(None, logging.INFO), ("echo error: no room >&2; exit 1", logging.WARNING)], ids=["none", "bad"]
)
def test_who_needs_the_kernels_is_told_why_there_are_none(
    tmp_path: Path,
    compiler: FakeCompiler,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    body: str | None,
    level: int,
) -> None:
    """Others do without, and a compiler that fails is worth a warning."""
    caplog.set_level(logging.INFO, "octavo.model")
    if body is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        compiler(body)
    assert kernels(tmp_path / "native") is None
    with pytest.raises(ModelError, match="'native' cannot be had here.*" + ("no C" if body is None else "no room")):
        kernels(tmp_path / "native", is_required=True)
    assert [record.levelno for record in caplog.records] == [level]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, compiler: FakeCompiler, mode: int) -> None:
    log, folder = compiler("exit 1"), tmp_path / "native"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CannotBuild, match="can be written"):
        built(folder)
    assert times(log) == 0


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o1777, False), (0o775, False), (0o755, False)])
def test_neither_may_a_folder_lie_where_others_could_put_another_in_its_place(
    tmp_path: Path, compiler: FakeCompiler, mode: int, is_refused: bool
) -> None:
    """What everybody may write to, unless nobody can move what is another's there, as in /tmp."""
    log = compiler("exit 1")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(CannotBuild, match=r"lies in \S+/open, which" if is_refused else "failed"):
        built(tmp_path / "open" / "a" / "native")
    assert (times(log) == 0) is is_refused


def test_a_link_is_followed_before_its_place_is_judged(tmp_path: Path, compiler: FakeCompiler) -> None:
    log = compiler("exit 1")
    (tmp_path / "open" / "native").mkdir(parents=True)
    (tmp_path / "open" / "native").chmod(0o700)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "native")
    with pytest.raises(CannotBuild, match=r"lies in \S+/open, which"):
        built(tmp_path / "link")
    assert times(log) == 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users have no numbers here")
def test_a_folder_of_somebody_else_is_refused(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, mine = compiler("exit 1"), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(CannotBuild, match="belongs to others"):
        built(tmp_path)
    assert times(log) == 0


def test_a_new_folder_is_for_us_alone(tmp_path: Path, compiler: FakeCompiler) -> None:
    compiler("exit 1")
    with pytest.raises(CannotBuild):
        built(tmp_path / "a" / "native")
    assert (tmp_path / "a" / "native").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_folders_place_is_a_reason_not_a_crash(tmp_path: Path, compiler: FakeCompiler) -> None:
    compiler("exit 1")
    (tmp_path / "native").touch()
    with pytest.raises(CannotBuild, match="native"):
        built(tmp_path / "native")


def test_what_was_compiled_once_is_found_again(tmp_path: Path, compiler: FakeCompiler, library_file: Path) -> None:
    log = compiler(copies(library_file))
    first = built(tmp_path / "native")
    assert built(tmp_path / "native") == first
    assert times(log) == 1
    assert list((tmp_path / "native").iterdir()) == [first]
    assert Kernels(first).function("rms_norm", next(iter(Kernels(first)._functions))[1]) is not None


def test_another_source_flag_compiler_or_processor_compiles_anew(
    tmp_path: Path, compiler: FakeCompiler, library_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(copies(library_file))
    sources = tmp_path / "src"
    shutil.copytree(build._SOURCES, sources)
    monkeypatch.setattr(build, "_SOURCES", sources)
    found = [built(tmp_path / "native")]
    (sources / "plan.h").write_text((sources / "plan.h").read_text() + "\n// more\n")
    found.append(built(tmp_path / "native"))
    (sources / "plan.h").rename(sources / "planned.h")
    found.append(built(tmp_path / "native"))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    found.append(built(tmp_path / "native"))
    compiler(copies(library_file), version="2")
    found.append(built(tmp_path / "native"))
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    found.append(built(tmp_path / "native"))
    assert times(log) == len(set(found)) == len(found)


@pytest.mark.parametrize("kept", [0, 100, 60_000, -1])
def test_a_file_that_was_cut_short_is_never_loaded(
    tmp_path: Path, compiler: FakeCompiler, library_file: Path, kept: int
) -> None:
    """Loading the half of a library ends the process with a signal. So much is left after a crash of the machine."""
    log = compiler(copies(library_file))
    whole = built(tmp_path / "native").read_bytes()
    (file,) = (tmp_path / "native").iterdir()
    os.truncate(file, kept if kept >= 0 else len(whole) + kept)
    again = built(tmp_path / "native")
    assert again.read_bytes() == whole
    assert times(log) == 2
    assert list((tmp_path / "native").iterdir()) == [again]


def test_two_at_once_leave_one_good_file(tmp_path: Path, compiler: FakeCompiler, library_file: Path) -> None:
    log = compiler("")
    compiler(f"until [ $(wc -l < {log}) -ge 2 ]; do sleep 0.01; done; {copies(library_file)}")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(built, [tmp_path / "native"] * 2)
    assert first == second
    assert times(log) == 2
    assert list((tmp_path / "native").iterdir()) == [first]
    assert first.read_bytes() == library_file.read_bytes()


def test_the_real_compiler_makes_what_passes_the_trial(library_file: Path) -> None:
    assert library_file.name.startswith("kernels-")
    assert library_file.stat().st_mode & 0o022 == 0
