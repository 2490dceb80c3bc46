"""What the drivers of all engines share: JSON lines on stdin and stdout, and the clock. Needs nothing but Python.

``engines.py`` starts each driver in the environment of its engine and writes one request per line::

    {"open": {"model": "...", "dtype": "bfloat16", "pool_tokens": 32768, "caching": true, "tiers": false, ...}}
    {"run": [[{"own": [17, 4], "out": 64, "samples": 1, "beams": 1}], ...]}

Each is answered by one line: ``{"opened": seconds}``, ``{"seconds": ..., "tokens": ..., "heads": [...]}``, or
``{"error": "..."}``. The end of stdin ends the driver. What an engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Literal, NamedTuple, Protocol, TextIO, TypeAlias

SAMPLING_SEED = 0
Dtype: TypeAlias = Literal["bfloat16", "float32"]


class Opening(NamedTuple):
    """How to open the engine; what it cannot do it goes without."""

    model: str
    dtype: Dtype
    """The cache included."""
    pool_tokens: int
    caching: bool
    tiers: bool
    threads: int
    batch_tokens: int
    """To compute in one step."""
    max_running: int
    """Sequences at the same time."""
    variant: str = ""
    """The driver's own: how the engine computes."""


class Turn(NamedTuple):
    """See ``workloads.py``."""

    own: list[int]
    out: int
    samples: int
    beams: int


class Ended(NamedTuple):
    """A request is done."""

    key: int
    outputs: Sequence[Sequence[int]]
    """Generated token ids of each sample."""


class Tally(NamedTuple):
    """What one run came to."""

    seconds: float
    """From the first request to the last token."""
    tokens: int
    """Generated and wanted."""
    heads: list[int]
    """The first token that came in each lane: engines that compute the same mostly agree on it."""


class Engine(Protocol):
    """An engine that runs lanes of turns."""

    def run(self, lanes: list[list[Turn]]) -> Tally: ...


class Batcher(Protocol):
    """An engine that is called again and again."""

    def submit(self, key: int, prompt: list[int], turn: Turn) -> None: ...

    def step(self) -> Iterable[Ended]:
        """Go on with all requests; those that are done now."""
        ...


class Conversation:
    """A lane, and how far it has come."""

    def __init__(self, turns: list[Turn]) -> None:
        self._turns = turns
        self._said: list[int] = []
        self._done = 0
        self.head = -1

    @property
    def turn(self) -> Turn | None:
        """The one that is due; ``None`` after the last."""
        return self._turns[self._done] if self._done < len(self._turns) else None

    def prompt(self) -> list[int]:
        """Of the turn that is due."""
        return [*self._said, *self._turns[self._done].own]

    def answer(self, outputs: Sequence[Sequence[int]]) -> int:
        """Note what the engine made of the due turn; how many tokens it is.

        :raises RuntimeError: when it is not what was asked for.
        """
        turn = self._turns[self._done]
        wanted = [turn.out] * max(turn.samples, turn.beams)
        if [len(each) for each in outputs] != wanted:
            raise RuntimeError(f"wanted outputs of {wanted} tokens, not {[len(each) for each in outputs]}")
        if not self._done:
            self.head = outputs[0][0]
        self._said = [*self.prompt(), *outputs[0]]
        self._done += 1
        return sum(wanted)


class Stepped:
    """Runs lanes on an engine that is called again and again."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def run(self, lanes: list[list[Turn]]) -> Tally:
        talks = [Conversation(turns) for turns in lanes]
        began, tokens = perf_counter(), 0
        open_lanes = sum(self._ask(key, talk) for key, talk in enumerate(talks))
        while open_lanes:
            for ended in self._batcher.step():
                talk = talks[ended.key]
                tokens += talk.answer(ended.outputs)
                open_lanes -= not self._ask(ended.key, talk)
        return Tally(perf_counter() - began, tokens, [talk.head for talk in talks])

    def _ask(self, key: int, talk: Conversation) -> bool:
        """Whether there was anything left to ask."""
        if talk.turn is None:
            return False
        self._batcher.submit(key, talk.prompt(), talk.turn)
        return True


def warm_up() -> list[list[Turn]]:
    """Something short that every engine runs before it counts as open."""
    return [[Turn(list(range(20 + lane, 84 + lane)), 8, 1, 1)] for lane in range(4)]


def serve(opener: Callable[[Opening], Engine]) -> None:
    """Answer requests until stdin ends."""
    engine: Engine = _Closed()

    def answer(line: str) -> Mapping[str, object]:
        nonlocal engine
        if '"open"' not in line:
            return engine.run(_lanes(line))._asdict()
        began = perf_counter()
        engine = opener(_opening(line))
        engine.run(warm_up())
        return {"opened": perf_counter() - began}

    answer_lines(answer)


def answer_lines(answer: Callable[[str], Mapping[str, object]]) -> None:
    """One line for each on stdin; what ``answer`` raises is its answer."""
    answers = _private_stdout()
    for line in sys.stdin:
        try:
            found = answer(line)
        except Exception as error:  # noqa: BLE001  # whatever an engine raises is its answer
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(found), file=answers, flush=True)


class _Closed:
    """Before an engine is open."""

    def run(self, lanes: list[list[Turn]]) -> Tally:
        raise RuntimeError("no engine is open")


def _opening(line: str) -> Opening:
    return Opening(**json.loads(line)["open"])


def _lanes(line: str) -> list[list[Turn]]:
    return [[Turn(**turn) for turn in lane] for lane in json.loads(line)["run"]]


def _private_stdout() -> TextIO:
    """A file that leads to stdout, while everything else that is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
