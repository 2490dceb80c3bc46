"""``octavo simulate``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.engine import cli
from octavo.engine.assembly import EVICTION_POLICIES
from octavo.errors import InvalidRequest, OctavoError, TraceError, UnknownPlugin
from octavo.policies.eviction.lfu import Lfu
from octavo.policies.simulator.readers import open_trace
from octavo.policies.simulator.replay import replay
from octavo.policies.simulator.service import ATOMIC, Service
from octavo.tests.policies.simulator.trace_files import write_small_trace

BROKEN = "octavo.tests.policies.simulator.faulty_policies:Raises"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_small_trace(tmp_path / "small.jsonl")


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", *map(str, arguments), "--jobs", "1"], env={"COLUMNS": "160"})


def _refused(*arguments: str | Path) -> OctavoError:
    result = _run(*arguments)
    assert isinstance(result.exception, OctavoError)
    assert result.stdout == ""
    return result.exception


def test_the_table_shows_what_a_direct_replay_finds(trace: Path) -> None:
    result = _run(trace, "-p", "lfu", "-c", "25%,64")
    assert result.exit_code == 0, result.output
    shown, size = dict[tuple[int, str], str](), 0
    for words in (line.split() for line in result.stdout.splitlines()[4:]):
        if len(words) == 2 and words[1].startswith("("):
            size = int(words[1].strip("()").replace(",", ""))
        elif len(words) > 7:
            shown[size, words[0]] = words[1]
    assert {name for _, name in shown} == {"lru", "lfu", "optimum", "bound", "no"}
    sizes = [blocks for blocks, name in shown if name == "lfu"]
    assert len(sizes) == 2
    for blocks in sizes:
        assert shown[blocks, "lfu"] == f"{replay(open_trace(trace), Lfu(blocks), blocks, Service()).hit_ratio:.4f}"
    assert "small: 120 requests, blocks of 16 tokens" in result.stdout


def test_json_is_one_array_of_rows(trace: Path) -> None:
    result = _run(trace, "-p", "lru", "-p", "lfu", "-c", "10%", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == ["lru", "lfu", "optimum", "bound", "limit"]
    assert rows[0]["gap_closed"] == 0.0
    assert rows[2]["gap_closed"] == 1.0
    assert rows[0]["hit_ratio"] <= rows[2]["hit_ratio"] <= rows[3]["hit_ratio"] <= rows[4]["hit_ratio"]
    assert all(row["saved_seconds"] == row["hit_tokens"] / 20_000 for row in rows)


def test_lru_runs_even_if_nobody_asks(trace: Path) -> None:
    rows = json.loads(_run(trace, "-p", "lfu", "-c", "10%", "--json", "--no-optimum").stdout)
    assert [row["policy"] for row in rows] == ["lru", "lfu", "limit"]


def test_all_means_every_installed_policy(trace: Path) -> None:
    rows = json.loads(_run(trace, "-p", "all", "-c", "10%", "--json", "--no-optimum").stdout)
    installed = {report.name for report in EVICTION_POLICIES.report() if report.error is None}
    assert {row["policy"] for row in rows if row["kind"] == "policy"} == installed
    assert all(row["error"] is None for row in rows)


def test_options_reach_the_replay(trace: Path) -> None:
    options = ["--limit", "50", "--prefill-rate", "100", "--decode-rate", "1"]
    slow = json.loads(_run(trace, "-c", "64", "--json", "--no-optimum", *options).stdout)[0]
    atomic = json.loads(_run(trace, "-c", "64", "--json", "--no-optimum", "--atomic", *options).stdout)[0]
    assert slow["requests"] == atomic["requests"] == 50
    assert slow["wait_seconds"] > 0
    assert atomic["wait_seconds"] == 0
    assert atomic["saved_seconds"] == atomic["hit_tokens"] / 100
    assert replay(open_trace(trace), Lfu(64), 64, ATOMIC).waits == 0


def test_several_processes_say_the_same(trace: Path) -> None:
    arguments = ["simulate", str(trace), "-p", "lfu", "-c", "10%", "--no-optimum", "--json"]
    one, two = (CliRunner().invoke(cli.app, [*arguments, "--jobs", jobs]).stdout for jobs in ("1", "2"))
    assert one == two
    assert len(json.loads(one)) == 3


def test_a_plot_is_saved(trace: Path, tmp_path: Path) -> None:
    result = _run(trace, "-c", "10%,50%", "--plot", tmp_path / "curves.png")
    assert result.exit_code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_faulty_policy_fails_the_run_but_not_the_others(trace: Path) -> None:
    result = _run(trace, "-p", BROKEN, "-p", "lfu", "-c", "25%", "--json")
    assert result.exit_code == 1
    rows = {row["policy"]: row for row in json.loads(result.stdout)}
    assert rows[BROKEN]["error"] == "ZeroDivisionError: victims are hard"
    assert rows["lfu"]["hit_ratio"] > 0
    assert "victims are hard" in result.stderr


def test_wrong_arguments_are_told_before_any_work(trace: Path, tmp_path: Path) -> None:
    unknown = _refused(trace, "-p", "lrru")
    assert isinstance(unknown, UnknownPlugin)
    assert "Did you mean 'lru'?" in str(unknown)
    assert "lfu" in str(unknown)
    assert isinstance(_refused(trace, "-c", "10%,many"), InvalidRequest)
    assert isinstance(_refused(trace, "--prefill-rate", "0"), InvalidRequest)
    assert isinstance(_refused(trace, "--limit", "0"), InvalidRequest)
    assert isinstance(_refused(trace, "--sessions", "2"), InvalidRequest)
    assert isinstance(_refused(trace, "--plot", tmp_path / "no" / "such.png"), InvalidRequest)
    assert isinstance(_refused(tmp_path / "missing.jsonl"), TraceError)
    (tmp_path / "text.jsonl").write_text("not a trace\n")
    assert isinstance(_refused(tmp_path / "text.jsonl"), TraceError)


def test_an_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "simulate", str(tmp_path / "missing.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603  # our own
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("TraceError: ")
    assert "Traceback" not in done.stderr
