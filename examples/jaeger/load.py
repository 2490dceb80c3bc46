"""A harbour office under pressure: requests that share a long guide, in a pool that is too small for all of them.

    python examples/jaeger/load.py                              # the traces go to Jaeger (compose.yaml)
    python examples/jaeger/load.py --save spans.jsonl           # they go into a file; no collector is needed
    python examples/jaeger/load.py --fake --save spans.jsonl    # and no model either

Visitors come one by one and all at once. Their requests are queued, find the guide in the cache, share it between
samples, push out what others have left, are preempted, go down to host memory and disk and come back. One visitor
leaves early, and a snapshot is taken at the end. Each request is traced below a span of its visitor, as it would be
below that of an HTTP server. What is worth opening is said in the end, with what to look for. ``octavo top`` can look
on while it runs; ``--rounds 20`` gives it something to see.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import OctavoError
from octavo.telemetry import Telemetry, setup
from octavo.telemetry.metrics.endpoint import PORT, serve_metrics

if TYPE_CHECKING:
    from octavo.examples.jaeger.saved_spans import Span, SpanFile, decode, encode
    from octavo.examples.jaeger.sights import worth_opening
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from saved_spans import Span, SpanFile, decode, encode
    from sights import worth_opening

BLOCK_SIZE = 16
POOL = 64
"""Blocks of the device: four guides' worth."""
HOST = 24
"""Blocks of the host tier; what it has no room for is on the disk only."""
GUIDE_TOKENS = 256
JAEGER = "http://localhost:16686/trace/"
VOCABULARY = 64
"""Of the fake model."""

# cut to GUIDE_TOKENS
GUIDE = """You answer for the harbour office. Be short and exact. Ships of up to ninety metres moor at the north quay,
longer ones at the east quay, where there is a crane for forty tonnes. The lock opens two hours before high water and
closes one hour after it. A pilot is compulsory from sixty metres on and is ordered six hours ahead, by radio on
channel twelve or by telephone. Water and power are at every berth; the meters are read at seven in the morning. Waste
is taken on Tuesdays and Fridays. Dangerous goods are declared a day ahead and stay on board until the fire brigade
has come. Fishing boats sell at the hall from five until eight. Yachts go to the inner basin, two nights at most
between June and September. Fees are paid at the office, which is open from eight to six, on Sundays from ten to noon.
Ferries have the right of way in the whole basin. In fog the signal station gives one long sound each minute and the
lock stays closed. Lost property is kept for three months. Dogs are welcome on the quays and not in the hall. The
museum in the old warehouse shows the harbour as it was when coffee and spices came in sacks, and the tides run
through its model every ten minutes, with bells."""


class Visitor(NamedTuple):
    """One request."""

    name: str
    question: str
    log_tokens: int = 0
    """So much of a ship's log comes before the question, instead of the guide."""
    answer: int = 24
    """Tokens."""
    samples: int = 1
    leaves_after: int | None = None
    """So many outputs are enough."""


class Scene(NamedTuple):
    """Visitors who come at the same time."""

    title: str
    visitors: tuple[Visitor, ...]


SCENES = (
    Scene("the first visitor has the guide computed", (Visitor("anna", "When does the lock open?"),)),
    Scene(
        "long logs push a part of it out",
        (
            Visitor("ben", "What was sold?", log_tokens=384),
            Visitor("clara", "Which day was good?", log_tokens=384),
        ),
    ),
    Scene(
        "two want the guide, one of them two answers",
        (Visitor("dora", "Do I need a pilot?", samples=2), Visitor("emil", "Where do yachts go?")),
    ),
    Scene(
        "all at once, in a pool that is too small",
        (
            Visitor("finn", "Which day was the best?", log_tokens=240, answer=96),
            Visitor("greta", "Which was the worst?", log_tokens=240, answer=96, samples=2),
            Visitor("hugo", "Where is the crane?", answer=96, samples=2),
        ),
    ),
    Scene(
        "one leaves before the answer is complete", (Visitor("ida", "Are dogs allowed?", answer=96, leaves_after=6),)
    ),
)


class Office(NamedTuple):
    """What the visitors come to."""

    engine: AsyncEngine
    encode: Callable[[str], list[int]]
    telemetry: Telemetry
    round: int
    """Logs differ from round to round; the guide does not."""


async def serve(office: Office, visitor: Visitor) -> None:
    """One request, below a span of its visitor."""
    params = SamplingParams(
        max_tokens=visitor.answer, n=visitor.samples, seed=office.round, temperature=0.8, ignore_eos=True
    )
    prompt, count = prompt_of(office, visitor), 0
    tracer = office.telemetry.tracer_provider.get_tracer("harbour")
    with tracer.start_as_current_span(f"visitor {visitor.name}"):
        name = f"{visitor.name}-{office.round}"
        async with office.engine.generate(prompt, params, request_id=name) as outputs:
            async for _ in outputs:
                count += 1
                if count == visitor.leaves_after:
                    break


