"""From scrapes to what is shown: every number against a scenario in which it is known."""

from __future__ import annotations

import pytest

from octavo.telemetry.metrics import catalogue as c
from octavo.telemetry.top.board import Board, Cache, Counted, Pool, Tier, board
from octavo.telemetry.top.rates import Estimate, increase
from octavo.telemetry.top.reading import Failure, Scrape
from octavo.telemetry.top.watching import Outage, Watch
from octavo.tests.telemetry.top.top_rig import INFO, busy, exposition, latencies, scrape

GONE = Failure("Connection refused", answered=False)


@pytest.fixture
def shown() -> Board:
    """Two seconds, in which every counter that grows has grown by one step."""
    before = scrape(exposition(busy(1)), 10.0)
    after = scrape(exposition(busy(2)) + latencies(0.15), 12.0)
    return board(after, increase(before, after))


def counter(value: float, when: float) -> Scrape:
    return scrape(exposition([(c.GENERATED_TOKENS, value, {})]), when)


def decode(watch: Watch, value: float, when: float) -> float | None:
    shown = watch.take(counter(value, when), when).board
    assert shown is not None
    return shown.requests.decode.rate


def test_engine_and_window(shown: Board) -> None:
    assert shown.engines == (INFO,)
    assert shown.window == 2.0


def test_pool(shown: Board) -> None:
    assert shown.pool == Pool(used=60, pinned=7, idle=25, free=15)
    assert shown.pool.usage == 0.6


def test_cache(shown: Board) -> None:
    assert shown.cache == Cache(
        recent_hit_rate=450 / 600,
        hit_rate=900 / 1700,
        hit_tokens={"device": Counted(600, 150), "host": Counted(300, 75)},
        evictions={"allocate": Counted(80, 20), "forget": Counted(0, 0), "disk capacity": Counted(3, 0)},
        cow_forks=Counted(11, 0),
        partial_copies=Counted(0, 0),
        evicted_then_wanted=Counted(9, 0),
    )


def test_requests(shown: Board) -> None:
    requests = shown.requests
    assert (requests.running, requests.loading, requests.waiting) == (12, 2, 34)
    assert requests.waiting_reasons == {"blocks": 30, "slots": 0}
    assert requests.preemptions == {"recompute": Counted(5, 0), "swap": Counted(4, 0)}
    assert requests.finished == {"stop": Counted(40, 10)}
    assert requests.rejected == Counted(1, 0)
    assert requests.prefill == Counted(16000, 4000)
    assert requests.decode == Counted(4000, 1000)


def test_latencies(shown: Board) -> None:
    """One value in (0.1, 0.2]."""
    ttft = shown.latencies[0]
    assert ttft.name == "TTFT"
    assert ttft.middle == Estimate(pytest.approx(0.15), beyond=False)  # type: ignore[arg-type]  # stands for a number
    assert ttft.high == Estimate(pytest.approx(0.195), beyond=False)  # type: ignore[arg-type]  # as above
    assert [latency.name for latency in shown.latencies] == ["TTFT", "TPOT", "queue", "step", "request"]
    assert shown.latencies[1].middle is None
    assert shown.upkeep.lag.high == Estimate(pytest.approx(0.000195), beyond=False)  # type: ignore[arg-type]  # as above


def test_tiers(shown: Board) -> None:
    unknown = Counted(None, None)
    host, disk = shown.tiers
    assert host == Tier(
        name="host",
        blocks=200,
        bytes=3 * 2**30,
        capacity=8 * 2**30,
        queued=None,
        read=Counted(2 * 4 * 2**20, 2 * 2**20),
        written=Counted(2 * 2 * 2**20, 2**20),
        read_seconds=None,
        write_seconds=None,
        errors=unknown,
        corrupt=unknown,
        dropped=unknown,
        healthy=True,
        open_breakers=(),
    )
    assert (disk.name, disk.capacity, disk.queued) == ("disk", None, 5 * 2**10)
    assert (disk.errors, disk.corrupt, disk.open_breakers) == (Counted(6, 0), Counted(1, 0), ("write",))


def test_the_mean_of_a_tier_is_its_own() -> None:
    seconds = [(c.TIER_READ_SECONDS, 0.002, {"tier": "host"}), (c.TIER_READ_SECONDS, 0.5, {"tier": "disk"})]
    before, after = scrape(exposition(busy(1)), 0.0), scrape(exposition([*busy(2), *seconds]), 1.0)
    host, disk = board(after, increase(before, after)).tiers
    assert (host.read_seconds, disk.read_seconds, host.write_seconds) == (0.002, 0.5, None)


def test_restart_and_upkeep(shown: Board) -> None:
    assert shown.restart.ready is True
    assert (shown.restart.snapshot_age, shown.restart.snapshot_bytes) == (125, 3 * 2**20)
    assert shown.restart.restored_tokens.total == 4096
    assert shown.restart.checkpoints.total == 6
    assert shown.restart.loads == {"complete": Counted(13, 0)}
    assert shown.upkeep.spans_dropped == Counted(8, 0)
    assert shown.upkeep.policy_faults == Counted(0, 0)
    assert shown.upkeep.stuck_seconds == 0


