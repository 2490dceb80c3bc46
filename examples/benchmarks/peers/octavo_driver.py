"""Octavo's own driver: its public interface, with the settings that a user would begin with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.driver import SAMPLING_SEED, Conversation, Opening, Tally, Turn, serve
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from driver import SAMPLING_SEED, Conversation, Opening, Tally, Turn, serve

BLOCK_SIZE = 16
HOST_BYTES = 2**30
"""Of the host tier, where there is one."""


class Octavo:
    """An engine, and the event loop that it lives in."""

    def __init__(self, opening: Opening) -> None:
        torch.set_num_threads(opening.threads)
        self._runner = asyncio.Runner()
        self._engine = AsyncEngine.open(opening.model, _config(opening))
        self._runner.run(self._engine.__aenter__())

    def run(self, lanes: list[list[Turn]]) -> Tally:
        return self._runner.run(self._run(lanes))

    async def _run(self, lanes: list[list[Turn]]) -> Tally:
        talks = [Conversation(turns) for turns in lanes]
        began = perf_counter()
        tokens = await asyncio.gather(*(self._talk(talk) for talk in talks))
        return Tally(perf_counter() - began, sum(tokens), [talk.head for talk in talks])

    async def _talk(self, talk: Conversation) -> int:
        tokens = 0
        while talk.turn is not None:
            outputs = await self._engine.complete(talk.prompt(), _params(talk.turn))
            tokens += talk.answer(_ids(outputs))
        return tokens


def _ids(outputs: Sequence[RequestOutput]) -> list[Sequence[int]]:
    return [output.token_ids for output in outputs]


def _config(opening: Opening) -> EngineConfig:
    return EngineConfig(
        num_blocks=opening.pool_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=opening.caching,
        max_batch_tokens=opening.batch_tokens,
        max_running=opening.max_running,
        scheduling_policy="prefix_first",  # where the pool is short, what is cached is used before it goes
        tiers=("host",) if opening.tiers else (),
        host_bytes=HOST_BYTES if opening.tiers else None,
        dtype=opening.dtype,
        seed=SAMPLING_SEED,
    )


def _params(turn: Turn) -> SamplingParams:
    return SamplingParams(
        n=max(turn.samples, turn.beams),
        beam_width=turn.beams,
        early_stopping="never" if turn.beams > 1 else False,
        temperature=0.0 if turn.samples == 1 else 1.0,
        max_tokens=turn.out,
        ignore_eos=True,
    )


if __name__ == "__main__":
    serve(Octavo)
