"""Fleets against replays of their replicas, against a slow simulator, and by what must hold for all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.errors import ContractBroken, InvalidRequest
from octavo.policies.eviction.lru import Lru
from octavo.policies.eviction.s3_fifo import S3Fifo
from octavo.policies.routing.base import Choice, Reason, RoutedRequest
from octavo.policies.routing.fleet_view import FleetView
from octavo.policies.simulator import ATOMIC, ListTrace, Outcome, Request, Service, replay
from octavo.policies.simulator.fleet import (
    FleetOutcome,
    FleetSetting,
    Kill,
    TierSetting,
    TierWrites,
    simulate,
)
from octavo.tests.policies.simulator.fleet.fleet_rig import (
    BLOCK,
    INFO,
    Ask,
    InTurn,
    ToFirst,
    ToHolder,
    ToNobody,
    names,
    trace_of,
)
from octavo.tests.policies.simulator.fleet.slow_fleet import SlowFleet, Story

ASKS = st.lists(
    st.builds(
        Ask,
        word=st.lists(st.integers(0, 2), max_size=5).map(tuple),
        tail=st.integers(0, BLOCK - 1),
        output=st.integers(0, 9),
        arrival=st.floats(0, 20),
    ),
    max_size=25,
).map(lambda asks: sorted(asks, key=lambda ask: ask.arrival))
SERVICES = st.sampled_from([ATOMIC, Service(7.0, 3.0), Service(50.0, 1.0), Service(math.inf, 0.7)])
KILLS = st.lists(
    st.builds(Kill, at=st.floats(0, 20), replica=st.integers(0, 1), back_after=st.sampled_from([0.5, 5.0, math.inf])),
    max_size=3,
)
TIERS = st.none() | st.builds(
    TierSetting,
    capacity=st.none() | st.integers(1, 9),
    writes=st.sampled_from(TierWrites),
    token_bytes=st.just(10),
    bytes_per_second=st.sampled_from([math.inf, 40.0]),
    store_bytes_per_second=st.sampled_from([math.inf, 100.0]),
    latency=st.sampled_from([0.0, 0.25]),
    lost_at=st.sampled_from([0.0, 10.0, math.inf]),
)
SETTINGS = st.builds(
    FleetSetting,
    replicas=st.just(2),
    capacity=st.integers(3, 14),
    routing=st.sampled_from([InTurn, ToFirst, ToHolder]),
    eviction=st.sampled_from([Lru, S3Fifo]),
    service=SERVICES,
    max_running=st.none() | st.integers(1, 3),
    shares_prefill=st.booleans(),
    news_delay=st.sampled_from([None, 0.0, 3.0]),
    half_life=st.just(30.0),
    window=st.just(5.0),
    tier=TIERS,
    kills=KILLS,
)


def as_replays(found: FleetOutcome) -> tuple[float, ...]:
    return (
        found.requests,
        found.refused,
        found.uses,
        found.hits,
        found.hit_tokens,
        found.input_tokens,
        found.evicted,
        found.wanted_again,
        found.waits,
    )


def added(parts: list[Outcome]) -> tuple[float, ...]:
    counts = [
        (p.requests, p.refused, p.uses, p.hits, p.hit_tokens, p.input_tokens, p.evicted, p.wanted_again, p.waits)
        for p in parts
    ]
    return tuple(map(sum, zip(*counts, strict=True)))


@settings(max_examples=100, deadline=None)
@given(asks=ASKS, service=SERVICES, capacity=st.integers(1, 14), policy=st.sampled_from([Lru, S3Fifo]))
def test_one_replica_does_what_a_replay_does(
    asks: list[Ask], service: Service, capacity: int, policy: type[Lru | S3Fifo]
) -> None:
    found = simulate(trace_of(asks), FleetSetting(1, capacity, ToHolder, policy, service))
    alone = replay(trace_of(asks), policy(capacity), capacity, service)
    assert as_replays(found) == added([alone])
    assert (found.wait_seconds, found.end) == pytest.approx((alone.wait_seconds, alone.end))


@settings(max_examples=100, deadline=None)
@given(asks=ASKS, service=SERVICES, capacity=st.integers(1, 14), replicas=st.integers(2, 4))
def test_replicas_that_share_nothing_are_as_many_replays(
    asks: list[Ask], service: Service, capacity: int, replicas: int
) -> None:
    fitting = [ask for ask in asks if len(ask.word) + ask.own <= capacity]  # the others are nobody's turn
    found = simulate(trace_of(fitting), FleetSetting(replicas, capacity, InTurn, Lru, service))
    parts = [replay(trace_of(fitting[first::replicas]), Lru(capacity), capacity, service) for first in range(replicas)]
    assert as_replays(found) == added(parts)
    assert found.replica_requests == tuple(part.requests for part in parts)
    assert found.end == pytest.approx(max(part.end for part in parts))


@settings(max_examples=200, deadline=None)
@given(asks=ASKS, capacity=st.integers(2, 9), tier=TIERS, kills=KILLS)
def test_a_fleet_counts_what_a_slow_simulator_counts(
    asks: list[Ask], capacity: int, tier: TierSetting | None, kills: list[Kill]
) -> None:
    moments = [ask.arrival for ask in asks] + [kill.at for kill in kills]
    moments += [kill.at + kill.back_after for kill in kills]
    finite = [moment for moment in moments if moment < math.inf]
    if tier is not None:  # loads that take no time, so that no two requests overlap
        tier = tier._replace(bytes_per_second=math.inf, store_bytes_per_second=math.inf, latency=0.0)
    assume(len(set(finite)) == len(finite))
    slow = SlowFleet(2, capacity, tier, kills)
    slow.run(asks)
    assume(len(set(slow.served_at)) == len(slow.served_at))  # of those used last at one moment, any may go
    found = simulate(trace_of(asks), FleetSetting(2, capacity, InTurn, Lru, ATOMIC, tier=tier, kills=kills))
    assert slow.story() == Story(
        found.answered,
        found.refused,
        found.unanswered,
        found.hits,
        found.tier_hits,
        found.evicted,
        found.blocks_up,
        found.blocks_down,
    )


@settings(max_examples=200, deadline=None)
@given(asks=ASKS, setting=SETTINGS)
def test_every_request_has_one_end_and_every_token_one_origin(asks: list[Ask], setting: FleetSetting) -> None:
    found = simulate(trace_of(asks), setting)
    assert found == simulate(trace_of(asks), setting)  # nothing is left to chance
    assert found.requests == len(asks) == found.answered + found.refused + found.unanswered
    assert found.refused == sum(len(ask.word) + ask.own > setting.capacity for ask in asks)
    assert found.answered <= sum(found.replica_requests) <= found.answered + found.sent_again
    assert found.blocks_down == found.tier_hits
    assert 0 <= found.ttft_p50 <= found.ttft_p99
    if not found.sent_again and not found.unanswered:
        fits = [ask for ask in asks if len(ask.word) + ask.own <= setting.capacity]
        whole = sum(ask.tokens + ask.output for ask in fits)
        assert sum(found.computed_tokens) + found.hit_tokens + found.tier_hit_tokens == whole
        assert found.input_tokens == sum(ask.tokens for ask in asks)
    if not setting.kills:
        assert found.sent_again == found.unanswered == 0


@settings(max_examples=100, deadline=None)
@given(asks=ASKS, setting=SETTINGS)
def test_a_lost_store_is_misses_and_nothing_else(asks: list[Ask], setting: FleetSetting) -> None:
    atomic = setting._replace(service=ATOMIC, kills=(), tier=TierSetting(lost_at=0.0))
    lost = simulate(trace_of(asks), atomic)
    assert lost == simulate(trace_of(asks), atomic._replace(tier=None))
    kept = simulate(trace_of(asks), atomic._replace(tier=TierSetting()))
    late = simulate(trace_of(asks), atomic._replace(tier=TierSetting(lost_at=10.0)))
    assert (lost.hits, lost.answered) == (late.hits, late.answered) == (kept.hits, kept.answered)
    assert 0 == lost.tier_hits <= late.tier_hits <= kept.tier_hits


@settings(max_examples=100, deadline=None)
@given(asks=ASKS, setting=SETTINGS)
def test_nothing_finds_more_than_one_cache_that_never_evicts(asks: list[Ask], setting: FleetSetting) -> None:
    fitting = [ask for ask in asks if len(ask.word) + ask.own <= setting.capacity]
    atomic = setting._replace(service=ATOMIC, kills=())
    found = simulate(trace_of(fitting), atomic)
    limit = simulate(trace_of(fitting), FleetSetting(1, 1000, ToFirst, service=ATOMIC))
    assert found.hits + found.tier_hits <= limit.hits
    store = TierSetting(writes=TierWrites.THROUGH)
    shared = simulate(trace_of(fitting), atomic._replace(tier=store))
    assert shared.hits + shared.tier_hits == limit.hits  # what anybody has computed is there for all


# what time does


def run(*asks: Ask, setting: FleetSetting) -> FleetOutcome:
    return simulate(trace_of(asks), setting)


SLOW = Service(4.0, 1.0)


def test_a_replica_computes_so_many_side_by_side() -> None:
    asks = [Ask((letter,), 0, 3) for letter in range(3)]
    one = run(*asks, setting=FleetSetting(1, 99, ToFirst, service=SLOW, max_running=1))
    assert (one.waits, one.wait_seconds, one.end) == (2, 4.0 + 8.0, 12.0)
    assert run(*asks, setting=FleetSetting(1, 99, ToFirst, service=SLOW, max_running=2)).end == 8.0
    assert run(*asks, setting=FleetSetting(1, 99, ToFirst, service=SLOW)).end == 4.0
    assert run(*asks, setting=FleetSetting(3, 99, InTurn, service=SLOW, max_running=1)).waits == 0


def test_prefills_of_one_replica_may_share_its_rate() -> None:
    asks = [Ask((letter, letter), 0, 1) for letter in range(2)]
    own = run(*asks, setting=FleetSetting(1, 99, ToFirst, service=SLOW))
    assert (own.ttft_p50, own.ttft_p99, own.end) == (2.0, 2.0, 3.0)
    shared = run(*asks, setting=FleetSetting(1, 99, ToFirst, service=SLOW, shares_prefill=True))
    assert (shared.ttft_p50, shared.end) == (3.0, 5.0)
    assert run(*asks, setting=FleetSetting(2, 99, InTurn, service=SLOW, shares_prefill=True)).end == 3.0


def test_a_load_takes_its_time_and_link_and_store_serve_all() -> None:
    asks = [Ask((0, 0)), Ask((1, 1), arrival=10.0), Ask((0, 0), arrival=20.0), Ask((1, 1), arrival=20.0)]
    tier = TierSetting(None, TierWrites.THROUGH, 5, bytes_per_second=40.0, latency=0.5)
    setting = FleetSetting(2, 99, ToFirst, service=SLOW, tier=tier, kills=[Kill(15.0, 0)])
    found = run(*asks, setting=setting)
    assert (found.tier_hits, found.blocks_up, found.bytes_down) == (4, 4, 4 * BLOCK * 5)
    assert found.end == 20.0 + 2 * (2 * BLOCK * 5 / 40.0) + 0.5  # one after the other on the link of one replica
    spread = run(*asks, setting=setting._replace(replicas=3, kills=[Kill(15.0, 0)], routing=InTurn))
    assert spread.end == 20.0 + 2 * BLOCK * 5 / 40.0 + 0.5
    busy = run(*asks, setting=setting._replace(tier=tier._replace(store_bytes_per_second=20.0)))
    assert busy.end == 20.0 + 4 * BLOCK * 5 / 20.0 + 0.5


def test_others_are_computed_while_one_is_loaded() -> None:
    tier = TierSetting(None, TierWrites.THROUGH, latency=10.0)
    asks = [Ask((0, 0)), Ask((0, 0, 1), arrival=20.0), Ask((1, 1), arrival=20.0)]
    setting = FleetSetting(1, 99, ToFirst, service=SLOW, shares_prefill=True, tier=tier, kills=[Kill(9.0, 0, 1.0)])
    found = run(*asks, setting=setting)
    assert found.tier_hits == 2
    assert found.ttft_p50 == 1.0 + 2.0  # of the last, behind the one block that the other computes
    assert found.end == 20.0 + 10.0 + 1.0


class Known(InTurn):
    """To who has something of the prompt, else in turn."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        in_turn, held = super().choose(request, fleet), fleet.matched(request.names)
        return Choice(sorted(in_turn.replicas, key=lambda replica: -held.get(replica, 0)), 0, Reason.PREFIX)


