"""The trial of OpenVINO hands both sides the same steps, and says when they do not compute the same.

Where OpenVINO was installed beside the peers it runs to its end; no times are judged here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
BLOCK = 32
Best = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def trial() -> Iterator[ModuleType]:
    before, paths = set(sys.modules), sys.path.copy()
    spec = importlib.util.spec_from_file_location("octavo_benchmark_openvino_trial", FOLDER / "openvino_trial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if "." not in name and str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]  # plain names such as ``report`` are for scripts


class Paged:
    """A side that keeps tokens in blocks as a runner keeps K and V, and answers from what it finds there."""

    def __init__(self, *, off: int = 0, shift: float = 0.0) -> None:
        self.cache = np.full((64, BLOCK), -1)
        self.off, self.shift = off, shift
        self.steps: list[tuple[int, ...]] = []

    def __call__(self, batch: SimpleNamespace, repeats: int) -> SimpleNamespace:
        start, best = 0, []
        for length, context, table in zip(batch.lengths, batch.contexts, batch.tables, strict=True):
            mine = slice(start, start + length)
            assert batch.positions[mine] == list(range(context - length, context))
            for token, position in zip(batch.tokens[mine], batch.positions[mine], strict=True):
                self.cache[table[position // BLOCK], position % BLOCK] = token
            seen = self.cache[table].ravel()[:context]
            assert seen.min() >= 0, "a token that nobody wrote"
            first = (int(seen.sum()) + self.off) % 1000
            best.append([(first, -0.5 + self.shift), (first + 1, -1.0)])
            start += length
        self.steps.append(tuple(batch.lengths))
        return SimpleNamespace(best=best, milliseconds=[1.0] * repeats)


def test_the_check_computes_shared_blocks_once_and_then_decodes(trial: ModuleType) -> None:
    mine, theirs = Paged(), Paged()
    agreement = trial.check(mine, theirs, 40)
    own = trial.PROMPT - trial.SHARED
    assert mine.steps == [(trial.PROMPT,), (own,) * 3, (1,) * 4, *[(1,) * 4] * 39]
    assert theirs.steps == mine.steps
    assert (theirs.cache == mine.cache).all()
    assert agreement == (1.0, 0.0)


def test_sides_that_differ_are_told(trial: ModuleType) -> None:
    assert trial.check(Paged(), Paged(shift=0.25), 3) == (1.0, 0.25)
    other = trial.check(Paged(), Paged(off=1), 3)
    assert other.tokens == 0.0
    assert other.difference == pytest.approx(0.5)
    assert trial.check(Paged(), Paged(off=500), 3).difference == float("inf")  # no token in common
    found = trial.Found(other, other, {})
    assert [target.passes for target in trial.report_of(found).targets] == [False, False]


def test_both_get_the_steps_of_the_levers(trial: ModuleType) -> None:
    seen: dict[str, list[object]] = {"octavo": [], "openvino": []}

    def side(name: str, milliseconds: float) -> Callable[[object, int], SimpleNamespace]:
        def run(batch: object, repeats: int) -> SimpleNamespace:
            seen[name].append(batch)
            return SimpleNamespace(milliseconds=[milliseconds] * repeats)

        return run

    found = trial.measure({"octavo": side("octavo", 2.0), "openvino": side("openvino", 3.0)}, 2, 1)
    assert list(found) == [shape.name for shape in trial.SHAPES]
    assert len(seen["octavo"]) == 2 * len(trial.SHAPES)
    for shape in trial.SHAPES:
        batch = trial.batch_of(trial.step_of(shape, BLOCK))
        assert [seen[name].count(batch) for name in seen] == [2, 2]
        assert len(batch.tokens) == shape.rows * shape.length
        assert set(batch.contexts) == {shape.context}
        common = set.intersection(*map(set, batch.tables))
        assert len(common) == (shape.shared // BLOCK if shape.rows > 1 else -(-shape.context // BLOCK))
        assert max(max(table) for table in batch.tables) < trial.BLOCKS * trial.BLOCK_SIZE // BLOCK
    assert [row[3] for row in trial.sheet_of(found).rows] == ["1.50"] * len(trial.SHAPES)


def test_octavo_answers_through_its_driver(trial: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=trial.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    octavo = next(peer for peer in trial.peers() if peer.name == "octavo")
    process = trial.PeerProcess(trial._stepping(octavo), tmp_path, 1)  # the process that it times
    try:
        opening = trial.StepOpening(str(tmp_path), 1, "float32", trial.CHECK_BLOCKS, BLOCK)
        process.ask({"open": opening._asdict()}, trial.Opened, trial.TO_OPEN)
        rows = trial.chats()
        for row in rows:
            answer = trial._runs(process)(trial.due([row]), 1)
            with torch.inference_mode():
                scores = model(torch.tensor([row.tokens])).logits[0, -1].log_softmax(0)
            wanted = scores.topk(trial.TOP)
            assert [token for token, _ in answer.best[0]] == wanted.indices.tolist()
            assert [score for _, score in answer.best[0]] == pytest.approx(wanted.values.tolist(), abs=1e-5)
        with pytest.raises(trial.PeerFailed, match="out of range"):
            trial._runs(process)(trial.due(rows[:1])._replace(tables=[[trial.CHECK_BLOCKS] * 4]), 1)
    finally:
        process.close()


def test_without_openvino_it_says_what_to_do(
    trial: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trial.main(["--folder", str(tmp_path)]) == 0
    assert "openvino is not here: run peers/install.py" in capsys.readouterr().out


@pytest.mark.slow
def test_openvino_computes_what_octavo_computes(trial: ModuleType, tmp_path: Path) -> None:
    peer = next(peer for peer in trial.peers() if peer.name == "openvino")
    if missing := peer.missing(trial.default_folder()):
        pytest.skip(f"OpenVINO is not here: {', '.join(missing)}")
    saved, picture = tmp_path / "trial.json", tmp_path / "trial.png"
    assert trial.main(["--quick", "--json", str(saved), "--plot", str(picture)]) == 0
    found = json.loads(saved.read_text(encoding="utf-8"))
    assert all(target["passes"] for target in found["targets"])
    assert set(found["numbers"]["milliseconds"]) == {shape.name for shape in trial.SHAPES}
    assert picture.read_bytes().startswith(b"\x89PNG")
