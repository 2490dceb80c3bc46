"""Streams on a terminal: side by side in panels, or line by line where there is no terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .async_engine import AsyncEngine
from .request import Prompt, RequestOutput, SamplingParams

REFRESHES = 12
"""Per second."""


class LoadingBar:
    """A progress bar over the phases of loading a model; on anything but a terminal, nothing."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<11}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, what: str, share: float) -> None:
        """The progress callback of ``AsyncEngine.open``; any thread may call it."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=1.0)
        self._progress.update(self._tasks[what], completed=share)


async def show_streams(
    console: Console, engine: AsyncEngine, prompts: Sequence[Prompt], params: SamplingParams, titles: Sequence[str]
) -> list[RequestOutput]:
    """Run all prompts side by side and show their texts as they grow. Returns the last output of every sample."""
    view = (
        _Panels(console, titles)
        if console.is_terminal and (len(prompts) > 1 or params.samples > 1)
        else _Lines(console)
    )
    last: dict[tuple[int, int], RequestOutput] = {}

    async def follow(which: int, prompt: Prompt) -> None:
        async for output in engine.generate(prompt, params):
            last[which, output.index] = output
            view.update(which, output, alone=len(prompts) == 1 and params.samples == 1)

    with view:
        try:
            async with anyio.create_task_group() as tasks:
                for which, prompt in enumerate(prompts):
                    tasks.start_soon(follow, which, prompt)
        except ExceptionGroup as group:  # the first refusal or failure says it best
            raise group.exceptions[0] from group
    return [last[key] for key in sorted(last)]


class _Lines:
    """Plain output: one text flows as it comes, several are printed whole as they end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, which: int, output: RequestOutput, *, alone: bool) -> None:
        if alone:
            end = "\n" if output.finish_reason is not None else ""
            self._console.print(output.text_delta, end=end, markup=False, highlight=False, soft_wrap=True)
        elif output.finish_reason is not None:
            text = output.text.strip()
            self._console.print(
                f"[{which + 1}.{output.index + 1}] {text}", markup=False, highlight=False, soft_wrap=True
            )


class _Panels:
    """One panel for each sample, redrawn while they grow."""

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self._titles = titles
        self._texts: dict[tuple[int, int], RequestOutput] = {}
        self._console = console
        self._live = Live(console=console, refresh_per_second=REFRESHES, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, which: int, output: RequestOutput, *, alone: bool) -> None:
        self._texts[which, output.index] = output

    def _render(self) -> Columns:
        per_row = max(1, min(3, self._console.width // 40))
        width = self._console.width // per_row - 1
        rows = math.ceil(max(len(self._texts), 1) / per_row)
        lines = max(4, (self._console.height - 2) // rows - 2)
        return Columns([self._panel(key, width, lines) for key in sorted(self._texts)], padding=(0, 0))

    def _panel(self, key: tuple[int, int], width: int, lines: int) -> Panel:
        output = self._texts[key]
        shown = output.text.strip()[-lines * (width - 4) :]
        title = escape(self._titles[key[0]][: width - 6])
        color = "green" if output.finish_reason is not None else "cyan"
        return Panel(escape(shown), title=title, width=width, height=lines, border_style=color)
