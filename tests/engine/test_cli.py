"""The command line, the view of streams and the demo, on the fake model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest
from rich.console import Console
from typer.testing import CliRunner

from octavo import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from octavo.engine import cli, demo
from octavo.engine.assembly import EVICTION_POLICIES
from octavo.engine.request import Chat
from octavo.engine.show import LoadingBar, show_streams
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, ModelError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
Open = Callable[..., AsyncEngine]


class AnyText(FakeCodec):
    """Knows every character, in its way."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]

    def encode_chat(self, chat: Chat) -> list[int]:
        return self.encode(str(chat.messages))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EngineConfig]]:
    """What ``AsyncEngine.open`` was asked for; it gives engines on the fake model."""
    asked: list[tuple[str, EngineConfig]] = []

    def open_fake(
        model: str, config: EngineConfig, *, progress: Callable[[str, float], None] | None = None
    ) -> AsyncEngine:
        asked.append((model, config))
        if model == "none":
            raise ModelError("there is no such model")
        if progress is not None:
            progress("load", 1.0)
        return AsyncEngine(runner=FakeRunner(), codec=AnyText(), config=config)

    monkeypatch.setattr(AsyncEngine, "open", open_fake)
    return asked


def test_generate_streams_one_prompt(opened: list[tuple[str, EngineConfig]]) -> None:
    result = CliRunner().invoke(cli.app, ["generate", "Hello", "--max-tokens", "5", "--num-blocks", "9"])
    assert result.exit_code == 0
    assert len(result.stdout.strip()) == 5
    assert opened[0][0] == "smollm2"
    assert opened[0][1].num_blocks == 9


def test_generate_runs_several_prompts_and_samples() -> None:
    async def expected(prompt: str) -> list[str]:
        async with AsyncEngine(runner=FakeRunner(), codec=AnyText()) as engine:
            params = SamplingParams(max_tokens=5, temperature=0.7, seed=3, n=2)
            return [output.text for output in await engine.complete(prompt, params)]

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(
            AsyncEngine,
            "open",
            lambda _, config, **__: AsyncEngine(runner=FakeRunner(), codec=AnyText(), config=config),
        )
        arguments = [
            "generate",
            "first",
            "second",
            "--max-tokens",
            "5",
            "--temperature",
            "0.7",
            "--seed",
            "3",
            "--n",
            "2",
        ]
        result = CliRunner().invoke(cli.app, arguments)
    texts = [*asyncio.run(expected("first")), *asyncio.run(expected("second"))]
    assert result.exit_code == 0
    assert sorted(line.split("] ", 1)[1] for line in result.stdout.splitlines()) == sorted(texts)


def test_generate_reads_standard_input_and_takes_a_system_message(opened: list[tuple[str, EngineConfig]]) -> None:
    result = CliRunner().invoke(cli.app, ["generate", "-", "--system", "be brief", "--max-tokens", "3"], input="Hi")
    assert result.exit_code == 0
    assert len(result.stdout.strip()) == 3
    assert cli._as_prompt("Hi", "be brief", chat=False) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert cli._as_prompt("Hi", None, chat=False) == "Hi"


@pytest.mark.parametrize("arguments", [["generate", "x", "--model", "none"], ["generate", "x", "--n", "0"]])
def test_errors_are_one_line(
    arguments: list[str],
    opened: list[tuple[str, EngineConfig]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert "ModelError" in (told := capsys.readouterr().err) or "InvalidRequest" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("message", ["pip install 'octavo[hf]'", "no file [a]x.gguf", "/x[/red]y"])
def test_messages_are_printed_as_they_are(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> AsyncEngine:
        raise ModelError(message)

    monkeypatch.setattr(AsyncEngine, "open", refuse)
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", "x"])
    with pytest.raises(SystemExit):
        cli.main()
    assert message in capsys.readouterr().err


def test_samples_differ_unless_a_temperature_is_given(opened: list[tuple[str, EngineConfig]]) -> None:
    drawn = CliRunner().invoke(cli.app, ["generate", "x", "--n", "3", "--max-tokens", "8"]).stdout.splitlines()
    greedy = CliRunner().invoke(cli.app, ["generate", "x", "--n", "3", "--max-tokens", "8", "--temperature", "0"])
    assert len({line.split("] ")[1] for line in drawn}) == 3
    assert len({line.split("] ")[1] for line in greedy.stdout.splitlines()}) == 1


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout.strip() == version("octavo")


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; sys.argv = ['octavo']; from octavo.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 1
    assert done.stderr.strip() == "the command line needs typer: pip install 'octavo[cli]'"


def test_plugins_lists_what_is_installed_and_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, ["plugins"])
    assert result.exit_code == 0
    for name in ("lru", "lfu", "cost_aware", "fcfs", "priority"):
        assert name in result.stdout
    group = EVICTION_POLICIES
    broken = group.report()[0]._replace(name="mine", error="[no] module")
    monkeypatch.setattr(type(group), "report", lambda _: [broken])
    result = CliRunner().invoke(cli.app, ["plugins"])
    assert result.exit_code == 1
    assert "mine" in result.stdout


@pytest.mark.asyncio
@pytest.mark.parametrize("terminal", [False, True])
async def test_streams_show_every_text(*, terminal: bool) -> None:
    console = Console(force_terminal=terminal, width=100, height=40, record=True, file=open("/dev/null", "w"))  # noqa: ASYNC230, PTH123, SIM115
    async with AsyncEngine(runner=FakeRunner(), codec=AnyText()) as engine:
        outputs = await show_streams(console, engine, ["one", "two", "three"], GREEDY, ["[a]", "b", "c"])
        assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 3
    console.file.close()
    shown = console.export_text()
    assert all(output.text.strip() in shown for output in outputs)


@pytest.mark.asyncio
async def test_the_first_refusal_is_raised_as_it_is() -> None:
    async with AsyncEngine(runner=FakeRunner(max_context=8), codec=AnyText()) as engine:
        with pytest.raises(InvalidRequest):
            await show_streams(Console(quiet=True), engine, ["fine", "x" * 40], GREEDY, ["", ""])
        assert engine.census().held == 0


def test_the_loading_bar_takes_any_phase() -> None:
    with LoadingBar(Console(force_terminal=True, quiet=True)) as bar:
        for share in (0.0, 0.5, 1.0):
            bar.update("load", share)
            bar.update("probe", share)


@pytest.mark.asyncio
async def test_the_demo_says_what_the_cache_did(opened: list[tuple[str, EngineConfig]]) -> None:
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: ASYNC230, PTH123, SIM115
    await demo.run_demo(console, "fake", "cpu", "float32")
    console.file.close()
    shown = console.export_text()
    assert [config.enable_prefix_caching for _, config in opened] == [True, False]
    assert "6 of 6 chats have the same tokens" in shown
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in shown.splitlines() if line.startswith("│")}
    cached = [int(cell) for cell in rows["of them from the cache"]]
    copied = [int(cell) for cell in rows["blocks copied (copy-on-write)"]]
    assert cached[0] > 2 * int(rows["prompt tokens"][0]) // 3
    assert cached[1] == 0
    assert copied[0] >= 3  # four samples share the last block of their prompt
