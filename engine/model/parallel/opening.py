"""How a model is opened over the ranks of a job, on rank 0 and on the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from ....errors import ModelError
from ....telemetry.logging import get_logger
from ..attention.kv_tensors import LayerGeometry
from ..runner import ModelRunner
from ..sources import Opened, Setup, open_model
from ..text import TextCodec
from ..transformers_runner import describe_geometry
from .following import Follower
from .job import Job, join, part, require_device, require_job
from .line import Line, Patience
from .runner import ParallelRunner
from .splitting import whole_layers


class _Share(NamedTuple):
    """What a rank has of the model."""

    line: Line
    device: torch.device
    opened: Opened
    whole: tuple[LayerGeometry, ...]
    """The layers of the whole model."""


def lead(
    source: str,
    how: Setup,
    size: int,
    report: Callable[[str, float], None],
    chat_template: str | None,
    patience: Patience = Patience(),  # noqa: B008  # it is immutable
) -> tuple[ModelRunner, TextCodec | None]:
    """On rank 0: load its share, at the same time as the others, and make the runner of the whole model.

    :param size: ranks of the job.
    :raises UnsupportedModel: when the model cannot be split over them.
    :raises ModelError: when this is not rank 0 of such a job, and when it cannot be loaded on every rank.
    """
    job = require_job(size)
    if not job.leads:
        raise ModelError(f"the engine is on rank 0; rank {job.rank} calls octavo.follow(model, config) instead")
    _say_what_is_off(how)
    line, device, opened, whole = _share(source, how, job, report, chat_template, patience)
    runner = opened.runner
    geometry = describe_geometry(whole)
    return ParallelRunner(runner, line, device, local=runner.layers, whole=whole, geometry=geometry), opened.codec


def follow_along(
    source: str,
    how: Setup,
    size: int,
    patience: Patience = Patience(),  # noqa: B008  # it is immutable
) -> None:
    """On other ranks: load a share and compute with it until rank 0 closes its runner.

    :raises UnsupportedModel: when the model cannot be split like this.
    :raises ModelError: when this is no other rank of such a job, when the model cannot be loaded on every rank, and
        when the ranks lost each other.
    """
    job = require_job(size)
    if job.leads:
        raise ModelError("this is rank 0, which has the engine: open it here, and follow on the other ranks")
    line, device, opened, _ = _share(source, how, job, lambda _phase, _part: None, None, patience)
    Follower(opened.runner, line, device).follow()


def _share(
    source: str,
    how: Setup,
    job: Job,
    report: Callable[[str, float], None],
    chat_template: str | None,
    patience: Patience,
) -> _Share:
    device = require_device(how.device, job)
    # programs and packed weights are for whole layers: they do not know where the parts must be put together
    plain = replace(how.acceleration, fused=False, packed=False)
    store = join(job, device, patience.answer)  # outside: a group that was there before is not ours to close
    try:
        line = Line(job.rank, job.size, store, patience)
        opened = open_model(source, how._replace(device=device, ranks=line, acceleration=plain), report, chat_template)
        return _Share(line, device, opened, whole_layers(opened.runner.layers, opened.config, job.size))
    except BaseException:
        part()
        raise


def _say_what_is_off(how: Setup) -> None:
    off = [name for name in ("fused", "packed") if getattr(how.acceleration, name)]
    if off:
        get_logger("octavo.model").info("acceleration_limited", off=off, reason="the model is split over ranks")
