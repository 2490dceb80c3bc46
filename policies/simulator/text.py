"""Text files, plain or compressed, line by line and numbered."""

from __future__ import annotations

import gzip
import importlib.util
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ...errors import TraceError

XZ, GZIP, ZSTD = b"\xfd7zXZ\x00", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Line(NamedTuple):
    """One line, without its end."""

    number: int
    """From 1."""
    text: str
    whole: bool
    """Whether its end was there: the last line of a file may lack it, or be torn."""


def lines(path: Path, first: int = 1) -> Iterator[Line]:
    """The lines of ``path`` from number ``first`` on, one in memory at a time; xz, gzip and zstd by their first bytes.

    :raises TraceError: when it cannot be read, is damaged, is not UTF-8, or needs a package that is not installed.
    """
    number = 0
    try:
        source = _open(path)
        try:
            with io.TextIOWrapper(source.file, encoding="utf-8", newline="\n") as text:
                for number, line in enumerate(text, 1):
                    if number >= first:
                        yield Line(number, line.rstrip("\r\n"), line.endswith("\n"))
        except source.errors as error:
            raise TraceError(f"{path}, after line {number}: the file is damaged or cut off ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, after line {number}: this is no UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def first_line(path: Path) -> Line:
    """What tells of which kind a file is.

    :raises TraceError: as ``lines``, and when there is none.
    """
    for line in lines(path):
        return line
    raise TraceError(f"{path} is empty; a trace begins with a line that says what it is")


def bad_line(path: Path, line: Line, what: object) -> TraceError:
    """The error for one line; a last line that has no end was probably torn."""
    torn = "" if line.whole else " (the file ends in the middle of this line: it was torn, or is still being written)"
    return TraceError(f"{path}, line {line.number}: {what}{torn}")


class _Source(NamedTuple):
    file: IO[bytes] | gzip.GzipFile
    errors: tuple[type[Exception], ...]
    """What reading raises when the file is damaged."""


def _open(path: Path) -> _Source:
    with path.open("rb") as file:
        magic = file.read(len(XZ))
    if magic.startswith(XZ):
        return _Source(lzma.open(path), (EOFError, lzma.LZMAError))
    if magic.startswith(GZIP):
        return _Source(gzip.open(path), (EOFError, gzip.BadGzipFile, zlib.error))
    if magic.startswith(ZSTD):
        return _open_zstd(path)
    return _Source(path.open("rb"), ())


def _open_zstd(path: Path) -> _Source:
    if importlib.util.find_spec("zstandard") is None:
        raise TraceError(f"{path} is compressed with zstd, which needs a package: pip install 'octavo[zstd]'")
    import zstandard  # noqa: PLC0415  # an extra

    return _Source(zstandard.open(path, "rb"), (zstandard.ZstdError,))