def test_news_come_late_and_placements_bridge_the_gap() -> None:
    """Of the two turns the second needs blocks of the answer, of which the router only hears; where, it knows."""
    first = Request(0.0, BLOCK, 4, names((0,)), names((0, 1))[8:])
    other = Request(2.0, BLOCK, 0, names((2,)))
    again = Request(5.0, 2 * BLOCK, 0, names((0, 1)))
    trace = ListTrace(INFO, [first, other, again])
    for delay in (0.0, 9.0, None):
        found = simulate(trace, FleetSetting(3, 9, Known, service=SLOW, news_delay=delay))
        assert (found.hits, found.replica_requests) == (2, (2, 1, 0))


def test_a_router_believes_what_it_has_not_heard_to_be_gone() -> None:
    asks = [Ask((0, 0), arrival=0.0), Ask((1, 1), arrival=1.0), Ask((0, 0), arrival=2.0)]
    told: list[int] = []

    class Noting(ToHolder):
        def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
            choice = super().choose(request, fleet)
            told.append(choice.matched)
            return choice

    run(*asks, setting=FleetSetting(1, 2, Noting, service=ATOMIC, news_delay=0.0))
    run(*asks, setting=FleetSetting(1, 2, Noting, service=ATOMIC, news_delay=5.0))
    assert told == [0, 0, 0, 0, 0, 2]


