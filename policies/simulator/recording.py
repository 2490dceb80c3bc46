"""Reader of recordings (see :mod:`octavo.policies.history`): the lines themselves, and the trace that they make."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...errors import TraceError
from ..eviction.base import NAME_BYTES
from ..history import (
    FORMAT,
    Admitted,
    Done,
    Dropped,
    Evicted,
    Forked,
    Gap,
    Header,
    Left,
    Line,
    Locked,
    Published,
    Unlocked,
)
from .text import bad_line, first_line, lines
from .trace import Request, Trace, TraceInfo

_LINE = msgspec.json.Decoder(Line)


class Numbered(NamedTuple):
    """An event and where it stands."""

    line: int
    """From 1; the header is line 1."""
    event: Line


def read_header(path: str | os.PathLike[str]) -> Header:
    """:raises TraceError: when the file cannot be read or is no recording."""
    file = Path(path)
    line = first_line(file)
    try:
        header = msgspec.json.decode(line.text, type=Header)
    except msgspec.DecodeError as error:
        raise bad_line(file, line, f"this is no header of a recording: {error}") from error
    if header.format != FORMAT:
        raise TraceError(f"{file} has the format {header.format!r}; this reader knows {FORMAT}")
    return header


def events(path: str | os.PathLike[str]) -> Iterator[Numbered]:
    """All that was recorded, in order, one line in memory at a time. A torn last line is passed over.

    :raises TraceError: at a line that is wrong; the message names it.
    """
    file = Path(path)
    for line in lines(file, 2):
        try:
            event = _LINE.decode(line.text)
        except msgspec.DecodeError as error:
            if not line.whole:
                return
            raise bad_line(file, line, error) from error
        yield Numbered(line.number, event)


class Chains:
    """Which block comes before which, of all that are cached: about 200 bytes for each."""

    def __init__(self) -> None:
        self._before: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._before)

    def path(self, end: bytes, blocks: int | None = None) -> bytes:
        """The names of the blocks from the start of a prompt to the one called ``end``; ``blocks``: how many these are.

        After a gap in the recording some may be unknown: they get names that follow from the first that is known, the
        same each time.
        """
        found: list[bytes] = []
        name = end
        while name:
            found.append(name)
            name = self._before.get(name, b"")
        top = found[-1] if found else b""
        found += [_substitute(top, index) for index in range((blocks or 0) - len(found))]
        return b"".join(reversed(found))

    def add(self, before: bytes, names: bytes) -> None:
        """``names`` follow each other, the first one on ``before``, which is empty at the start of a prompt."""
        for at in range(0, len(names), NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            self._before[name] = before
            before = name

    def cut(self, gone: Evicted | Dropped) -> None:
        """These are cached no longer."""
        for index, blocks in enumerate(gone.blocks):
            name = gone.names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
            for _ in range(blocks):
                name = self._before.pop(name, b"")


def _substitute(name: bytes, index: int) -> bytes:
    return hashlib.blake2b(name + index.to_bytes(4, "little"), digest_size=NAME_BYTES).digest()


class _Open:
    """A request that is not over."""

    __slots__ = ("arrival", "end", "generated", "is_over", "names", "number", "priority", "prompt", "tenant", "tokens")

    def __init__(self, number: int, arrival: float, tokens: int, names: bytes, tenant: str) -> None:
        self.number = number
        """Of the line that stands for it."""
        self.arrival = arrival
        self.tokens = tokens
        self.names = names
        """Of the whole blocks of its prompt, and of those that it has published beyond."""
        self.prompt = len(names)
        """Bytes of ``names`` that are of the prompt."""
        self.tenant = tenant
        self.priority: int | None = None
        self.generated = 0
        self.end = ""
        self.is_over = False

    def published(self, names: bytes, priority: int) -> None:
        """Its blocks so far are called ``names``. The first priority that it gave to any counts."""
        self.names = max(self.names, names, key=len)
        if self.priority is None:
            self.priority = priority

    def request(self) -> Request:
        """As a trace has it."""
        return Request(
            self.arrival,
            self.tokens,
            self.generated,
            self.names[: self.prompt],
            self.names[self.prompt :],
            tenant=self.tenant,
            priority=self.priority or 0,
            end=self.end,
        )


class RecordingTrace(Trace):
    """The requests of a recording, to be replayed with other policies and other capacities.

    Requests come in the order in which they were admitted, and that is when they arrive: how long each waited before
    is the scheduler's doing, and another cache would let it wait another time. The first line of text stands for a
    request with several, and ``output_tokens`` counts all. A fork of a request is one of its own, with the tokens so
    far as its prompt. Those that were not over when the recording ended have an empty ``end``.

    Held in memory: the requests since the oldest one that is not over, and :class:`Chains`.
    """

    has_priorities = True  # that none has shows only at the end

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the header.

        :raises TraceError: when the file is no recording.
        """
        self.path = Path(path)
        self.header = read_header(path)
        self.lost = 0
        """Events that the disk could not follow, as far as the file was read; what hangs on them is guessed."""
        source = f"recorded by octavo {self.header.octavo} with {self.header.eviction_policy}"
        self.info = TraceInfo(self.path.stem, self.header.block_tokens, source)

    def __iter__(self) -> Iterator[Request]:
        self.lost = 0
        story = _Story(self.header.clock)
        for _, event in events(self.path):
            story.take(event)
            if isinstance(event, Done):
                yield from story.finished()
            elif isinstance(event, Gap):
                self.lost += event.lost
        yield from story.rest()