def test_before_the_second_scrape_there_are_totals_alone() -> None:
    first = board(scrape(exposition(busy(1)), 0.0), None)
    assert first.window is None
    assert first.requests.decode == Counted(2000, None)
    assert first.cache.recent_hit_rate is None
    assert first.cache.hit_rate == 450 / 1100
    assert all(latency.middle is None for latency in first.latencies)


def test_an_engine_that_tells_little_is_shown_with_little() -> None:
    before, after = (scrape(exposition([(c.RUNNING, 1, {})]), when) for when in (0.0, 1.0))
    shown = board(after, increase(before, after))
    assert (shown.pool, shown.tiers, shown.engines) == (None, (), ())
    assert shown.requests.running == 1
    assert shown.requests.decode == Counted(None, None)
    assert (shown.cache.hit_rate, shown.restart.ready, shown.upkeep.stuck_seconds) == (None, None, None)


def test_all_families_but_one_are_shown_whichever_is_missing() -> None:
    for left_out in {metric for metric, _, _ in busy(1)}:
        texts = [exposition([told for told in busy(step) if told[0] is not left_out]) for step in (1, 2)]
        before, after = (scrape(text, when) for when, text in enumerate(texts))
        assert board(after, increase(before, after)).window == 1.0


def test_a_cold_cache_has_a_rate_of_nothing() -> None:
    """Nothing was hit yet, and the family may be absent; nothing asked for is no rate."""
    cold = board(scrape(exposition([(c.PREFIX_QUERY_TOKENS, 10, {})]), 0.0), None)
    idle = board(scrape(exposition([(c.PREFIX_QUERY_TOKENS, 0, {})]), 0.0), None)
    assert (cold.cache.hit_rate, idle.cache.hit_rate) == (0.0, None)


def test_several_engines_are_one_sum_and_the_worst_of_each_state() -> None:
    def one(name: str, used: int, ready: int, age: float) -> str:
        told = [
            (c.INFO, 1, INFO),
            (c.POOL_BLOCKS, used, {"state": "used"}),
            (c.POOL_BLOCKS, 100 - used, {"state": "free"}),
            (c.READY, ready, {}),
            (c.SNAPSHOT_AGE, age, {}),
            (c.STUCK, age / 10, {}),
            (c.TIER_BLOCKS, 5, {"tier": "disk"}),
            (c.TIER_HEALTHY, ready, {"tier": "disk"}),
        ]
        return exposition(told, engine=name)

    shown = board(scrape(one("b", 10, 1, 5.0) + one("a", 50, 0, 90.0), 0.0), None)
    assert [engine["engine"] for engine in shown.engines] == ["a", "b"]
    assert shown.pool == Pool(used=60, pinned=0, idle=0, free=140)
    assert (shown.restart.ready, shown.restart.snapshot_age, shown.upkeep.stuck_seconds) == (False, 90.0, 9.0)
    [disk] = shown.tiers
    assert (disk.blocks, disk.healthy) == (10, False)


def test_the_window_is_as_long_as_asked_for_and_no_longer() -> None:
    watch = Watch(window=4.0)
    assert decode(watch, 0, 0.0) is None
    assert decode(watch, 100, 2.0) == 50
    assert decode(watch, 100, 4.0) == 25
    assert decode(watch, 100, 6.0) == 0  # the tokens lie before the window now
    assert decode(watch, 500, 8.0) == 100


def test_one_reading_is_always_in_the_window() -> None:
    watch = Watch(window=1.0)
    decode(watch, 0, 0.0)
    assert decode(watch, 600, 60.0) == 10


def test_trends_have_a_point_for_each_reading_of_its_own_span() -> None:
    watch = Watch(window=100.0)
    for value, when in ((0, 0.0), (100, 2.0), (100, 4.0)):
        watch.take(counter(value, when), when)
    watch.take(GONE, 6.0)
    assert watch.take(counter(500, 8.0), 8.0).trends.decode == (None, 50, 0, None, 100)


def test_trends_are_bounded() -> None:
    watch = Watch(window=1.0)
    moments = [watch.take(counter(when, float(when)), float(when)) for when in range(600)]
    assert len(moments[-1].trends.decode) == len(moments[400].trends.decode) == 240


def test_an_outage_keeps_the_last_picture_and_ends() -> None:
    watch = Watch(window=10.0)
    watch.take(counter(100, 0.0), 1000.0)
    gone = watch.take(GONE, 1002.0)
    later = watch.take(Failure("HTTP status 503", answered=True), 1004.0)
    assert gone.outage == Outage(1002.0, GONE)
    assert later.outage == Outage(1002.0, Failure("HTTP status 503", answered=True))
    assert later.board is not None
    assert later.board.requests.decode.total == 100
    back = watch.take(counter(180, 8.0), 1008.0)
    assert back.outage is None
    assert back.board is not None
    assert back.board.requests.decode.rate == 10


def test_nobody_there_from_the_start_is_an_outage_without_a_picture() -> None:
    moment = Watch(window=10.0).take(GONE, 1000.0)
    assert (moment.board, moment.outage) == (None, Outage(1000.0, GONE))


def test_restarts_are_counted() -> None:
    watch = Watch(window=10.0)
    moments = [watch.take(counter(value, when), when) for value, when in ((50, 0.0), (4, 2.0), (9, 4.0), (0, 6.0))]
    assert [moment.restarts for moment in moments] == [0, 1, 1, 2]
    assert moments[1].board is not None
    assert moments[1].board.requests.decode.rate == 2
