"""OpenVINO GenAI's driver: its continuous batching over an IR of the same weights, computed and cached in one dtype."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino_genai

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.driver import SAMPLING_SEED, Ended, Opening, Stepped, Turn, serve
    from octavo.examples.benchmarks.peers.openvino_steps import PRECISIONS
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from driver import SAMPLING_SEED, Ended, Opening, Stepped, Turn, serve
    from openvino_steps import PRECISIONS

BLOCK_SIZE = 32
"""Of the CPU plug-in."""
SHORT_POOL = 8192
"""Tokens. In a smaller cache it goes without prefixes: once its pool is full of cached ones it drops every request."""


class OpenVino:
    """A continuous batching pipeline."""

    def __init__(self, opening: Opening) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.num_kv_blocks = opening.pool_tokens // BLOCK_SIZE
        scheduling.max_num_batched_tokens = opening.batch_tokens
        scheduling.max_num_seqs = opening.max_running
        scheduling.enable_prefix_caching = opening.caching and opening.pool_tokens >= SHORT_POOL
        scheduling.dynamic_split_fuse = True
        properties = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[opening.dtype],
            "KV_CACHE_PRECISION": PRECISIONS[opening.dtype],
            "INFERENCE_NUM_THREADS": opening.threads,
            "NUM_STREAMS": 1,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(opening.model, scheduling, "CPU", properties)
        self._running: dict[int, openvino_genai.py_openvino_genai.GenerationHandle] = {}

    def submit(self, key: int, prompt: list[int], turn: Turn) -> None:
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._running[key] = self._pipeline.add_request(key, ids, _config(turn))

    def step(self) -> Iterable[Ended]:
        self._pipeline.step()
        running = openvino_genai.GenerationStatus.RUNNING
        for key, handle in list(self._running.items()):
            if handle.get_status() != running:
                del self._running[key]
                yield Ended(key, [list(output.generated_ids) for output in handle.read_all()])


def _config(turn: Turn) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = turn.out
    config.ignore_eos = True
    config.apply_chat_template = False
    config.num_return_sequences = max(turn.samples, turn.beams)
    if turn.beams > 1:
        config.num_beams = turn.beams
        config.stop_criteria = openvino_genai.StopCriteria.NEVER
    if turn.samples > 1:
        config.do_sample = True
        config.temperature = 1.0
        config.rng_seed = SAMPLING_SEED
    return config


if __name__ == "__main__":
    serve(lambda opening: Stepped(OpenVino(opening)))
