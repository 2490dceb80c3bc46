"""Tasks in several processes: results in order, one that dies takes one task with it, none is left behind.

Starting a process costs half a second, so a few runs show it all.
"""

from __future__ import annotations

import multiprocessing

import pytest

from octavo.policies.simulator.workers import run_tasks
from octavo.tests.policies.simulator.worker_tasks import Fragile, work


def test_each_task_has_its_own_fate_and_results_come_in_order() -> None:
    told: list[tuple[int, int]] = []
    results = run_tasks(
        work,
        [1, "die", 2, "raise", 3, Fragile(), 4, 5],
        jobs=2,
        lost=str,
        on_progress=lambda index, done: told.append((index, done)),
    )
    fragile = results.pop(5)
    assert results == [2, "its process ended with status 3", 4, "ValueError: no such number", 6, 8, 10]
    assert str(fragile).startswith("ValueError: invalid literal")
    whole = [(index, done) for index in (0, 2, 4, 6, 7) for done in (1, 2)]
    assert sorted(told) == sorted([*whole, (1, 1), (3, 1)])
    assert multiprocessing.active_children() == []


def test_more_jobs_than_tasks() -> None:
    assert run_tasks(work, [1, 2], jobs=9, lost=str) == [2, 4]


def test_one_job_runs_here() -> None:
    told: list[tuple[int, int]] = []
    results = run_tasks(
        work, [5, "raise", 6, "exit"], jobs=1, lost=str, on_progress=lambda index, done: told.append((index, done))
    )
    assert results == [10, "ValueError: no such number", 12, "SystemExit: enough"]
    assert told == [(0, 1), (0, 2), (1, 1), (2, 1), (2, 2), (3, 1)]
    assert run_tasks(work, [], jobs=9, lost=str) == []


def test_leaving_early_ends_all_processes() -> None:
    def leave(index: int, done: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(work, ["hang", "hang", "hang"], jobs=2, lost=str, on_progress=leave)
    assert multiprocessing.active_children() == []