class _Words:
    """One line of text, and the request that it stands for, if it does."""

    __slots__ = ("names", "opened")

    def __init__(self, names: bytes, opened: _Open | None) -> None:
        self.names = names
        """Of its blocks from the start, as far as known."""
        self.opened = opened


class _Story:
    """From events to requests."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._chains = Chains()
        self._open: dict[int, _Open] = {}  # by request, in order of admission
        self._words: dict[int, _Words] = {}  # by number
        self._found: dict[int, bytes] = {}  # by number: names of the prefix that is locked

    def take(self, event: Line) -> None:
        """What happened next."""
        match event:
            case Locked():
                self._found[event.number] = self._chains.path(event.names, event.blocks)
            case Unlocked():
                self._found.pop(event.number, None)
            case Admitted():
                self._admitted(event)
            case Forked():
                self._forked(event)
            case Published():
                self._published(event)
            case Evicted() | Dropped():
                self._chains.cut(event)
            case Left():
                self._words.pop(event.number, None)
            case Done():
                self._done(event)
            case _:
                return

    def finished(self) -> Iterator[Request]:
        """Those that nobody who came earlier holds up."""
        while self._open:
            number, first = next(iter(self._open.items()))
            if not first.is_over:
                return
            del self._open[number]
            yield first.request()

    def rest(self) -> Iterator[Request]:
        """Those that were not over."""
        for opened in self._open.values():
            yield opened.request()
        self._open.clear()

    def _admitted(self, event: Admitted) -> None:
        names = self._found.pop(event.number, b"") + event.names
        tenant = str(event.tenant) if event.tenant else ""
        self._words[event.number] = _Words(names, None)
        if event.used and not event.resumed:
            opened = _Open(event.number, event.now, event.tokens, names, tenant)
            self._begin(event.request, self._words[event.number], opened)
        elif (earlier := self._open.get(event.request)) is not None and earlier.number == event.number:
            self._words[event.number].opened = earlier

    def _forked(self, event: Forked) -> None:
        parent = self._words.get(event.parent)
        words = self._words[event.number] = _Words(b"" if parent is None else parent.names, None)
        tenant = "" if parent is None or parent.opened is None else parent.opened.tenant
        if event.request not in self._open:
            self._begin(event.request, words, _Open(event.number, event.now, event.tokens, words.names, tenant))

    def _begin(self, request: int, words: _Words, opened: _Open) -> None:
        if request:
            opened.arrival -= self._began
            self._open[request] = words.opened = opened

    def _published(self, event: Published) -> None:
        words = self._words.setdefault(event.number, _Words(b"", None))
        start = event.blocks * NAME_BYTES - len(event.names)
        self._chains.add(words.names[start - NAME_BYTES : start] if start else b"", event.names)
        if event.blocks * NAME_BYTES > len(words.names):
            words.names = words.names[:start] + event.names
        if words.opened is not None:
            words.opened.published(words.names, event.parts[0].priority)

    def _done(self, event: Done) -> None:
        opened = self._open.get(event.request)
        if opened is not None:
            opened.generated, opened.end, opened.is_over = event.generated_tokens, event.end, True
