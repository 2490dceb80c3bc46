"""A model over two ranks on gloo: the same logits, texts, blocks and snapshots as on one, and clean ends of all faults.

All jobs run once, in a process of their own (``ranks_rig.py``); the tests look at what its ranks found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from octavo.tests.system import ranks_rig
from octavo.tests.system.ranks_families import BLOCK, FAMILIES, FEW, NEW, VOCAB, prompts

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
PATIENCE = 300.0
"""Seconds for all jobs, on a machine that is busy; no result depends on it."""
TOLERANCE = 1e-5
"""Of the size of the logits: sums over the ranks are added in another order. Some 80 roundings of float32."""


class Jobs(NamedTuple):
    """What was found."""

    folder: Path
    families: Sequence[str]

    def of(self, job: str, rank: int = 0) -> dict[str, object]:
        file = self.folder / f"{job}-{rank}.json"
        found: dict[str, object] = json.loads(file.read_text())
        assert "failed" not in found, found["failed"]
        return found

    def logits(self, family: str, ranks: str) -> np.ndarray:
        loaded: np.ndarray = np.load(self.folder / family / f"{ranks}.npy")
        return loaded


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FEW, id="few"),
        pytest.param(sorted({"llama", *FAMILIES} - {*FEW[1:]}), id="others", marks=pytest.mark.slow),
    ],
)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(ranks_rig.__file__)), str(folder), *request.param]
    process = subprocess.Popen(  # noqa: S603  # ours
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        log, _ = process.communicate(timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks as well
    assert process.returncode == 0, log
    return Jobs(folder, request.param)


def test_logits_are_those_of_one_rank(jobs: Jobs) -> None:
    for family in jobs.families:
        one, two = jobs.logits(family, "one"), jobs.logits(family, "two")
        assert one.shape == two.shape == (3 * NEW, VOCAB)
        assert np.abs(two - one).max() <= TOLERANCE * np.abs(one).max(), family


def test_texts_are_those_of_transformers(jobs: Jobs) -> None:
    expected, found = jobs.of("alone"), jobs.of("families")
    for family in jobs.families:
        assert len({tuple(text) for text in expected[family]}) == len(prompts()), "equal texts would hide a mix-up"  # type: ignore[attr-defined]
        assert found[family] == expected[family], family
        assert found[f"{family} at rest"] is True


def test_a_split_model_is_the_same_model(jobs: Jobs) -> None:
    """Name, geometry, digests of weights and bytes of a block: tiers and snapshots are shared by them."""
    expected, found = jobs.of("alone"), jobs.of("families")
    for family in jobs.families:
        assert found[f"{family} fingerprint"] == expected[f"{family} fingerprint"]


def test_one_rank_reads_what_two_have_saved(jobs: Jobs) -> None:
    expected, found = jobs.of("alone"), jobs.of("reread")
    for family in jobs.families:
        assert found[family] == {"texts": expected[family], "cached": whole_blocks()}


def test_two_ranks_read_what_one_has_saved(jobs: Jobs) -> None:
    expected, found = jobs.of("alone")["llama"], shown(jobs.of("pressed"), "restored")
    assert found["texts"] == [expected, expected]
    assert found["cached"][0] == whole_blocks()  # type: ignore[index]
    assert found["at rest"] is True


def test_preemption_and_swaps_leave_texts_as_they_are(jobs: Jobs) -> None:
    expected, found = jobs.of("alone")["llama"], jobs.of("pressed")
    for name in ("small", "tiered"):
        case = shown(found, name)
        assert case["texts"] == [expected, expected]
        assert case["at rest"] is True
        assert case["preemptions"]
    assert shown(found, "tiered")["loaded"], "nothing came back from the host tier"
    assert shown(found, "small")["loaded"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_split_is_refused_on_every_rank(jobs: Jobs, rank: int) -> None:
    found = jobs.of("refused", rank)
    heads = (
        "UnsupportedModel: LlamaForCausalLM: its 4 attention heads and 1 K/V heads cannot be shared out evenly over 2"
    )
    assert str(found["odd"]).startswith(heads)
    assert str(found["planless"]).startswith("UnsupportedModel: GPT2LMHeadModel: Transformers has no plan to split it")
    assert str(found["too many"]).startswith(
        "ModelError: tensor_parallel=3, but the job has 2 processes; start it with"
    )


def test_a_load_that_fails_on_one_rank_fails_on_all(jobs: Jobs) -> None:
    here, there = (str(jobs.of("refused", rank)["lost there"]) for rank in (0, 1))
    assert "hub gave no model of that name" in there
    assert here.startswith("ModelError: rank 1: ")


@pytest.mark.parametrize(
    ("case", "what"),
    [("another shape", "configuration"), ("another dtype", "configuration"), ("other weights", "model")],
)
def test_ranks_that_were_given_different_models_refuse_them(jobs: Jobs, case: str, what: str) -> None:
    here, there = (str(jobs.of("refused", rank)[case]) for rank in (0, 1))
    assert here == there
    assert here.startswith(f"ModelError: the ranks have not the same {what}; ")


def test_a_failing_step_fails_its_request_and_no_other(jobs: Jobs) -> None:
    found, other = jobs.of("faults"), jobs.of("faults", 1)
    assert found["well"] is True
    assert found["ModelError on 1"] == "ModelError: rank 1: no good"
    assert found["ValueError on 1"] == "ModelError: rank 1: ValueError: no good"
    assert found["ValueError on 0"] == "ModelError: the model failed in a step: ValueError: no good"
    assert len(found["DeviceOutOfMemory on 1"]) == NEW, "a smaller step would have done"  # type: ignore[arg-type]
    assert found["well again"] is True
    assert found["closed"] is other["closed"] is True


def test_orders_may_be_long_and_bytes_of_blocks_come_back_as_they_went(jobs: Jobs) -> None:
    found = jobs.of("faults")
    assert found["long"] is True
    assert found["memory"] is True


def test_a_rank_that_fails_in_the_middle_of_a_step_lets_the_others_go(jobs: Jobs) -> None:
    why = "ModelError: the ranks are no longer together, start all of them again: rank 1: RuntimeError: half way"
    assert jobs.of("stuck") == {"first": why, "second": why, "closed": True}
    assert jobs.of("stuck", 1) == {"error": why, "closed": True}


def test_a_rank_that_dies_ends_the_step_and_the_engine_closes(jobs: Jobs) -> None:
    found = jobs.of("killed")
    for answer in ("first", "second"):
        assert str(found[answer]).startswith("ModelError: the ranks are no longer together, start all of them again: ")
    assert found["closed"] is True
    assert not (jobs.folder / "killed-1.json").exists(), "it was not killed"


def test_a_rank_that_froze_holds_nobody_up(jobs: Jobs) -> None:
    assert str(jobs.of("frozen")["error"]).startswith("ModelError: the ranks are no longer together")


def test_without_rank_0_the_others_end(jobs: Jobs) -> None:
    found = jobs.of("left_alone", 1)
    assert str(found["error"]).startswith("ModelError: the ranks are no longer together")
    assert found["closed"] is True


def whole_blocks() -> list[int]:
    """Tokens of each prompt that a snapshot has; the last one is always computed."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts()]


def shown(found: dict[str, object], case: str) -> dict[str, object]:
    values = found[case]
    assert isinstance(values, dict)
    return values
