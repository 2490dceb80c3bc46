"""Many policies at many capacities over one trace, side by side in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ...errors import describe
from ..eviction.base import EvictionPolicy
from ..eviction.lru import Lru
from .capacity import Capacity
from .costs import CostModel
from .optimum import Survey, optimum_at, survey
from .replay import replay
from .results import Outcome
from .rows import Kind, Row
from .service import Service
from .trace import Trace
from .workers import run_tasks

BASELINE = "lru"
"""The policy that the gap to the optimum is measured from."""
SMALLEST_GAP = 1e-9
"""Below this there is nothing between ``lru`` and the optimum that could be closed."""


class Contender(NamedTuple):
    """A policy and what it is called in the results."""

    name: str
    policy: Callable[[int], EvictionPolicy]
    """Makes it for a capacity. Goes to other processes: a class, or a function of a module."""


class Setting(NamedTuple):
    """What all cells of a grid have in common. The trace is read anew for each, and may go to another process."""

    trace: Trace
    service: Service = Service()
    costs: CostModel = CostModel()


class Progress(NamedTuple):
    """How far a grid is."""

    done: int
    """Requests replayed, over all cells."""
    total: int


class _Cell(NamedTuple):
    setting: Setting
    contender: Contender
    capacity: int


class _Best(NamedTuple):
    setting: Setting
    capacities: Sequence[int]


class _Found(NamedTuple):
    """Of one task: counts by kind and capacity, or why there are none."""

    outcomes: Mapping[tuple[Kind, int], Outcome]
    error: str | None = None


def with_baseline(contenders: Iterable[Contender]) -> list[Contender]:
    """The contenders, and ``lru`` in front unless it is among them."""
    given = list(contenders)
    return given if any(one.name == BASELINE for one in given) else [Contender(BASELINE, Lru), *given]


def run_grid(
    setting: Setting,
    contenders: Sequence[Contender],
    capacities: Sequence[Capacity],
    *,
    optimum: bool = True,
    jobs: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Row]:
    """Replay the trace for every contender at every capacity. Rows come by capacity, then in the order given.

    After the contenders of a capacity come the offline optimum and its bound, with ``optimum``; at the very end the
    limit of a cache that never evicts. ``gap_closed`` is known where a contender is called ``lru``. A policy that
    raises or breaks its contract has a row with its ``error``. With ``jobs`` above 1 the cells run in processes of
    their own, none of which is left when this returns or raises.

    :raises TraceError: when the trace cannot be read.
    """
    seen = survey(setting.trace)
    sizes = list(dict.fromkeys(capacity.of(seen.unique) for capacity in capacities))
    tasks: list[_Cell | _Best] = [_Best(setting, sizes)] if optimum else []  # the longest one first
    tasks += [_Cell(setting, contender, size) for size in sizes for contender in contenders]
    found = run_tasks(_do, tasks, jobs=jobs, lost=_lost, on_progress=Meter(len(tasks), seen.requests, on_progress))
    best = found.pop(0) if optimum else _Found({})
    cells = iter(found)
    rows = _Rows(setting, seen)
    listed: list[Row] = []
    for size in sizes:
        listed += [rows.of(Kind.POLICY, one.name, size, next(cells)) for one in contenders]
        listed += [rows.of(kind, kind.value, size, best) for kind in (Kind.OPTIMUM, Kind.BOUND) if optimum]
    limit = _Found({(Kind.LIMIT, seen.unique): seen.limit})
    return [*with_gaps(listed), rows.of(Kind.LIMIT, Kind.LIMIT.value, seen.unique, limit)]


def with_gaps(rows: Sequence[Row]) -> list[Row]:
    """The rows with ``gap_closed`` wherever ``lru`` and the optimum of that trace and capacity are among them."""
    low = {(row.trace, row.capacity): row.hit_ratio for row in rows if _is(row, Kind.POLICY, BASELINE)}
    high = {(row.trace, row.capacity): row.hit_ratio for row in rows if row.kind is Kind.OPTIMUM}
    return [
        row._replace(gap_closed=_share_of_gap(row.hit_ratio, low.get(place), high.get(place)))
        if row.kind in (Kind.POLICY, Kind.OPTIMUM)
        else row
        for row in rows
        for place in [(row.trace, row.capacity)]
    ]


def _is(row: Row, kind: Kind, name: str) -> bool:
    return row.kind is kind and row.policy == name


def _share_of_gap(ratio: float | None, low: float | None, high: float | None) -> float | None:
    if ratio is None or low is None or high is None or high - low < SMALLEST_GAP:
        return None
    return (ratio - low) / (high - low)


class _Rows:
    """Makes rows of counts."""

    def __init__(self, setting: Setting, seen: Survey) -> None:
        self._setting = setting
        self._seen = seen

    def of(self, kind: Kind, name: str, capacity: int, found: _Found) -> Row:
        """Of one kind at one capacity."""
        info = self._setting.trace.info
        share = capacity / self._seen.unique if self._seen.unique else 0.0
        row = Row(info.name, kind, name, capacity, share, info.block_tokens, self._seen.requests, error=found.error)
        outcome = found.outcomes.get((kind, capacity))
        return row if outcome is None else self._filled(row, outcome)

    def _filled(self, row: Row, outcome: Outcome) -> Row:
        costs = self._setting.costs
        filled = row._replace(
            refused=outcome.refused,
            uses=outcome.uses,
            hits=outcome.hits,
            hit_ratio=outcome.hit_ratio,
            hit_tokens=outcome.hit_tokens,
            input_tokens=outcome.input_tokens,
            saved_seconds=costs.saved_seconds(outcome),
            saved_flops=costs.saved_flops(outcome),
        )
        if row.kind in (Kind.BOUND, Kind.LIMIT):  # of requests that are over at once, so their waits say nothing
            return filled
        return filled._replace(
            evicted=outcome.evicted,
            evicted_then_wanted=outcome.wanted_again if row.kind is Kind.POLICY else None,  # the optimum remembers none
            waits=outcome.waits,
            wait_seconds=outcome.wait_seconds,
        )


class Meter:
    """Adds up how far the tasks are; what each tells may stand still, but does not count beyond its share."""

    def __init__(self, total: int, requests: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._total = total * requests
        self._requests = requests
        self._on_progress = on_progress
        self._done: dict[int, int] = {}
        self._sum = 0

    def __call__(self, index: int, done: int) -> None:
        if self._on_progress is None:
            return
        before = self._done.get(index, 0)
        self._done[index] = max(before, min(done, self._requests))
        self._sum += self._done[index] - before
        self._on_progress(Progress(self._sum, self._total))


def _do(task: _Cell | _Best, tell: Callable[[int], None]) -> _Found:
    if isinstance(task, _Best):
        return _do_best(task, tell)
    trace, service, _ = task.setting
    try:
        policy = task.contender.policy(task.capacity)
        outcome = replay(trace, policy, task.capacity, service, on_progress=tell)
    except Exception as error:  # noqa: BLE001  # anybody's policy; OctavoError where it broke the contract
        return _Found({}, describe(error))
    tell(outcome.requests)
    return _Found({(Kind.POLICY, task.capacity): outcome})


def _do_best(task: _Best, tell: Callable[[int], None]) -> _Found:
    trace, service, _ = task.setting
    found: dict[tuple[Kind, int], Outcome] = {}
    for best in optimum_at(trace, task.capacities, service, on_progress=tell):
        found[Kind.OPTIMUM, best.capacity] = best.outcome
        found[Kind.BOUND, best.capacity] = best.bound
    return _Found(found)


def _lost(why: str) -> _Found:
    return _Found({}, why)
