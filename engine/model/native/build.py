"""Compiles the kernels, once for each machine, compiler and state of the sources, and tries them before use."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....errors import OctavoError, describe

_SOURCES = Path(__file__).parent / "src"
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
_THREADS = "-fopenmp"
_TRIAL = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).octavo_selftest())"
_PATIENCE = 180.0
"""Seconds for one run of the compiler."""


class CannotBuild(OctavoError):
    """The kernels could not be built or do not compute right here; the message says why."""


class NoCompiler(CannotBuild):
    """There is nothing to build them with."""


def built(folder: Path, compilers: Sequence[str] = _COMPILERS) -> Path:
    """The library's file below ``folder``, which is compiled now if it is not there: some seconds.

    A new library is loaded and tried in a process of its own, since one for another processor would end ours.

    :param compilers: programs to look for on the path; the first one that is there is taken.
    :raises NoCompiler: when none of them is there.
    :raises CannotBuild: when it fails, when the trial fails, when others may write to ``folder`` or what it lies in.
    """
    if getattr(sys, "frozen", False):  # the trial below would start the application once more
        raise CannotBuild("this is a frozen application: there is no Python to try the kernels with")
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler is installed ({', '.join(compilers)})")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder.resolve()  # what is looked at below is what is loaded from
        _require_ours(folder)
        key = _key(compiler)
        return _found(folder, key) or _compile(compiler, folder, key)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuild(describe(error)) from error


def _found(folder: Path, key: str) -> Path | None:
    """The library of an earlier run, if it is whole: to load one that was cut short would end the process."""
    return next((path for path in folder.glob(f"kernels-{key}-*.so") if path.name == _name(key, path)), None)


def _name(key: str, library: Path) -> str:
    """Of everything that the machine code depends on, and of the machine code."""
    return f"kernels-{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:24]}.so"


def _compile(compiler: str, folder: Path, key: str) -> Path:
    """In a place of its own first, so that another process finds all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "kernels.so"
        command = [compiler, *_FLAGS, str(_SOURCES / "kernels.cpp"), "-o", str(made)]
        result = _run([*command, _THREADS])
        if result.returncode:  # Apple's compiler knows no OpenMP: one thread is better than none
            result = _run(command)
        if result.returncode:
            raise CannotBuild(f"{compiler} failed: {_first_error(result.stderr)}")
        if _run([sys.executable, "-c", _TRIAL, str(made)]).returncode:
            raise CannotBuild("the compiled kernels do not compute right on this processor")
        return made.replace(folder / _name(key, made))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # the compiler on the path, our own sources
        command,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_PATIENCE,
    )


def _key(compiler: str) -> str:
    """Of everything that the machine code depends on."""
    version = _run([compiler, "--version"]).stdout
    digest = hashlib.sha256(repr((compiler, version, _FLAGS, platform.machine(), _processor())).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What it can do: a home folder may be shared by machines of many kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _require_ours(folder: Path) -> None:
    """Code is loaded from there: nobody else may have put it there, or may put another folder in its place.

    What it lies in may be written by a group: with the usual umask of 002 that is the user's own.
    """
    if not hasattr(os, "getuid"):
        return
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotBuild(f"{folder} belongs to others or can be written by them")
    for parent in folder.parents:
        found = parent.stat()
        is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if is_open or found.st_uid not in (0, os.getuid()):
            raise CannotBuild(f"{folder} lies in {parent}, which belongs to others or can be written by them")


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["(no message)"]
    return lines[0][:300]
