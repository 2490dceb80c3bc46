"""The publisher over real sockets. What arrives is read with msgpack alone, as a router in another language would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

import anyio
import anyio.lowlevel
import msgspec
import pytest
import zmq
import zmq.asyncio

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.testing import FakeRunner
from octavo.errors import TelemetryError
from octavo.telemetry.events.log import Cleared, EventBatch, Removed
from octavo.telemetry.events.wire import block_hash, payload
from octavo.telemetry.events.zmq_publisher import ZmqPublisher
from octavo.tests.telemetry.events.event_rig import ANY, PATIENCE, SPACE, TENANT, Engine, digest, stored

pytestmark = pytest.mark.asyncio
END = b"\xff" * 8


class Message(NamedTuple):
    topic: bytes
    seq: int
    body: list[object]

    @property
    def events(self) -> list[list[object]]:
        events = self.body[1]
        assert isinstance(events, list)
        return events


Sockets: TypeAlias = zmq.asyncio.Context


@asynccontextmanager
async def sockets() -> AsyncIterator[Sockets]:
    with zmq.asyncio.Context() as context:
        try:
            with anyio.fail_after(PATIENCE):
                yield context
        finally:
            context.destroy(linger=0)


async def subscribed(context: Sockets, publisher: ZmqPublisher, topic: bytes = b"") -> zmq.asyncio.Socket:
    """A reader whose subscription has reached the publisher: seen by what is sent until it has."""
    reader = context.socket(zmq.SUB)
    reader.connect(publisher.endpoint)
    reader.subscribe(topic)
    monitor = publisher._opened().news
    while not await reader.poll(5):
        monitor.send_multipart((b"%sprobe" % topic, bytes(8), msgspec.msgpack.encode([0.0, [], 0])))
    await reader.recv_multipart()
    return reader


async def message(reader: zmq.asyncio.Socket) -> Message:
    """The next one that is no probe."""
    while True:
        topic, number, body = await reader.recv_multipart()
        if not topic.endswith(b"probe"):
            return Message(topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(body))


async def sent(publisher: ZmqPublisher, count: int) -> None:
    """Wait until the publisher has sent so many messages."""
    while publisher.published < count:
        await anyio.lowlevel.checkpoint()


async def replayed(context: Sockets, publisher: ZmqPublisher, start: int, *, framed: bool = True) -> list[Message]:
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint or "")
    question = start.to_bytes(8, "big")
    await socket.send_multipart([b"", question] if framed else [question])
    found: list[Message] = []
    while True:
        frames = await socket.recv_multipart()
        if framed:
            assert frames.pop(0) == b""
        topic, number, body = frames
        if number == END:
            assert (topic, body) == (b"", b"")
            socket.close(linger=0)
            return found
        found.append(Message(topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(body)))


async def test_two_readers_get_the_same_messages_in_the_form_that_routers_read() -> None:
    engine = Engine()
    async with sockets() as context, ZmqPublisher(ANY, topic="kv@pod@model", rank=3).serving(engine) as publisher:
        readers = [await subscribed(context, publisher, topic) for topic in (b"", b"kv@")]
        engine.log.note(stored(1, 2, parent=7))
        engine.log.note(Removed((digest(1),), "device", SPACE))
        await anyio.lowlevel.checkpoint()
        engine.log.note(stored(3, tier="host"))
        first, second = [[await message(reader), await message(reader)] for reader in readers]
    assert first == second
    assert [each.topic for each in first] == [b"kv@pod@model"] * 2
    assert [each.seq for each in first] == [1, 2], "number 0 was what is stored"
    hashes = [int.from_bytes(digest(number)[-8:], "big") for number in (1, 2, 3, 7)]
    assert first[0].body == [
        12.5,
        [
            ["BlockStored", hashes[:2], hashes[3], [1, 1000, 2, 2000], 2, None, "GPU", None],
            ["BlockRemoved", hashes[:1], "GPU"],
        ],
        3,
    ]
    assert first[1].events == [["BlockStored", hashes[2:3], None, [3, 3000], 2, None, "CPU", None]]


async def test_a_reader_that_comes_late_or_missed_some_asks_for_them() -> None:
    engine = Engine()
    engine.standing_now, engine.places = [stored(5)], ("disk",)
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, topic="t")
    async with sockets() as context, publisher.serving(engine):
        while publisher.published < 2:  # device and tier
            await anyio.lowlevel.checkpoint()
        for number in range(4):
            engine.log.note(stored(number))
            await anyio.lowlevel.checkpoint()
        await sent(publisher, 6)
        everything = await replayed(context, publisher, 0)
        assert [each.seq for each in everything] == list(range(6))
        assert everything[0].events == [
            ["AllBlocksCleared"],
            ["BlockStored", [block_hash(digest(5))], None, [5, 5000], 2, None, "GPU", None],
        ]
        assert everything[1].events == [
            ["BlockStored", [block_hash(digest(99))], None, [99, 99000], 2, None, "STORAGE", None]
        ]
        assert await replayed(context, publisher, 4) == everything[4:]
        assert await replayed(context, publisher, 4, framed=False) == everything[4:]
        assert await replayed(context, publisher, 6) == []


async def test_nonsense_at_the_replay_endpoint_is_passed_over() -> None:
    engine = Engine()
    async with sockets() as context, ZmqPublisher(ANY, replay_endpoint=ANY).serving(engine) as publisher:
        socket = context.socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint or "")
        for frames in ([b""], [b"", b"short"], [b"", b"", b"", bytes(8)], [b"x" * 100_000]):
            await socket.send_multipart(frames)
        assert len(await replayed(context, publisher, 0)) == 1
        assert not await socket.poll(0)


async def test_only_the_last_messages_are_kept() -> None:
    engine = Engine()
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, most=3)
    async with sockets() as context, publisher.serving(engine):
        for number in range(9):
            engine.log.note(stored(number))
            await anyio.lowlevel.checkpoint()
        await sent(publisher, 10)
        assert len(publisher._sent) == 3
        assert [each.seq for each in await replayed(context, publisher, 0)] == [7, 8, 9]


async def test_what_was_before_a_new_beginning_is_not_kept() -> None:
    """However often a part is cleared, which is told as a new beginning with all that is left."""
    engine = Engine()
    engine.standing_now = [stored(1)]
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY)
    async with sockets() as context, publisher.serving(engine):
        for _ in range(20):
            published = publisher.published
            engine.log.note(stored(1))
            engine.log.note(Cleared("device", TENANT))
            await sent(publisher, published + 1)
        engine.log.note(stored(2))
        await sent(publisher, publisher.published + 1)
        kept = await replayed(context, publisher, 0)
        assert [each.events[0][0] for each in kept] == ["AllBlocksCleared", "BlockStored"]
        assert kept[-1].seq == publisher.published - 1


async def test_a_reader_that_never_reads_holds_nobody_up() -> None:
    engine = Engine()
    publisher = ZmqPublisher(ANY, most=10)
    async with sockets() as context, publisher.serving(engine):
        dead = await subscribed(context, publisher)
        alive = await subscribed(context, publisher)
        for _ in range(300):
            engine.log.note(stored(*range(200)))
            await anyio.lowlevel.checkpoint()
        await sent(publisher, 301)
        engine.log.note(Removed((digest(1),), "device", SPACE))
        while (await message(alive)).events != [["BlockRemoved", [block_hash(digest(1))], "GPU"]]:
            while not await alive.poll(20):
                engine.log.note(Removed((digest(1),), "device", SPACE))
        assert not dead.closed


async def test_what_is_cleared_in_part_is_told_anew() -> None:
    """The form knows only ``AllBlocksCleared``."""
    engine = Engine()
    async with sockets() as context, ZmqPublisher(ANY).serving(engine) as publisher:
        reader = await subscribed(context, publisher)
        engine.standing_now = [stored(1), stored(2)]
        engine.log.note(Cleared("host", TENANT))
        told = await message(reader)
        assert [event[0] for event in told.events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
        engine.log.note(Cleared())
        assert (await message(reader)).events == [["AllBlocksCleared"]]


async def test_events_can_be_maps_as_in_the_newest_form() -> None:
    batch = EventBatch(4, 1.5, (Cleared(), stored(1, parent=2), Removed((digest(1),), "host", SPACE)))
    time, events, rank = msgspec.msgpack.decode(payload(batch, rank=0, form="map"))
    assert (time, rank) == (1.5, 0)
    assert events == [
        {"type": "AllBlocksCleared"},
        {
            "type": "BlockStored",
            "block_hashes": [block_hash(digest(1))],
            "parent_block_hash": block_hash(digest(2)),
            "token_ids": [1, 1000],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [block_hash(digest(1))], "medium": "CPU"},
    ]


async def test_blocks_of_a_tenant_are_told_from_public_ones_with_the_same_tokens() -> None:
    """By an extra key of the first block, as with a salt; it is a part of the digest, and no digest of an image."""
    batch = EventBatch(0, 0.0, (stored(1, 2, is_private=True), stored(3, parent=2, is_private=True)))
    _, (first, second), _ = msgspec.msgpack.decode(payload(batch, rank=0, form="array"))
    assert first[8] == [[TENANT.hex()[:32]], None]
    assert len(second) == 8


async def test_leaving_frees_the_endpoints_and_ends_the_events() -> None:
    engine = Engine()
    async with ZmqPublisher(ANY, replay_endpoint=ANY).serving(engine) as publisher:
        places = publisher.endpoint, publisher.replay_endpoint
        with pytest.raises(TelemetryError, match="serves once"):
            async with publisher.serving(engine):
                raise AssertionError
    assert not engine.log.is_on
    with pytest.raises(TelemetryError, match="not serving"):
        _ = publisher.endpoint
    async with ZmqPublisher(places[0], replay_endpoint=places[1]).serving(engine) as again:
        assert (again.endpoint, again.replay_endpoint) == places


async def test_an_endpoint_in_use_is_named_and_nothing_stays_behind() -> None:
    engine = Engine()
    async with ZmqPublisher(ANY).serving(engine) as publisher:
        for taken in (
            ZmqPublisher(publisher.endpoint),
            ZmqPublisher(ANY, replay_endpoint=publisher.endpoint),
            ZmqPublisher("nonsense"),
        ):
            with pytest.raises(TelemetryError, match=r"127\.0\.0\.1|nonsense"):
                async with taken.serving(engine):
                    raise AssertionError
        assert engine.log.is_on
    with pytest.raises(LookupError):
        async with ZmqPublisher(ANY).serving(engine):
            raise LookupError("an error of the body comes out as it is")


async def test_it_can_connect_to_a_reader_that_has_bound() -> None:
    engine = Engine()
    async with sockets() as context:
        reader = context.socket(zmq.SUB)
        reader.subscribe(b"")
        port = reader.bind_to_random_port("tcp://127.0.0.1")
        publisher = ZmqPublisher(f"tcp://127.0.0.1:{port}", binds=False)
        async with publisher.serving(engine):
            while not await reader.poll(5):
                engine.log.note(Removed((digest(1),), "device", SPACE))
            assert (await message(reader)).events


async def test_an_engine_is_mirrored_over_the_wire_to_its_end() -> None:
    """The blocks that a router thinks are there are those in the cache; after the engine has ended, none."""
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    config = EngineConfig(num_blocks=12, block_size=4)
    known: set[object] = set()

    def apply(told: Message) -> None:
        for kind, *fields in told.events:
            hashes = fields[0] if fields else []
            assert isinstance(hashes, list)
            if kind == "BlockStored":
                assert fields[1] is None or fields[1] in known
                assert fields[3] == 4
                known.update(hashes)
            elif kind == "BlockRemoved":
                assert known.issuperset(hashes)
                known.difference_update(hashes)
            else:
                known.clear()

    engine, publisher = AsyncEngine(runner=FakeRunner(), config=config), ZmqPublisher(ANY, replay_endpoint=ANY)
    async with sockets() as context, engine:
        await engine.complete([*range(30)], greedy)
        async with publisher.serving(engine):
            reader = await subscribed(context, publisher)
            for start in (40, 10, 20, 0):
                await engine.complete([*range(start, start + 24)], greedy)
            names = {block_hash(name) for run in engine._loop.cache.runs() for name in run.names}
            await sent(publisher, engine._life.parts.kv_events.log.next_seq)
            for told in await replayed(context, publisher, 0):
                apply(told)
            assert known == names
            assert names
            await engine.close()
            last = await message(reader)
            while last.events != [["AllBlocksCleared"]]:
                last = await message(reader)
