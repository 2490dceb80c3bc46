"""Which process of the job this one is, and how the processes find each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as torch has it
from torch.distributed.rendezvous import rendezvous

from ....errors import ModelError, describe

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long the ranks wait for each other before they load."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Job(NamedTuple):
    """A process's place, as ``torchrun`` says it."""

    rank: int
    local_rank: int
    """Among those of this machine; it takes the device of this number."""
    size: int

    @property
    def leads(self) -> bool:
        """Whether the engine is here."""
        return self.rank == 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job | None:
        """``None`` when the process was not started by ``torchrun``."""
        try:
            return cls(*(int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
        except (KeyError, ValueError):
            return None


class Notes(Protocol):
    """A board that all ranks see: a store of torch."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def require_job(size: int) -> Job:
    """The place of this process in a job of ``size`` ranks.

    :raises ModelError: when there is no such job, or it would be one of a single process.
    """
    if size < 2:
        raise ModelError("tensor_parallel=1 splits nothing: each process has an engine of its own, and none follows")
    job = Job.of(os.environ)
    how = f"start it with: torchrun --nproc-per-node {size} -m octavo serve MODEL --tensor-parallel {size}"
    if job is None:
        raise ModelError(f"tensor_parallel={size} needs {size} processes, and this one is alone; {how}")
    if job.size != size:
        raise ModelError(f"tensor_parallel={size}, but the job has {job.size} processes; {how}")
    return job


def require_device(device: torch.device, job: Job) -> torch.device:
    """The device of this rank.

    :raises ModelError: when ranks cannot talk from there.
    """
    if device.type not in _BACKENDS:
        raise ModelError(f"tensor_parallel runs on {' or '.join(_BACKENDS)}, not on {device}")
    found = torch.accelerator.current_accelerator(check_available=True)
    used = "cpu" if found is None else found.type
    if used != device.type:  # Transformers puts the shares where the machine's accelerator is
        raise ModelError(
            f"the device is {device.type}, but a model that is split goes to this machine's {used}: "
            f"set device={used!r}, or hide the accelerator (CUDA_VISIBLE_DEVICES=)"
        )
    return device if device.type == "cpu" else torch.device(device.type, job.local_rank)


def join(job: Job, device: torch.device, patience: timedelta) -> Notes:
    """Meet the others and open the process group, in which the model computes.

    :param patience: how long an operation of the group may take.
    :returns: where ranks can leave each other notes, which outlives them where ``torchrun`` keeps it.
    :raises ModelError: when the others do not come, or there is a process group already.
    """
    if dist.is_initialized():
        raise ModelError("tensor_parallel opens a process group, and this process has one already; destroy that first")
    try:
        shared, _, _ = next(rendezvous("env://", job.rank, job.size, timeout=JOIN_TIMEOUT))
        turn = shared.add(f"octavo/turns/{job.rank}", 1)  # the same everywhere: a job may open one engine after another
        store = PrefixStore(f"octavo/{turn}", shared)
        store.set(f"here/{job.rank}", "")
        shared.wait([f"octavo/{turn}/here/{rank}" for rank in range(job.size)], JOIN_TIMEOUT)
        dist.init_process_group(
            _BACKENDS[device.type],
            store=store,
            rank=job.rank,
            world_size=job.size,
            timeout=patience,
            device_id=None if device.type == "cpu" else device,
        )
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the ranks did not find each other: {describe(error)}") from error
    notes: Notes = store
    return notes


def get_through(device: torch.device) -> None:
    """Wait until ``device`` has computed all it was given.

    A step whose results nobody reads returns before that. If its rank said then that all went well, and another had
    failed in the middle of it, sums of this step would be taken for sums of the next.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def part() -> None:
    """Close all groups of this process; those whose others are gone as well."""
    with suppress(AssertionError, RuntimeError, ValueError):  # there are none, or one cannot be closed any more
        dist.destroy_process_group()
