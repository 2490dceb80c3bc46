"""The benchmark runs, measures what it says, and its yardstick is a sound manager. No times are judged here."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from io import StringIO
from pathlib import Path
from random import Random
from types import ModuleType
from unittest.mock import patch

import pytest

ROUND = {"admit", "admit, ids packed", "decode", "finish", "churn", "churn, ids packed"}
FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"octavo_benchmark_{Path(name).name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bookkeeping() -> ModuleType:
    return _load("bookkeeping")


@pytest.fixture(scope="module")
def yardstick() -> ModuleType:
    return _load("yardstick")


def test_each_act_is_measured_on_both_sides(bookkeeping: ModuleType) -> None:
    random = Random(1)  # noqa: S311  # not for secrets
    results = list(bookkeeping.measure_acts(tokens=64, rounds=1, random=random))
    results += bookkeeping.measure_churn(tokens=64, rounds=1, random=random)
    results += bookkeeping.measure_fragmented(tokens=64, random=random)
    acts = {result.act for result in results}
    assert {"encode", "admit", "commit", "finish", "rehit", "churn"} <= acts
    assert all(result.octavo > 0 and result.yardstick > 0 for result in results)


def test_missed_targets_are_named(bookkeeping: ModuleType) -> None:
    result, target = bookkeeping.Result, bookkeeping.TARGETS[512]
    fast = [result(512, act, 1.0, float(target)) for act in ("admit", "rehit", "finish", "churn")]
    whole = result(512, "admit + commit", 1.0, 32.0 * 10)  # 10 us for each of 32 blocks
    decode = result(512, "decode", 1.0, 1.0, "1 running")
    assert bookkeeping.missed_targets([*fast, whole, decode]) == []
    slow = [result(512, "finish", 1.01, float(target)), whole, result(512, "decode", 1.01, 1.0, "1 running")]
    assert [line.split()[0] for line in bookkeeping.missed_targets(slow)] == ["finish", "decode"]


@pytest.mark.slow
def test_command_line_gives_json(bookkeeping: ModuleType, tmp_path: Path) -> None:
    assert bookkeeping.main(["--quick", "--peers", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    output = json.loads((tmp_path / "found.json").read_text())
    assert {line["act"] for line in output["numbers"]["yardstick"]} >= {"admit", "rehit", "finish", "churn", "decode"}
    assert {tuple(line["microseconds"]) for line in output["numbers"]["peers"]} == {("octavo",)}
    assert {"vllm skipped", "sglang skipped"} <= {note.partition(":")[0] for note in output["notes"]}


def test_a_round_measures_every_act(bookkeeping: ModuleType) -> None:
    one_round = _load("bookkeeping_acts").one_round
    octavo, yardstick = (one_round(side, 64, seed=1) for side in (bookkeeping.Octavo, bookkeeping.Yardstick))
    assert set(octavo) == set(yardstick) == ROUND
    assert min(*octavo.values(), *yardstick.values()) > 0


def test_a_peer_answers_line_by_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    peers, acts, bookkeeping = _load("bookkeeping_peers"), _load("bookkeeping_acts"), _load("bookkeeping")
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # it is given back at the end
    monkeypatch.setattr(sys, "stdin", StringIO("[64, 1]\n[32, 2]\n"))
    peers.serve(partial(acts.one_round, bookkeeping.Yardstick))
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [set(answer) for answer in answers] == [ROUND] * 2


def test_a_peer_that_ends_says_why(tmp_path: Path) -> None:
    peers = _load("bookkeeping_peers")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no such engine >&2\nexit 1\n")
    python.chmod(0o755)
    with (
        (tmp_path / "log").open("w+") as log,
        peers.Peer("vllm", tmp_path, log) as peer,
        pytest.raises(peers.PeerFailed, match="vllm: no such engine"),
    ):
        peer.one_round(64, 1)


def test_targets_are_stricter_for_long_prompts() -> None:
    rivals, report = _load("bookkeeping_rivals"), _load("report")
    sides = {"octavo": report.Spread.of([1.0, 2.0]), "vllm": report.Spread.of([6.0, 14.0])}
    short, long = rivals.peer_targets({(512, "admit"): sides, (2_048, "admit"): sides})
    assert (short.value, short.limit, short.passes) == (6.5, 5, True)
    assert (long.value, long.limit, long.passes) == (6.5, 10, False)
    assert rivals.peer_sheet({(512, "admit"): sides}).rows[0][-1] == "6.5"


def test_every_peer_has_its_ratio_and_only_vllm_has_targets() -> None:
    rivals, report = _load("bookkeeping_rivals"), _load("report")
    spreads = {"octavo": [2.0], "vllm": [30.0], "sglang": [50.0]}
    times = {(512, "admit"): {name: report.Spread.of(values) for name, values in spreads.items()}}
    assert rivals.peer_sheet(times).rows[0][-2:] == ("15.0", "25.0")
    assert [target.value for target in rivals.peer_targets(times)] == [15.0]


def test_a_package_is_imported_without_what_it_never_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sglang = _load("bookkeeping_sglang")
    package = tmp_path / "lonely"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('starts a web server')\n")
    (package / "inner.py").write_text(
        "from absent_web.routing import Mount\n"
        "from lonely.kernels.memory import jit\n"
        "class Route(Mount): path: Mount[int] | None = None\n"
        "@jit\n"
        "def three(): return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    with patch.dict(sys.modules):
        for _ in range(2):  # the second time there is nothing to do
            finders = len(sys.meta_path)
            sglang.import_bare("lonely", ("lonely.kernels", "absent_web"))
        assert len(sys.meta_path) == finders
        inner = importlib.import_module("lonely.inner")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("absent_web_client")  # only what is named, and what is below it
    assert inner.three() == 3
    assert inner.Route.__bases__ == (object,)


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match="sglang is not installed"):
        _load("bookkeeping_sglang").Sglang(4, 16, 1)


def test_a_manager_is_installed_once_and_without_what_it_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install = _load("peers/install")
    asked: list[list[str]] = []

    def make(where: Path, *, clear: bool, with_pip: bool) -> None:
        assert clear
        assert with_pip
        (where / "bin").mkdir(parents=True)
        (where / "bin" / "python").touch()

    monkeypatch.setattr(install.venv, "create", make)
    monkeypatch.setattr(install, "_call", lambda command, _variables: asked.append(command))
    for _ in range(2):
        assert install.main(["--peers", "sglang", "--folder", str(tmp_path)]) == 0
    (sglang,) = (command for command in asked if any("sglang==" in word for word in command))
    assert asked[-1] == sglang
    assert "--no-deps" in sglang
    assert not any("--no-deps" in command for command in asked[:-1])
    assert _load("bookkeeping_rivals").installed_peers(tmp_path)[0] == ["sglang"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_peer_does_a_round(name: str, tmp_path: Path) -> None:
    rivals, peers = _load("bookkeeping_rivals"), _load("bookkeeping_peers")
    if name not in rivals.installed_peers(rivals.PEER_FOLDER)[0]:
        pytest.skip(f"{name} has no environment")
    with (tmp_path / "log").open("w+") as log, peers.Peer(name, rivals.PEER_FOLDER / name, log) as peer:
        found = peer.one_round(64, 1)
    assert set(found) == ROUND
    assert min(found.values()) > 0


def test_scale_runs_in_a_full_pool_and_keeps_every_sequence() -> None:
    found = _load("bookkeeping_scale").cost(blocks=1_000, running=4, random=Random(1))  # noqa: S311  # not for secrets
    assert set(found.times) == {"admit", "commit", "decode", "finish", "churn"}
    assert min(found.times.values()) > 0


@pytest.mark.parametrize("packed", [False, True])
def test_yardstick_shares_frees_and_evicts(yardstick: ModuleType, *, packed: bool) -> None:
    manager = yardstick.HashChainManager(6, 4, packed=packed)
    first = manager.admit(list(range(12)))
    assert first.computed == 0
    manager.commit(first, 12, 99)
    second = manager.admit(list(range(12)))
    assert second.computed == 8  # the last token is always computed
    assert second.blocks[:2] == first.blocks[:2]
    with pytest.raises(MemoryError):
        manager.admit([7] * 12)
    manager.finish(first)
    manager.finish(second)
    assert manager._free.count == 6
    other = manager.admit([7] * 24)  # everything that was cached is evicted
    assert not manager._cached
    assert len({block.block_id for block in other.blocks}) == 6


def test_yardstick_publishes_what_it_decodes(yardstick: ModuleType) -> None:
    manager = yardstick.HashChainManager(8, 4)
    first = manager.admit([1, 2, 3])
    manager.commit(first, 3, 4)
    for token in (5, 6, 7, 8):
        manager.decode(first, token)
    assert first.computed == 7
    assert manager.admit([1, 2, 3, 4, 5]).computed == 4
