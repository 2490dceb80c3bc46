"""A FleetView that is kept up by news alone, against the engines that they come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import AsyncEngine
from octavo.engine.fleet.holdings import BREATH, Holdings
from octavo.engine.fleet.news import FleetNews
from octavo.policies.routing.fleet_view import FleetView
from octavo.policies.routing.status import ReplicaStatus
from octavo.storage.naming import Namespace, names_after
from octavo.storage.testing.contract import MemoryStore, SharedMemoryTier
from octavo.telemetry.events.log import Cleared, EventBatch, KvEvent, Removed, Stored
from octavo.telemetry.events.zmq_publisher import ZmqPublisher
from octavo.tests.engine.tier_rig import ONE, B, EngineOf, ask, cool, memory, prompt, settled

PATIENCE = 20.0


def named(engine: AsyncEngine, ids: list[int], tenant: str | None = None) -> list[bytes]:
    """As a router names a prompt: from what it knows of the replica, without its engine."""
    root = Namespace(engine.identity, None, tenant).shelf().namespace
    return names_after(root, b"".join(token.to_bytes(4, "little") for token in ids), B)


async def until_matched(view: FleetView, names: list[bytes], wanted: dict[str, int]) -> None:
    with anyio.fail_after(PATIENCE):
        while view.matched(names) != wanted:  # noqa: ASYNC110  # it comes from many sides
            await anyio.sleep(0.002)


@asynccontextmanager
async def news_of(view: FleetView) -> AsyncIterator[FleetNews]:
    news = FleetNews(view)
    try:
        yield news
    finally:
        await news.aclose()


@pytest.fixture
def view() -> FleetView:
    return FleetView(clock=lambda: 0.0)


@pytest.mark.asyncio
async def test_the_view_follows_the_engines_of_this_process(engine_of: EngineOf, view: FleetView) -> None:
    ids = prompt(1, 4 * B + 1)
    async with engine_of() as first, engine_of() as second, news_of(view) as news:
        await ask(first, ids, ONE)  # before anybody reads
        for name, engine in (("first", first), ("second", second)):
            view.join(name)
            news.follow(name, engine.kv_events)
        names = named(first, ids)
        await until_matched(view, names, {"first": 4})
        await ask(second, ids[: 2 * B + 1], ONE)
        await until_matched(view, names, {"first": 4, "second": 2})
        await ask(second, prompt(2, B + 1), ONE, tenant="t")
        await until_matched(view, named(second, prompt(2, B + 1), "t"), {"second": 1})
        assert view.matched(named(second, prompt(2, B + 1))) == {}
        await cool(first)
        await until_matched(view, names, {"second": 2})
        news.left("second")
        view.leave("second")
        await until_matched(view, names, {})
        assert news.following == {"first"}
    assert not first.is_open


@pytest.mark.asyncio
async def test_what_is_in_a_near_tier_counts_and_what_all_share_does_not(engine_of: EngineOf, view: FleetView) -> None:
    ids, store = prompt(1, 3 * B + 1), MemoryStore()
    shared = {"redis": lambda geometry: SharedMemoryTier(geometry, store=store)}
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(engine_of(mounts={"host": memory()}, host_bytes=1))
        far = await stack.enter_async_context(engine_of(mounts=shared))
        news = await stack.enter_async_context(news_of(view))
        for name, engine in (("near", near), ("far", far)):
            view.join(name)
            news.follow(name, engine.kv_events)
            await ask(engine, ids, ONE)
        await until_matched(view, named(near, ids), {"near": 3, "far": 3})
        await cool(near)
        await cool(far)
        assert store.blocks
        await until_matched(view, named(near, ids), {"near": 3})
        await near.erase(None)
        await until_matched(view, named(near, ids), {})


@pytest.mark.asyncio
async def test_news_come_over_the_wire_where_a_status_says_so(engine_of: EngineOf, view: FleetView) -> None:
    ids = prompt(1, 4 * B + 1)
    address = "tcp://127.0.0.1:*"
    publisher = ZmqPublisher(address, replay_endpoint=address, form="names")
    async with engine_of() as engine, news_of(view) as news:
        await ask(engine, ids, ONE)
        view.join("far")
        async with publisher.serving(engine):
            where = ReplicaStatus(kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint)
            for _ in range(3):
                news.reported("far", where)
            news.reported("far", ReplicaStatus())
            assert news.following == {"far"}
            await until_matched(view, named(engine, ids), {"far": 4})
            await cool(engine)
            await until_matched(view, named(engine, ids), {})
            await settled(engine)


@pytest.mark.asyncio
async def test_a_replica_whose_news_end_is_known_by_its_digest_again(
    engine_of: EngineOf, view: FleetView, caplog: pytest.LogCaptureFixture
) -> None:
    from octavo.engine.fleet.status import StatusBoard  # noqa: PLC0415

    ids = prompt(1, 4 * B + 1)

    @asynccontextmanager
    async def breaks() -> AsyncIterator[AsyncIterator[EventBatch]]:
        async def batches() -> AsyncIterator[EventBatch]:
            yield EventBatch(0, 0.0, (Cleared(),))
            await gate.wait()
            raise ValueError("nonsense")

        yield batches()

    gate = asyncio.Event()
    async with engine_of() as engine, news_of(view) as news:
        await ask(engine, ids, ONE)
        view.join("one")
        news.follow("one", breaks)
        await asyncio.sleep(0.01)
        board = StatusBoard(engine)
        view.report("one", await board.status())
        assert view.matched(named(engine, ids)) == {}, "news say that it is empty"
        gate.set()
        await until_matched(view, named(engine, ids), {"one": 4})
        assert news.following == frozenset()
        board.close()


@pytest.mark.asyncio
async def test_an_endpoint_that_is_none_leaves_the_others_alone(engine_of: EngineOf, view: FleetView) -> None:
    ids = prompt(1, 2 * B + 1)
    async with engine_of() as engine, news_of(view) as news:
        view.join("good")
        view.join("bad")
        news.reported("bad", ReplicaStatus(kv_events="nonsense"))
        news.follow("good", engine.kv_events)
        await ask(engine, ids, ONE)
        await until_matched(view, named(engine, ids), {"good": 2})
        assert news.following == {"good"}
        news.left("stranger")
        await news.aclose()
        await news.aclose()
        assert not engine._life.parts.kv_events.log.is_on


@pytest.mark.asyncio
async def test_who_is_followed_anew_is_known_by_the_new_source_alone(engine_of: EngineOf, view: FleetView) -> None:
    ids = prompt(1, 3 * B + 1)
    async with engine_of() as old, engine_of() as new, news_of(view) as news:
        view.join("one")
        await ask(old, ids, ONE)
        news.follow("one", old.kv_events)
        await until_matched(view, named(old, ids), {"one": 3})
        news.follow("one", new.kv_events)
        await ask(old, prompt(5, B + 1), ONE)
        await ask(new, ids[: B + 1], ONE)
        await until_matched(view, named(new, ids), {"one": 1})
        assert view.matched(named(old, prompt(5, B + 1))) == {}
        assert news.following == {"one"}


class Sets:
    """What a listener believes."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()

    def add(self, names: Sequence[bytes], /) -> None:
        assert not self.there & set(names)
        self.there |= set(names)

    def remove(self, names: Sequence[bytes], /) -> None:
        assert self.there >= set(names)
        self.there -= set(names)

    def clear(self) -> None:
        self.there.clear()


