"""A process's place in its job, as ``torchrun`` says it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # as torch has it

from octavo import EngineConfig, follow
from octavo.engine.following import follows
from octavo.engine.model.loader import load
from octavo.engine.model.parallel.job import Job, require_device, require_job
from octavo.engine.model.parallel.line import Ending, Report, _read, _written
from octavo.errors import DeviceOutOfMemory, InvalidRequest, ModelError

PLACE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
CPU = torch.device("cpu")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)


def test_the_place_is_read_from_the_environment() -> None:
    job = Job.of(PLACE)
    assert job == Job(rank=3, local_rank=1, size=4)
    assert not job.leads
    assert Job(0, 0, 4).leads


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {**PLACE, "RANK": "first"}])
def test_without_torchrun_there_is_none(environment: Mapping[str, str]) -> None:
    assert Job.of(environment) is None


@pytest.mark.usefixtures("nowhere")
def test_a_process_that_is_alone_is_told_how_to_start() -> None:
    with pytest.raises(ModelError, match=r"needs 2 processes, and this one is alone; start it with: torchrun .* 2 -m"):
        require_job(2)
    with pytest.raises(ModelError, match="alone"):
        load("smollm2", tensor_parallel=2)
    with pytest.raises(ModelError, match="alone"):
        follow("smollm2", EngineConfig(tensor_parallel=2))
    assert not follows(EngineConfig(tensor_parallel=2))


@pytest.mark.usefixtures("place")
def test_one_rank_has_nobody_to_follow_it() -> None:
    with pytest.raises(ModelError, match="tensor_parallel=1 splits nothing"):
        follow("smollm2", EngineConfig())


def test_a_process_group_of_the_host_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**PLACE, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ModelError, match="this process has one already"):
            load("smollm2", tensor_parallel=4)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("place")
def test_a_job_of_another_size_is_refused() -> None:
    with pytest.raises(ModelError, match="tensor_parallel=2, but the job has 4 processes"):
        require_job(2)
    assert require_job(4).rank == 3


@pytest.mark.usefixtures("place")
def test_an_engine_is_opened_on_rank_0_only() -> None:
    with pytest.raises(ModelError, match=r"rank 3 calls octavo\.follow"):
        load("smollm2", tensor_parallel=4)
    assert follows(EngineConfig(tensor_parallel=4))
    assert not follows(EngineConfig()), "one that does not split is as good as any other process"


@pytest.mark.usefixtures("place")
def test_rank_0_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert not follows(EngineConfig(tensor_parallel=4))
    with pytest.raises(ModelError, match="this is rank 0, which has the engine"):
        follow("smollm2", EngineConfig(tensor_parallel=4))


def test_a_device_that_ranks_cannot_talk_from_is_refused() -> None:
    with pytest.raises(ModelError, match="runs on cpu or cuda, not on meta"):
        require_device(torch.device("meta"), Job(0, 0, 2))


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_the_device_is_where_transformers_puts_the_shares(
    monkeypatch: pytest.MonkeyPatch, accelerator: torch.device | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    here, other = (CPU, torch.device("cuda")) if accelerator is None else (torch.device("cuda"), CPU)
    assert require_device(here, Job(3, 1, 4)) == (CPU if accelerator is None else torch.device("cuda", 1))
    with pytest.raises(ModelError, match=f"the device is {other.type}, but .* this machine's {here.type}"):
        require_device(other, Job(3, 1, 4))


@pytest.mark.parametrize("value", [0, -1, 1.0, True])
def test_ranks_are_counted(value: int) -> None:
    with pytest.raises(InvalidRequest, match="tensor_parallel must be a positive integer"):
        EngineConfig(tensor_parallel=value)


def test_a_report_says_the_kind_of_an_error_and_its_reason() -> None:
    assert Report.of(None) == Report(Ending.WELL)
    assert Report.of(ModelError("no")) == Report(Ending.FAILED, "no")
    assert Report.of(DeviceOutOfMemory("full")) == Report(Ending.OUT_OF_MEMORY, "full")
    assert Report.of(ValueError("no")) == Report(Ending.FAILED, "ValueError: no")


@pytest.mark.parametrize("reason", ["", "short", "ü" * 2000])
def test_a_report_arrives_as_far_as_there_is_room(reason: str) -> None:
    found = _read(_written(Report(Ending.OUT_OF_MEMORY, reason)))
    assert found.ending is Ending.OUT_OF_MEMORY
    assert reason.startswith(found.reason)
    assert len(found.reason) >= min(len(reason), 250)
