"""What the drivers of single steps share: a batch over block tables, and the clock. Needs nothing but Python.

``openvino_trial.py`` writes one request per line, as for the engines (see ``driver.py``)::

    {"open": {"model": "...", "threads": 2, "dtype": "bfloat16", "blocks": 768, "block_size": 32}}
    {"step": {"tokens": [5], "positions": [9], "lengths": [1], "contexts": [10], "tables": [[7]], "top": 1},
     "repeats": 3}

Each is answered by one line: ``{"opened": seconds}``, ``{"milliseconds": [...], "best": [[[id, logprob], ...], ...]}``
with a list for each row, or ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.driver import answer_lines
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from driver import answer_lines

Prepared = TypeVar("Prepared")
Output = TypeVar("Output")
Best = Sequence[Sequence[tuple[int, float]]]
"""For each row: token ids with their log-probabilities, best first."""


class StepOpening(NamedTuple):
    """How to open the runner. Its cache is full of numbers from the start."""

    model: str
    threads: int
    dtype: str
    """Of products and cache."""
    blocks: int
    block_size: int
    """Tokens."""


class Batch(NamedTuple):
    """A step, packed row after row."""

    tokens: list[int]
    positions: list[int]
    lengths: list[int]
    """New tokens of each row."""
    contexts: list[int]
    """Tokens of each row after the step."""
    tables: list[list[int]]
    """Block ids of each row."""
    top: int
    """Tokens to report for each row."""


class Stepper(Protocol[Prepared, Output]):
    """A runner of steps."""

    def prepare(self, batch: Batch) -> Prepared:
        """What a scheduler hands over: arrays. Takes none of the time."""
        ...

    def execute(self, prepared: Prepared) -> Output:
        """What is timed: from arrays to the best token of each row."""
        ...

    def best(self, output: Output, top: int) -> Best:
        """What is reported, in no hurry."""
        ...


def answer_step(stepper: Stepper[Prepared, Output], batch: Batch, repeats: int) -> Mapping[str, object]:
    """Run ``batch`` once, and ``repeats`` times more with the clock: the first one finds cold caches."""
    prepared = stepper.prepare(batch)
    output = stepper.execute(prepared)
    times = []
    for _ in range(repeats):
        began = perf_counter()
        output = stepper.execute(prepared)
        times.append((perf_counter() - began) * 1e3)
    return {"milliseconds": times, "best": stepper.best(output, batch.top)}


def serve_steps(opener: Callable[[StepOpening], Stepper[Prepared, Output]]) -> None:
    """Answer requests until stdin ends."""
    opened: list[Stepper[Prepared, Output]] = []

    def answer(line: str) -> Mapping[str, object]:
        question = json.loads(line)
        if "open" in question:
            began = perf_counter()
            opened[:] = [opener(StepOpening(**question["open"]))]
            return {"opened": perf_counter() - began}
        return answer_step(opened[0], Batch(**question["step"]), question["repeats"])

    answer_lines(answer)
