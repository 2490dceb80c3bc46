"""What the cache's bookkeeping costs, without any model: octavo beside vLLM's ``KVCacheManager`` and SGLang's
``RadixCache``, where those are there, and beside the usual hash-chain manager (``yardstick.py``).

    python examples/benchmarks/bookkeeping.py            # tables; a minute
    python examples/benchmarks/bookkeeping.py --quick    # short prompts and few repetitions
    python examples/benchmarks/bookkeeping.py --scale    # from 1,000 to 1,000,000 blocks, from 10 to 10,000 sequences

``--json FILE`` and ``--plot FILE`` (with ``--scale``) keep the result. A peer runs in a process and an environment of
its own (``bookkeeping_peers.py``). Beside it the acts are cut where all engines can be cut: *admit* is everything from
a list of ids to published blocks, packing or hashing included. Beside the yardstick the parts are told apart:

64 prompts share the first half of their tokens. Both sides do the same acts in one process, round by round in turn;
medians in microseconds. Prompts are lists of token ids. *admit*: look up the prefix, hold it, allocate the rest; the
yardstick's hashing is a part of it, octavo's packing of the list into bytes is shown apart as *encode*, and both
together as *encode + admit*. *commit*: the prompt is computed, publish its blocks. *rehit*: admit the same prompts
again. *churn*: admit, commit and finish distinct prompts in a pool that holds a quarter of them. *decode*: one token,
with its share of new blocks and of publishing them, mean of 160. *admit, packed*: the yardstick hashes int32 bytes
instead of pickles, which is leaner than what engines do by default.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from octavo.engine.kv import Sequence

if TYPE_CHECKING:
    from octavo.examples.benchmarks.bookkeeping_acts import (
        BLOCK_SIZE,
        PROMPTS,
        Track,
        prompts_with_shared_half,
        quiet,
        random_tokens,
    )
    from octavo.examples.benchmarks.bookkeeping_rivals import (
        PEER_FOLDER,
        installed_peers,
        measure_peers,
        peer_sheet,
        peer_targets,
    )
    from octavo.examples.benchmarks.bookkeeping_scale import measure_scale, plot_scale, scale_sheets
    from octavo.examples.benchmarks.bookkeeping_sides import Octavo, Yardstick
    from octavo.examples.benchmarks.report import Report, Sheet, parser_of, this_machine
    from octavo.examples.benchmarks.yardstick import ChainedSequence
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from bookkeeping_acts import (
        BLOCK_SIZE,
        PROMPTS,
        Track,
        prompts_with_shared_half,
        quiet,
        random_tokens,
    )
    from bookkeeping_rivals import PEER_FOLDER, installed_peers, measure_peers, peer_sheet, peer_targets
    from bookkeeping_scale import measure_scale, plot_scale, scale_sheets
    from bookkeeping_sides import Octavo, Yardstick
    from report import Report, Sheet, parser_of, this_machine

DECODED = 160
TARGETS = {512: 5, 8_192: 10, 32_768: 20}
"""Prompt length in tokens -> how many times faster than the yardstick admit, rehit, finish and churn have to be."""

Times: TypeAlias = "defaultdict[str, list[float]]"


Pair: TypeAlias = "tuple[Track[array[int], Sequence] | Track[list[int], ChainedSequence], ...]"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. Times are medians in microseconds."""

    tokens: int
    act: str
    octavo: float
    yardstick: float
    detail: str = ""

    @property
    def ratio(self) -> float:
        """How many times faster octavo is."""
        return self.yardstick / self.octavo