NAMES = st.lists(st.sampled_from([bytes([at]) for at in range(12)]), max_size=6, unique=True).map(tuple)
TIERS = st.sampled_from(["device", "host", "elsewhere"])
TENANTS = st.sampled_from([b"a", b"b"])
EVENTS = st.one_of(
    st.builds(Stored, NAMES, st.none(), st.just(b""), st.just(4), TIERS, st.just(b""), TENANTS, st.just(value=False)),
    st.builds(Removed, NAMES, TIERS, st.just(b"")),
    st.builds(Cleared, st.none() | TIERS, st.none() | TENANTS),
)


@given(st.lists(EVENTS, max_size=40))
def test_a_block_counts_while_any_place_has_it(events: list[KvEvent]) -> None:
    heard, model = Sets(), set[tuple[str, bytes, bytes]]()
    holdings = Holdings({"device": 100, "host": 100}, heard)
    for event in events:
        holdings.apply(event)
        if isinstance(event, Stored):
            known = {(tier, name) for tier, name, _ in model}
            model |= {(event.tier, name, event.tenant) for name in event.names if (event.tier, name) not in known}
        elif isinstance(event, Removed):
            model = {each for each in model if each[0] != event.tier or each[1] not in event.names}
        else:
            meant = event.tier, event.tenant
            model = {each for each in model if meant[0] not in (None, each[0]) or meant[1] not in (None, each[2])}
        there = {name for tier, name, _ in model if tier != "elsewhere"}
        assert heard.there == there


