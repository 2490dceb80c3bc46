"""Many fleets over one trace, side by side in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ....errors import describe
from ...eviction.base import EvictionPolicy
from ...routing.base import RoutingPolicy
from ..capacity import Capacity
from ..grid import Meter, Progress
from ..optimum import survey
from ..trace import Trace
from ..workers import run_tasks
from .course import simulate
from .outcome import FleetOutcome
from .rows import FleetRow
from .setting import FleetSetting


class Routing(NamedTuple):
    """A routing policy and what it is called in the results."""

    name: str
    policy: Callable[[], RoutingPolicy]


class Eviction(NamedTuple):
    """An eviction policy and what it is called in the results."""

    name: str
    policy: Callable[[int], EvictionPolicy]


class Fleets(NamedTuple):
    """Which fleets: every number of replicas, of every capacity, under every pair of policies."""

    common: FleetSetting
    """What they have in common; the rest of it is replaced."""
    replicas: Sequence[int]
    capacities: Sequence[Capacity]
    """Of each replica."""
    routings: Sequence[Routing]
    evictions: Sequence[Eviction]


class _Task(NamedTuple):
    trace: Trace
    row: FleetRow
    setting: FleetSetting


def run_fleets(
    trace: Trace, fleets: Fleets, *, jobs: int = 1, on_progress: Callable[[Progress], None] | None = None
) -> list[FleetRow]:
    """Simulate each. Rows come by replicas, then by capacity, then in the order of the policies.

    A policy that raises or breaks its contract has a row with its ``error``. With ``jobs`` above 1 they run in
    processes of their own, none of which is left when this returns or raises.

    :raises InvalidRequest: when a setting is wrong.
    :raises TraceError: when the trace cannot be read.
    """
    for replicas in fleets.replicas:
        fleets.common._replace(replicas=replicas).checked()
    seen = survey(trace)
    sizes = list(dict.fromkeys(capacity.of(seen.unique) for capacity in fleets.capacities))
    tasks = [
        _Task(
            trace,
            FleetRow(
                trace.info.name,
                routing.name,
                eviction.name,
                replicas,
                size,
                size / seen.unique if seen.unique else 0.0,
                trace.info.block_tokens,
                seen.requests,
            ),
            fleets.common._replace(replicas=replicas, capacity=size, routing=routing.policy, eviction=eviction.policy),
        )
        for replicas in fleets.replicas
        for size in sizes
        for eviction in fleets.evictions
        for routing in fleets.routings
    ]
    found = run_tasks(_do, tasks, jobs=jobs, lost=_Lost, on_progress=Meter(len(tasks), seen.requests, on_progress))
    return [_filled(task.row, result) for task, result in zip(tasks, found, strict=True)]


class _Lost(NamedTuple):
    why: str


def _do(task: _Task, tell: Callable[[int], None]) -> FleetOutcome | _Lost:
    try:
        outcome = simulate(task.trace, task.setting, on_progress=tell)
    except Exception as error:  # noqa: BLE001  # anybody's policy; OctavoError where it broke the contract
        return _Lost(describe(error))
    tell(outcome.requests)
    return outcome


def _filled(row: FleetRow, found: FleetOutcome | _Lost) -> FleetRow:
    if isinstance(found, _Lost):
        return row._replace(error=found.why)
    counted = {name: value for name, value in found._asdict().items() if name in FleetRow._fields}
    return row._replace(
        **counted,
        hit_ratio=found.hit_ratio,
        hit_ratio_with_tier=found.hit_ratio_with_tier,
        work_balance=found.work_balance,
        request_balance=found.request_balance,
    )