def measure_acts(tokens: int, rounds: int, random: Random) -> Iterator[Result]:
    """Admit, commit, finish and rehit of one prompt length. Each round starts with an empty cache."""
    names = ("admit, encode", "admit", "commit", "finish", "rehit", "rehit commit", "rehit finish")
    times: tuple[Times, Times] = (defaultdict(list), defaultdict(list))
    pool = (PROMPTS + 2) * (tokens // BLOCK_SIZE + 2)
    for _ in range(rounds):
        prompts = prompts_with_shared_half(tokens, PROMPTS, random)
        with quiet():
            pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool), prompts))
            _live(pair, "admit", "commit", "finish")
            _live(pair, "rehit", "rehit commit", "rehit finish")
        for track, into in zip(pair, times, strict=True):
            for name in names:
                into[name] += track.times[name]
    for side in times:
        side["encode"] = side.pop("admit, encode")
        for first, second in (("admit", "commit"), ("encode", "admit")):
            side[f"{first} + {second}"] = [a + b for a, b in zip(side[first], side[second], strict=True)]
    yield Result(tokens, "encode", median(times[0]["encode"]), median(times[1]["encode"]))
    for name in (*names[1:], "admit + commit", "encode + admit"):
        yield Result(tokens, name, median(times[0][name]), median(times[1][name]))


def measure_packed(tokens: int, random: Random) -> Iterator[Result]:
    """Admission beside the leaner yardstick."""
    prompts = prompts_with_shared_half(tokens, PROMPTS, random)
    pool = (PROMPTS + 2) * (tokens // BLOCK_SIZE + 2)
    with quiet():
        pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool, packed=True), prompts))
        _live(pair, "admit, packed", "commit", "finish")
    yield _compare(tokens, "admit, packed", pair)


def measure_churn(tokens: int, rounds: int, random: Random) -> Iterator[Result]:
    """Distinct prompts, one after the other, in a pool that holds a quarter of them."""
    prompts = [random_tokens(tokens, random) for _ in range(PROMPTS)]
    pool = PROMPTS // 4 * -(-tokens // BLOCK_SIZE)
    with quiet():
        pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool), prompts))
        for turn in range(rounds + 1):  # the first fills the pool
            for track in pair:
                for index in range(PROMPTS):
                    track.whole(index, "churn" if turn else "filling")
    yield _compare(tokens, "churn", pair)


def measure_decode(running: int, pool: int, random: Random) -> Iterator[Result]:
    """One token of each of ``running`` sequences after a prompt of 512 tokens of which half is shared."""
    tokens = min(TARGETS)
    prompts = prompts_with_shared_half(tokens, running, random)
    with quiet():
        pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool), prompts))
        for _ in range(max(1, 32 // running)):
            for track in pair:
                for index in range(running):
                    track.admit(index, "admit")
                    track.commit(index, "commit")
                track.decode(DECODED, "decode")
                track.finish_all()
    yield _compare(tokens, "decode", pair, f"{running} running, pool {pool}")


def measure_pool_size(pool: int, random: Random) -> Iterator[Result]:
    """Admission and finish of prompts of 512 tokens in pools of any size."""
    tokens = min(TARGETS)
    prompts = prompts_with_shared_half(tokens, PROMPTS, random)
    with quiet():
        pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool), prompts))
        _live(pair, "admit", "commit", "finish")
    for name in ("admit", "finish"):
        yield _compare(tokens, name, pair, f"pool {pool}")


def measure_fragmented(tokens: int, random: Random) -> Iterator[Result]:
    """Every second block is held by somebody else: there are no neighbours to hand out or to free together."""
    blocks = tokens // BLOCK_SIZE
    singles = [random_tokens(BLOCK_SIZE - 1, random) for _ in range(2 * (blocks + 2) * 4)]
    prompt = random_tokens(tokens, random)
    with quiet():
        pair: Pair = (
            Track(Octavo(len(singles)), [*singles, prompt]),
            Track(Yardstick(len(singles)), [*singles, prompt]),
        )
        for track in pair:
            for index in range(len(singles)):
                track.admit(index, "single")
            for index in range(0, len(singles), 2):
                track.finish(index, "single")
        for _ in range(3):
            for track in pair:
                track.admit(len(singles), "admit")
                track.finish(len(singles), "finish")  # nothing was published: all blocks go back one by one
    for name in ("admit", "finish"):
        yield _compare(tokens, name, pair, "every second block held")