# what goes wrong


def test_requests_of_a_replica_that_dies_are_sent_again() -> None:
    asks = [Ask((0, 0), 0, 8), Ask((1,), 0, 8), Ask((0, 0), 0, 1, 3.0)]
    setting = FleetSetting(2, 99, ToFirst, service=SLOW, max_running=1, kills=[Kill(4.0, 0)])
    found = run(*asks, setting=setting)
    assert (found.answered, found.sent_again) == (3, 3)
    assert found.replica_requests == (1, 3)
    assert found.hits == 2  # the third finds what the first, sent again, has computed anew
    assert found.end == 4.0 + (2.0 + 8.0) + (1.0 + 8.0) + 1.0
    assert found.ttft_p50 == pytest.approx(15.0)  # of the second; the first had its first token before


def test_the_client_has_the_first_token_though_the_replica_died_later() -> None:
    setting = FleetSetting(2, 99, ToFirst, service=SLOW, kills=[Kill(3.0, 0)])
    assert run(Ask((0, 0), 0, 8), setting=setting).ttft_p50 == 2.0
    early = setting._replace(kills=[Kill(1.0, 0)])
    assert run(Ask((0, 0), 0, 8), setting=early).ttft_p50 == 1.0 + 2.0


def test_requests_without_a_replica_wait_for_one_or_are_never_answered() -> None:
    asks = [Ask((0,), arrival=0.0), Ask((0,), arrival=2.0), Ask((0,), arrival=3.0)]
    gone = FleetSetting(1, 99, ToFirst, service=ATOMIC, kills=[Kill(1.0, 0)])
    found = run(*asks, setting=gone)
    assert (found.answered, found.unanswered, found.hits) == (1, 2, 0)
    back = run(*asks, setting=gone._replace(kills=[Kill(1.0, 0, 5.0)]))
    assert (back.answered, back.unanswered, back.hits, back.end) == (3, 0, 1, 6.0)
    assert back.wait_seconds == 4.0 + 3.0


