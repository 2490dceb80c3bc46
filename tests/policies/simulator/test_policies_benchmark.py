"""The benchmarks run and judge what they say. No times are judged here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from octavo.policies.simulator.kvtrace import KvTrace
from octavo.policies.simulator.rows import Kind, Row
from octavo.tests.policies.simulator.trace_files import write_small_trace

EXAMPLES = Path(__file__).parents[3] / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"octavo_benchmark_{name}", EXAMPLES / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def policies() -> ModuleType:
    return _load("policies")


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return _load("simulator_speed")


def _row(policy: str, hit_ratio: float | None, *, trace: str = "rag", share: float = 0.01, gap: float = 0.3) -> Row:
    capacity = round(18_279 * share)
    return Row(trace, Kind.POLICY, policy, capacity, share, 16, 9, hit_ratio=hit_ratio, gap_closed=gap)


def test_adaptive_may_be_a_little_below_lru_and_no_more(policies: ModuleType) -> None:
    usual = _row("lru", 0.5)
    assert [verdict.kept for verdict in policies.judge([usual, _row("adaptive", 0.4951)])] == [True]
    (verdict,) = policies.judge([usual, _row("adaptive", 0.4949)])
    assert not verdict.kept
    assert str(verdict) == "FAIL  rag at 1%: adaptive 0.4949, lru 0.5000 (-0.0051; at least -0.005)"


def test_adaptive_without_a_result_is_a_broken_promise(policies: ModuleType) -> None:
    assert [verdict.kept for verdict in policies.judge([_row("lru", 0.5), _row("adaptive", None)])] == [False]
    assert policies.judge([_row("lru", 0.5), _row("arc", 0.1)]) == []


@pytest.mark.parametrize(("share", "least"), [(0.01, 0.25), (0.02, 0.25), (0.05, 0.1), (0.1, 0.1)])
def test_the_gap_has_to_be_closed_on_one_trace(policies: ModuleType, share: float, least: float) -> None:
    for gap in (least, least - 0.001):
        rows = [
            _row(name, 0.5, trace="mooncake_conversation", share=round(18_279 * share) / 18_279, gap=gap)
            for name in ("lru", "adaptive")
        ]
        assert [verdict.kept for verdict in policies.judge(rows)] == [True, gap == least]
    larger = [_row(name, 0.5, trace="mooncake_conversation", share=0.5, gap=0.0) for name in ("lru", "adaptive")]
    assert len(policies.judge(larger)) == 1


def test_the_four_traces_are_there_and_can_be_read(policies: ModuleType) -> None:
    for name in policies.TRACES:
        trace = policies.opened(name, None)
        assert isinstance(trace, KvTrace)
        assert trace.info.name == name
        assert (EXAMPLES / "traces" / f"LICENSE-{trace.info.license}").is_file()


@pytest.mark.slow
def test_it_prints_both_tables_and_saves(
    policies: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--quick", "--traces", "ragpulse", "--policies", "lfu", "--jobs", "1", "--save", str(tmp_path)]
    assert policies.main(arguments) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "policies.json").read_text())
    assert {row["policy"] for row in rows} == {"lru", "lfu", "optimum", "bound", "limit"}
    for row in rows:
        assert f"{row['hit_ratio']:.4f}" in printed
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")


def test_the_other_side_gets_the_same_blocks(speed: ModuleType, tmp_path: Path) -> None:
    trace = speed.InMemory(KvTrace(write_small_trace(tmp_path / "small.jsonl")))
    blocks = speed.block_sequence(trace)
    names = [name for request in trace for name in memoryview(request.names).cast("Q")]
    numbers = dict(zip(names, blocks.tolist(), strict=True))
    assert [numbers[name] for name in names] == blocks.tolist()
    assert sorted(numbers.values()) == list(range(1, len(numbers) + 1))
    speed.write_its_format(blocks, tmp_path / "blocks")
    assert (tmp_path / "blocks").stat().st_size == 24 * len(blocks)


def test_both_ways_into_the_other_library_are_a_plain_lru(speed: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("libcachesim")
    blocks = speed.block_sequence(speed.InMemory(KvTrace(write_small_trace(tmp_path / "small.jsonl"))))
    speed.write_its_format(blocks, tmp_path / "blocks")
    for capacity in (5, 50):
        order, hits = OrderedDict[int, None](), 0
        for block in blocks.tolist():
            hits += block in order
            order[block] = None
            order.move_to_end(block)
            if len(order) > capacity:
                order.popitem(last=False)
        expected = pytest.approx(hits / len(blocks))
        assert speed.fed_from_python(blocks.tolist(), capacity) == expected
        assert speed.fed_by_its_reader(tmp_path / "blocks", capacity) == expected


def test_ways_are_measured_in_turns(speed: ModuleType) -> None:
    ran: list[str] = []

    def way(name: str, ratio: float) -> float:
        ran.append(name)
        return ratio

    measured = speed.measure({"a": partial(way, "a", 0.25), "b": partial(way, "b", 0.5)}, 2)
    assert ran == ["a", "b", "a", "b"]
    assert [(one.way, len(one.seconds), one.hit_ratio) for one in measured] == [("a", 2, 0.25), ("b", 2, 0.5)]
    assert "1.00" in speed.report(measured).splitlines()[1]


def test_without_the_other_library_it_says_what_to_install(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "libcachesim", None)
    with pytest.raises(SystemExit, match=r"pip install 'octavo\[bench\]'"):
        speed.main([])