def measure(*, quick: bool) -> Iterator[Result]:
    """All of it, one result after the other."""
    random = Random(0)  # noqa: S311  # not for secrets
    lengths = [512] if quick else list(TARGETS)
    for tokens in lengths:
        rounds = 3 if quick else max(3, 16_384 // tokens)
        yield from measure_acts(tokens, rounds, random)
        yield from measure_packed(tokens, random)
        yield from measure_churn(tokens, rounds, random)
        yield from measure_fragmented(tokens, random)
    for running in (1, 16) if quick else (1, 16, 256):
        yield from measure_decode(running, 1 << 14, random)
    for pool in (1 << 12, 1 << 14) if quick else (1 << 12, 1 << 14, 1 << 17, 1 << 20):
        yield from measure_pool_size(pool, random)
        yield from measure_decode(1, pool, random)


def missed_targets(results: list[Result]) -> list[str]:
    """What is slower than it should be. A decoded token may cost a tenth of the yardstick's admission of a block."""
    missed = []
    for result in results:
        wanted = TARGETS[result.tokens]
        if result.act in ("admit", "rehit", "finish", "churn") and not result.detail and result.ratio < wanted:
            missed.append(f"{result.act} at {result.tokens} tokens is {result.ratio:.1f} times faster, not {wanted}")
    shortest = min(TARGETS)
    admit = next(r.yardstick for r in results if r.act == "admit + commit" and r.tokens == shortest)
    per_block = admit * BLOCK_SIZE / shortest
    missed += [
        f"decode ({result.detail}) takes {result.octavo:.2f} us, not {per_block / 10:.2f}"
        for result in results
        if result.act == "decode" and result.octavo > per_block / 10
    ]
    return missed


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=Path, default=PEER_FOLDER, help="folder of the peers' environments")
    parser.add_argument("--scale", action="store_true", help="only how the costs grow with pool and sequences")
    chosen = parser.parse_args(arguments)
    machine = this_machine(1, ["octavo"])
    if chosen.scale:
        costs = measure_scale(quick=chosen.quick)
        report = Report("bookkeeping, scale", machine, scale_sheets(costs), costs)
        if chosen.plot is not None:
            plot_scale(costs, chosen.plot)
    else:
        report = _compared(chosen.peers, quick=chosen.quick)
    report.show()
    report.save(chosen.json)
    return 0


def _compared(folder: Path, *, quick: bool) -> Report:
    names, skipped = installed_peers(folder)
    times = measure_peers(names, folder, [512, 2_048] if quick else [512, 2_048, 8_192], 2 if quick else 5)
    results = list(measure(quick=quick))
    rows = [
        (f"{r.act} at {r.tokens}", f"{r.octavo:.2f}", f"{r.yardstick:.2f}", f"{r.ratio:.1f}", r.detail) for r in results
    ]
    yardstick = Sheet("The usual manager, us", ["act", "octavo", "yardstick", "ratio", ""], rows)
    numbers = {
        "peers": [
            {"tokens": tokens, "act": act, "microseconds": {name: spread.values for name, spread in sides.items()}}
            for (tokens, act), sides in times.items()
        ],
        "yardstick": results,
    }
    notes = [*skipped, *(f"missed: {line}" for line in missed_targets(results))]
    sheets = [peer_sheet(times), yardstick]
    return Report("bookkeeping", this_machine(1, ["octavo"]), sheets, numbers, peer_targets(times), notes)


def _live(pair: Pair, admit: str, commit: str, finish: str) -> None:
    """All prompts come, run together, and go; first on one side, then on the other."""
    for track in pair:
        for index in range(PROMPTS):
            track.admit(index, admit)
            track.commit(index, commit)
        for index in range(PROMPTS):
            track.finish(index, finish)


def _compare(tokens: int, name: str, pair: Pair, detail: str = "") -> Result:
    octavo, yardstick = (median(track.times[name]) for track in pair)
    return Result(tokens, name, octavo, yardstick, detail)


if __name__ == "__main__":
    sys.exit(main())
