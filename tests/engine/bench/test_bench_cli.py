"""``octavo bench`` against a server on loopback."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.engine import cli
from octavo.engine.bench.load import GONE_AFTER
from octavo.engine.bench.report import read_report
from octavo.errors import InvalidRequest
from octavo.tests.engine.bench.stub_server import Body, Loopback, Piece, Reply, chunk, plain, refusal

SMALL = ("--prompt-tokens", "8", "--output-tokens", "3", "--no-tui")


@pytest.fixture(scope="module")
def running() -> Iterator[Loopback]:
    with Loopback(plain).running() as server:
        yield server


@pytest.fixture
def server(running: Loopback) -> Iterator[Loopback]:
    yield running
    running.answer = plain


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)], env={"COLUMNS": "160"})


def test_a_run_is_shown_saved_and_drawn(server: Loopback, tmp_path: Path) -> None:
    saved, picture = tmp_path / "r.json", tmp_path / "p.png"
    result = bench(
        *("--url", server.url, *SMALL, "-n", 12, "-c", 3, "--warmup", 2, "--slo", "ttft:60"),
        *("--json", saved, "--per-request", "--plot", picture, "--api-key", "sk-secret", "-H", "X-A: hidden"),
    )
    assert result.exit_code == 0, result.output
    assert "12 ok, 0 refused (429), 0 failed" in result.stdout
    assert "running" in result.stderr
    report = read_report(saved)
    assert (report.requests.ok, report.tokens.output) == (12, 36)
    assert report.goodput is not None
    assert report.goodput.requests == 12
    assert len(json.loads(saved.read_text())["rows"]) == 12
    assert picture.stat().st_size > 10_000
    assert "secret" not in saved.read_text() + result.output
    assert "hidden" not in saved.read_text() + result.output


def test_every_option_gets_to_its_setting(server: Loopback, tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    options: dict[str, object] = {
        "--model": "m",
        "--endpoint": "completions",
        "--extra-body": '{"top_k": 5}',
        "--temperature": 0.5,
        "--timeout": 50,
        "--retry": 2,
        "--rate": 200,
        "--arrivals": "constant",
        "--speed": 3,
        "--requests": 4,
        "--duration": 30,
        "--max-in-flight": 7,
        "--seed": 9,
        "--workload": "multi-turn",
        "--prompt-tokens": 11,
        "--prompt-spread": 0.1,
        "--output-tokens": 4,
        "--output-spread": 0.25,
        "--prefix-tokens": 13,
        "--prefixes": 2,
        "--share": 0.75,
        "--turns": 2,
        "--think": 0.001,
        "--slo": "e2e:9",
        "--json": saved,
    }
    flat = [part for pair in options.items() for part in pair]
    result = bench("--url", server.url, "--no-tui", "--ignore-eos", *flat)
    assert result.exit_code == 0, result.output
    assert read_report(saved).settings == {
        "target": {
            "url": server.url,
            "model": "m",
            "endpoint": "completions",
            "fields": {"temperature": 0.5, "ignore_eos": True, "top_k": 5},
            "timeout": 50,
            "retries": 2,
        },
        "load": {
            "pace": {"concurrency": None, "rate": 200, "arrivals": "constant", "trace": None, "speed": 3},
            "requests": 4,
            "duration": 30,
            "warmup": 0,
            "max_in_flight": 7,
            "seed": 9,
        },
        "prompts": {
            "kind": "multi-turn",
            "form": "text",
            "lengths": {"prompt_tokens": 11, "prompt_spread": 0.1, "output_tokens": 4, "output_spread": 0.25},
            "prefix": {"tokens": 13, "prefixes": 2, "share": 0.75},
            "turns": 2,
            "think": 0.001,
            "file": None,
        },
        "slo": {"e2e": 9},
    }


def test_a_file_is_asked_line_by_line(server: Loopback, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 1}\n{"messages": [], "max_tokens": 2}')
    result = bench("--url", server.url, "--workload", "file", "--file", path)
    assert result.exit_code == 0, result.output
    assert "2 ok" in result.stdout


def test_failures_are_told_by_their_kind(server: Loopback) -> None:
    replies: list[Callable[[], Reply]] = [
        lambda: Reply([Piece(0, chunk("a"))], breaks=True),
        lambda: Reply([Piece(0, b"boom")], 500),
        refusal,
    ]
    server.answer = lambda body: replies.pop()() if replies else plain(body)
    result = bench("--url", server.url, *SMALL, "-n", 5, "-c", 1)
    assert result.exit_code == 0
    assert "2 ok, 1 refused (429), 2 failed" in result.stdout
    assert "1 x truncated" in result.stdout
    assert "1 x http 500" in result.stdout


def test_when_everything_fails_so_does_the_command(server: Loopback) -> None:
    server.answer = lambda _body: Reply(status=500)
    result = bench("--url", server.url, *SMALL, "-n", 3)
    assert result.exit_code == 1
    assert "3 x http 500" in result.stdout


def test_of_a_server_that_dies_what_there_is_gets_reported() -> None:
    served = 0

    def answer(body: Body) -> Reply:
        nonlocal served
        served += 1
        if served > 4:
            mortal.die()
            return Reply([Piece(0, chunk("a"))], hangs=True)
        return plain(body)

    mortal = Loopback(answer)
    with mortal.running():
        result = bench("--url", mortal.url, *SMALL, "-n", 1000, "-c", 1, "--timeout", 20)
    assert result.exit_code == 0, result.output
    assert "4 ok" in result.stdout
    assert f"{GONE_AFTER} requests in a row found no server" in result.stdout


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a shell: processes that run tests side by side, or in the background, ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupted_it_reports_what_it_has(server: Loopback) -> None:
    served = 0

    def answer(body: Body) -> Reply:
        nonlocal served
        served += 1
        if served == 5:
            signal.raise_signal(signal.SIGINT)
        return plain(body) if served < 4 else Reply(hangs=True)

    server.answer = answer
    result = bench("--url", server.url, *SMALL, "-n", 1000, "-c", 2)
    assert result.exit_code == 130, result.output
    assert "3 ok" in result.stdout
    assert "it was interrupted" in result.stdout


def test_two_reports_are_compared(server: Loopback, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        assert bench("--url", server.url, *SMALL, "-n", 2, "--json", path).exit_code == 0
    result = bench("compare", *paths)
    assert result.exit_code == 0, result.output
    assert "a.json" in result.stdout
    assert "ttft p50, ms" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--extra-body", "[1]"], "--extra-body"),
        (["-H", "sk-secret"], "--header"),
        (["--slo", "x:1"], "--slo"),
        (["--per-request"], "--json"),
        (["--json", "/nowhere/r.json"], "no folder"),
        (["--plot", "p.svg"], "PNG"),
        (["-c", "2", "-r", "3"], "one of"),
        (["--url", "http://127.0.0.1:1"], "no server is ready"),
    ],
)
def test_what_cannot_work_is_told_before_the_run(arguments: list[str], problem: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, InvalidRequest)
    assert problem in str(result.exception)
    assert "sk-secret" not in str(result.exception)


def test_the_help_has_its_groups() -> None:
    text = bench("--help").stdout
    for word in ("Server", "Load", "Workload", "Output", "compare"):
        assert word in text
