"""Shadow policies: they count what they would have found, and nothing that they do touches the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.insight.shadows import ShadowReport, Shadows, _Sampling
from octavo.engine.kv import CacheManager
from octavo.engine.surroundings import Surroundings
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, UnknownPlugin
from octavo.policies.eviction.base import Entry, EvictionPolicy
from octavo.policies.eviction.lru import Lru
from octavo.policies.history import Admitted, Extended, Left, Part, Published
from octavo.telemetry.logging import get_logger
from octavo.telemetry.tracing import Tracing
from octavo.tests.engine.conftest import EngineOf, FakeClock

LRU = "octavo.policies.eviction.lru:Lru"
LFU = "octavo.policies.eviction.lfu:Lfu"
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class Newest(Lru):
    """The most recently used goes first: good where a loop is larger than the cache, bad elsewhere."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield max(super().victims(count, now), key=lambda entry: entry.last_use)


class Raising(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise RuntimeError("no")


class Nonsense(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield Entry(1, 1, 0.0, 0.0)


class QuietLast(Lru):
    """Gives up what belongs to somebody else before what is of tenant ``1``, as recordings call the first one."""

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        yield min(super().victims(count, now), key=lambda entry: entry.tenant in ("quiet", "1"))


NEWEST, RAISING, NONSENSE, QUIET_LAST = (f"{__name__}:{cls.__name__}" for cls in (Newest, Raising, Nonsense, QuietLast))


EXACT = {"clock": FakeClock(step=0.001), "evict_below": 0.0, "evict_until": 0.0}
"""Shadows know no watermarks: they evict when blocks are short."""


async def loop_over(engine: AsyncEngine, prompts: int, rounds: int) -> None:
    for number in (*range(prompts),) * rounds:
        await engine.complete([number, *range(1, 16)], GREEDY)


def of(engine: AsyncEngine, spec: str) -> ShadowReport:
    return next(report for report in engine.shadows() if report.policy == spec)


@pytest.mark.asyncio
async def test_a_shadow_of_the_live_policy_finds_what_the_live_cache_finds(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24, **EXACT, shadow_policies=(LRU, NEWEST)) as engine:
        random = Random(3)  # noqa: S311  # nothing is secret here
        for _ in range(80):
            await engine.complete([random.randrange(9), *range(1, random.randint(5, 20))], GREEDY)
        same, other = engine.shadows()
    assert same.hits == same.live_hits == other.live_hits > 0
    assert same.uses == other.uses
    assert (same.requests, same.refused, same.fault) == (80, 0, None)
    assert same.evicted > 0
    assert other.hits != same.hits


@pytest.mark.asyncio
async def test_it_shows_that_another_policy_would_do_better(engine_of: EngineOf) -> None:
    """A loop over more than fits: the least recently used is always the one that is wanted next."""
    async with engine_of(num_blocks=24, **EXACT, shadow_policies=(NEWEST,)) as engine:
        await loop_over(engine, 8, 5)
        shadow = of(engine, NEWEST)
    assert shadow.hit_ratio > shadow.live_hit_ratio + 0.3


@pytest.mark.asyncio
async def test_what_it_says_is_what_the_engine_does_under_that_policy(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24, **EXACT, shadow_policies=(NEWEST,)) as engine:
        await loop_over(engine, 8, 5)
        shadow = of(engine, NEWEST)
    async with engine_of(num_blocks=24, **EXACT, eviction_policy=NEWEST, shadow_policies=(LRU,)) as engine:
        await loop_over(engine, 8, 5)
        live = of(engine, LRU)
    assert (shadow.hits, shadow.uses) == (live.live_hits, live.uses)
    assert (live.hits, live.uses) == (shadow.live_hits, shadow.uses)


@pytest.mark.asyncio
async def test_a_shadow_knows_whose_blocks_they_are(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24, **EXACT, eviction_policy=QUIET_LAST, shadow_policies=(QUIET_LAST,)) as engine:
        for number in range(30):
            await engine.complete([*range(1, 16)], GREEDY, tenant="quiet")
            for other in range(4):
                await engine.complete([number, other, *range(1, 14)], GREEDY, tenant="loud")
        shadow = of(engine, QUIET_LAST)
    assert shadow.hits == shadow.live_hits > 50


@pytest.mark.asyncio
@pytest.mark.parametrize("spec", [RAISING, NONSENSE])
async def test_one_that_fails_is_stopped_and_the_others_go_on(spec: str, engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24, shadow_policies=(spec, LRU)) as engine:
        await loop_over(engine, 8, 3)
        failed, good = engine.shadows()
        assert failed.fault is not None
        assert good.fault is None
        assert failed.requests < good.requests == 24
        assert engine.stats().cache.policy_faults == engine.stats().cache.hook_faults == 0


@pytest.mark.asyncio
async def test_one_that_holds_up_the_loop_is_stopped(engine_of: EngineOf) -> None:
    clock = FakeClock()

    class Slow(Lru):
        def on_insert(self, entry: Entry, now: float) -> None:
            clock.now += 0.2
            super().on_insert(entry, now)

    async with engine_of(num_blocks=24, clock=clock) as engine:
        engine._life.parts.shadows._make = lambda _, blocks: Slow(blocks)
        engine.add_shadow("slow")
        await loop_over(engine, 2, 1)
        fault = of(engine, "slow").fault
    assert fault is not None
    assert "took 0.2" in fault


@pytest.mark.asyncio
async def test_shadows_come_and_go_while_requests_run(engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=24) as engine:
        watchers = engine._loop.cache._watchers
        assert not watchers.requests
        await loop_over(engine, 3, 1)
        generation = await engine.generate(list(range(9)), SamplingParams(max_tokens=30, ignore_eos=True)).start()
        await anext(generation)
        engine.add_shadow(LFU)
        with pytest.raises(InvalidRequest, match="already"):
            engine.add_shadow(LFU)
        await loop_over(engine, 3, 2)
        async for _ in generation:
            pass
        report = of(engine, LFU)
        assert report.requests == 6
        assert report.hits < report.live_hits  # it began with an empty cache
        assert report.fault is None
        assert engine.remove_shadow(LFU)
        assert not engine.remove_shadow(LFU)
        assert engine.shadows() == ()
        assert not watchers.requests
        with pytest.raises(UnknownPlugin):
            engine.add_shadow("no_such_policy")


@pytest.mark.asyncio
async def test_forks_beams_aborts_and_preemptions_do_not_trouble_it(engine_of: EngineOf, tmp_path: Path) -> None:
    random = Random(5)  # noqa: S311  # nothing is secret here
    async with engine_of(num_blocks=26, max_running=6, shadow_policies=(LRU, LFU), shadow_sample=1.0) as engine:
        for number in range(30):
            text = [random.randrange(3), *range(1, random.randint(4, 20))]
            shape = random.choice(({"n": 3}, {"beam_width": 3}, {}))
            params = SamplingParams(max_tokens=random.randint(1, 14), seed=number, **shape)  # type: ignore[arg-type]  # n and beam_width
            generation = await engine.generate(text, params, request_id=str(number)).start()
            if random.random() < 0.3:
                engine.abort(str(number))
            if number % 3 == 0:
                async for _ in generation:
                    pass
        await engine.drain(10.0)
        assert [report.fault for report in engine.shadows()] == [None, None]
        shadows = engine._life.parts.shadows
        for shadow in shadows._shadows:
            replica = shadow._replica
            assert not shadow._leases
            assert replica.free + replica.cached == replica.capacity == 26
            assert replica.idle == replica.cached
        assert not shadows._lines


class Feed:
    """A cache manager's place: only its size matters."""

    def __init__(self, blocks: int, sample: float, policy: type[EvictionPolicy] = Lru) -> None:
        clock = FakeClock()
        tracing = Tracing(None, clock=clock, wall=clock, version="1", shows_text=False)
        faults: list[tuple[str, object]] = []
        cache = CacheManager(blocks, 1, Lru(blocks), clock=clock, on_fault=lambda *_: None)
        self.faults = faults
        self.shadows = Shadows(
            cache,
            lambda _, count: policy(count),
            sample,
            outside=Surroundings(clock, clock, get_logger("test"), tracing),
            timeout=10.0,
            on_fault=lambda where, what: faults.append((where, what)),
        )
        self.shadows.add("x")

    def request(self, number: int, names: bytes, generated: int = 0) -> None:
        now, blocks = float(number), len(names) // 8
        self.shadows.heard(Admitted(now, number, number, blocks + 1, 0, blocks + 1, names))
        self.shadows.heard(Published(now, number, blocks, names, 0, (Part(blocks, 0.0),)))
        if generated:
            self.shadows.heard(Extended(now, number, generated))
        self.shadows.heard(Left(now, number, "finished"))


def skewed(seed: int, requests: int) -> Iterator[bytes]:
    """Prompts with shared heads, some of them popular."""
    random = Random(seed)  # noqa: S311  # nothing is secret here
    for _ in range(requests):
        group, leaf = int(random.paretovariate(0.8)) % 400, int(random.paretovariate(0.6)) % 5000
        names, key = [], ("head", group)
        for depth in range(random.randint(10, 30)):
            part = (*key, depth) if depth < 8 else (*key, leaf, depth)
            names.append(Random(repr(part)).randbytes(8))  # noqa: S311  # as above
        yield b"".join(names)


def test_what_is_found_again_after_a_preemption_counts_nothing() -> None:
    feed, names = Feed(16, 1.0), next(skewed(1, 1))[: 4 * 8]
    feed.request(1, names)
    before = feed.shadows.reports()
    feed.shadows.heard(Admitted(2.0, 1, 1, 5, 4, 1, names, resumed=True))
    feed.shadows.heard(Left(3.0, 1, "finished"))
    assert feed.shadows.reports() == before
    assert [(report.requests, report.uses, report.hits) for report in before] == [(1, 4, 0)]


def test_a_sample_comes_close_to_the_whole() -> None:
    ratios = {}
    for share in (1.0, 0.25):
        feed = Feed(2000, share)
        for number, names in enumerate(skewed(1, 1500), 1):
            feed.request(number, names, generated=3)
        (report,) = feed.shadows.reports()
        assert feed.faults == []
        assert report.evicted > 0
        ratios[share] = report.hit_ratio
        assert report.uses == pytest.approx(share * 1500 * 20, rel=0.4)  # popular heads are in the sample or are not
    assert 0.1 < ratios[1.0] < 0.9
    assert ratios[0.25] == pytest.approx(ratios[1.0], abs=0.06)


def test_a_sample_keeps_prefixes_of_prefixes() -> None:
    """Of two prompts with a common head, the samples have a common head, too, and it is the sample of that."""
    sampling = _Sampling(0.5)
    head = Random(1).randbytes(8 * 40)  # noqa: S311  # nothing is secret here
    one, two = sampling.begin(head + b"\x00" * 8), sampling.begin(head + b"\xff" * 8)
    own = sampling.begin(head)
    assert one.names.startswith(own.names)
    assert two.names == own.names
    assert 8 * 8 < len(own.names) < 32 * 8
    assert [own.known(blocks) for blocks in (0, 40)] == [0, len(own.names) // 8]


def test_what_is_rounded_off_counts_later() -> None:
    sampling = _Sampling(0.3)
    assert sum(sampling.scaled(1) for _ in range(1000)) == pytest.approx(300, abs=1)


def test_wrong_settings_are_refused() -> None:
    for share in (0.0, 1.5, "half", True):
        with pytest.raises(InvalidRequest, match="shadow_sample"):
            EngineConfig(shadow_sample=share)  # type: ignore[arg-type]  # on purpose
    for names in (("lru", "lru"), ["lru"], ("",)):
        with pytest.raises(InvalidRequest, match="shadow_policies"):
            EngineConfig(shadow_policies=names)  # type: ignore[arg-type]  # on purpose


@pytest.mark.asyncio
async def test_an_unknown_shadow_keeps_the_engine_from_opening() -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=EngineConfig(num_blocks=8, shadow_policies=("nobody",)))
    with pytest.raises(UnknownPlugin, match="nobody"):
        await engine.__aenter__()
