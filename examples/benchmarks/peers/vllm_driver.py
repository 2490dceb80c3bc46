"""vLLM's driver, for its CPU build: the engine in this process, so that both cores compute. Variant ``eager``: without
``torch.compile``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.driver import SAMPLING_SEED, Ended, Opening, Stepped, Turn, serve
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from driver import SAMPLING_SEED, Ended, Opening, Stepped, Turn, serve

BLOCK_SIZE = 128
"""Of the CPU build; its kernels want multiples of 32."""
LONGEST = 4096


class Vllm:
    """The engine beneath ``LLM``, called step by step, so that a chat can go on as soon as its answer is there."""

    def __init__(self, opening: Opening) -> None:
        block_size = BLOCK_SIZE if opening.pool_tokens >= 16 * BLOCK_SIZE else 32
        blocks = opening.pool_tokens // block_size
        self._llm = LLM(
            opening.model,
            dtype=opening.dtype,
            block_size=block_size,
            num_gpu_blocks_override=blocks,
            max_model_len=min(LONGEST, (blocks - 1) * block_size),  # one block is never given away
            max_num_batched_tokens=opening.batch_tokens,
            max_num_seqs=opening.max_running,
            enable_prefix_caching=opening.caching,
            enforce_eager=opening.variant == "eager",
            max_logprobs=20,
            gpu_memory_utilization=0.3,  # a share of the memory; by default nearly all
            seed=SAMPLING_SEED,
        )
        self._beams: dict[int, tuple[list[int], Turn]] = {}

    def submit(self, key: int, prompt: list[int], turn: Turn) -> None:
        if turn.beams > 1:
            self._beams[key] = prompt, turn
            return
        params = SamplingParams(
            n=turn.samples,
            temperature=0.0 if turn.samples == 1 else 1.0,
            max_tokens=turn.out,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._llm.llm_engine.add_request(str(key), {"prompt_token_ids": prompt}, params)

    def step(self) -> Iterable[Ended]:
        for key, (prompt, turn) in self._beams.items():
            yield Ended(key, self._search(prompt, turn))
        self._beams = {}
        if self._llm.llm_engine.has_unfinished_requests():
            for output in self._llm.llm_engine.step():
                if output.finished:
                    yield Ended(int(output.request_id), [list(sample.token_ids) for sample in output.outputs])

    def _search(self, prompt: list[int], turn: Turn) -> list[list[int]]:
        params = BeamSearchParams(beam_width=turn.beams, max_tokens=turn.out, ignore_eos=True)
        found = self._llm.beam_search([{"prompt_token_ids": prompt}], params)[0]
        return [list(beam.tokens)[len(prompt) :] for beam in found.sequences]


if __name__ == "__main__":
    serve(lambda opening: Stepped(Vllm(opening)))
