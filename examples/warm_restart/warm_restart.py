"""An engine is killed, starts again, and still knows what it had computed.

    python examples/warm_restart/warm_restart.py
    python examples/warm_restart/warm_restart.py --documents 5 --tokens 2000

A process of its own answers a question about each of a few long documents. Its disk tier keeps the K and V of every
block as soon as a request is done. Then it is killed, without a chance to save anything. A second process on the same
folder answers the same questions: the documents come from the disk, only the questions are computed. Times to first
token of both are shown side by side, and that the answers are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from octavo import AsyncEngine, EngineConfig, SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
QUESTION = "\n\nThe cargo of this ship was"


class Answer(NamedTuple):
    """What one process said to one document."""

    tokens: int
    """Of the prompt."""
    saved: int
    """Of them, those that an earlier process had computed."""
    seconds: float
    """To the first token."""
    text: str


# the process that is killed


def config(folder: Path, documents: int, tokens: int) -> EngineConfig:
    """A pool that holds all documents, over a disk tier that gets every block once its request is done."""
    return EngineConfig(
        num_blocks=(documents + 1) * (tokens // BLOCK_SIZE + 4),
        block_size=BLOCK_SIZE,
        tiers=("disk",),
        disk_path=folder,
        disk_bytes=4 << 30,
        demotion="write_through",
    )


def document(number: int, days: int) -> str:
    """The log of a ship: long, and another one for each number."""
    lines = (f"Day {day}: wind {(day * number) % 9}, {(day * 7 + number) % 90} barrels sold." for day in range(days))
    return "\n".join((f"Log of the good ship Octavo, voyage {number}.", *lines))


async def ask(engine: AsyncEngine, number: int, tokens: int) -> Answer:
    """The answer to the question about the first ``tokens`` tokens of one document."""
    codec = engine.codec
    if codec is None:
        sys.exit("this example needs a model that comes with a tokenizer")
    prompt = [*codec.encode(document(number, tokens))[:tokens], *codec.encode(QUESTION)]
    before, began, first = engine.stats().restore.saved_tokens, perf_counter(), 0.0
    text = ""
    async for output in engine.generate(prompt, GREEDY):
        first, text = first or perf_counter() - began, output.text
    return Answer(len(prompt), engine.stats().restore.saved_tokens - before, first, text)


async def answer_all(model: str, folder: Path, documents: int, tokens: int) -> None:
    """Answer every question, say so once all blocks are on the disk, and wait for the end."""
    async with AsyncEngine.open(model, config(folder, documents, tokens)) as engine:
        await engine.complete("Ahoy", GREEDY)  # the very first step of a process takes longer than others
        for number in range(1, documents + 1):
            print(json.dumps(await ask(engine, number, tokens)), flush=True)
        while engine.stats().tiers[0].tier.blocks < documents * (tokens // BLOCK_SIZE):  # noqa: ASYNC110  # polled
            await asyncio.sleep(0.05)
        print("stored", flush=True)
        await asyncio.Event().wait()


# the process that kills it


@contextmanager
def killed_at_the_end(command: list[str]) -> Iterator[Iterator[str]]:
    """The lines of a process that is killed with SIGKILL in the end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # this very file
        try:
            yield iter(process.stdout or ())
        finally:
            process.kill()


def answers(model: str, folder: Path, documents: int, tokens: int) -> list[Answer]:
    """All answers of a new process, which is killed once it has given them."""
    command = [sys.executable, __file__, model, "--documents", str(documents), "--tokens", str(tokens)]
    found: list[Answer] = []
    with killed_at_the_end([*command, "--answer-in", str(folder)]) as lines:
        for line in lines:
            if line.strip() == "stored":
                return found
            found.append(Answer(*json.loads(line)))
    sys.exit("the engine ended before it had answered everything")


def show(cold: list[Answer], warm: list[Answer]) -> None:
    """Both side by side."""
    print(f"{'document':>8} {'tokens':>7} {'saved':>7} {'cold s':>8} {'warm s':>8} {'faster':>7}  answer")
    for number, (before, after) in enumerate(zip(cold, warm, strict=True), 1):
        times = f"{before.seconds:>8.3f} {after.seconds:>8.3f} {before.seconds / after.seconds:>6.1f}x"
        same = "the same" if before.text == after.text else f"{before.text!r}, then {after.text!r}"
        print(f"{number:>8} {after.tokens:>7} {after.saved:>7} {times}  {same}")
    saved, tokens = sum(each.saved for each in warm), sum(each.tokens for each in warm)
    print(f"{saved} of {tokens} tokens did not have to be computed again")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--documents", type=int, default=3, help="how many documents (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1_500, help="tokens of each (%(default)s)")
    parser.add_argument("--answer-in", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.answer_in:
        asyncio.run(answer_all(chosen.model, Path(chosen.answer_in), chosen.documents, chosen.tokens))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [answers(chosen.model, Path(folder), chosen.documents, chosen.tokens) for _ in range(2)]
    show(*runs)


if __name__ == "__main__":
    main()
