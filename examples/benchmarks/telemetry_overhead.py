"""What tracing costs: the same load with tracing off, with one request in ten traced, and with all of them traced.

    python examples/benchmarks/telemetry_overhead.py             # ratios of throughput; about a minute
    python examples/benchmarks/telemetry_overhead.py --quick     # seconds, fewer rounds, rough
    python examples/benchmarks/telemetry_overhead.py --json      # the same for machines

A model that takes 2 ms for every step and computes nothing, so that what is measured is the engine. 16 clients send
prompts of 256 tokens, half of them shared, and read 96 to 160 tokens each, about 45 requests a second; the pool is
small enough for evictions. Spans go through ``octavo.telemetry.setup`` and the OTLP/HTTP exporter to a collector in
another process, which throws them away. All arms take turns in one process, round by round; a ratio is that of one
round, and the median of them is shown. "Off" runs twice: how far its two arms are apart is the noise of the machine.
The last column is what a request costs more than one that is not traced, in microseconds of CPU time, with making,
encoding and sending its spans.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from multiprocessing.connection import Connection
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from opentelemetry.trace import NoOpTracerProvider

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.model.runner import (
    Int32Array,
    ModelInfo,
    Row,
    RowOutput,
    SampledToken,
    StepInput,
    StepOutput,
    UInt8Array,
)
from octavo.telemetry import setup

SHARES: dict[str, float | None] = {"off": None, "off again": None, "10 % traced": 0.1, "all traced": 1.0}
STEP_SECONDS = 0.002
CLIENTS = 16
PROMPT, SHARED, GENERATED = 256, 128, 128
CONFIG = EngineConfig(num_blocks=512, block_size=16, max_running=CLIENTS, max_batch_tokens=512)
PARAMS = [SamplingParams(max_tokens=GENERATED - 32 + 16 * each, temperature=0.0) for each in (2, 0, 3, 1, 4)]
"""Of different lengths, or else all clients would come and go together."""


class SleepingRunner:
    """A model whose steps take their time and nothing else."""

    info = ModelInfo("sleeping", "sleeping", 1000, 4096, frozenset(), 0, MappingProxyType({}))

    def allocate(self, num_blocks: int, block_size: int) -> None: ...

    def execute(self, step: StepInput) -> StepOutput:
        time.sleep(STEP_SECONDS)
        return StepOutput(tuple(map(self._output, step.rows)))

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None: ...

    def import_blocks(self, blocks: Int32Array, payloads: object) -> None: ...

    def close(self) -> None: ...

    @staticmethod
    def _output(row: Row) -> RowOutput:
        return RowOutput() if row.sampling is None else RowOutput((SampledToken(7, -1.0, ()),))


class Collector(BaseHTTPRequestHandler):
    """Takes everything and keeps nothing."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the base class's name
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Say nothing."""


def _collect(port: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1/traces"
    finally:
        process.kill()
        process.join()


class Sample(NamedTuple):
    """One arm in one round."""

    tokens_per_second: float
    cpu: float
    """Seconds of the whole process, by request."""


async def load(engine: AsyncEngine, requests: int, first: Iterator[int]) -> Sample:
    """``requests`` requests of ``CLIENTS`` clients."""
    left = iter(range(requests))
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for _ in left:
            number = next(first)
            shared = [number % 3] * SHARED
            own = [(number * 31 + at) % 997 for at in range(PROMPT - SHARED)]
            async for output in engine.generate(shared + own, PARAMS[number % len(PARAMS)]):
                tokens += len(output.new_token_ids)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return Sample(tokens / (time.perf_counter() - began), (time.process_time() - cpu) / requests)


async def measure(rounds: int, requests: int) -> dict[str, list[Sample]]:
    """Throughput of every arm in every round."""
    found: dict[str, list[Sample]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        endpoint = stack.enter_context(collector())
        arms = {}
        for name, share in SHARES.items():
            made = None if share is None else stack.enter_context(setup(endpoint=endpoint, sample=share))
            arms[name] = await stack.enter_async_context(
                AsyncEngine(
                    runner=SleepingRunner(),
                    config=CONFIG,
                    tracer_provider=NoOpTracerProvider() if made is None else made.tracer_provider,
                )
            )
        numbers = count()
        for engine in arms.values():
            await load(engine, CLIENTS, numbers)  # warm up
        for turn in range(rounds):
            order = list(arms.items())
            for name, engine in order[turn % len(order) :] + order[: turn % len(order)]:
                found[name].append(await load(engine, requests, numbers))
    return found


def ratios(found: dict[str, list[Sample]]) -> dict[str, float]:
    """Throughput beside the mean of both arms that are off, median over the rounds."""
    rates = {name: [sample.tokens_per_second for sample in samples] for name, samples in found.items()}
    base = [(one + other) / 2 for one, other in zip(rates["off"], rates["off again"], strict=True)]
    return {name: median(rate / off for rate, off in zip(each, base, strict=True)) for name, each in rates.items()}


def microseconds(found: dict[str, list[Sample]]) -> dict[str, float]:
    """CPU time of a request more than with tracing off."""
    spent = {name: median(sample.cpu for sample in samples) * 1e6 for name, samples in found.items()}
    return {name: cpu - (spent["off"] + spent["off again"]) / 2 for name, cpu in spent.items()}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(4, 32) if options.quick else measure(16, 64))
    shown, cpu = ratios(found), microseconds(found)
    if options.json:
        json.dump({"throughput": shown, "cpu_microseconds": cpu}, sys.stdout)
        return
    print(f"{'arm':<14}{'tokens/s':>10}{'of off':>9}{'cost':>9}{'us/request':>12}")
    for name, ratio in shown.items():
        rate = median(sample.tokens_per_second for sample in found[name])
        print(f"{name:<14}{rate:>10.0f}{ratio:>9.3f}{100 * (1 - ratio):>8.1f} %{cpu[name]:>12.0f}")


if __name__ == "__main__":
    main()
