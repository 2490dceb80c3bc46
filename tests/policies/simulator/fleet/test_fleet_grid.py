"""Many fleets over one trace: their rows, what they say in words, and their picture."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from octavo.errors import InvalidRequest
from octavo.policies.eviction.lfu import Lfu
from octavo.policies.eviction.lru import Lru
from octavo.policies.routing.power_of_two import PowerOfTwo
from octavo.policies.routing.prefix import Prefix
from octavo.policies.routing.rendezvous import Rendezvous
from octavo.policies.simulator.capacity import Capacity
from octavo.policies.simulator.fleet import Chats, ChatTrace, FleetSetting, Kill, TierSetting, simulate
from octavo.policies.simulator.fleet.grid import Eviction, Fleets, Routing, run_fleets
from octavo.policies.simulator.fleet.plot import draw, save_plot
from octavo.policies.simulator.fleet.report import HEADINGS, as_json, cells, failures, fleet_of, notes, trace_of
from octavo.policies.simulator.fleet.rows import FleetRow
from octavo.policies.simulator.grid import Progress
from octavo.tests.policies.simulator.fleet.fleet_rig import Ask, InTurn, ToFirst, ToNobody
from octavo.tests.policies.simulator.fleet.fleet_rig import trace_of as trace_of_asks

CHATS = Chats(60, 2, 6, system_tokens=32, turn_tokens=48, answer_tokens=32, chats_per_second=2.0, think_seconds=5.0)
COMMON = FleetSetting(1, 1, InTurn, tier=TierSetting(token_bytes=100))
FLEETS = Fleets(
    COMMON,
    (2, 3),
    (Capacity(200), Capacity(None, 0.5)),
    (Routing("in_turn", InTurn), Routing("prefix", Prefix)),
    (Eviction("lru", Lru), Eviction("lfu", Lfu)),
)


def test_rows_are_what_single_simulations_find() -> None:
    rows = run_fleets(ChatTrace(CHATS), FLEETS)
    places = [(row.replicas, row.capacity, row.eviction, row.routing) for row in rows]
    half = rows[4].capacity
    assert half == round(rows[0].capacity / rows[0].capacity_share / 2)
    assert places == [
        (replicas, size, eviction, routing)
        for replicas in (2, 3)
        for size in (200, half)
        for eviction in ("lru", "lfu")
        for routing in ("in_turn", "prefix")
    ]
    alone = simulate(ChatTrace(CHATS), COMMON._replace(replicas=3, capacity=200, routing=Prefix, eviction=Lfu))
    row = rows[places.index((3, 200, "lfu", "prefix"))]
    same = (alone.hit_ratio, alone.hit_ratio_with_tier, alone.work_balance, alone.ttft_p99, alone.bytes_up, alone.end)
    assert (row.hit_ratio, row.hit_ratio_with_tier, row.work_balance, row.ttft_p99, row.bytes_up, row.end) == same
    assert row.error is None


def test_several_processes_find_the_same_rows() -> None:
    told: list[Progress] = []
    rows = run_fleets(ChatTrace(CHATS), FLEETS, jobs=2, on_progress=told.append)
    assert rows == run_fleets(ChatTrace(CHATS), FLEETS)
    assert told[-1].done == told[-1].total == len(rows) * rows[0].requests


def test_one_policy_that_fails_does_not_stop_the_others() -> None:
    fleets = FLEETS._replace(routings=(Routing("nobody", ToNobody), Routing("in_turn", InTurn)), replicas=(2,))
    rows = run_fleets(ChatTrace(CHATS), fleets)
    assert [row.error is None for row in rows] == [False, True] * 4
    assert rows[0].hit_ratio is None
    assert "ToNobody chose" in failures(rows)[0]
    assert cells(rows)[0] == ("nobody", "failed", *[""] * (len(HEADINGS) - 2))


def test_what_makes_no_sense_is_told_before_any_work() -> None:
    kills = FLEETS._replace(common=COMMON._replace(kills=[Kill(1.0, 2)]))  # of two there is no third
    with pytest.raises(InvalidRequest, match="no replica 2"):
        run_fleets(ChatTrace(CHATS), kills)


def test_chats_find_their_prefixes_where_the_router_looks_for_them() -> None:
    """Whoever sends a turn anywhere finds about one in four of its prefixes."""
    for replicas in (2, 4):
        setting = FleetSetting(replicas, 600, Prefix, shares_prefill=True, news_delay=0.05)
        found = {
            name: simulate(ChatTrace(CHATS), setting._replace(routing=routing))
            for name, routing in (
                ("prefix", Prefix),
                ("rendezvous", Rendezvous),
                ("power_of_two", partial(PowerOfTwo, seed=3)),
                ("in_turn", InTurn),
            )
        }
        assert found["prefix"].hit_ratio > 0.65
        assert found["prefix"].work_balance < 1.5
        assert found["rendezvous"].hit_ratio > found["power_of_two"].hit_ratio
        for name in ("power_of_two", "in_turn"):
            assert found["prefix"].hit_ratio > (1.2 if replicas == 2 else 1.5) * found[name].hit_ratio


def test_rows_in_words() -> None:
    row = FleetRow("t", "prefix", "lru", 4, 1828, 0.01, 16, 12031)
    assert trace_of([row]) == "t: 12,031 requests, blocks of 16 tokens"
    assert fleet_of(row) == "4 replicas of 1,828 blocks (1%), lru"
    assert set(cells([row])[0][1:]) == {"-", "- -"}
    full = row._replace(
        hit_ratio=0.5,
        hit_ratio_with_tier=0.75,
        work_balance=1.204,
        window_balance=1.5,
        request_balance=1.0,
        wait_p50=0.0,
        wait_p99=0.0621,
        ttft_p50=1.04,
        ttft_p99=1234.0,
        bytes_up=3 * 2**30,
        bytes_down=1023,
        sent_again=1200,
        refused=2,
        unanswered=3,
    )
    assert cells([full])[0] == (
        "prefix",
        "0.5000",
        "0.7500",
        "1.20",
        "1.50",
        "0 ms 62 ms",
        "1.0 s 1,234.0 s",
        "3 GiB",
        "1023 B",
        "1,200",
    )
    assert len(notes([full])) == 2
    assert notes([row]) == []
    assert json.loads(as_json([full, row]))[0]["routing"] == "prefix"


def test_an_empty_trace_has_rows_in_json() -> None:
    rows = run_fleets(trace_of_asks([]), FLEETS)
    assert json.loads(as_json(rows))[0]["hit_ratio"] == 0.0


def test_a_picture_has_a_line_for_each_policy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = run_fleets(ChatTrace(CHATS._replace(chats=5)), FLEETS)
    hits, balance = draw(rows).axes
    labels = [str(line.get_label()) for line in hits.lines]
    assert len(labels) == len(set(labels)) == 8  # two routings, two evictions, two capacities
    assert hits.get_xlabel() == "replicas"
    assert len(balance.lines) == 8
    same = [row for row in rows if row.replicas == 2 and row.eviction == "lru"]
    assert [str(line.get_label()) for line in draw(same).axes[0].lines] == ["in_turn", "prefix"]
    assert draw(same).axes[0].get_xlabel() == "blocks of a replica"
    save_plot(rows, tmp_path / "fleets.png")
    assert (tmp_path / "fleets.png").read_bytes().startswith(b"\x89PNG")
    assert draw([]).axes


def test_a_fleet_of_one_with_a_large_cache_evicts_nothing() -> None:
    rows = run_fleets(
        trace_of_asks([Ask((0, 1)), Ask((0, 1), arrival=1.0)]),
        Fleets(COMMON, (1,), (Capacity(9),), (Routing("first", ToFirst),), (Eviction("lru", Lru),)),
    )
    assert (rows[0].evicted, rows[0].hit_ratio, rows[0].capacity_share) == (0, 0.5, 4.5)
