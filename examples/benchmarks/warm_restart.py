"""What a restart costs with the disk tier: time to first token of a long prompt, cold, cached and after a restart.

    python examples/benchmarks/warm_restart.py            # ratios from one run; some minutes, most of them cold prefill
    python examples/benchmarks/warm_restart.py --quick    # a minute: a short prompt, one restart, small trees
    python examples/benchmarks/warm_restart.py --json     # the same numbers for machines, on stdout

SmolLM2 in bfloat16, whose context is 8,192 tokens; the prompt has 8,177 of them, 511 blocks of 16 and the one token
that is always computed. *cold*: time to first token of the prompt that nobody has seen. *device hit*: of the same
prompt again. *read*: plain ``preadv`` of all segment files of the disk tier, whole, into memory that is there already.
*restart*: time to first token in a new process on the folder that the first one has left. In each process the model is
loaded, and a short prompt of its own has run, before any clock starts. *read*, *restart* and *device hit* come from
the same process, one after the other; the ratio is that of each process, and the medians of all are shown. Once with
a *cold* page cache (``posix_fadvise(DONTNEED)`` on all files before *read* and before *restart*; where the system
keeps the pages all the same, *read* shows it) and once with a *warm* one.

*open*: until a disk tier, and a snapshot, of many blocks with tiny payloads answers, beside the cold prefill of as many
tokens at the speed measured above.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import msgspec
import numpy as np

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.storage.base import Head, Record, Tier, TierGeometry
from octavo.storage.disk.tier import DiskTier
from octavo.storage.identity import Identity
from octavo.storage.naming import Namespace, name_after
from octavo.storage.record import RecordCodec
from octavo.storage.snapshot.backend import FolderBackend

BLOCK_SIZE = 16
PROMPT = 511 * BLOCK_SIZE + 1
QUICK_PROMPT = 31 * BLOCK_SIZE + 1
TREES = (25_000, 50_000, 100_000)
QUICK_TREES = (1_000, 2_000)
BRANCH = 512
"""Blocks of one prompt in the trees."""
ONE = SamplingParams(max_tokens=1, temperature=0.0)
ABOVE_HIT, BELOW_COLD, OPEN_SHARE = 1.5, 10.0, 0.01
"""Targets: restart / (read + device hit) at most, cold / restart at least, open / cold prefill at most."""


class First(msgspec.Struct, frozen=True):
    """The process that fills the folder. Times in seconds."""

    cold: float
    token: int
    stored_bytes: int


class Again(msgspec.Struct, frozen=True):
    """One process after it. Times in seconds."""

    page_cache: str
    read: float
    restart: float
    device_hit: float
    token: int
    loaded_tokens: int

    @property
    def above_hit(self) -> float:
        """The time to first token beside what cannot be avoided."""
        return self.restart / (self.read + self.device_hit)


@dataclass(frozen=True, slots=True)
class Opening:
    """How long one tree takes to open."""

    kind: str
    blocks: int
    seconds: float
    prefill: float
    """Seconds to compute its tokens."""

    @property
    def share(self) -> float:
        """Of the cold prefill."""
        return self.seconds / self.prefill


# with a model, each in a process of its own


def config(folder: Path, tokens: int) -> EngineConfig:
    """An engine with a disk tier that gets every block as soon as its request is done."""
    return EngineConfig(
        num_blocks=2 * (tokens // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        tiers=("disk",),
        disk_path=folder,
        disk_bytes=2 << 30,
        demotion="write_through",
    )


def prompt_of(tokens: int, vocabulary: int) -> list[int]:
    """The same in every process."""
    return Random(0).choices(range(vocabulary), k=tokens)  # noqa: S311  # not for secrets


async def first_token(engine: AsyncEngine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token of ``prompt``, and the token."""
    began = perf_counter()
    outputs = await engine.complete(prompt, ONE)
    return perf_counter() - began, outputs[0].token_ids[0]


async def fill(folder: Path, tokens: int) -> First:
    """Compute the prompt and leave it in ``folder``."""
    async with AsyncEngine.open("smollm2", config(folder, tokens)) as engine:
        await engine.complete([1, 2, 3], ONE)
        seconds, token = await first_token(engine, prompt_of(tokens, engine.model.vocab_size))
    return First(seconds, token, sum(path.stat().st_size for path in segments(folder)))


