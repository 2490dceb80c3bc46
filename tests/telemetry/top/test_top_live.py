"""``octavo top`` as a user runs it: once, live on a terminal, against a real engine."""

from __future__ import annotations

import io
import os
import pty
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from prometheus_client import CollectorRegistry
from rich.console import Console, ConsoleDimensions
from typer.testing import CliRunner, Result

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine import cli
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, TelemetryError
from octavo.telemetry.metrics.endpoint import PORT, serve_metrics
from octavo.telemetry.top.live import Read, moment_after, show_live, single_keys, until_q
from octavo.telemetry.top.reading import Failure, Scrape
from octavo.telemetry.top.watching import Watch
from octavo.tests.engine.conftest import DEFAULTS, EngineOf
from octavo.tests.telemetry.top.test_top_reading import endpoint, says
from octavo.tests.telemetry.top.top_rig import busy, exposition, scrape

GONE = Failure("Connection refused", answered=False)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, ["top", *arguments], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@contextmanager
def terminal() -> Iterator[tuple[int, TextIO]]:
    """The end that a user types into, and the one that a program reads."""
    keyboard, inner = pty.openpty()
    try:
        with os.fdopen(inner) as stdin:
            yield keyboard, stdin
    finally:
        os.close(keyboard)


def nothing() -> None:
    pass


def scripted(*readings: Scrape | Failure, then: Callable[[], None] = nothing) -> Read:
    """Gives ``readings``, calls ``then`` and waits for ever."""
    left = iter(readings)

    async def read() -> Scrape | Failure:
        for reading in left:
            return reading
        then()
        await anyio.sleep_forever()
        raise AssertionError

    return read


def scrapes(*steps: int) -> list[Scrape]:
    return [scrape(exposition(busy(step)), float(when)) for when, step in enumerate(steps)]


def type_keys(keyboard: int, keys: bytes) -> None:
    assert os.write(keyboard, keys) == len(keys)


def screen() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None, legacy_windows=False
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def wall() -> float:
    return 0.0


async def show(console: Console, read: Read, stdin: TextIO) -> None:
    with anyio.fail_after(15):
        await show_live(read, console, Watch(10.0), 0.0, wall, stdin)


@pytest.mark.asyncio
async def test_the_view_goes_on_through_outages_and_restarts_until_q_is_pressed() -> None:
    readings: list[Scrape | Failure] = [*scrapes(3, 5), GONE, *scrapes(1)]
    console = screen()
    with terminal() as (keyboard, stdin):
        await show(console, scripted(*readings, then=lambda: type_keys(keyboard, b"xQ")), stdin)
    text = written(console)
    assert text.startswith("\x1b[?1049h")
    assert text.endswith("\x1b[?1049l")  # the screen of before is back
    assert "unreachable since" in text
    assert "restarted 1x" in text


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_the_view_and_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    console = screen()
    with terminal() as (_, stdin):
        before = termios.tcgetattr(stdin)

        def end() -> None:
            assert termios.tcgetattr(stdin) != before
            os.kill(os.getpid(), number)

        await show(console, scripted(*scrapes(1), then=end), stdin)
        assert termios.tcgetattr(stdin) == before
    assert written(console).endswith("\x1b[?1049l")


@pytest.mark.asyncio
async def test_a_terminal_of_another_size_is_drawn_anew() -> None:
    console = screen()
    with terminal() as (keyboard, stdin):

        async def read() -> Scrape | Failure:
            if not written(console).count("tiers"):
                return scrapes(1)[0]
            console.size = ConsoleDimensions(120, 40)
            os.kill(os.getpid(), signal.SIGWINCH)
            while "corrupt" not in written(console):  # a column for which 80 were too few
                await anyio.lowlevel.checkpoint()
            type_keys(keyboard, b"q")
            return await scripted()()

        await show(console, read, stdin)


@pytest.mark.asyncio
async def test_a_terminal_that_is_gone_ends_the_view() -> None:
    keyboard, inner = pty.openpty()
    with os.fdopen(inner) as stdin, anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_q, stdin)
            await anyio.lowlevel.checkpoint()
            os.close(keyboard)


def test_what_is_no_terminal_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "input").open("w+") as stdin, single_keys(stdin):
        assert not stdin.isatty()


@pytest.mark.asyncio
async def test_one_picture_takes_two_readings() -> None:
    moment = await moment_after(scripted(*scrapes(1, 2)), 0.0, wall)
    assert moment.board is not None
    assert moment.board.requests.decode.rate == 2000


