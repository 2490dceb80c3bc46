"""The command ``octavo top``."""

from __future__ import annotations

import functools
import io
import time
from pathlib import Path
from typing import Annotated, Final

import anyio
import typer
from anyio import to_thread
from rich.console import Console

from ...errors import InvalidRequest, TelemetryError, describe
from ..metrics.endpoint import PORT
from .live import moment_after, show_live
from .picture import Picture
from .reading import Failure, Labels, Scrape, checked_url, read
from .watching import Moment, Watch
from .wording import printable

ADDRESS: Final = f"http://127.0.0.1:{PORT}/metrics"
TIMEOUT: Final = 3.0
"""Seconds that an endpoint has to answer: more than the one for which it waits for a busy engine."""
SVG_COLUMNS: Final = 100


def top(
    url: Annotated[str, typer.Argument(help="The metrics endpoint of a running engine.")] = ADDRESS,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, help="Seconds between two readings.")] = 2.0,
    window: Annotated[float, typer.Option(min=0.1, help="Seconds over which rates and quantiles are taken.")] = 10.0,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help="Only series with this label: engine=a. May be repeated.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read twice, one interval apart, print and leave.")] = False,
    svg: Annotated[Path | None, typer.Option(help="As --once, and save the picture in this file as well.")] = None,
    no_color: Annotated[bool, typer.Option("--no-color", help="In black and white.")] = False,
) -> None:
    """Watch a running engine: its pool, hits, requests, latencies and tiers."""
    reading = functools.partial(_read, checked_url(url), _labels(label or []))
    console = Console(no_color=True if no_color else None)
    if once or svg is not None:
        _print_once(console, anyio.run(moment_after, reading, interval, time.time), svg)
        return
    if not console.is_terminal:
        raise InvalidRequest("the live view needs a terminal; --once prints one picture")
    try:
        anyio.run(show_live, reading, console, Watch(window), interval, time.time)
    except KeyboardInterrupt:  # before the view stood, and on Windows
        return


async def _read(url: str, chosen: Labels) -> Scrape | Failure:
    return await to_thread.run_sync(read, url, chosen, time.monotonic, TIMEOUT, abandon_on_cancel=True)


def _labels(given: list[str]) -> Labels:
    pairs = [text.partition("=") for text in given]
    if any(not name or not sign for name, sign, _ in pairs):
        raise InvalidRequest("--label takes name=value, as in --label engine=a")
    return frozenset((name, value) for name, _, value in pairs)


def _print_once(console: Console, moment: Moment, svg: Path | None) -> None:
    if moment.outage is not None:
        raise TelemetryError(f"there is nothing to show: {printable(moment.outage.failure.reason)}")
    console.print(Picture(moment))
    if svg is not None:
        _save(svg, moment)


def _save(path: Path, moment: Moment) -> None:
    """The same picture whatever the terminal."""
    paper = Console(
        record=True,
        file=io.StringIO(),
        width=SVG_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    paper.print(Picture(moment))
    drawn = paper.export_svg(title="octavo top", unique_id="octavo-top")
    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise TelemetryError(f"the picture cannot be saved: {describe(error)}") from error