async def restart(folder: Path, tokens: int, page_cache: str) -> Again:
    """Read the folder plainly, then through a new engine, then find the prompt on the device."""
    async with AsyncEngine.open("smollm2", config(folder, tokens)) as engine:
        await engine.complete([1, 2, 3], ONE)
        prompt = prompt_of(tokens, engine.model.vocab_size)
        buffer = np.ones(max(path.stat().st_size for path in segments(folder)), dtype=np.uint8).data
        read(folder, buffer)
        if page_cache == "cold":
            drop(folder)
        reading = read(folder, buffer)
        if page_cache == "cold":
            drop(folder)
        restarting, token = await first_token(engine, prompt)
        loaded = sum(engine.stats().transfers.loaded_tokens.values())
        hit, _ = await first_token(engine, prompt)
    return Again(page_cache, reading, restarting, hit, token, loaded)


def segments(folder: Path) -> list[Path]:
    """The files of the disk tier that hold blocks."""
    return sorted(folder.rglob("*.seg"))


def read(folder: Path, buffer: memoryview) -> float:
    """Seconds to read all of them."""
    began = perf_counter()
    for path in segments(folder):
        descriptor = os.open(path, os.O_RDONLY)
        at = 0
        while got := os.preadv(descriptor, [buffer], at):
            at += got
        os.close(descriptor)
    return perf_counter() - began


