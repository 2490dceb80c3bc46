"""``octavo simulate --replicas``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.engine import cli
from octavo.engine.fleet.routing import ROUTING_POLICIES
from octavo.errors import InvalidRequest, OctavoError, UnknownPlugin
from octavo.policies.eviction.lfu import Lfu
from octavo.policies.routing.prefix import Prefix
from octavo.policies.simulator.fleet import (
    ChatTrace,
    FleetSetting,
    Kill,
    TierSetting,
    TierWrites,
    simulate,
)
from octavo.policies.simulator.fleet.chats import parse_chats
from octavo.policies.simulator.readers import open_trace
from octavo.policies.simulator.selection import First
from octavo.policies.simulator.service import Service
from octavo.tests.policies.simulator.trace_files import write_small_trace

NOBODY = "octavo.tests.policies.simulator.fleet.fleet_rig:ToNobody"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_small_trace(tmp_path / "small.jsonl")


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", *map(str, arguments), "--jobs", "1"], env={"COLUMNS": "170"})


def _refused(*arguments: str | Path) -> OctavoError:
    result = _run(*arguments)
    assert isinstance(result.exception, OctavoError)
    assert result.stdout == ""
    return result.exception


def test_the_table_has_a_line_for_each_routing_policy(trace: Path) -> None:
    result = _run(trace, "--replicas", "2,4", "-r", "prefix,round_robin", "-c", "64")
    assert result.exit_code == 0, result.output
    assert "small: 120 requests, blocks of 16 tokens" in result.stdout
    assert "2 replicas of 64 blocks" in result.stdout
    assert "4 replicas of 64 blocks" in result.stdout
    shown = [words[:2] for line in result.stdout.splitlines() if len(words := line.split()) > 10]
    rows = json.loads(_run(trace, "--replicas", "2,4", "-r", "prefix,round_robin", "-c", "64", "--json").stdout)
    assert shown[1:3] + shown[-2:] == [[row["routing"], f"{row['hit_ratio']:.4f}"] for row in rows]


def test_every_option_reaches_the_simulation(trace: Path) -> None:
    options = {
        "--replicas": "3",
        "--routing": "prefix",
        "--routing-options": '{"prefix": {"overload": 2.0}}',
        "-p": "lfu",
        "-c": "50",
        "--prefill-rate": "100",
        "--decode-rate": "9",
        "--max-running": "2",
        "--news-delay": "1.5",
        "--shared-tier": "90",
        "--tier-writes": "through",
        "--tier-bandwidth": "1e6",
        "--store-bandwidth": "2e6",
        "--tier-latency": "0.01",
        "--tier-lost-at": "50",
        "--token-bytes": "1000",
        "--balance-window": "7",
        "--limit": "100",
    }
    words = [word for option in options.items() for word in option]
    row = json.loads(_run(trace, *words, "--kill", "20:1:5", "--kill", "30:0", "--own-prefill", "--json").stdout)[0]
    setting = FleetSetting(
        3,
        50,
        lambda: Prefix(overload=2.0),
        Lfu,
        Service(100.0, 9.0),
        max_running=2,
        news_delay=1.5,
        tier=TierSetting(90, TierWrites.THROUGH, 1000, 1e6, 2e6, 0.01, 50.0),
        kills=(Kill(20.0, 1, 5.0), Kill(30.0, 0)),
        window=7.0,
    )
    found = simulate(First(open_trace(trace), 100), setting)
    counted = {name: value for name, value in found._asdict().items() if name in row}
    assert {name: row[name] for name in counted} == counted
    assert row["sent_again"] > 0
    assert row["tier_hit_tokens"] > 0


def test_defaults_are_those_of_a_live_fleet_that_hears_at_once(trace: Path) -> None:
    row = json.loads(_run(trace, "--replicas", "2", "--json").stdout)[0]
    assert (row["routing"], row["eviction"], row["bytes_up"], row["sent_again"]) == ("prefix", "lru", 0, 0)
    assert row["capacity_share"] == pytest.approx(0.05, abs=0.01)
    setting = FleetSetting(2, row["capacity"], Prefix, shares_prefill=True)
    assert row["ttft_p99"] == simulate(open_trace(trace), setting).ttft_p99


def test_all_means_every_installed_routing_policy(trace: Path) -> None:
    rows = json.loads(_run(trace, "--replicas", "2", "-r", "all", "--json").stdout)
    assert [row["routing"] for row in rows] == [report.name for report in ROUTING_POLICIES.report()]
    assert all(row["error"] is None for row in rows)


def test_chats_need_no_file() -> None:
    text = "20:2-4:user=40:think=3"
    row = json.loads(_run("--chats", text, "--seed", "5", "--replicas", "2", "-c", "100", "--json").stdout)[0]
    setting = FleetSetting(2, 100, Prefix, shares_prefill=True)
    assert row["hit_tokens"] == simulate(ChatTrace(parse_chats(text, 5)), setting).hit_tokens
    single = json.loads(_run("--chats", text, "-c", "100", "--json", "--no-optimum").stdout)
    assert [line["policy"] for line in single] == ["lru", "limit"]


def test_a_store_without_bounds_and_news_that_never_come(trace: Path) -> None:
    options = ("--replicas", "2", "-c", "40", "--json")
    row = json.loads(_run(trace, *options, "--shared-tier", "all", "--news-delay", "none").stdout)[0]
    setting = FleetSetting(2, 40, Prefix, shares_prefill=True, news_delay=None, tier=TierSetting())
    found = simulate(open_trace(trace), setting)
    assert (row["hit_tokens"], row["bytes_down"]) == (found.hit_tokens, found.bytes_down)
    assert found.bytes_down > 0


def test_a_fleet_plot_is_saved(trace: Path, tmp_path: Path) -> None:
    result = _run(trace, "--replicas", "1,2", "--plot", tmp_path / "fleet.png")
    assert result.exit_code == 0
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")


def test_a_faulty_routing_policy_fails_the_run_but_not_the_others(trace: Path) -> None:
    result = _run(trace, "--replicas", "2", "-r", NOBODY, "-r", "prefix", "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)
    assert "ToNobody chose" in rows[0]["error"]
    assert rows[1]["error"] is None
    assert "ToNobody chose" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ["--replicas", "two"],
        ["--replicas", "0"],
        ["--replicas", "2", "-c", "many"],
        ["--replicas", "2", "--kill", "5"],
        ["--replicas", "2", "--kill", "5:2"],
        ["--replicas", "2", "--kill", "5:0:0"],
        ["--replicas", "2", "--kill", "soon:0"],
        ["--replicas", "2", "--shared-tier", "big"],
        ["--replicas", "2", "--shared-tier", "0"],
        ["--replicas", "2", "--tier-latency", "0.1"],
        ["--replicas", "2", "--tier-writes", "through"],
        ["--replicas", "2", "--news-delay", "late"],
        ["--replicas", "2", "--routing-options", "fast"],
        ["--replicas", "2", "--routing-options", '{"rendezvous": {}}'],
        ["--replicas", "2", "--routing-options", '{"prefix": {"no_such": 1}}'],
        ["--replicas", "2", "--chats", "9:3"],
        ["--routing", "prefix"],
        ["--kill", "5:0"],
        ["--shared-tier", "90"],
    ],
)
def test_wrong_fleets_are_told_before_any_work(trace: Path, wrong: list[str]) -> None:
    assert isinstance(_refused(trace, *wrong), InvalidRequest)


def test_what_is_missing_is_told() -> None:
    assert "one of the two" in str(_refused("--replicas", "2"))
    assert isinstance(_refused("--chats", "9:3", "--replicas", "2", "-r", "prefiks"), UnknownPlugin)
