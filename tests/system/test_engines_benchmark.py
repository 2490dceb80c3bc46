from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
TINY = 160
"""Token ids of the tiny model; the drivers warm up with some of them."""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"octavo_benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workloads() -> ModuleType:
    return _load(FOLDER / "workloads.py")


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    return _load(FOLDER / "peers" / "driver.py")


@pytest.fixture(scope="module")
def engines() -> Iterator[ModuleType]:
    before, paths = set(sys.modules), sys.path.copy()
    yield _load(FOLDER / "engines.py")
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if "." not in name and str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]  # plain names such as ``report`` are for scripts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    folder = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    return folder


def test_workloads_are_those_of_the_table(workloads: ModuleType) -> None:
    tasks = {task.name: task for task in workloads.workloads()}
    assert list(tasks) == ["W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W8 tiers"]
    shared = tasks["W1"].lanes(0, 1000)
    assert len(shared) == 32
    assert {tuple(lane[0].own[:512]) for lane in shared} == {tuple(shared[0][0].own[:512])}
    assert len({tuple(lane[0].own[512:]) for lane in shared}) == 32
    assert {(len(lane[0].own), lane[0].out) for lane in shared} == {(544, 64)}
    assert [(len(lane), lane[0].samples, len(lane[0].own)) for lane in tasks["W4"].lanes(0, 1000)] == [(1, 8, 256)] * 4
    mixed = [lane[0] for lane in tasks["W5"].lanes(0, 1000)]
    assert len(mixed) == 48
    assert all(32 <= len(turn.own) <= 768 and 16 <= turn.out <= 128 for turn in mixed)
    chats = tasks["W8"].lanes(0, 1000)
    assert [[len(turn.own) for turn in lane] for lane in chats] == [[320, 64, 64, 64, 64, 64]] * 8


def test_each_round_asks_something_else_of_the_same_length(workloads: ModuleType) -> None:
    for task in workloads.workloads():
        one, same, other = task.lanes(1, 1000), task.lanes(1, 1000), task.lanes(2, 1000)
        assert one == same
        assert [[(len(turn.own), turn.out) for turn in lane] for lane in one] == [
            [(len(turn.own), turn.out) for turn in lane] for lane in other
        ]
        assert all(mine[0].own[:4] != theirs[0].own[:4] for mine, theirs in zip(one, other, strict=True))
    tasks = {task.name: task for task in workloads.workloads()}
    assert tasks["W8"].lanes(1, 1000) == tasks["W8 tiers"].lanes(1, 1000)


