"""The benchmark of the gap between steps runs and measures what it says. No times are judged here."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def loop_gap() -> Iterator[ModuleType]:
    before, paths = set(sys.modules), sys.path.copy()
    spec = importlib.util.spec_from_file_location("octavo_benchmark_loop_gap", FOLDER / "loop_gap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if "." not in name and str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]  # plain names such as ``report`` are for scripts


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_of_the_whole_batch_are_measured(
    overlap: bool, loop_gap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is as long as the model sleeps, the gap is what is left."""
    monkeypatch.setattr(loop_gap, "STEP_SECONDS", {3: 0.003})
    found = asyncio.run(loop_gap._measured(loop_gap.Arm("sleeping", 3, overlap), 30))
    assert found.step >= 0.003
    assert found.gap > 0
    assert found.lag_p99 >= found.lag_median >= 0


def test_what_was_found_is_shown_and_judged(
    loop_gap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def invented(arm: object, tokens: int) -> object:
        return loop_gap.Found(0.02, 0.001, 0.0005, 0.001 if getattr(arm, "rows", 0) < 100 else 0.01)

    monkeypatch.setattr(loop_gap, "_measured", invented)
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["loop_gap.py", "--quick", "--json", str(path)])
    assert loop_gap.main() == 0
    shown = capsys.readouterr().out
    assert "MISS  lag p99 / step, sleeping, 128 rows, overlap" in shown
    assert "pass  lag p99 / step, sleeping, 32 rows, overlap" in shown
    whole = json.loads(path.read_text())
    assert len(whole["numbers"]) == 10
    assert [target["passes"] for target in whole["targets"]].count(False) == 1
