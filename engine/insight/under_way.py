"""What is under way in an engine: its requests, for operators. Neither prompts nor answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..sequence import Phase, SequenceGroup


class RequestView(NamedTuple):
    """A request that is not over."""

    request_id: str
    tenant: str | None
    priority: int
    state: str
    """``waiting``, ``loading`` or ``running``: what its furthest sample does."""
    age: float
    """Seconds since it came."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Over all samples."""
    samples: int


def request_views(groups: Iterable[SequenceGroup], now: float) -> tuple[RequestView, ...]:
    """The oldest first. ``now``: on the engine's monotonic clock."""
    return tuple(sorted((_view(group, now) for group in groups), key=lambda view: -view.age))


def _view(group: SequenceGroup, now: float) -> RequestView:
    return RequestView(
        request_id=group.request_id,
        tenant=group.namespace.salt,
        priority=group.job.priority,
        state=_state(group),
        age=max(now - group.metrics.arrival, 0.0),
        prompt_tokens=len(group.prompt_ids),
        cached_tokens=group.cached_tokens,
        generated_tokens=group.generated,
        samples=len(group.samples),
    )


def _state(group: SequenceGroup) -> str:
    phases = {sample.phase for sample in group.samples}
    return next((phase.value for phase in (Phase.RUNNING, Phase.LOADING) if phase in phases), Phase.WAITING.value)