def test_pools_are_a_third_where_they_are_short_and_ample_elsewhere(workloads: ModuleType) -> None:
    for task in workloads.workloads():
        for each in (task, task.smaller(8)):
            shape, pool = each.shape, each.setting.pool_tokens
            if task.name.startswith("W8"):
                assert shape.longest_lane <= pool
                needed = max(shape.cached_tokens // 3, shape.longest_lane, workloads.SMALLEST_POOL)
                assert pool <= needed + workloads.BLOCK_SIZE
            else:
                turns = [turn for lane in each.lanes(0, 1000) for turn in lane]
                assert sum(len(turn.own) + turn.out * turn.samples * turn.beams for turn in turns) < pool
    full = next(task for task in workloads.workloads() if task.name == "W8")
    assert full.shape.cached_tokens == 256 + 8 * 6 * 96
    assert 0.33 < full.setting.pool_tokens / full.shape.cached_tokens < 0.35


def test_lanes_go_on_from_what_was_answered(driver: ModuleType) -> None:
    class Echo:
        """Answers with the length of the prompt, one request a step."""

        def __init__(self) -> None:
            self.asked: list[tuple[int, list[int], int]] = []
            self.prompts: list[list[int]] = []

        def submit(self, key: int, prompt: list[int], turn: driver.Turn) -> None:  # type: ignore[name-defined]
            self.prompts.append(prompt)
            self.asked.append((key, prompt, turn.out))

        def step(self) -> list[object]:
            key, prompt, out = self.asked.pop(0)
            return [driver.Ended(key, [[len(prompt)] * out])]

    echo = Echo()
    turn = driver.Turn
    tally = driver.Stepped(echo).run([[turn([7, 8], 2, 1, 1), turn([9], 1, 1, 1)], [turn([5], 3, 1, 1)]])
    assert tally.tokens == 6
    assert tally.heads == [2, 1]
    assert echo.prompts == [[7, 8], [5], [7, 8, 2, 2, 9]]
    with pytest.raises(RuntimeError, match=r"\[2\] tokens, not \[3\]"):
        driver.Conversation([turn([1], 2, 1, 1)]).answer([[1, 2, 3]])


def test_best_peer_and_ratios(engines: ModuleType) -> None:
    findings_of = sys.modules["findings"]
    findings, run = findings_of.Findings(), sys.modules["process"].Run
    for name, tokens, first in (("octavo", 30, 0.5), ("slow", 10, 0.25), ("fast", 20, 1.0)):
        findings.runs["W1", name] = [run(1.0, tokens, [1, 2]), run(2.0, 2 * tokens, [1, 2])]
        findings.runs["W6 cached", name] = [run(first, 1, [tokens])]
    findings.runs["W8", "fast"] = [run(1.0, 10, [1])]
    findings.runs["W8", "octavo"] = [run(1.0, 5, [1])]
    findings.runs["W8 tiers", "octavo"] = [run(1.0, 20, [1])]
    assert findings_of.gain(findings, "W1") == pytest.approx(1.5)
    assert findings.best("W1")[0] == "fast"
    assert findings_of.gain(findings, "W6 cached") == pytest.approx(0.5)  # times: less is better
    assert findings.best("W6 cached")[0] == "slow"
    assert findings_of.gain(findings, "W8 tiers") == pytest.approx(2.0)  # peers without tiers do without
    assert findings.agreement("fast") == pytest.approx(5 / 6)
    tasks = sys.modules["workloads"].workloads()
    verdicts = {target.name.split(":")[0]: target.passes for target in findings_of.targets(tasks, findings)}
    assert verdicts == {
        "W1": True,
        "W2": False,
        "W3": False,
        "W4": False,
        "W5": False,
        "W6 cached": False,
        "W7": False,
        "W8 tiers": True,
    }


def test_unknown_names_are_refused(engines: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engines.main(["--workloads", "W1,W9"])
    assert "no W9; there are W1, W2" in capsys.readouterr().err


def test_quick_run_of_octavo(
    engines: ModuleType, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, picture = tmp_path / "engines.json", tmp_path / "engines.png"
    command = ["--quick", "--peers", "octavo", "--workloads", "W1,W6,W7,W8 tiers", "--model", str(tiny)]
    assert engines.main([*command, "--json", str(saved), "--plot", str(picture)]) == 0
    output = capsys.readouterr().out
    found = json.loads(saved.read_text())
    assert set(found["numbers"]) == {"W1", "W6 cold", "W6 cached", "W7", "W8 tiers"}, output
    assert found["notes"] == ["bfloat16"]
    assert picture.stat().st_size > 1000
    assert "not measured" in output  # there is no peer to compare with


def test_missing_peers_are_skipped_with_a_word(
    engines: ModuleType, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--quick", "--peers", "openvino,llama.cpp", "--workloads", "W3", "--model", str(tiny)]
    assert engines.main([*command, "--folder", str(tmp_path)]) == 0
    notes = capsys.readouterr().out
    assert "openvino is not here: run peers/install.py" in notes
    assert "llama.cpp is not here" in notes


def test_random_lengths_stay_within_their_bounds(workloads: ModuleType) -> None:
    shape = workloads.Shape(lanes=50, own=(3, 9), out=(2, 5))
    turns = [lane[0] for lane in shape.draw(Random(1), Random(2), 40)]  # noqa: S311  # not for secrets
    assert {len(turn.own) for turn in turns} == set(range(3, 10))
    assert {turn.out for turn in turns} == {2, 3, 4, 5}
    assert all(16 <= token < 40 for turn in turns for token in turn.own)
