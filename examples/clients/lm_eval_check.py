"""lm_eval against Octavo: its log-likelihoods beside those that transformers computes itself.

    python examples/clients/lm_eval_check.py --lm-eval .venv-clients/bin/lm_eval

Serves SmolLM2 in float32, lets lm_eval's ``local-completions`` score a small task twice, with a cold and with a hot
prefix cache, and compares every log-likelihood, and whether the ending was the likeliest, with one plain forward of
transformers. Ends with status 1 when they differ by more than ``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.gguf_file import converted
from octavo.engine.model.loader import default_cache_dir
from octavo.engine.model.sources import demo_model_path
from octavo.engine.server.running import serving

TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 1e-3
"""Natural logarithm; float32 sums of some tokens in another order."""


class Asked(msgspec.Struct):
    """The two halves of what is scored, as lm_eval writes them."""

    arg_0: str
    arg_1: str


class Sample(msgspec.Struct):
    """One line of lm_eval's log: a question with its endings."""

    arguments: dict[str, Asked]
    resps: list[list[tuple[str, str]]]
    """Log-likelihood, and whether it is the likeliest text, for each ending."""


class Scored(NamedTuple):
    """One ending of one question."""

    context: str
    continuation: str
    logprob: float
    is_greedy: bool


async def main() -> int:
    """Serve, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", default="lm_eval", help="the program, of an environment of its own")
    program: str = parser.parse_args().lm_eval
    folder = converted(demo_model_path(), torch.float32, default_cache_dir(), lambda *_: None)
    async with AsyncEngine.open(str(folder), EngineConfig(num_blocks=512)) as engine, serving(engine) as address:
        runs = []
        for name in ("cold", "hot"):
            runs.append(await anyio.to_thread.run_sync(run_lm_eval, program, address.url, engine.model.name, folder))
            print(f"{name}: {len(runs[-1])} log-likelihoods; {engine.stats().prefill_tokens} prompt tokens computed")
    return compare(runs, folder)


def run_lm_eval(program: str, url: str, model: str, tokenizer: Path) -> list[Scored]:
    """One run of the task; what it says of every ending."""
    with tempfile.TemporaryDirectory() as out:
        settings = f"model={model},base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=2"
        command = [program, "run", "--model", "local-completions", "--model_args", settings]
        command += ["--include_path", str(TASKS), "--tasks", "octavo_small", "--log_samples", "--output_path", out]
        subprocess.run(command, cwd=TASKS, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # the user's own program
        (samples,) = Path(out).rglob("samples_octavo_small*.jsonl")
        lines = samples.read_bytes().splitlines()
    return [scored for line in lines for scored in _scored(msgspec.json.decode(line, type=Sample))]


def _scored(sample: Sample) -> list[Scored]:
    found = []
    for number, ((logprob, is_greedy),) in enumerate(sample.resps):
        asked = sample.arguments[f"gen_args_{number}"]
        found.append(Scored(asked.arg_0, asked.arg_1, float(logprob), is_greedy == "True"))
    return found


def compare(runs: list[list[Scored]], folder: Path) -> int:
    """Print how far apart they are; 1 when too far."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    worst, wrong = 0.0, 0
    for cold, hot in zip(*runs, strict=True):
        logprob, is_greedy = directly(model, tokenizer, cold.context, cold.continuation)
        worst = max(worst, abs(cold.logprob - logprob), abs(hot.logprob - logprob))
        wrong += (cold.is_greedy, hot.is_greedy) != (is_greedy, is_greedy)
    print(f"{len(runs[0])} endings: largest difference {worst:.2g}, {wrong} differ in whether they are the likeliest")
    return int(worst > TOLERANCE or wrong > 0 or not runs[0])


def directly(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: str, continuation: str
) -> tuple[float, bool]:
    """Log-likelihood of ``continuation`` after ``context``, split into tokens as lm_eval splits them."""
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.inference_mode():
        scores = model(torch.tensor([whole])).logits[0, start - 1 : -1].float().log_softmax(-1)
    wanted = torch.tensor(whole[start:])
    return float(scores.gather(1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