def drop(folder: Path) -> None:
    """Ask the system to forget their pages."""
    for path in segments(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_process(*arguments: str) -> str:
    """What this script prints when it is called with ``arguments``."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  # this very file
    return done.stdout.splitlines()[-1]


def measure_restarts(folder: Path, tokens: int, runs: int) -> tuple[First, list[Again]]:
    """One process that fills the folder, then ``runs`` for each state of the page cache."""
    where = [str(folder), str(tokens)]
    first = msgspec.json.decode(in_process("--child", "fill", *where), type=First)
    states = [state for _ in range(runs) for state in ("cold", "warm")]
    return first, [msgspec.json.decode(in_process("--child", state, *where), type=Again) for state in states]


# without a model


class Blocks:
    """Prompts of ``BRANCH`` blocks with tiny payloads, as a tier keeps them."""

    def __init__(self) -> None:
        identity = Identity.of({"weights": "tiny"}, block_size=BLOCK_SIZE, payload_bytes=64)
        self._codec = RecordCodec(block_size=BLOCK_SIZE, payload_bytes=64, run=bytes(8))
        self.geometry = TierGeometry(identity, self._codec.record_bytes)
        self.shelf = Namespace(identity.digest).shelf()

    def batches(self, count: int) -> Iterator[list[Record]]:
        """``count`` blocks, a prompt at a time."""
        random = Random(count)  # noqa: S311  # not for secrets
        for first in range(0, count, BRANCH):
            yield list(self._prompt(min(BRANCH, count - first), random))

    def _prompt(self, count: int, random: Random) -> Iterator[Record]:
        parent, buffer = self.shelf.namespace, self._codec.buffer(count)
        buffer[:] = 0
        for at in range(count):
            tokens = random.randbytes(4 * BLOCK_SIZE)
            head = Head(name_after(parent, tokens), parent, at * BLOCK_SIZE, tokens)
            yield Record(head, self._codec.seal(buffer[at], self.shelf, head, 0.0))
            parent = head.name


def disk(folder: Path, blocks: Blocks) -> DiskTier:
    """A disk tier at ``folder``, not open."""
    return DiskTier.create({"path": str(folder), "bytes": 4 << 30}, blocks.geometry)


async def write_disk(folder: Path, blocks: Blocks, count: int) -> None:
    """Leave ``count`` blocks in a disk tier."""
    tier = disk(folder, blocks)
    await tier.open()
    for batch in blocks.batches(count):
        await tier.put(blocks.shelf, batch)
    await tier.close()


async def write_snapshot(folder: Path, blocks: Blocks, count: int) -> None:
    """Leave a snapshot of ``count`` blocks."""
    sink = await FolderBackend.create({}).begin(str(folder), blocks.geometry)
    for batch in blocks.batches(count):
        await sink.add(blocks.shelf, batch)
    await sink.commit()


async def open_disk(folder: Path, blocks: Blocks) -> Tier:
    """As an engine does."""
    tier = disk(folder, blocks)
    await tier.open()
    return tier


async def open_snapshot(folder: Path, blocks: Blocks) -> Tier:
    """As an engine does."""
    return await FolderBackend.create({}).open(str(folder), blocks.geometry)


async def seconds_to_open(how: Callable[[Path, Blocks], Awaitable[Tier]], folder: Path, blocks: Blocks) -> float:
    """The median of three times."""
    times = []
    for _ in range(3):
        began = perf_counter()
        tier = await how(folder, blocks)
        times.append(perf_counter() - began)
        await tier.close()
    return median(times)


async def measure_trees(folder: Path, counts: tuple[int, ...], tokens_per_second: float) -> list[Opening]:
    """Disk tier and snapshot of each size."""
    blocks, found = Blocks(), []
    for count in counts:
        places = folder / f"disk-{count}", folder / f"snapshot-{count}"
        await write_disk(places[0], blocks, count)
        await write_snapshot(places[1], blocks, count)
        prefill = count * BLOCK_SIZE / tokens_per_second
        found.append(Opening("disk tier", count, await seconds_to_open(open_disk, places[0], blocks), prefill))
        found.append(Opening("snapshot", count, await seconds_to_open(open_snapshot, places[1], blocks), prefill))
    return found


# the report


def verdicts(first: First, again: list[Again], openings: list[Opening]) -> list[str]:
    """Each target, met or missed."""
    lines = [
        *_verdicts_of("cold page cache", first, [each for each in again if each.page_cache == "cold"]),
        *_verdicts_of("warm page cache", first, [each for each in again if each.page_cache == "warm"]),
    ]
    largest = max(each.blocks for each in openings)
    for each in openings:
        if each.blocks == largest:
            text = f"{each.kind} of {each.blocks} blocks opens in {each.share:.4%} of their prefill, at most"
            lines.append(f"{_met(each.share <= OPEN_SHARE)}: {text} {OPEN_SHARE:.0%}")
    same = {first.token, *(each.token for each in again)} == {first.token}
    return [*lines, f"{_met(same)}: the first token is the same in every process"]


def _verdicts_of(state: str, first: First, again: list[Again]) -> list[str]:
    above = median(each.above_hit for each in again)
    faster = first.cold / median(each.restart for each in again)
    return [
        f"{_met(above <= ABOVE_HIT)}: restart / (read + device hit), {state}: {above:.2f}, at most {ABOVE_HIT}",
        f"{_met(faster >= BELOW_COLD)}: cold / restart, {state}: {faster:.1f}, at least {BELOW_COLD}",
    ]


def _met(holds: bool) -> str:
    return "met   " if holds else "missed"


def show(tokens: int, first: First, again: list[Again], openings: list[Opening]) -> None:
    """Tables of everything, then the verdicts."""
    print(f"{tokens} tokens, {first.stored_bytes / 1e6:.0f} MB stored; milliseconds to the first token")
    print(f"cold: {first.cold * 1e3:.0f} ({tokens / first.cold:.0f} tokens per second)\n")
    print(f"{'page cache':<10} {'read':>8} {'device hit':>10} {'restart':>8} {'ratio':>6} {'loaded tokens':>13}")
    for each in again:
        times = f"{each.read * 1e3:>8.1f} {each.device_hit * 1e3:>10.1f} {each.restart * 1e3:>8.1f}"
        print(f"{each.page_cache:<10} {times} {each.above_hit:>6.2f} {each.loaded_tokens:>13}")
    print(f"\n{'open':<10} {'blocks':>8} {'seconds':>8} {'us/block':>9} {'share of prefill':>17}")
    for opening in openings:
        each_us = opening.seconds / opening.blocks * 1e6
        print(f"{opening.kind:<10} {opening.blocks:>8} {opening.seconds:>8.3f} {each_us:>9.2f} {opening.share:>17.4%}")
    print("", *verdicts(first, again, openings), sep="\n")


def as_json(first: First, again: list[Again], openings: list[Opening]) -> str:
    """All numbers in seconds, and the verdicts."""
    numbers = {
        "first": msgspec.to_builtins(first),
        "again": msgspec.to_builtins(again),
        "openings": [asdict(each) for each in openings],
        "verdicts": verdicts(first, again, openings),
    }
    return json.dumps(numbers, indent=1)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short prompt, one restart, small trees")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--tokens", type=int, help="of the prompt; best a multiple of 16 and one more")
    parser.add_argument("--runs", type=int, help="restarts for each state of the page cache")
    parser.add_argument("--folder", help="where to make a temporary folder; a disk, not memory")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        return child(*chosen.child)
    tokens = chosen.tokens or (QUICK_PROMPT if chosen.quick else PROMPT)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        folder = Path(made)
        first, again = measure_restarts(folder / "engine", tokens, chosen.runs or (1 if chosen.quick else 3))
        sizes = QUICK_TREES if chosen.quick else TREES
        openings = asyncio.run(measure_trees(folder, sizes, tokens / first.cold))
    if chosen.json:
        print(as_json(first, again, openings))
    else:
        show(tokens, first, again, openings)
    return 0


def child(what: str, folder: str, tokens: str) -> int:
    """One process of the measurement; its result is the last line."""
    work = fill(Path(folder), int(tokens)) if what == "fill" else restart(Path(folder), int(tokens), what)
    print(msgspec.json.encode(asyncio.run(work)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
