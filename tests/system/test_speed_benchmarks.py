"""The benchmarks of speed count and compare rightly, and run to their end on a model that computes nothing.

No times are judged here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.insight.under_way import RequestView
from octavo.engine.model import loader
from octavo.engine.model.attention import AttentionOptions
from octavo.engine.model.attention.torch_backend import TorchBackend
from octavo.engine.model.runner import Row, RowSampling, StepInput, StepOutput
from octavo.engine.testing import FakeRunner

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
VOCABULARY = 40_000
BLOCK = 4


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"octavo_benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return _load("report")


@pytest.fixture(scope="module")
def sharing() -> ModuleType:
    return _load("sharing")


@pytest.fixture(scope="module")
def step_work() -> ModuleType:
    return _load("step_work")


@pytest.fixture(scope="module")
def step_taps() -> ModuleType:
    return _load("step_taps")


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    return _load("roofline")


def _step(*rows: tuple[int, list[int], bool]) -> StepInput:
    """Of rows with so many tokens, as many blocks as there are, the last one full, and whether they are sampled."""
    made, start = [], 0
    sampling = RowSampling(SamplingParams(), (0,), np.zeros(1, dtype=np.int32), 1)
    for length, blocks, is_sampled in rows:
        held = np.array(blocks, dtype=np.int32)
        made.append(Row(start, length, len(blocks) * BLOCK, held, sampling if is_sampled else None))
        start += length
    numbers = np.zeros(start, dtype=np.int32)
    return StepInput(numbers, numbers, numbers.astype(np.int64), tuple(made), np.zeros((0, 2), dtype=np.int32))


# what all of them share


def test_every_contender_has_its_turn_in_every_round_and_begins_once(report: ModuleType) -> None:
    order = list(report.turns(["a", "b", "c"], 3))
    rounds = [order[at : at + 3] for at in range(0, 9, 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * 3
    assert [each[0] for each in rounds] == ["a", "b", "c"]


def test_ratios_are_taken_round_by_round(report: ModuleType) -> None:
    mine, theirs = report.Spread.of([2.0, 40.0, 6.0]), report.Spread.of([1.0, 10.0, 3.0])
    assert mine.over(theirs) == 2.0
    assert mine.over(report.Spread.of([3.0])) == 2.0
    assert mine.text(0) == "6 (2..40)"
    assert report.Spread.of([1234.56]).text() == "1,234.6"


@pytest.mark.parametrize(
    ("value", "at_most", "passes"),
    [(1.5, False, True), (1.49, False, False), (1.5, True, True), (1.51, True, False), (None, True, False)],
)
def test_a_target_is_met_at_its_limit(report: ModuleType, value: float | None, at_most: bool, passes: bool) -> None:
    target = report.Target("ratio", value, 1.5, at_most)
    assert target.passes is passes
    assert str(target).startswith("pass" if passes else "MISS")


def test_a_report_is_shown_plainly_and_saved_whole(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = report.this_machine(2, ["torch", "no-such-package"])
    sheet = report.Sheet("[a] sheet", ("what", "number"), [["first", "1.0"]])
    targets = [report.Target("enough", 1.0, 2.0)]
    whole = report.Report("trial", machine, [sheet], {"spread": report.Spread.of([1.0])}, targets, ["a [note]"])
    whole.show()
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("[a] sheet", "first", "a [note]", "MISS  enough: 1 (at least 2)"))
    assert "\x1b" not in shown
    whole.save(tmp_path / "found.json")
    saved = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert saved["numbers"] == {"spread": {"values": [1.0]}}
    assert saved["targets"] == [{"name": "enough", "value": 1.0, "passes": False}]
    assert set(saved["machine"]["versions"]) == {"python", "torch"}


def test_bars_keep_the_place_of_what_is_missing(report: ModuleType) -> None:
    _, (axes,) = report.panels("bars", 1)
    report.bars(axes, {"one": {"x": 1.0, "y": 2.0}, "two": {"y": 3.0}}, unit="tokens/s")
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.0, 2.0, 3.0]


def test_a_picture_that_cannot_be_made_is_refused_before_the_run(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        report.parser_of("").parse_args(["--plot", str(tmp_path / "picture.gif")])
    assert "ends in .png" in capsys.readouterr().err


# roofline


def test_blocks_that_rows_share_are_read_once(step_work: ModuleType) -> None:
    shared = _step((1, [0, 1, 2], True), (1, [0, 1, 3], True))
    alone = _step((1, [0, 1, 2], True), (1, [4, 5, 3], True))
    assert step_work.tokens_read(shared, BLOCK) == 4 * BLOCK
    assert step_work.tokens_read(alone, BLOCK) == 6 * BLOCK


def test_a_block_that_is_partly_filled_counts_as_far_as_it_is(step_work: ModuleType) -> None:
    step = _step((1, [0, 1], True))
    row = step.rows[0]._replace(context=5)
    partly = StepInput(step.tokens, step.positions, step.slots, (row,), step.copies)
    assert step_work.tokens_read(partly, BLOCK) == 5


def test_operations_are_those_of_a_count_by_hand(step_work: ModuleType) -> None:
    model = step_work.Geometry(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, mlp=16, vocabulary=32)
    work = step_work.work_of(_step((3, [0, 1], False), (1, [2], True)), BLOCK, model)
    pairs = (6 + 7 + 8) + 4
    weights = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    assert work["attention"] == step_work.Work(3 * BLOCK * (2 * 2 * 2 * 2) * 2, 4 * 2 * (4 * 2) * pairs)
    assert work["products"] == step_work.Work(2 * weights, 2 * weights * 4)
    assert work["head"] == step_work.Work(2 * 32 * 8, 2 * 32 * 8)


def test_the_geometry_is_that_of_the_model(step_work: ModuleType) -> None:
    model = step_work.SMOLLM2
    norms = model.hidden * (2 * model.layers + 1)
    assert model.product_weights + model.vocabulary * model.hidden + norms == 134_515_008  # as its card says


def test_the_bound_is_the_tighter_of_the_two(step_work: ModuleType) -> None:
    limits = step_work.Limits(bandwidth=10.0, rate=100.0)
    assert step_work.Work(20, 100).bound(limits) == 2.0
    assert step_work.Work(20, 400).bound(limits) == 4.0


def test_attention_is_timed_and_left_as_it_was(step_taps: ModuleType) -> None:
    step = _step((1, [0, 1], True), (1, [2], True))
    backend = TorchBackend(torch.device("cpu"))
    plan = backend.plan(step.rows, BLOCK)
    kind, attend = type(plan), type(plan).attend
    query, keys, values = torch.randn(2, 2, 8), torch.randn(3, BLOCK, 1, 8), torch.randn(3, BLOCK, 1, 8)
    usual = plan.attend(query, keys, values, AttentionOptions(1.0))
    with step_taps.attention_timed(backend, step) as calls:
        timed = plan.attend(query, keys, values, AttentionOptions(1.0))
        assert len(calls) == 1
    assert torch.equal(usual, timed)
    assert kind.attend is attend


class _Multiplying(FakeRunner):
    """Three products, of which one belongs to attention, and the last is the head's."""

    def execute(self, step: StepInput) -> StepOutput:
        small, large = torch.ones(4, 4), torch.ones(4, 4_096)
        torch.nn.functional.linear(small, small)
        with torch.profiler.record_function("attention"):
            torch.matmul(small, large)
        torch.matmul(small, large)
        return StepOutput(())


