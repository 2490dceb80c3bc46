"""Grids: the numbers are those of direct replays, in one order, whatever runs where and whatever goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import InvalidRequest
from octavo.policies.eviction.lfu import Lfu
from octavo.policies.eviction.lru import Lru
from octavo.policies.simulator.capacity import Capacity, parse_capacities
from octavo.policies.simulator.costs import CostModel
from octavo.policies.simulator.grid import Contender, Progress, Setting, run_grid, with_baseline, with_gaps
from octavo.policies.simulator.optimum import optimum_at, survey
from octavo.policies.simulator.readers import open_trace
from octavo.policies.simulator.replay import replay
from octavo.policies.simulator.rows import Kind, Row
from octavo.policies.simulator.service import ATOMIC, Service
from octavo.tests.policies.simulator.faulty_policies import CannotBeMade, EndsItsProcess, NamesNothing, Raises
from octavo.tests.policies.simulator.trace_files import write_small_trace

BOTH = [Contender("lru", Lru), Contender("lfu", Lfu)]
CAPACITIES = [Capacity(None, 0.25), Capacity(None, 0.5), Capacity(64)]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(open_trace(write_small_trace(tmp_path / "small.jsonl")))


def test_rows_are_what_direct_replays_give(setting: Setting) -> None:
    rows = run_grid(setting, BOTH, CAPACITIES)
    costs = CostModel()
    for name, policy in (("lru", Lru), ("lfu", Lfu)):
        for row in (row for row in rows if row.policy == name):
            outcome = replay(setting.trace, policy(row.capacity), row.capacity, Service())
            assert (row.hits, row.uses, row.hit_ratio) == (outcome.hits, outcome.uses, outcome.hit_ratio)
            assert (row.evicted, row.evicted_then_wanted) == (outcome.evicted, outcome.wanted_again)
            assert (row.waits, row.wait_seconds, row.refused) == (outcome.waits, outcome.wait_seconds, outcome.refused)
            assert (row.hit_tokens, row.input_tokens) == (outcome.hit_tokens, outcome.input_tokens)
            assert row.saved_seconds == costs.saved_seconds(outcome)
            assert row.saved_flops == costs.saved_flops(outcome)


def test_reference_rows_are_the_optimum_its_bound_and_the_limit(setting: Setting) -> None:
    rows = run_grid(setting, BOTH, CAPACITIES)
    seen = survey(setting.trace)
    sizes = [capacity.of(seen.unique) for capacity in CAPACITIES]
    for best in optimum_at(setting.trace, sizes, Service()):
        found = {row.kind: row for row in rows if row.capacity == best.capacity and row.kind is not Kind.POLICY}
        assert found[Kind.OPTIMUM].hits == best.outcome.hits
        assert found[Kind.BOUND].hits == best.bound.hits
        assert found[Kind.OPTIMUM].evicted == best.outcome.evicted
        assert found[Kind.OPTIMUM].evicted_then_wanted is None
        assert found[Kind.BOUND].evicted is None
    assert rows[-1].kind is Kind.LIMIT
    assert (rows[-1].hits, rows[-1].capacity, rows[-1].capacity_share) == (seen.limit.hits, seen.unique, 1.0)


def test_rows_come_by_capacity_then_as_given(setting: Setting) -> None:
    rows = run_grid(setting, BOTH, CAPACITIES)
    unique = survey(setting.trace).unique
    assert [(row.capacity, row.policy) for row in rows] == [
        *[
            (capacity.of(unique), name)
            for capacity in CAPACITIES
            for name in ("lru", "lfu", Kind.OPTIMUM.value, Kind.BOUND.value)
        ],
        (unique, Kind.LIMIT.value),
    ]
    shares = {row.capacity_share for row in rows}
    assert all(row.capacity_share == row.capacity / unique for row in rows)
    assert len(shares) == 4


def test_without_the_optimum_there_are_no_gaps(setting: Setting) -> None:
    rows = run_grid(setting, BOTH, CAPACITIES, optimum=False)
    assert {row.kind for row in rows} == {Kind.POLICY, Kind.LIMIT}
    assert all(row.gap_closed is None for row in rows)


def test_several_processes_give_the_same_rows(setting: Setting) -> None:
    contenders = [*BOTH, Contender("raises", Raises)]
    assert run_grid(setting, contenders, CAPACITIES, jobs=2) == run_grid(setting, contenders, CAPACITIES, jobs=1)


def test_requests_that_do_not_overlap_do_not_wait(setting: Setting) -> None:
    rows = run_grid(setting._replace(service=ATOMIC), BOTH, [Capacity(40)])
    assert {row.waits for row in rows if row.kind is Kind.POLICY} == {0}
    assert any(row.waits for row in run_grid(setting, BOTH, [Capacity(40)]) if row.kind is Kind.POLICY)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Raises, "ZeroDivisionError: victims are hard"),
        (NamesNothing, "ContractBroken: NamesNothing named nothing while"),
        (CannotBeMade, "RuntimeError: not today"),
    ],
)
def test_a_faulty_policy_is_a_row_with_its_error(setting: Setting, policy: type[Lru], says: str) -> None:
    rows = run_grid(setting, [Contender("faulty", policy), *BOTH], [Capacity(None, 0.25)])
    faulty, *others = rows
    assert faulty.error is not None
    assert faulty.error.startswith(says)
    assert (faulty.hit_ratio, faulty.hits, faulty.gap_closed) == (None, None, None)
    assert all(row.error is None and row.hit_ratio is not None for row in others)


def test_a_policy_that_takes_its_process_down_is_a_row_too(setting: Setting) -> None:
    contenders = [Contender("lru", Lru), Contender("fatal", EndsItsProcess), Contender("lfu", Lfu)]
    rows = run_grid(setting, contenders, [Capacity(None, 0.25)], jobs=2)
    assert [row.error for row in rows] == [None, "its process ended with status 9", None, None, None, None]


def test_progress_rises_to_the_whole(setting: Setting) -> None:
    told: list[Progress] = []
    run_grid(setting, BOTH, CAPACITIES, on_progress=told.append)
    done = [progress.done for progress in told]
    assert done == sorted(done)
    assert {progress.total for progress in told} == {7 * 120}
    assert done[-1] > 6 * 120 - 1


def _row(kind: Kind, policy: str, hit_ratio: float | None, capacity: int = 10, trace: str = "t") -> Row:
    return Row(trace, kind, policy, capacity, 0.1, 16, 5, hit_ratio=hit_ratio)


def test_the_gap_is_measured_from_lru_to_the_optimum_of_the_same_cell() -> None:
    rows = [
        _row(Kind.POLICY, "lru", 0.2),
        _row(Kind.POLICY, "a", 0.3),
        _row(Kind.POLICY, "b", 0.1),
        _row(Kind.POLICY, "failed", None),
        _row(Kind.OPTIMUM, "optimum", 0.6),
        _row(Kind.BOUND, "bound", 0.7),
        _row(Kind.POLICY, "a", 0.3, capacity=11),
        _row(Kind.POLICY, "a", 0.3, trace="other"),
        _row(Kind.POLICY, "lru", 0.4, capacity=12),
        _row(Kind.OPTIMUM, "optimum", 0.4, capacity=12),
    ]
    gaps = [row.gap_closed for row in with_gaps(rows)]
    assert gaps[:6] == [0.0, pytest.approx(0.25), pytest.approx(-0.25), None, 1.0, None]
    assert gaps[6:] == [None] * 4


def test_a_policy_that_is_called_optimum_is_still_a_policy() -> None:
    rows = [_row(Kind.POLICY, "lru", 0.2), _row(Kind.POLICY, "optimum", 0.9), _row(Kind.OPTIMUM, "optimum", 0.6)]
    assert with_gaps(rows)[2].gap_closed == 1.0
    assert with_gaps(rows)[1].gap_closed == pytest.approx(1.75)


def test_lru_is_added_where_it_is_missing() -> None:
    assert [one.name for one in with_baseline([Contender("lfu", Lfu)])] == ["lru", "lfu"]
    assert with_baseline(BOTH) == BOTH


def test_capacities_are_shares_or_blocks() -> None:
    assert parse_capacities(["1%, 2.5%", "4096", "1%"]) == [
        Capacity(None, 0.01),
        Capacity(None, 0.025),
        Capacity(4096),
    ]
    assert [Capacity(None, 0.025).of(1000), Capacity(None, 0.01).of(10), Capacity(7).of(1000)] == [25, 1, 7]


@pytest.mark.parametrize("text", ["", "5 %%", "0", "0%", "-3", "-3%", "nan%", "inf%", "1.5", "512MiB", "5%,,6%"])
def test_what_is_no_capacity_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no capacity: give a share"):
        parse_capacities([text])
