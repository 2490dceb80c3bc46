"""An engine in a process of its own, which stands still while another one is measured."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.catalogue import Peer
    from octavo.examples.benchmarks.peers.driver import Opening
    from octavo.examples.benchmarks.workloads import Lanes
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from catalogue import Peer
    from driver import Opening

T = TypeVar("T", bound=msgspec.Struct)
TO_OPEN, TO_RUN = 600.0, 600.0
"""Seconds; compiling counts to the first."""
LAST_WORDS = 400
"""Characters of stderr to show of an engine that died."""


class PeerFailed(Exception):
    """The engine could not do what it was asked for; the message says why."""


class Opened(msgspec.Struct):
    """What a driver says once its engine is open."""

    opened: float
    """Seconds."""


class Run(msgspec.Struct):
    """What a driver says after a workload."""

    seconds: float
    tokens: int
    heads: list[int]


class Failed(msgspec.Struct):
    """What a driver says instead."""

    error: str


class PeerProcess:
    """A driver. It runs between a question and its answer, and is stopped in between."""

    def __init__(self, peer: Peer, folder: Path, threads: int) -> None:
        self.peer = peer
        self._stderr: IO[bytes] = TemporaryFile()  # noqa: SIM115  # as long as the process
        driver = Path(__file__).with_name(peer.driver)
        self._process = subprocess.Popen(  # noqa: S603  # what the catalogue names
            [str(peer.python(folder)), str(driver)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **peer.variables(folder, threads)},
            start_new_session=True,  # a group of its own, so that its children stop with it
        )

    def open(self, opening: Opening) -> None:
        """:raises PeerFailed: when the engine cannot be opened so."""
        self.ask({"open": opening._asdict()}, Opened, TO_OPEN)

    def run(self, lanes: Lanes) -> Run:
        """:raises PeerFailed: when the engine cannot do it."""
        return self.ask({"run": [[turn._asdict() for turn in lane] for lane in lanes]}, Run, TO_RUN)

    def ask(self, question: Mapping[str, object], kind: type[T], seconds: float) -> T:
        """Let it run until it has answered.

        :raises PeerFailed: when its answer is an error, or does not come.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise PeerFailed("has no pipes")
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
            answer = self._line(self._process.stdout, seconds)
        except BrokenPipeError:
            answer = b""
        self._signal(signal.SIGSTOP)
        if not answer:
            raise PeerFailed(f"ended: {self._last_words()}")
        decoded = msgspec.json.decode(answer, type=dict[str, msgspec.Raw])
        if "error" in decoded:
            raise PeerFailed(msgspec.json.decode(answer, type=Failed).error)
        return msgspec.json.decode(answer, type=kind)

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a question that an engine which died has not read
                    pipe.close()

    def _line(self, pipe: IO[bytes], seconds: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(seconds):
                self._signal(signal.SIGKILL)  # a late answer would be taken for the next one
                raise PeerFailed(f"no answer within {seconds:g} s")
        return pipe.readline()

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:LAST_WORDS] if lines else "without a word"

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