def test_to_kill_the_dead_changes_nothing() -> None:
    asks = [Ask((0,), arrival=at) for at in (0.0, 5.0, 9.0)]
    once = FleetSetting(2, 99, ToFirst, service=ATOMIC, kills=[Kill(1.0, 0, 7.0)])
    twice = once._replace(kills=[*once.kills, Kill(2.0, 0, 1.0)])
    assert run(*asks, setting=once) == run(*asks, setting=twice)


def test_a_policy_that_chooses_nobody_ends_the_simulation() -> None:
    with pytest.raises(ContractBroken, match="ToNobody chose"):
        run(Ask((0,)), setting=FleetSetting(2, 99, ToNobody))


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 0},
        {"capacity": 0},
        {"max_running": 0},
        {"news_delay": -1.0},
        {"news_delay": math.inf},
        {"window": 0.0},
        {"half_life": math.nan},
        {"service": Service(0.0, 1.0)},
        {"tier": TierSetting(0)},
        {"tier": TierSetting(token_bytes=0)},
        {"tier": TierSetting(bytes_per_second=0.0)},
        {"tier": TierSetting(latency=-1.0)},
        {"tier": TierSetting(lost_at=math.nan)},
        {"kills": [Kill(0.0, 2)]},
        {"kills": [Kill(-1.0, 0)]},
        {"kills": [Kill(1.0, 0, 0.0)]},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    setting = FleetSetting(2, 9, ToFirst)._replace(**wrong)  # type: ignore[arg-type]  # one of its fields
    with pytest.raises(InvalidRequest):
        simulate(trace_of([]), setting)


