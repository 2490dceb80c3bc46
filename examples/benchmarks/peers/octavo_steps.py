"""Octavo's runner, step by step, with its default levers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo import SamplingParams
from octavo.engine.model.loader import load
from octavo.engine.model.runner import Int32Array, Int64Array, Row, RowSampling, StepInput, StepOutput

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.steps import Batch, Best, StepOpening, serve_steps
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from steps import Batch, Best, StepOpening, serve_steps

FILLED_AT_ONCE = 64
"""Blocks."""


class OctavoSteps:
    """The model as ``AsyncEngine`` would load it."""

    def __init__(self, opening: StepOpening) -> None:
        torch.set_num_threads(opening.threads)
        self._runner = load(opening.model, dtype=opening.dtype).runner
        self._runner.allocate(opening.blocks, opening.block_size)
        self._block_size = opening.block_size
        self._fill(opening)

    def prepare(self, batch: Batch) -> StepInput:
        tokens, positions = (np.array(each, dtype=np.int32) for each in (batch.tokens, batch.positions))
        tables = [np.array(table, dtype=np.int32) for table in batch.tables]
        starts = np.cumsum([0, *batch.lengths])
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=batch.top if batch.top > 1 else None)
        rows = [
            Row(int(start), length, context, table, RowSampling(sampling, (0,), np.zeros(context, np.int32), context))
            for start, length, context, table in zip(starts, batch.lengths, batch.contexts, tables, strict=False)
        ]
        slots = [self._slots(row, positions) for row in rows]
        return StepInput(tokens, positions, np.concatenate(slots), tuple(rows), np.zeros((0, 2), np.int32))

    def execute(self, prepared: StepInput) -> StepOutput:
        return self._runner.execute(prepared)

    def best(self, output: StepOutput, top: int) -> Best:
        drawn = [row.sampled[0] for row in output.rows]
        return [each.top[:top] if top > 1 else [(each.token_id, each.logprob)] for each in drawn]

    def _slots(self, row: Row, positions: Int32Array) -> Int64Array:
        mine = positions[row.start : row.start + row.length]
        return row.blocks[mine // self._block_size].astype(np.int64) * self._block_size + mine % self._block_size

    def _fill(self, opening: StepOpening) -> None:
        """All blocks with the same numbers, each in memory of its own."""
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[opening.dtype]
        count = self._runner.info.bytes_per_block // dtype.itemsize
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
        payload = memoryview(numbers.view(torch.uint8).numpy().data)
        for some in np.array_split(np.arange(opening.blocks, dtype=np.int32), -(-opening.blocks // FILLED_AT_ONCE)):
            self._runner.import_blocks(some, [payload] * len(some))


if __name__ == "__main__":
    serve_steps(OctavoSteps)