@pytest.mark.asyncio
@pytest.mark.parametrize("readings", [[GONE], [*scrapes(1), GONE]])
async def test_a_reading_that_fails_is_told(readings: list[Scrape | Failure]) -> None:
    moment = await moment_after(scripted(*readings), 0.0, wall)
    assert moment.outage is not None
    assert moment.outage.failure == GONE


def test_once_prints_a_picture() -> None:
    with endpoint(says(exposition(busy(1)))) as url:
        result = run(url, "--once", "--interval", "0.1")
    assert result.exit_code == 0
    assert "pool: 100 blocks of 16" in result.stdout
    assert "\x1b" not in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_a_label_chooses_an_engine() -> None:
    text = exposition(busy(1), engine="a") + exposition(busy(1), engine="b")
    with endpoint(says(text)) as url:
        assert "2 engines" in run(url, "--once", "--interval", "0.1").stdout
        assert "engine=b" in run(url, "--once", "--interval", "0.1", "--label", "engine=b").stdout
        with pytest.raises(TelemetryError, match='no engine with engine="c"; there: engine="a"; engine="b"'):
            run(url, "--once", "--label", "engine=c")


def test_a_picture_is_saved(tmp_path: Path) -> None:
    with endpoint(says(exposition(busy(1)))) as url:
        result = run(url, "--svg", str(tmp_path / "top.svg"), "--interval", "0.1")
        with pytest.raises(TelemetryError, match="cannot be saved"):
            run(url, "--svg", str(tmp_path / "top.svg" / "below.svg"), "--interval", "0.1")
    drawn = (tmp_path / "top.svg").read_text()
    assert "pool: 100 blocks" in result.stdout
    assert drawn.startswith("<svg")
    assert "octavo&#160;top" in drawn
    assert "100&#160;blocks" in drawn


def test_nobody_there_is_an_error() -> None:
    with endpoint(says("")) as url:
        pass
    with pytest.raises(TelemetryError, match="nothing to show: Connection refused"):
        run(url, "--once")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--label", "engine"), "--label takes name=value"),
        (("--label", "=a"), "--label takes name=value"),
        (("file:///etc/passwd",), "no address"),
        ((), "needs a terminal"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(*arguments)


def test_the_address_that_is_taken_is_the_one_that_is_served() -> None:
    assert f"127.0.0.1:{PORT}" in run("--help").stdout


@pytest.mark.asyncio
async def test_the_numbers_of_a_real_engine(engine_of: EngineOf) -> None:
    """Eight blocks of four; the same prompt twice: of 2 x 12 tokens, the second finds 8."""
    async with engine_of() as engine:
        server = serve_metrics(engine.registry, port=0)
        try:
            for _ in range(2):
                async for _ in engine.generate(list(range(12)), GREEDY):
                    pass
            stats = engine.stats()
            result = await to_thread.run_sync(run, server.url, "--once", "--interval", "0.1")
        finally:
            await to_thread.run_sync(server.stop)
    assert stats.cache.prefix_hit_tokens
    share = stats.cache.prefix_hit_tokens / stats.cache.prefix_query_tokens
    assert f"overall    {100 * share:.1f} %" in result.stdout
    assert f"hit tokens device {stats.cache.prefix_hit_tokens} " in result.stdout
    assert f"idle {stats.cache.idle} " in result.stdout
    assert f"free {stats.cache.free} " in result.stdout
    assert "pool: 64 blocks of 4" in result.stdout
    assert "ended      length 2" in result.stdout
    assert "running 0 loading 0 waiting 0" in result.stdout


@pytest.mark.asyncio
async def test_engines_that_share_a_registry_are_one_sum() -> None:
    registry = CollectorRegistry()

    def engine(name: str) -> AsyncEngine:
        config = EngineConfig(**DEFAULTS | {"metric_labels": {"engine": name}})  # type: ignore[arg-type]  # as there
        return AsyncEngine(runner=FakeRunner(), config=config, registry=registry)

    async with engine("a"), engine("b"):
        server = serve_metrics(registry, port=0)
        try:
            both = await to_thread.run_sync(run, server.url, "--once", "--interval", "0.1")
            one = await to_thread.run_sync(run, server.url, "--once", "--interval", "0.1", "--label", "engine=a")
        finally:
            await to_thread.run_sync(server.stop)
    assert "pool: 128 blocks of 4" in both.stdout
    assert "pool: 64 blocks of 4" in one.stdout
