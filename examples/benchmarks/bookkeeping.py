"""What the cache's bookkeeping costs, without any model: octavo beside the usual hash-chain manager (``yardstick.py``).

    python examples/benchmarks/bookkeeping.py            # a table; half a minute
    python examples/benchmarks/bookkeeping.py --quick    # seconds, short prompts and few repetitions
    python examples/benchmarks/bookkeeping.py --json     # the same numbers for machines, on stdout

64 prompts share the first half of their tokens. Both sides do the same acts in one process, round by round in turn;
medians in microseconds. Prompts are lists of token ids. *admit*: look up the prefix, hold it, allocate the rest; the
yardstick's hashing is a part of it, octavo's packing of the list into bytes is shown apart as *encode*, and both
together as *encode + admit*. *commit*: the prompt is computed, publish its blocks. *rehit*: admit the same prompts
again. *churn*: admit, commit and finish distinct prompts in a pool that holds a quarter of them. *decode*: one token,
with its share of new blocks and of publishing them, mean of 160. *admit, packed*: the yardstick hashes int32 bytes
instead of pickles, which is leaner than what engines do by default.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.policies.eviction import Lru

if TYPE_CHECKING:
    from octavo.examples.benchmarks.yardstick import ChainedSequence, HashChainManager
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from yardstick import ChainedSequence, HashChainManager

BLOCK_SIZE = 16
PROMPTS = 64
VOCABULARY = 50_000
DECODED = 160
TARGETS = {512: 5, 8_192: 10, 32_768: 20}
"""Prompt length in tokens -> how many times faster than the yardstick admit, rehit, finish and churn have to be."""

Handle = TypeVar("Handle")
Prompt = TypeVar("Prompt")
Times: TypeAlias = "defaultdict[str, list[float]]"


class Side(Protocol[Prompt, Handle]):
    """What is measured, on either side."""

    def encode(self, tokens: list[int]) -> Prompt: ...
    def admit(self, prompt: Prompt) -> Handle: ...
    def commit(self, handle: Handle) -> None: ...
    def decode(self, handle: Handle, token: int) -> None: ...
    def finish(self, handle: Handle) -> None: ...


class Octavo:
    """The cache manager of this package."""

    def __init__(self, num_blocks: int) -> None:
        policy = Lru(num_blocks)
        self._manager = CacheManager(num_blocks, BLOCK_SIZE, policy, clock=monotonic, on_fault=_fail)
        self._namespace = Namespace("weights")
        self._next_id = 0

    def encode(self, tokens: list[int]) -> array[int]:
        return encode_tokens(tokens)

    def admit(self, prompt: array[int]) -> Sequence:
        self._next_id += 1
        sequence = Sequence(self._next_id, prompt[:], self._namespace, block_size=BLOCK_SIZE)
        self._manager.copied(self._manager.admit(sequence).copies)
        return sequence

    def commit(self, handle: Sequence) -> None:
        self._manager.commit(handle, handle.uncomputed, 1)

    def decode(self, handle: Sequence, token: int) -> None:
        manager = self._manager
        manager.extend(handle, 1)
        manager.commit(handle, 1, token)

    def finish(self, handle: Sequence) -> None:
        self._manager.finish(handle)


class Yardstick:
    """The hash-chain manager."""

    def __init__(self, num_blocks: int, *, packed: bool = False) -> None:
        self._manager = HashChainManager(num_blocks, BLOCK_SIZE, packed=packed)

    def encode(self, tokens: list[int]) -> list[int]:
        return tokens

    def admit(self, prompt: list[int]) -> ChainedSequence:
        return self._manager.admit(prompt)

    def commit(self, handle: ChainedSequence) -> None:
        self._manager.commit(handle, len(handle.tokens) - handle.computed, 1)

    def decode(self, handle: ChainedSequence, token: int) -> None:
        self._manager.decode(handle, token)

    def finish(self, handle: ChainedSequence) -> None:
        self._manager.finish(handle)


class Track(Generic[Prompt, Handle]):
    """One side with its prompts, its running sequences and its times in microseconds by name."""

    def __init__(self, side: Side[Prompt, Handle], prompts: list[list[int]]) -> None:
        self.side = side
        self.times: dict[str, list[float]] = defaultdict(list)
        self.running: dict[int, Handle] = {}
        self.prompts: list[Prompt] = []
        for tokens in prompts:
            start = perf_counter_ns()
            prompt = side.encode(tokens)
            self._note("encode", start)
            self.prompts.append(prompt)

    def admit(self, index: int, name: str) -> None:
        side, prompt = self.side, self.prompts[index]
        start = perf_counter_ns()
        handle = side.admit(prompt)
        self._note(name, start)
        self.running[index] = handle

    def commit(self, index: int, name: str) -> None:
        side, handle = self.side, self.running[index]
        start = perf_counter_ns()
        side.commit(handle)
        self._note(name, start)

    def finish(self, index: int, name: str) -> None:
        side, handle = self.side, self.running.pop(index)
        start = perf_counter_ns()
        side.finish(handle)
        self._note(name, start)

    def whole(self, index: int, name: str) -> None:
        """Admit, commit and finish one prompt; ``name`` gets the sum."""
        side, prompt = self.side, self.prompts[index]
        start = perf_counter_ns()
        handle = side.admit(prompt)
        side.commit(handle)
        side.finish(handle)
        self._note(name, start)

    def decode(self, tokens: int, name: str) -> None:
        """``tokens`` steps of everything that runs; the time is that of one token."""
        decode, handles = self.side.decode, list(self.running.values())
        start = perf_counter_ns()
        for token in range(tokens):
            for handle in handles:
                decode(handle, token)
        self.times[name].append((perf_counter_ns() - start) / 1000 / tokens / len(handles))

    def finish_all(self) -> None:
        """Without a measurement."""
        for handle in self.running.values():
            self.side.finish(handle)
        self.running.clear()

    def _note(self, name: str, start: int) -> None:
        self.times[name].append((perf_counter_ns() - start) / 1000)


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


def prompts_with_shared_half(tokens: int, count: int, random: Random) -> list[list[int]]:
    """``count`` prompts of ``tokens`` tokens that have the first half in common."""
    shared = _random_tokens(tokens // 2, random)
    return [shared + _random_tokens(tokens - len(shared), random) for _ in range(count)]


def measure_acts(tokens: int, rounds: int, random: Random) -> Iterator[Result]:
    """Admit, commit, finish and rehit of one prompt length. Each round starts with an empty cache."""
    names = ("encode", "admit", "commit", "finish", "rehit", "rehit commit", "rehit finish")
    times: tuple[Times, Times] = (defaultdict(list), defaultdict(list))
    pool = (PROMPTS + 2) * (tokens // BLOCK_SIZE + 2)
    for _ in range(rounds):
        prompts = prompts_with_shared_half(tokens, PROMPTS, random)
        with _quiet():
            pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool), prompts))
            _live(pair, "admit", "commit", "finish")
            _live(pair, "rehit", "rehit commit", "rehit finish")
        for track, into in zip(pair, times, strict=True):
            for name in names:
                into[name] += track.times[name]
    for side in times:
        for first, second in (("admit", "commit"), ("encode", "admit")):
            side[f"{first} + {second}"] = [a + b for a, b in zip(side[first], side[second], strict=True)]
    yield Result(tokens, "encode", median(times[0]["encode"]), median(times[1]["encode"]))
    for name in (*names[1:], "admit + commit", "encode + admit"):
        yield Result(tokens, name, median(times[0][name]), median(times[1][name]))


def measure_packed(tokens: int, random: Random) -> Iterator[Result]:
    """Admission beside the leaner yardstick."""
    prompts = prompts_with_shared_half(tokens, PROMPTS, random)
    pool = (PROMPTS + 2) * (tokens // BLOCK_SIZE + 2)
    with _quiet():
        pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool, packed=True), prompts))
        _live(pair, "admit, packed", "commit", "finish")
    yield _compare(tokens, "admit, packed", pair)


def measure_churn(tokens: int, rounds: int, random: Random) -> Iterator[Result]:
    """Distinct prompts, one after the other, in a pool that holds a quarter of them."""
    prompts = [_random_tokens(tokens, random) for _ in range(PROMPTS)]
    pool = PROMPTS // 4 * -(-tokens // BLOCK_SIZE)
    with _quiet():
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
    with _quiet():
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
    with _quiet():
        pair: Pair = (Track(Octavo(pool), prompts), Track(Yardstick(pool), prompts))
        _live(pair, "admit", "commit", "finish")
    for name in ("admit", "finish"):
        yield _compare(tokens, name, pair, f"pool {pool}")


def measure_fragmented(tokens: int, random: Random) -> Iterator[Result]:
    """Every second block is held by somebody else: there are no neighbours to hand out or to free together."""
    blocks = tokens // BLOCK_SIZE
    singles = [_random_tokens(BLOCK_SIZE - 1, random) for _ in range(2 * (blocks + 2) * 4)]
    prompt = _random_tokens(tokens, random)
    with _quiet():
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short prompts, few repetitions")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    chosen = parser.parse_args(arguments)
    results: list[Result] = []
    for result in measure(quick=chosen.quick):
        print(f"{result.act} at {result.tokens} {result.detail}", file=sys.stderr)
        results.append(result)
    missed = missed_targets(results)
    if chosen.json:
        lines = [asdict(result) | {"ratio": result.ratio} for result in results]
        print(json.dumps({"results": lines, "missed": missed}, indent=1))
    else:
        print(f"{'tokens':>7} {'act':<14} {'octavo us':>10} {'yardstick us':>12} {'ratio':>7}")
        for r in results:
            print(f"{r.tokens:>7} {r.act:<14} {r.octavo:>10.2f} {r.yardstick:>12.2f} {r.ratio:>7.1f}  {r.detail}")
        print("\n".join(["", *(f"missed: {line}" for line in missed)] if missed else ["", "all targets met"]))
    return 0


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


def _random_tokens(count: int, random: Random) -> list[int]:
    return random.choices(range(VOCABULARY), k=count)


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection while the clock runs; what is there now stays out of the next one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _fail(where: str, error: BaseException | str) -> None:
    raise RuntimeError(f"{where}: {error}")


if __name__ == "__main__":
    sys.exit(main())
