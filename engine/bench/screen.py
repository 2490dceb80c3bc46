"""Progress on a terminal: a bar that moves, or plain lines where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .live import Live


class BarScreen:
    """A bar, with the live numbers behind it."""

    interval = 0.2

    def __init__(self, console: Console) -> None:
        parts = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        self._progress = Progress(*parts, console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, live: Live) -> None:
        if live.phase not in self._tasks:
            self._tasks[live.phase] = self._progress.add_task(live.phase, total=None, text="")
        total = None if live.share is None else 1.0
        self._progress.update(self._tasks[live.phase], total=total, completed=live.share or 0.0, text=text_of(live))


class LineScreen:
    """A line now and then."""

    interval = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, live: Live) -> None:
        line = f"{live.phase} {live.seconds:6.1f} s  {text_of(live)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def text_of(live: Live) -> str:
    """The numbers in one line."""
    done = f"{live.done:,}" if live.of is None else f"{live.done:,}/{live.of:,}"
    parts = [
        f"{done} done",
        f"{live.in_flight:,} in flight",
        f"{live.request_rate:.1f} req/s",
        f"~{live.content_rate:,.0f} tok/s",
    ]
    if live.refused:
        parts.append(f"{live.refused:,} refused")
    if live.failed:
        parts.append(f"{live.failed:,} errors")
    return "  ".join(parts)
