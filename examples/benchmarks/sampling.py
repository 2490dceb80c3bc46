"""What choosing tokens costs: Octavo's sampler beside the processors and warpers of Hugging Face, by kind of request.

    pip install 'octavo[bench]'
    python examples/benchmarks/sampling.py
    python examples/benchmarks/sampling.py --quick
    python examples/benchmarks/sampling.py --json sampling.json --plot sampling.png

Both get the same logits, float32, 49,152 ids a row, peaked as a language model's are, and the same histories. Octavo
also reports the log-probability of what it chose, as it always does, so the other side does too. All rows of a batch
ask for the same kind here: that is how the other side wants it. "Beams" are the best 8 continuations of each row.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo import SamplingParams
from octavo.engine.model.runner import Int32Array, RowSampling
from octavo.engine.model.sampler import Sampler

if TYPE_CHECKING:
    from octavo.examples.benchmarks.report import Report, Sheet, Spread, bars, panels, parser_of, this_machine, turns
else:
    from report import Report, Sheet, Spread, bars, panels, parser_of, this_machine, turns

VOCAB = 49_152
CONTEXT, PROMPT = 576, 512
LIKELY = 400
"""Ids of a row that stand out."""
BEAMS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of a batch ask for, in both tongues."""

    name: str
    params: Mapping[str, object]
    processors: Sequence[LogitsProcessor] = ()
    beams: int = 0
    top: int = 0


FEW = MappingProxyType({97 * each: 1.0 for each in range(20)})
KINDS = (
    Kind("greedy", {"temperature": 0.0}),
    Kind("temperature", {"temperature": 0.8}, [TemperatureLogitsWarper(0.8)]),
    Kind("top-k", {"temperature": 0.8, "top_k": 50}, [TemperatureLogitsWarper(0.8), TopKLogitsWarper(50)]),
    Kind("top-p", {"temperature": 0.8, "top_p": 0.9}, [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)]),
    Kind("min-p", {"temperature": 0.8, "min_p": 0.05}, [TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.05)]),
    Kind(
        "repetition",
        {"temperature": 0.0, "repetition_penalty": 1.1},
        [RepetitionPenaltyLogitsProcessor(1.1)],
    ),
    Kind(
        "bias, 20 ids",
        {"temperature": 0.0, "logit_bias": FEW},
        [SequenceBiasLogitsProcessor([[[token], bias] for token, bias in FEW.items()])],
    ),
    Kind("5 alternatives", {"temperature": 0.0, "logprobs": 5}, top=5),
    Kind("beams", {"temperature": 0.0}, beams=BEAMS),
)


class Work(NamedTuple):
    """One contender on one batch."""

    kind: str
    rows: int
    side: str
    run: Callable[[], object]


def logits_of(rows: int) -> Tensor:
    """Noise, and a few hundred ids that stand out by up to 14."""
    rng = np.random.default_rng(rows)
    logits = rng.normal(0.0, 1.5, (rows, VOCAB)).astype(np.float32)
    likely = rng.integers(0, VOCAB, (rows, LIKELY))
    np.put_along_axis(logits, likely, np.linspace(14.0, 2.0, LIKELY, dtype=np.float32)[None], axis=1)
    return torch.from_numpy(logits)


def octavo_side(kind: Kind, logits: Tensor, history: Int32Array) -> Callable[[], object]:
    """The engine's sampler."""
    sampler, params = Sampler(), SamplingParams.from_mapping(kind.params)
    rows = [
        RowSampling(params, () if kind.beams else (at,), line, PROMPT, beam_candidates=kind.beams)
        for at, line in enumerate(history)
    ]
    return lambda: sampler.sample(logits, rows)


def hugging_face_side(kind: Kind, logits: Tensor, history: Int32Array) -> Callable[[], object]:
    """What ``generate`` does with the logits of a step, and the log-probability of what came out."""
    processors, ids = LogitsProcessorList(kind.processors), torch.LongTensor(history.astype(np.int64))
    is_greedy = not kind.params["temperature"]

    def run() -> object:
        with torch.inference_mode():
            logprobs = logits.log_softmax(dim=-1)
            if kind.beams:
                return [found.tolist() for found in logprobs.topk(kind.beams)]
            scores = processors(ids, logits.clone())
            chosen = scores.argmax(dim=-1) if is_greedy else torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]
            top = [found.tolist() for found in logprobs.topk(kind.top)] if kind.top else []
            return chosen.tolist(), logprobs.gather(1, chosen[:, None]).tolist(), top

    return run


def all_work(batches: Sequence[int]) -> list[Work]:
    """Every kind at every size, both sides next to each other."""
    work: list[Work] = []
    for rows in batches:
        logits = logits_of(rows)
        history = np.random.default_rng(0).integers(0, VOCAB, (rows, CONTEXT), dtype=np.int32)
        for kind in KINDS:
            work.append(Work(kind.name, rows, "octavo", octavo_side(kind, logits, history)))
            work.append(Work(kind.name, rows, "transformers", hugging_face_side(kind, logits, history)))
    return work


def measure(work: Sequence[Work], rounds: int) -> dict[tuple[str, int, str], Spread]:
    """Milliseconds of each; every one runs once before it counts."""
    for each in work:
        each.run()
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for each in turns(work, rounds, name=lambda each: f"{each.kind}, {each.rows} rows, {each.side}"):
        begun = time.perf_counter()
        each.run()
        found[each.kind, each.rows, each.side].append(1e3 * (time.perf_counter() - begun))
    return {key: Spread.of(values) for key, values in found.items()}


def sheet_of(found: Mapping[tuple[str, int, str], Spread], rows: int) -> Sheet:
    """The table of one batch size."""
    lines = []
    for kind in KINDS:
        ours, theirs = found[kind.name, rows, "octavo"], found[kind.name, rows, "transformers"]
        lines.append([kind.name, ours.text(2), theirs.text(2), f"{theirs.over(ours):.1f}"])
    return Sheet(f"{rows} rows, milliseconds", ["kind", "octavo", "transformers", "times faster"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    batches, rounds = ([4], 3) if options.quick else ([1, 4, 32], options.rounds)
    found = measure(all_work(batches), rounds)
    numbers = [
        {"kind": kind, "rows": rows, "side": side, "milliseconds": spread}
        for (kind, rows, side), spread in found.items()
    ]
    report = Report(
        "sampling", this_machine(torch.get_num_threads()), [sheet_of(found, rows) for rows in batches], numbers
    )
    report.show()
    report.save(options.json)
    if options.plot is not None:
        figure, axes = panels("Choosing tokens", len(batches))
        for panel, rows in zip(axes, batches, strict=True):
            values = {
                kind.name: {side: found[kind.name, rows, side].median for side in ("octavo", "transformers")}
                for kind in KINDS
            }
            bars(panel, values, unit=f"milliseconds, {rows} rows")
            panel.tick_params("x", rotation=45)
        figure.savefig(options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
