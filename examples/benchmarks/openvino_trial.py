"""Would OpenVINO compute our steps faster? Its paged attention over block tables such as ours, beside octavo's runner.

    python examples/benchmarks/peers/install.py --peers openvino    # once: its environment and its form of the weights
    python examples/benchmarks/openvino_trial.py                    # a minute
    python examples/benchmarks/openvino_trial.py --quick            # one round, one repetition
    python examples/benchmarks/openvino_trial.py --json FILE --plot FILE

SmolLM2 from the same bfloat16 weights, on as many threads. ``engines.py`` compares engines; this compares what is
inside: the steps of ``levers.py`` as they are, handed to a runner as arrays, up to the best token of each row. Blocks
have 32 tokens on both sides (OpenVINO's CPU plug-in knows no others) and lie scattered; the caches are full of numbers.
Each side is a process of its own and stands still while the other one computes; they take turns.

First it has to be right: both compute prompts that share blocks, then decode, both fed what octavo chose. In float32
they must agree, in bfloat16 it is told how far they do. Then milliseconds a step in bfloat16, cache included: medians
of the rounds, their median and their range. *ratio* is OpenVINO's time over octavo's, round by round: above 1 octavo is
faster. In octavo's time is the log-probability of each token, in OpenVINO's it is not.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from octavo.engine.model.runner import StepInput

if TYPE_CHECKING:
    from octavo.examples.benchmarks.levers import BLOCK_SIZE, BLOCKS, SHAPES, step_of
    from octavo.examples.benchmarks.peers.catalogue import Peer, default_folder, peers
    from octavo.examples.benchmarks.peers.install import demo_weights
    from octavo.examples.benchmarks.peers.process import TO_OPEN, TO_RUN, Opened, PeerFailed, PeerProcess
    from octavo.examples.benchmarks.peers.steps import Batch, StepOpening
    from octavo.examples.benchmarks.report import (
        Report,
        Sheet,
        Spread,
        Target,
        bars,
        panels,
        parser_of,
        this_machine,
        turns,
    )
else:
    FOLDER = Path(__file__).parent  # neither this folder nor that of the peers is a package
    sys.path[:0] = [str(FOLDER), str(FOLDER / "peers")]
    from catalogue import Peer, default_folder, peers
    from install import demo_weights
    from levers import BLOCK_SIZE, BLOCKS, SHAPES, step_of
    from process import TO_OPEN, TO_RUN, Opened, PeerFailed, PeerProcess
    from report import Report, Sheet, Spread, Target, bars, panels, parser_of, this_machine, turns
    from steps import Batch, StepOpening

OCTAVO, OPENVINO = "octavo", "openvino"
BLOCK = 32
"""Tokens, on both sides."""
THREADS = 2
ROWS, SHARED, PROMPT, DECODED = 4, 2 * BLOCK, 3 * BLOCK + 5, 2 * BLOCK
"""Of the check: rows, tokens that all of them share, tokens of each prompt, steps after it."""
CHECK_BLOCKS = 64
VOCABULARY = 40_000
TOP = 5
CLOSE = 1e-3
"""Between log-probabilities: both sides sum in float32, each in an order of its own."""


class Answer(msgspec.Struct):
    """What a driver says after a step."""

    milliseconds: list[float]
    best: list[list[tuple[int, float]]]


class Runs(Protocol):
    """Something that runs a step."""

    def __call__(self, batch: Batch, repeats: int) -> Answer:
        """Once, and ``repeats`` times more with the clock."""
        ...


class Agreement(NamedTuple):
    """How alike two sides compute."""

    tokens: float
    """Share of the best tokens that are the same."""
    difference: float
    """The largest one between log-probabilities that both report for a token."""


class Chat:
    """A row of the check."""

    def __init__(self, tokens: list[int], table: list[int]) -> None:
        self.tokens = tokens
        self.table = table
        self.computed = 0


# the steps


def batch_of(step: StepInput) -> Batch:
    """What of a step goes to a driver."""
    rows = step.rows
    tables = [row.blocks.tolist() for row in rows]
    lengths, contexts = [row.length for row in rows], [row.context for row in rows]
    return Batch(step.tokens.tolist(), step.positions.tolist(), lengths, contexts, tables, 1)


def chats() -> list[Chat]:
    """Prompts that begin alike, in blocks that lie anywhere: the common ones first."""
    random = np.random.default_rng(0)
    free = random.permutation(CHECK_BLOCKS).tolist()
    common, shared = [free.pop() for _ in range(SHARED // BLOCK)], random.integers(0, VOCABULARY, SHARED).tolist()
    own = -(-(PROMPT + DECODED) // BLOCK) - len(common)
    prompts = [shared + random.integers(0, VOCABULARY, PROMPT - SHARED).tolist() for _ in range(ROWS)]
    return [Chat(prompt, common + [free.pop() for _ in range(own)]) for prompt in prompts]


def due(rows: Sequence[Chat]) -> Batch:
    """A step that computes what ``rows`` have and is not computed yet."""
    tokens = [token for row in rows for token in row.tokens[row.computed :]]
    positions = [at for row in rows for at in range(row.computed, len(row.tokens))]
    lengths, contexts = [len(row.tokens) - row.computed for row in rows], [len(row.tokens) for row in rows]
    tables = [row.table[: -(-len(row.tokens) // BLOCK)] for row in rows]
    for row in rows:
        row.computed = len(row.tokens)
    return Batch(tokens, positions, lengths, contexts, tables, TOP)


# measuring


def check(octavo: Runs, openvino: Runs, steps: int) -> Agreement:
    """One prompt, then the others after what they share with it, then ``steps`` of all rows."""
    first, *others = rows = chats()
    alike, differences = [], []

    def compare(some: Sequence[Chat]) -> None:
        batch = due(some)
        mine, theirs = (side(batch, 0).best for side in (octavo, openvino))
        for row, best, other in zip(some, mine, theirs, strict=True):
            row.tokens.append(best[0][0])
            alike.append(best[0][0] == other[0][0])
            differences.append(_difference(dict(best), dict(other)))

    compare([first])
    for row in others:
        row.computed = SHARED
    compare(others)
    for _ in range(steps):
        compare(rows)
    return Agreement(sum(alike) / len(alike), max(differences))


def measure(sides: Mapping[str, Runs], rounds: int, repeats: int) -> Mapping[str, Mapping[str, Spread]]:
    """Milliseconds by shape and side, one median of ``repeats`` for each round."""
    steps = {shape.name: batch_of(step_of(shape, BLOCK)) for shape in SHAPES}
    found: dict[str, dict[str, list[float]]] = {shape: defaultdict(list) for shape in steps}
    for shape, side in turns([(shape, side) for shape in steps for side in sides], rounds, name=" by ".join):
        found[shape][side].append(median(sides[side](steps[shape], repeats).milliseconds))
    return {shape: {side: Spread.of(times[side]) for side in sides} for shape, times in found.items()}


def sheet_of(found: Mapping[str, Mapping[str, Spread]]) -> Sheet:
    """A row for each shape."""
    rows = [
        [shape, times[OCTAVO].text(), times[OPENVINO].text(), f"{times[OPENVINO].over(times[OCTAVO]):.2f}"]
        for shape, times in found.items()
    ]
    return Sheet("milliseconds a step", ["step", OCTAVO, OPENVINO, "ratio"], rows)


@contextmanager
def both(folder: Path, dtype: str, blocks: int) -> Iterator[Mapping[str, Runs]]:
    """The runners by name, with their caches.

    :raises PeerFailed: when one cannot be opened.
    """
    known = {peer.name: peer for peer in peers()}
    processes = {name: PeerProcess(_stepping(known[name]), folder, THREADS) for name in (OCTAVO, OPENVINO)}
    try:
        for process in processes.values():
            model = folder / process.peer.prepared if process.peer.prepared else demo_weights()
            opening = StepOpening(str(model), THREADS, dtype, blocks, BLOCK)
            process.ask({"open": opening._asdict()}, Opened, TO_OPEN)
        yield {name: _runs(process) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.close()


class Found(NamedTuple):
    """What the trial came to."""

    exact: Agreement
    """In float32."""
    rounded: Agreement
    """In bfloat16."""
    milliseconds: Mapping[str, Mapping[str, Spread]]
    """By shape and side."""


def trial(folder: Path, *, quick: bool) -> Found:
    """The check, then the times.

    :raises PeerFailed: when a side fails.
    """
    rounds, repeats, steps = (1, 1, 2) if quick else (5, 5, DECODED)
    with both(folder, "float32", CHECK_BLOCKS) as sides:
        exact = check(sides[OCTAVO], sides[OPENVINO], steps)
    with both(folder, "bfloat16", BLOCKS * BLOCK_SIZE // BLOCK) as sides:
        rounded = check(sides[OCTAVO], sides[OPENVINO], steps)
        return Found(exact, rounded, measure(sides, rounds, repeats))


def report_of(found: Found) -> Report:
    """The times, and whether they count."""
    targets = [
        Target("same greedy tokens, float32", found.exact.tokens, 1.0),
        Target("largest difference of log-probabilities, float32", found.exact.difference, CLOSE, at_most=True),
    ]
    tokens, difference = found.rounded
    note = f"bfloat16: {tokens:.0%} of the greedy tokens the same, log-probabilities at most {difference:.2f} apart"
    machine, sheets = this_machine(THREADS), [sheet_of(found.milliseconds)]
    return Report("openvino trial", machine, sheets, found._asdict(), targets, [note])


def save_plot(found: Found, path: Path) -> None:
    """Bars for each shape."""
    figure, axes = panels("A step in octavo and in OpenVINO", 1)
    medians = {
        shape: {side: spread.median for side, spread in times.items()} for shape, times in found.milliseconds.items()
    }
    bars(axes[0], medians, unit="milliseconds")
    figure.savefig(path)


def _difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    return max((abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()), default=float("inf"))


def _stepping(peer: Peer) -> Peer:
    return replace(peer, driver=f"{peer.name}_steps.py")


def _runs(process: PeerProcess) -> Runs:
    def run(batch: Batch, repeats: int) -> Answer:
        return process.ask({"step": batch._asdict(), "repeats": repeats}, Answer, TO_RUN)

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show."""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of the peers; default: %(default)s")
    options = parser.parse_args(arguments)
    missing = [path for peer in peers() if peer.name == OPENVINO for path in peer.missing(options.folder)]
    if missing:
        print(f"openvino is not here: run peers/install.py ({', '.join(missing)} missing)")
        return 0
    try:
        found = trial(options.folder, quick=options.quick)
    except PeerFailed as failure:
        print(f"no trial: {failure}")
        return 1
    report = report_of(found)
    report.show()
    report.save(options.json)
    if options.plot is not None:
        save_plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
