"""The drivers of transformers: ``generate`` over a padded batch, and, as variant ``continuous``, its own continuous
batching."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.driver import SAMPLING_SEED, Ended, Engine, Opening, Stepped, Turn, serve
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from driver import SAMPLING_SEED, Ended, Engine, Opening, Stepped, Turn, serve

BLOCK_SIZE = 32
PATIENCE = 600.0
"""Seconds without any result."""


class Padded:
    """``generate``: all that waits is one batch, padded on the left, and runs until the last of it is done."""

    def __init__(self, opening: Opening) -> None:
        self._model = _load(opening, "sdpa")
        self._waiting: list[tuple[int, list[int], Turn]] = []

    def submit(self, key: int, prompt: list[int], turn: Turn) -> None:
        self._waiting.append((key, prompt, turn))

    def step(self) -> Iterable[Ended]:
        batch, self._waiting = self._waiting, []
        longest = max(len(prompt) for _, prompt, _ in batch)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for _, prompt, _ in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for _, prompt, _ in batch])
        first = batch[0][2]
        with torch.inference_mode():
            rows = self._model.generate(ids, attention_mask=mask, **_how(first, max(turn.out for _, _, turn in batch)))
        each = max(first.samples, first.beams)
        for at, (key, _, turn) in enumerate(batch):
            found = rows[at * each : (at + 1) * each, longest : longest + turn.out]
            yield Ended(key, found.tolist())


def _how(turn: Turn, out: int) -> dict[str, object]:
    """Arguments of ``generate``."""
    return {
        "max_new_tokens": out,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_beams": turn.beams,
        "num_return_sequences": max(turn.samples, turn.beams),
        "do_sample": turn.samples > 1,
        "top_k": 0,
        "top_p": 1.0,
        "temperature": 1.0,
    }


class Continuous:
    """``init_continuous_batching``: paged, scheduled by itself in a thread."""

    def __init__(self, opening: Opening) -> None:
        self._model = _load(opening, "paged|sdpa")
        config = transformers.GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
        batching = transformers.ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=opening.pool_tokens // BLOCK_SIZE,
            max_batch_tokens=opening.batch_tokens,
            allow_block_sharing=opening.caching,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self._manager.start()

    def submit(self, key: int, prompt: list[int], turn: Turn) -> None:
        if max(turn.samples, turn.beams) > 1:
            raise RuntimeError("one greedy continuation for each request")
        self._manager.add_request(prompt, request_id=str(key), max_new_tokens=turn.out)

    def step(self) -> Iterable[Ended]:
        result = self._manager.get_result(timeout=PATIENCE)
        if result is None or result.error:
            raise RuntimeError("no result" if result is None else str(result.error))
        if result.is_finished():
            yield Ended(int(result.request_id), [_ids(result.generated_tokens)])


def _ids(tokens: Sequence[int]) -> list[int]:
    return list(tokens)


def _load(opening: Opening, attention: str) -> transformers.GenerationMixin:
    torch.set_num_threads(opening.threads)
    torch.manual_seed(SAMPLING_SEED)
    model: transformers.GenerationMixin = transformers.AutoModelForCausalLM.from_pretrained(
        opening.model, dtype=getattr(torch, opening.dtype), attn_implementation=attention
    )
    return model


def opened(opening: Opening) -> Engine:
    """The engine of the variant."""
    return Stepped(Continuous(opening) if opening.variant == "continuous" else Padded(opening))


if __name__ == "__main__":
    serve(opened)
