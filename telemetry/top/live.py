"""Reading again and again, and showing it until somebody has seen enough."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

import anyio
from rich.console import Console
from rich.live import Live

from .picture import Picture
from .reading import Failure, Scrape
from .watching import Moment, Watch

if sys.platform != "win32":
    import termios
    import tty

Read: TypeAlias = Callable[[], Awaitable[Scrape | Failure]]
Clock: TypeAlias = Callable[[], float]


async def moment_after(read: Read, interval: float, wall: Clock) -> Moment:
    """What two readings ``interval`` seconds apart show; the first failure, if one fails."""
    watch = Watch(interval)
    moment = watch.take(await read(), wall())
    if moment.outage is not None:
        return moment
    await anyio.sleep(interval)
    return watch.take(await read(), wall())


async def show_live(
    read: Read, console: Console, watch: Watch, interval: float, wall: Clock, stdin: TextIO = sys.stdin
) -> None:
    """Show the newest reading on a screen of its own until ``q`` is pressed, or a signal ends it."""
    with single_keys(stdin), Live(console=console, screen=True, auto_refresh=False) as live:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_leave_on_signal, live, tasks.cancel_scope)
            tasks.start_soon(_leave_on_q, stdin, tasks.cancel_scope)
            await _refresh(read, live, watch, interval, wall)


@contextmanager
def single_keys(stdin: TextIO) -> Iterator[None]:
    """Keys arrive as they are pressed and are not shown, where ``stdin`` is a terminal."""
    if sys.platform == "win32" or not stdin.isatty():
        yield
        return
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


async def until_q(stdin: TextIO) -> None:
    """Return when ``q`` is pressed, or the terminal is gone; never where ``stdin`` is no terminal."""
    if sys.platform == "win32" or not stdin.isatty():
        await anyio.sleep_forever()
    pressed = anyio.Event()

    def look() -> None:
        keys = os.read(stdin.fileno(), 64)
        if not keys or b"q" in keys.lower():
            pressed.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(stdin, look)
    try:
        await pressed.wait()
    finally:
        loop.remove_reader(stdin)


async def _refresh(read: Read, live: Live, watch: Watch, interval: float, wall: Clock) -> None:
    while True:
        started = anyio.current_time()
        moment = watch.take(await read(), wall())
        live.update(Picture(moment, hint="q quits"), refresh=True)
        await anyio.sleep(max(0.0, started + interval - anyio.current_time()))


async def _leave_on_q(stdin: TextIO, scope: anyio.CancelScope) -> None:
    await until_q(stdin)
    scope.cancel()


async def _leave_on_signal(live: Live, scope: anyio.CancelScope) -> None:
    """A terminal of another size is drawn anew; all other signals end the view, and leave the terminal as it was."""
    if sys.platform == "win32":  # ctrl-C raises there
        return
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH) as received:
        async for number in received:
            if number == signal.SIGWINCH:
                live.refresh()
            else:
                scope.cancel()
