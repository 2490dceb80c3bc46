"""How the costs of ``bookkeeping.py`` grow: with the blocks of the pool, and with the sequences that run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.examples.benchmarks.bookkeeping_acts import BLOCK_SIZE, DECODED, Track, quiet, random_tokens
    from octavo.examples.benchmarks.bookkeeping_sides import Octavo
    from octavo.examples.benchmarks.report import Sheet, panels, progress
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from bookkeeping_acts import BLOCK_SIZE, DECODED, Track, quiet, random_tokens
    from bookkeeping_sides import Octavo
    from report import Sheet, panels, progress

TOKENS = 512
PROBES = 256
"""Requests that are measured beside those that run."""
FEW = 10
POOLS = (1_000, 10_000, 100_000, 1_000_000)
RUNNING = (10, 100, 1_000, 10_000)
ACTS = ("admit", "commit", "decode", "finish", "churn")


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds, medians, of each act; of one token for ``decode``."""

    blocks: int
    running: int
    times: dict[str, float]


def cost(blocks: int, running: int, random: Random) -> Cost:
    """Of prompts of ``TOKENS`` tokens with the first half in common, while ``running`` others run, in a pool that is
    full of what earlier requests left.
    """
    shared, numbers = random_tokens(TOKENS, random), count()

    def prompt(common: int) -> list[int]:
        """Its block after ``common`` tokens is unlike all others."""
        return [*shared[:common], next(numbers), *shared[common + 1 :]]

    half = TOKENS // 2
    with quiet():
        filling = blocks * BLOCK_SIZE // TOKENS + 1
        prompts = [prompt(0) for _ in range(filling + PROBES)] + [prompt(half) for _ in range(running + PROBES)]
        track = Track(Octavo(blocks), prompts)
        for index in range(filling):
            track.whole(index, "filling")
        first = filling + PROBES
        for index in range(first, first + running):
            track.admit(index, "filling")
            track.commit(index, "filling")
        track.decode(DECODED, "decode")
        for index in range(filling, filling + PROBES):
            track.whole(index, "churn")
        for index in range(first + running, first + running + PROBES):
            track.admit(index, "admit")
            track.commit(index, "commit")
            track.finish(index, "finish")
        track.finish_all()
    return Cost(blocks, running, {act: median(track.times[act]) for act in ACTS})


def measure_scale(*, quick: bool) -> list[Cost]:
    """Both ways; the last two sizes of each are left out if it is to be ``quick``."""
    random = Random(0)  # noqa: S311  # not for secrets
    most = 2 if quick else len(POOLS)
    cases = [(blocks, FEW) for blocks in POOLS[:most]]
    cases += [(running * 32 + POOLS[0], running) for running in RUNNING[:most]]
    found = []
    with progress(len(cases)) as step:
        for blocks, running in cases:
            step(f"{blocks:,} blocks, {running:,} running")
            found.append(cost(blocks, running, random))
    return found


def scale_sheets(costs: list[Cost]) -> list[Sheet]:
    """One table."""
    rows = [(f"{each.blocks:,}", f"{each.running:,}", *(f"{each.times[act]:.2f}" for act in ACTS)) for each in costs]
    return [Sheet("Costs by size, us", ["blocks", "running", *ACTS], rows)]


def plot_scale(costs: list[Cost], path: Path) -> None:
    """Two panels: by blocks, and by sequences that run."""
    figure, (by_blocks, by_running) = panels("Cost of an operation", 2)
    half = len(costs) // 2
    for act in ACTS:
        by_blocks.plot(
            [each.blocks for each in costs[:half]], [each.times[act] for each in costs[:half]], "o-", label=act
        )
        by_running.plot([each.running for each in costs[half:]], [each.times[act] for each in costs[half:]], "o-")
    for axes, what in ((by_blocks, f"blocks, {FEW} sequences running"), (by_running, "sequences running")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(what)
        axes.set_ylabel("microseconds")
    by_blocks.legend(fontsize="small")
    figure.savefig(path)