# what is told


def test_balance_is_the_busiest_over_the_mean() -> None:
    asks = [Ask((letter,), arrival=at) for at, letter in ((0.0, 0), (1.0, 1), (70.0, 2), (71.0, 3))]
    even = run(*asks, setting=FleetSetting(2, 99, InTurn, service=ATOMIC))
    assert (even.work_balance, even.request_balance, even.window_balance) == (1.0, 1.0, 1.0)
    lonely = run(*asks, setting=FleetSetting(2, 99, ToFirst, service=ATOMIC))
    assert (lonely.work_balance, lonely.request_balance, lonely.window_balance) == (2.0, 2.0, 2.0)
    uneven = [asks[0], asks[2]]
    found = run(*uneven, setting=FleetSetting(2, 99, InTurn, service=ATOMIC))
    assert (found.work_balance, found.window_balance) == (1.0, 2.0)


def test_an_empty_trace_has_no_ratios_to_speak_of() -> None:
    found = run(setting=FleetSetting(3, 1, ToFirst))
    assert (found.requests, found.hit_ratio, found.hit_ratio_with_tier, found.work_balance) == (0, 0.0, 0.0, 1.0)


def test_progress_of_a_fleet_is_told_now_and_then_and_at_the_end() -> None:
    told: list[int] = []
    asks = [Ask((0,), arrival=float(at)) for at in range(600)]
    simulate(trace_of(asks), FleetSetting(2, 9, InTurn, service=ATOMIC), on_progress=told.append)
    assert told == [256, 512, 600]


def test_priorities_of_the_trace_are_kept_by_every_replica() -> None:
    words = ((0,), (1,), (2,), (0,))
    asked = [Request(float(at), BLOCK, 0, names(word), priority=int(word == (0,))) for at, word in enumerate(words)]
    assert simulate(ListTrace(INFO, asked), FleetSetting(1, 2, ToFirst, service=ATOMIC)).hits == 1
    plain = [each._replace(priority=0) for each in asked]
    assert simulate(ListTrace(INFO, plain), FleetSetting(1, 2, ToFirst, service=ATOMIC)).hits == 0
