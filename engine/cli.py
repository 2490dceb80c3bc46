"""The command line: ``octavo generate``, ``octavo snapshot``, ``octavo top`` and so on (extra ``cli``)."""

from __future__ import annotations

import asyncio
import sys
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..errors import OctavoError
from ..telemetry.top.command import top
from .assembly import EVICTION_POLICIES, SCHEDULING_POLICIES
from .async_engine import AsyncEngine
from .bench_cli import bench_app
from .config import EngineConfig
from .demo import run_demo
from .fleet.routing import ROUTING_POLICIES
from .mounting import PERSISTENCE_BACKENDS, STORAGE_TIERS
from .request import Prompt, SamplingParams
from .serve_cli import serve
from .server.tools.choosing import TOOL_FORMATS
from .show import LoadingBar, show_streams
from .simulate_cli import simulate
from .snapshot_cli import snapshot_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(snapshot_app, name="snapshot")
app.add_typer(bench_app, name="bench")
app.command()(serve)
app.command()(simulate)
app.command()(top)


@app.callback(invoke_without_command=True)
def octavo(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Run language models with a paged, shared, copy-on-write KV cache."""
    if show_version:
        typer.echo(version("octavo"))
        raise typer.Exit


class Dtype(StrEnum):
    """Of weights and cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[
    str, typer.Option("--model", "-m", help="Directory, hub id, .gguf file, or smollm2 (the demo model).")
]
Device = Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of weights and cache.")]
Blocks = Annotated[int, typer.Option(help="Blocks of 16 tokens in the cache.")]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts; they run side by side. - reads stdin.")],
    model: Model = "smollm2",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token. Default 0, or 0.8 with --n, --seed or --top-p."),
    ] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Root of the random streams.")] = None,
    n: Annotated[int, typer.Option("--n", help="Samples for each prompt.")] = 1,
    beams: Annotated[int, typer.Option(help="Above 1: beam search of this width.")] = 1,
    system: Annotated[str | None, typer.Option(help="System message; makes the prompts chat messages.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Prompts are chat messages, or text to continue.")] = False,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.FLOAT32,
    num_blocks: Blocks = 1024,
) -> None:
    """Continue prompts and stream the text."""
    if temperature is None:  # whoever asks for several samples or a seed wants draws
        temperature = 0.8 if n > 1 or seed is not None or top_p < 1 else 0.0
    config = EngineConfig(device=device, dtype=dtype.value, num_blocks=num_blocks)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, n=n, beam_width=beams
    )
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    asyncio.run(_generate(model, config, [_as_prompt(text, system, chat=chat) for text in texts], params, texts))


@app.command()
def plugins() -> None:
    """List the installed plug-ins, and what is wrong with the broken ones."""
    console = Console()
    broken = 0
    groups = (
        EVICTION_POLICIES,
        SCHEDULING_POLICIES,
        ROUTING_POLICIES,
        STORAGE_TIERS,
        PERSISTENCE_BACKENDS,
        TOOL_FORMATS,
    )
    for group in groups:
        table = Table("name", "distribution", Column("target", overflow="fold"), "state", title=group.name)
        for found in group.report():
            broken += found.error is not None
            state = "[green]ok[/]" if found.error is None else f"[red]{escape(found.error)}[/]"
            table.add_row(found.name, f"{found.distribution} {found.version}", found.target, state)
        console.print(table)
    raise typer.Exit(1 if broken else 0)


@app.command()
def demo(model: Model = "smollm2", device: Device = "cpu", dtype: DtypeOption = Dtype.FLOAT32) -> None:
    """Several chats with one long system prompt, with and without sharing its cache."""
    asyncio.run(run_demo(Console(), model, device, dtype.value))


def main() -> None:
    """Run the command line; errors of Octavo are one line and exit status 1."""
    try:
        app()
    except OctavoError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
        sys.exit(1)


async def _generate(
    model: str, config: EngineConfig, prompts: list[Prompt], params: SamplingParams, titles: list[str]
) -> None:
    with LoadingBar(Console(stderr=True)) as bar:
        engine = AsyncEngine.open(model, config, progress=bar.update)
        await engine.__aenter__()
    try:
        await show_streams(Console(), engine, prompts, params, titles)
    finally:
        await engine.__aexit__(None, None, None)


def _as_prompt(text: str, system: str | None, *, chat: bool) -> Prompt:
    if not chat and system is None:
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]