def test_products_are_told_from_attention_and_from_the_head(step_taps: ModuleType) -> None:
    tap, step = step_taps.Tap(_Multiplying()), _step((1, [0], True))
    found = step_taps.profiled_products(tap, step)
    assert set(found) == {"products", "head"}
    assert found["products"] > 0
    assert set(step_taps.phases_of(tap, step, 1.0)) == {"sampling", "products", "head", "rest"}


def test_phases_are_parts_of_the_time_that_the_step_takes_by_itself(
    step_taps: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = {step_taps.WHOLE: 2.0, "sampling": 0.5, "attention": 1.0}
    monkeypatch.setattr(step_taps, "_phases_once", lambda *_: dict(spent))
    phases = step_taps.phases_of(step_taps.Tap(FakeRunner()), _step((1, [0], True)), 1.0)
    assert phases == {"sampling": 0.25, "attention": 0.5, "rest": 0.25}


def test_a_profiler_that_sees_no_product_leaves_it_to_the_rest(step_taps: ModuleType) -> None:
    runner = FakeRunner(vocab_size=8)
    runner.allocate(4, BLOCK)
    empty = StepInput(*(np.zeros(0, dtype=np.int32),) * 2, np.zeros(0, np.int64), (), np.zeros((0, 2), np.int32))
    assert step_taps.profiled_products(step_taps.Tap(runner), empty) == {}


def test_the_roofline_is_drawn_from_steps_of_an_engine(
    roofline: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fake(*_: object, **__: object) -> loader.LoadedModel:
        return loader.LoadedModel(FakeRunner(vocab_size=VOCABULARY), None)

    monkeypatch.setattr(loader, "load", fake)
    monkeypatch.setattr(roofline, "ENOUGH", 0.0)
    monkeypatch.setattr(roofline, "bandwidth_probe", lambda: lambda: 1e9)
    monkeypatch.setattr(roofline, "rate_probe", lambda: lambda: 1e12)
    found, picture = tmp_path / "roofline.json", tmp_path / "roofline.png"
    assert roofline.main(["--batches", "2", "--chunks", "64", "--json", str(found), "--plot", str(picture)]) == 0
    steps = {each["step"]["name"]: each for each in json.loads(found.read_text(encoding="utf-8"))["numbers"]["steps"]}
    assert set(steps) == {"prefill 64", "decode 2 shared", "decode 2 alone"}
    shared, alone = (steps[f"decode 2 {kind}"]["step"]["work"]["attention"]["bytes"] for kind in ("shared", "alone"))
    assert alone - shared == 512 * 30 * 2 * 3 * 64 * 2
    assert picture.read_bytes().startswith(b"\x89PNG")


# sharing


def test_a_request_alone_needs_blocks_for_every_sample(sharing: ModuleType) -> None:
    view = RequestView("a", None, 0, "running", 1.0, prompt_tokens=30, cached_tokens=0, generated_tokens=8, samples=4)
    assert sharing.blocks_alone(view, 16) == 4 * 2
    assert sharing.blocks_alone(view._replace(generated_tokens=12), 16) == 4 * 3
    assert sharing.blocks_alone(view._replace(state="waiting"), 16) == 0


def test_all_arms_get_the_same_requests_and_as_many_tokens(sharing: ModuleType) -> None:
    for scenario in sharing.SCENARIOS:
        first, again = (list(sharing.arrivals(scenario, 1.0)) for _ in range(2))
        assert first == again
        assert len({tuple(each.prompt[: scenario.shared]) for each in first}) == 1
        assert len({tuple(each.prompt) for each in first}) == scenario.requests
        for arm in scenario.arms:
            calls = sharing.calls(scenario, arm, 3)
            assert sum(each.n for each in calls) == scenario.samples
            assert len({each.seed for each in calls}) == len(calls) or scenario.is_beam


@pytest.mark.asyncio
async def test_copy_on_write_holds_less_than_separate_requests(
    sharing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = sharing.Scenario("small", 0, own=64, output=40, samples=4, rates=(1e3,), requests=2)
    monkeypatch.setattr(sharing, "LOOK", 0.001)
    held = {}
    for arm in scenario.arms:
        config = EngineConfig(num_blocks=256, max_running=16, enable_prefix_caching=arm != sharing.UNSHARED)
        runner = FakeRunner(vocab_size=VOCABULARY, step_seconds=0.002)
        async with AsyncEngine(runner=runner, config=config) as engine:
            result = await sharing.run(engine, sharing.Cell(scenario, 1e3, arm))
        assert result.tokens_per_second > 0
        held[arm] = result
    assert held[sharing.UNSHARED].saved == pytest.approx(0.0, abs=0.15)
    assert held["copy-on-write"].held < held[sharing.UNSHARED].held
    assert held["copy-on-write"].saved > 0.3


def test_the_curves_of_all_scenarios_are_drawn(sharing: ModuleType, tmp_path: Path) -> None:
    results = [
        sharing.Result(scenario.name, rate, arm, 10.0 * rate, 0.1, 5, 20, 0.75)
        for scenario in sharing.SCENARIOS
        for rate in scenario.rates
        for arm in scenario.arms
    ]
    shown = list(sharing.sheets(results))
    assert [len(sheet.rows) for sheet in shown] == [len(s.rates) * len(s.arms) for s in sharing.SCENARIOS]
    sharing.save_plot(results, tmp_path / "sharing.png")
    assert (tmp_path / "sharing.png").read_bytes().startswith(b"\x89PNG")


# levers


class _Idle(FakeRunner):
    """The steps read what nobody wrote."""

    def execute(self, step: StepInput) -> StepOutput:
        return StepOutput(())


def test_levers_are_added_one_by_one() -> None:
    levers = _load("levers")
    made = list(levers.ways().values())
    on = [[getattr(each, lever) for lever in levers.LEVERS] for each in made]
    assert on == [[at < count for at in range(4)] for count in range(5)]


def test_steps_of_all_shapes_fit_the_cache_and_share_what_they_should(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    levers = _load("levers")
    for shape in levers.SHAPES:
        step = levers.step_of(shape)
        owners: dict[int, int] = {}
        for row in step.rows:
            for block in row.blocks.tolist():
                owners[block] = owners.get(block, 0) + 1
        assert sum(count == shape.rows for count in owners.values()) >= shape.shared // levers.BLOCK_SIZE
        assert len(set(step.slots.tolist())) == len(step.tokens) == shape.rows * shape.length

    def fake(*_: object, **__: object) -> loader.LoadedModel:
        return loader.LoadedModel(_Idle(vocab_size=VOCABULARY), None)

    monkeypatch.setattr(levers, "load", fake)
    found = tmp_path / "levers.json"
    assert levers.main(["--quick", "--json", str(found)]) == 0
    assert len(json.loads(found.read_text(encoding="utf-8"))["numbers"]) == 5
