"""Real steps of an engine, to be repeated, and where their time goes: for ``roofline.py``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.model import loader, sources
from octavo.engine.model.attention import AttentionBackend, AttentionOptions, StepAttention, make_backend
from octavo.engine.model.attention.native_backend import NativeStep
from octavo.engine.model.native.product import NativeProduct
from octavo.engine.model.runner import Int32Array, ModelInfo, ModelRunner, StepInput, StepOutput, UInt8Array

if TYPE_CHECKING:
    from octavo.examples.benchmarks.step_work import ATTENTION
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from step_work import ATTENTION

CONFIG = EngineConfig(num_blocks=2_700, max_batch_tokens=2_048, max_running=64, dtype="bfloat16")
SHARED, OWN, OUTPUT = 512, 48, 32
"""Tokens of a prompt, and what is generated: the step that is looked at is in the middle."""
VOCABULARY = 40_000
"""Token ids of prompts are below this."""
PRODUCT_NAMES = ("linear", "addmm", "aten::mm", "matmul", "bmm")
"""One of these is in the name of every operator that multiplies matrices."""
WHOLE = "whole"
TRIES = 3


# real steps


class Executed(NamedTuple):
    """One step of an engine, and when."""

    step: StepInput
    began: float
    ended: float


class Tap:
    """A runner that remembers its steps, and outlives its engine so that they can be repeated."""

    def __init__(self, runner: ModelRunner, attention: AttentionBackend | None = None) -> None:
        """``attention``: the runner's own backend, so that it can be timed."""
        self._runner = runner
        self.attention = attention
        self.executed: list[Executed] = []

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._runner.allocate(num_blocks, block_size)

    def execute(self, step: StepInput) -> StepOutput:
        began = perf_counter()
        output = self._runner.execute(step)
        self.executed.append(Executed(step, began, perf_counter()))
        return output

    def repeat(self, step: StepInput) -> StepOutput:
        """The same K and V go to the same places: nothing changes."""
        return self._runner.execute(step)

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        self._runner.export_blocks(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        self._runner.import_blocks(blocks, payloads)

    def close(self) -> None:
        """Not yet."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step to look at."""

    name: str
    step: StepInput
    engine_gap: float | None
    """Seconds between two such steps in the engine."""

    @property
    def context(self) -> int:
        return max(row.context for row in self.step.rows)


async def real_cases(batches: Sequence[int], chunks: Sequence[int]) -> tuple[Tap, list[Case]]:
    """Steps of an engine; and the runner, which goes on living."""
    taps: list[Tap] = []
    backends: list[AttentionBackend] = []
    load = loader.load

    def tapped(*args: str, **options: object) -> loader.LoadedModel:
        loaded = load(*args, **options)  # type: ignore[arg-type]  # as the engine calls it
        taps.append(Tap(loaded.runner, *backends[-1:]))
        return loaded._replace(runner=taps[0])

    def noted(*args: object, **options: object) -> AttentionBackend:
        backends.append(make_backend(*args, **options))  # type: ignore[arg-type]  # as the loader calls it
        return backends[-1]

    with patch.object(loader, "load", tapped), patch.object(sources, "make_backend", noted):
        async with AsyncEngine.open("smollm2", CONFIG) as engine:
            cases = [await _prefill(engine, taps[0], chunk) for chunk in chunks]
            cases += [await _decode(engine, taps[0], batch, shares=True) for batch in batches]
            cases += [await _decode(engine, taps[0], batch, shares=False) for batch in batches if batch > 1]
    return taps[0], cases


async def _prefill(engine: AsyncEngine, tap: Tap, tokens: int) -> Case:
    tap.executed.clear()
    await engine.complete(_tokens(f"chunk {tokens}", tokens), SamplingParams(max_tokens=1))
    return Case(f"prefill {tokens}", tap.executed[0].step, None)


async def _decode(engine: AsyncEngine, tap: Tap, batch: int, *, shares: bool) -> Case:
    beginnings = ["all" if shares else str(number) for number in range(batch)]
    prompts = [_tokens(each, SHARED) + _tokens(f"own {number}", OWN) for number, each in enumerate(beginnings)]
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.0)
    if shares:
        await engine.complete(prompts[0][:SHARED], SamplingParams(max_tokens=1))
    tap.executed.clear()
    await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
    whole = [each for each in tap.executed if len(each.step.rows) == len(each.step.tokens) == batch]
    gaps = [later.began - earlier.ended for earlier, later in pairwise(whole)]
    return Case(f"decode {batch} {'shared' if shares else 'alone'}", whole[len(whole) // 2].step, median(gaps))


def _tokens(seed: str, count: int) -> list[int]:
    return Random(seed).choices(range(VOCABULARY), k=count)  # noqa: S311  # not for secrets


# where the time goes


def phases_of(tap: Tap, step: StepInput, whole: float) -> dict[str, float]:
    """Seconds by phase of a step that takes ``whole`` seconds. What cannot be told apart belongs to the rest: products
    that the profiler does not see, and attention without a known backend."""
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(TRIES):
        spent = _phases_once(tap, step)
        scale = whole / spent.pop(WHOLE)  # so that phases and whole are of one moment of the machine
        for name, found in spent.items():
            times[name].append(found * scale)
    phases = {name: median(values) for name, values in times.items()}
    return phases | {"rest": max(whole - sum(phases.values()), 0.0)}


def _phases_once(tap: Tap, step: StepInput) -> dict[str, float]:
    """Seconds by phase, and of the whole: a plain run, and at once one in the profiler."""
    with operations_apart(), attention_timed(tap.attention, step) as calls:
        began = perf_counter()
        output = tap.repeat(step)
        spent = {WHOLE: perf_counter() - began, "sampling": output.timings.get("sample", 0.0)}
        if calls:
            spent[ATTENTION] = sum(calls)
        return spent | profiled_products(tap, step)


@contextmanager
def operations_apart() -> Iterator[None]:
    """A step that is one call of the kernels cannot be looked into: let it be their operations, one by one, and give
    their products a name in the profiler."""
    multiply = NativeProduct._multiply  # noqa: SLF001  # from outside, so that the product carries no clock

    def named(self: NativeProduct, x: Tensor, residual: Tensor | None) -> Tensor:
        with record_function("linear"):
            return multiply(self, x, residual)

    with patch.object(NativeStep, "plan_for", lambda *_: None), patch.object(NativeProduct, "_multiply", named):
        yield


@contextmanager
def attention_timed(backend: AttentionBackend | None, step: StepInput) -> Iterator[list[float]]:
    """Seconds of every attention call of steps like this one, as they come; in the profiler they get a name."""
    calls: list[float] = []
    if backend is None:
        yield calls
        return
    kind = type(backend.plan(step.rows, CONFIG.block_size))
    attend = kind.attend

    def timed(self: StepAttention, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        with record_function(ATTENTION):
            began = perf_counter()
            output = attend(self, query, keys, values, options)
            calls.append(perf_counter() - began)
        return output

    with patch.object(kind, "attend", timed):
        yield calls


def profiled_products(tap: Tap, step: StepInput) -> dict[str, float]:
    """Seconds of the products outside of attention. The last of a step is that of the head."""
    with patch.dict(os.environ, {"KINETO_LOG_LEVEL": "99"}), profile(activities=[ProfilerActivity.CPU]) as profiler:
        tap.repeat(step)
    events = [event for event in profiler.events() or [] if _is_product(event.name)]
    outermost = [event for event in events if not any(_is_known(name) for name in _above(event))]
    if not outermost:
        return {}
    *products, head = sorted(outermost, key=lambda event: event.time_range.start)
    times = [event.time_range.elapsed_us() / 1e6 for event in products]
    return {"products": sum(times), "head": head.time_range.elapsed_us() / 1e6}


def _is_product(name: str) -> bool:
    return any(part in name for part in PRODUCT_NAMES)


def _is_known(name: str) -> bool:
    return name == ATTENTION or _is_product(name)


def _above(event: FunctionEvent) -> Iterator[str]:
    """Names of the events around one."""
    above = event.cpu_parent
    while above is not None:
        yield above.name
        above = above.cpu_parent