def prompt_of(office: Office, visitor: Visitor) -> list[int]:
    """Token ids: the guide or a log, cut to size so that all models need as many blocks, and then the question."""
    question = office.encode(f"\n\nQuestion: {visitor.question}\nAnswer:")
    if not visitor.log_tokens:
        return office.encode(GUIDE)[:GUIDE_TOKENS] + question
    days = range(visitor.log_tokens)  # each takes more than a token
    lines = (f"{visitor.name}, day {day}: {(day * 7 + office.round) % 90} barrels." for day in days)
    return office.encode("\n".join(lines))[: visitor.log_tokens] + question


async def play(office: Office, folder: Path) -> None:
    """All scenes, then a snapshot."""
    for scene in SCENES:
        print(f"- {scene.title}: {', '.join(visitor.name for visitor in scene.visitors)}", flush=True)
        await asyncio.gather(*(serve(office, visitor) for visitor in scene.visitors))
    await office.engine.snapshot(folder / f"harbour-{office.round}.kv")
    print("- a snapshot", flush=True)


# set-up


def open_engine(model: str | None, telemetry: Telemetry, folder: Path) -> AsyncEngine:
    """``None``: the fake model."""
    block_bytes = 8 * BLOCK_SIZE if model is None else 2 * 30 * BLOCK_SIZE * 3 * 64 * 2  # SmolLM2-135M in bfloat16
    config = EngineConfig(
        num_blocks=POOL,
        block_size=BLOCK_SIZE,
        max_batch_tokens=128,
        dtype="bfloat16",
        tiers=("host", "disk"),
        host_bytes=HOST * (block_bytes + 1024),  # a block is kept with a head
        disk_path=folder / "disk",
        disk_bytes=1 << 30,
    )
    if model is None:
        runner = FakeRunner(vocab_size=VOCABULARY, step_seconds=0.002)
        return AsyncEngine(
            runner=runner, codec=FakeCodec(VOCABULARY), config=config, tracer_provider=telemetry.tracer_provider
        )
    return AsyncEngine.open(model, config, tracer_provider=telemetry.tracer_provider)


def encoder(engine: AsyncEngine, model: str | None) -> Callable[[str], list[int]]:
    """The model's tokenizer; the fake one knows few characters, so that those of the text are folded onto them."""
    if model is None:
        return lambda text: [ord(character) % VOCABULARY for character in text]
    if engine.codec is None:
        sys.exit("this example needs a model that comes with a tokenizer")
    return partial(engine.codec.encode)


async def run(model: str | None, telemetry: Telemetry, rounds: int, port: int) -> None:
    """Open the engine, play, and close it, which saves what the disk lacks."""
    with TemporaryDirectory() as folder:
        async with open_engine(model, telemetry, Path(folder)) as engine:
            endpoint = serve_metrics(engine.registry, port=port)
            print(f"metrics: {endpoint.url} (octavo top)")
            for number in range(1, rounds + 1):
                await play(Office(engine, encoder(engine, model), telemetry, number), Path(folder))
            await asyncio.to_thread(endpoint.stop)


def watched(telemetry: Telemetry) -> InMemorySpanExporter:
    """A second look at all spans, to say in the end which are worth opening."""
    seen = InMemorySpanExporter()
    if not isinstance(telemetry.tracer_provider, TracerProvider):
        sys.exit("OTEL_SDK_DISABLED is set: there is nothing to see")
    telemetry.tracer_provider.add_span_processor(SimpleSpanProcessor(seen))
    return seen


def show(spans: Sequence[Span], *, are_in_jaeger: bool) -> None:
    """Which traces are worth opening, and what for."""
    print("\nworth opening:")
    for sight in worth_opening(spans):
        print(f"\n{sight.name}\n  {JAEGER if are_in_jaeger else 'trace '}{sight.trace}")
        for line in sight.lines:
            print(f"  - {line}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--fake", action="store_true", help="a made-up model, which needs nothing")
    parser.add_argument("--save", type=Path, help="write the spans to this file instead of sending them")
    parser.add_argument("--rounds", type=int, default=1, help="how often the visitors come (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="of the metrics, 0 for any (%(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        with setup(exporter=SpanFile(chosen.save) if chosen.save else None) as telemetry:
            seen = watched(telemetry)
            asyncio.run(run(None if chosen.fake else chosen.model, telemetry, chosen.rounds, chosen.port))
    except OctavoError as error:
        sys.exit(f"error: {error}")
    show(decode([encode(seen.get_finished_spans())]), are_in_jaeger=chosen.save is None)
    print(f"\n{telemetry.spans_exported} spans were delivered, {telemetry.spans_lost} lost")
    if telemetry.spans_lost:
        print("is the collector running? with --save FILE none is needed")


if __name__ == "__main__":
    main()
