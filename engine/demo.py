"""``make demo``: chats that share a long system prompt, streamed side by side, and what the cache made of it."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from .async_engine import AsyncEngine
from .config import EngineConfig
from .counters import EngineStats
from .request import ChatMessage, RequestOutput, SamplingParams
from .show import LoadingBar, show_streams

SYSTEM = """You are the guide of the Harbour Museum, a small museum of ships and trade in an old port town. Answer
visitors in at most three short sentences, friendly and precise. If you do not know something, say so and name the
desk at the entrance.

The house. The museum stands in a brick warehouse from 1847, four floors high, where coffee and spices were stored until
1962. The ground floor shows the harbour as a model of eleven metres, with the tides running once every ten minutes.
The first floor is about ships: a fishing smack cut open along its keel, the bridge of a coaster from 1958 which
children may steer, and a wall of ship portraits. The second floor is about goods: how coffee was weighed, sampled and
cheated with, a smelling bar of forty spices, and a tea clipper's sea chest. The third floor belongs to the people:
dockers, cooks, pilots, emigrants, smugglers and the harbour police. The roof has a terrace with a telescope and a
view of the lighthouse.

Practical things. The museum is open from Tuesday to Sunday, from ten to six, on Thursdays until nine. Entry is nine
euros, five for students, and free for everyone under sixteen. The first Sunday of every month is free for all. Guided
tours start at eleven and at three at the model of the harbour and last fifty minutes. There is a lift to every floor
except the terrace. Bags go into the lockers, which take a coin of one euro and give it back. Photographs are welcome
without flash. Dogs have to wait in the yard, where there is water and shade. The cafe on the ground floor serves fish
soup, cake and the museum's own coffee.
"""
QUESTIONS = (
    "When are you open?",
    "What does a ticket cost for a student?",
    "Is there something for children?",
    "Where can I smell spices?",
    "May I bring my dog?",
    "What can I see from the roof?",
)
PARAMS = SamplingParams(max_tokens=48, temperature=0.0, repetition_penalty=1.1)
ALTERNATIVES = SamplingParams(max_tokens=24, temperature=0.8, seed=7, n=4)
BLOCK_SIZE = 16
Dtype = Literal["float32", "bfloat16", "float16"]


class Result(NamedTuple):
    """One run of the show."""

    outputs: list[RequestOutput]
    samples: list[RequestOutput]
    seconds: float
    stats: EngineStats


async def run_demo(console: Console, model: str, device: str, dtype: Dtype) -> None:
    """The whole show on ``console``: with sharing, again without, then both in a table."""
    chats: list[list[ChatMessage]] = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    console.rule(f"{len(chats)} chats, one system prompt, one cache ({model}, {dtype}, {device})")
    shared = await _run(console, model, _config(device, dtype, sharing=True), chats)
    console.rule("the same without sharing")
    alone = await _run(console, model, _config(device, dtype, sharing=False), chats)
    console.print(_table(shared, alone))
    same = [a.token_ids == b.token_ids for a, b in zip(shared.outputs, alone.outputs, strict=True)]
    console.print(f"{sum(same)} of {len(same)} chats have the same tokens with and without sharing")


def _config(device: str, dtype: Dtype, *, sharing: bool) -> EngineConfig:
    return EngineConfig(
        num_blocks=512, block_size=BLOCK_SIZE, device=device, dtype=dtype, enable_prefix_caching=sharing
    )


async def _run(console: Console, model: str, config: EngineConfig, chats: list[list[ChatMessage]]) -> Result:
    with LoadingBar(console) as bar:
        engine = AsyncEngine.open(model, config, progress=bar.update)
        await engine.__aenter__()
    try:
        began = time.monotonic()
        outputs = await show_streams(console, engine, chats, PARAMS, QUESTIONS)
        samples = await engine.complete(chats[2], ALTERNATIVES)
        return Result(outputs, samples, time.monotonic() - began, engine.stats())
    finally:
        await engine.__aexit__(None, None, None)


def _table(shared: Result, alone: Result) -> Table:
    table = Table(
        "", "with sharing", "without", title="What the cache did (the chats, then one of them with 4 samples)"
    )
    for name, value in _figures(shared).items():
        table.add_row(name, value, _figures(alone)[name])
    return table


def _figures(result: Result) -> dict[str, str]:
    chats, stats = [*result.outputs, result.samples[0]], result.stats
    first_tokens = [o.metrics.first_token - o.metrics.arrival for o in chats if o.metrics.first_token is not None]
    cached = sum(output.cached_tokens for output in chats)
    return {
        "prompt tokens": str(sum(output.prompt_tokens for output in chats)),
        "of them from the cache": str(cached),
        "blocks shared instead of computed": str(sum(output.cached_tokens // BLOCK_SIZE for output in chats)),
        "blocks copied (partial reuse)": str(stats.cache.partial_copies),
        "blocks copied (copy-on-write)": str(stats.cache.cow_forks),
        "blocks allocated": str(stats.cache.allocations),
        "tokens through the model": str(stats.batch_tokens),
        "mean time to first token": f"{sum(first_tokens) / len(first_tokens):.2f} s",
        "generated tokens per second": f"{stats.generated_tokens / result.seconds:.1f}",
        "seconds in all": f"{result.seconds:.1f}",
    }
