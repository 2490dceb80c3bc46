"""The policy of this example under an engine, found by its name; and what becomes of one that breaks its contract.

    python examples/custom_policy/run.py

It needs no model: the engine runs one that is made for tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.policies.eviction import Entry, Lru

ONE = SamplingParams(max_tokens=1, temperature=0.0)
BROKEN = f"{__name__}:Broken"


class Broken(Lru):
    """A policy with a bug."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise KeyError("no such entry")


class Printer(SpanExporter):
    """Shows those evictions in the trace during which the policy was at fault."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            attributes = dict(span.attributes or {})
            if span.name == "evict" and "octavo.policy_fault" in attributes:
                print("  span evict:", {name: attributes[name] for name in sorted(attributes) if "policy" in name})
        return SpanExportResult.SUCCESS


def document(number: int) -> list[int]:
    """A prompt of 16 tokens, four blocks."""
    return [number % 60, number // 60, *((number * 7 + at) % 60 for at in range(14))]


async def cached(engine: AsyncEngine, tenant: str, numbers: range) -> int:
    """How many of these documents the device has."""
    found = [(await engine.explain(document(number), tenant=tenant)).device_tokens for number in numbers]
    return sum(tokens > 0 for tokens in found)


async def flood(engine: AsyncEngine) -> None:
    """One tenant has three documents, another one reads forty of its own, once."""
    for number in range(3):
        await engine.complete(document(number), ONE, tenant="quiet")
    for number in range(40):
        await engine.complete(document(number), ONE, tenant="loud")
    quiet = await cached(engine, "quiet", range(3))
    print(f"{engine.stats().cache.policy}: the quiet tenant still has {quiet} of its 3 documents")


async def main() -> None:
    """Show both."""
    logging.basicConfig(format="  log: %(message).110s")
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Printer()))
    config = EngineConfig(num_blocks=48, block_size=4, eviction_policy="lru")
    async with AsyncEngine(runner=FakeRunner(), config=config, tracer_provider=provider) as engine:
        await flood(engine)
        await engine.set_eviction_policy("tenant_fair_lru")
        await flood(engine)
        await engine.set_eviction_policy(BROKEN)
        await flood(engine)
        cache = engine.stats().cache
        print(f"{cache.policy_set_aside} had {cache.policy_faults} faults and is set aside; {cache.policy} decides")
        engine.census()


if __name__ == "__main__":
    asyncio.run(main())