@given(st.lists(EVENTS, max_size=40), st.integers(0, 5))
def test_no_place_takes_more_than_it_has_room_for(events: list[KvEvent], room: int) -> None:
    heard = Sets()
    holdings = Holdings({"device": room, "host": 2}, heard)
    for event in events:
        holdings.apply(event)
        assert len(heard.there) <= room + 2


@pytest.mark.asyncio
async def test_others_have_their_turn_while_many_events_are_taken_and_none_is_lost() -> None:
    turns, many = 0, 40
    names = [number.to_bytes(8, "big") for number in range(many * BREATH)]
    heard = Sets()
    holdings = Holdings({"device": len(names)}, heard)
    events = [
        Stored(tuple(names[at : at + BREATH]), None, b"", 4, "device", b"", b"", is_private=False)
        for at in range(0, len(names), BREATH)
    ]

    async def take() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await holdings.take(events)

    task = asyncio.create_task(take())
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= many
    assert heard.there == set(names)


@pytest.mark.asyncio
async def test_what_the_source_before_said_counts_no_more_if_the_new_one_says_nothing(view: FleetView) -> None:
    @asynccontextmanager
    async def tells(*events: KvEvent) -> AsyncIterator[AsyncIterator[EventBatch]]:
        async def batches() -> AsyncIterator[EventBatch]:
            if events:
                yield EventBatch(0, 0.0, events)
            await asyncio.Event().wait()

        yield batches()

    names = [bytes([number]) * 8 for number in range(3)]
    event = Stored(tuple(names), None, b"", 4, "device", b"", b"", is_private=False)
    async with news_of(view) as news:
        view.join("one")
        news.follow("one", lambda: tells(event))
        await until_matched(view, names, {"one": 3})
        news.follow("one", tells)
        assert view.matched(names) == {}
        news.left("one")
        news.follow("one", lambda: tells(event))
        await until_matched(view, names, {"one": 3})
        news.left("one")
        assert view.matched(names) == {}


@pytest.mark.asyncio
async def test_a_random_life_is_followed_to_the_end(engine_of: EngineOf, view: FleetView) -> None:
    random = Random(7)  # noqa: S311  # no secret
    async with engine_of(num_blocks=20, mounts={"host": memory(10)}, host_bytes=1) as engine, news_of(view) as news:
        view.join("one")
        news.follow("one", engine.kv_events)
        prompts = [prompt(number, random.randrange(B, 5 * B)) for number in range(8)]
        for _ in range(25):
            await ask(engine, random.choice(prompts), ONE)
        await settled(engine)
        tier = engine._life.parts.tiering.manager._mounts[0].tier
        there = {name for run in engine._loop.cache.runs() for name in run.names}
        there |= {listed.head.name async for listed in tier.listing()}
        for ids in prompts:
            names = named(engine, ids)
            leading = next((at for at, name in enumerate(names) if name not in there), len(names))
            await until_matched(view, names, {"one": leading} if leading else {})
