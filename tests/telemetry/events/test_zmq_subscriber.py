"""The subscriber over real sockets: whoever applies what it yields has what the publisher's engine has, or less."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
import zmq
import zmq.asyncio

from octavo.errors import TelemetryError
from octavo.telemetry.events.log import Cleared, EventBatch, KvEvent, Removed, Stored
from octavo.telemetry.events.wire import Form, payload, told
from octavo.telemetry.events.zmq_publisher import ZmqPublisher
from octavo.telemetry.events.zmq_subscriber import ZmqSubscriber, wide_context
from octavo.tests.telemetry.events.event_rig import ANY, PATIENCE, SPACE, TENANT, Engine, digest, stored

FORMS: Sequence[Form] = ("array", "map", "names")


class Mirror:
    """What a router thinks is there, by applying what it reads."""

    def __init__(self, batches: ZmqSubscriber) -> None:
        self.batches = batches
        self.there: set[tuple[str, bytes]] = set()
        self.read: list[EventBatch] = []

    async def run(self) -> None:
        async for batch in self.batches:
            self.read.append(batch)
            for event in batch.events:
                self.apply(event)

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, Stored):
            self.there.update((event.tier, name) for name in event.names)
        elif isinstance(event, Removed):
            self.there.difference_update((event.tier, name) for name in event.names)
        else:
            self.there.clear()


@asynccontextmanager
async def mirrored(endpoint: str, replay: str | None = None, **options: float) -> AsyncIterator[Mirror]:
    most, wait = int(options.get("most", 10_000)), float(options.get("wait", 0.2))
    async with ZmqSubscriber(endpoint, replay, most=most, wait=wait) as batches:
        mirror = Mirror(batches)
        task = asyncio.create_task(mirror.run())
        try:
            with anyio.fail_after(PATIENCE):
                yield mirror
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
    with anyio.fail_after(PATIENCE):
        while not condition():
            meanwhile()
            await anyio.sleep(0.002)


def device(*numbers: int) -> set[tuple[str, bytes]]:
    return {("device", digest(number)) for number in numbers}


def more(engine: Engine, number: int) -> None:
    engine.log.note(stored(number))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_sent_is_read_as_it_was_but_for_tokens_and_namespaces(form: Form) -> None:
    def names(number: int) -> bytes:
        return digest(number) if form == "names" else digest(number)[-8:]

    tier = {"names": "disk"}.get(form, "STORAGE")
    events = (Cleared(), stored(1, 2, parent=7), stored(3, tier="disk"), Removed((digest(1), digest(2)), "host", SPACE))
    read = told(payload(EventBatch(4, 1.5, events), rank=3, form=form, since=1.25))
    assert read.time == 1.5
    assert read.since == (1.25 if form == "names" else 0.0)
    assert read.events == (
        Cleared(),
        Stored((names(1), names(2)), names(7), b"", 2, "device", b"", b"", is_private=False),
        Stored((names(3),), None, b"", 2, tier, b"", b"", is_private=False),
        Removed((names(1), names(2)), "host", b""),
    )


def test_names_travel_without_tokens_and_tenants() -> None:
    batch = EventBatch(0, 0.0, (stored(1, 2, is_private=True),))
    message = payload(batch, rank=0, form="names")
    assert TENANT not in message
    _, [event], *_ = msgspec.msgpack.decode(message)
    assert event == ["BlockStored", [digest(1), digest(2)], None, [], 2, None, "device", None]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        *map(
            msgspec.msgpack.encode,
            [
                7,
                {},
                [1.0],
                ["soon", []],
                [1.0, [7]],
                [1.0, [[]]],
                [1.0, [{}]],
                [1.0, [["BlockMoved", [1]]]],
                [1.0, [["BlockStored"]]],
                [1.0, [["BlockStored", [-1]]]],
                [1.0, [["BlockStored", ["x"]]]],
                [1.0, [["BlockStored", [bytes(65)]]]],
                [1.0, [["BlockRemoved", [1], 5]]],
                [1.0, [{"type": "BlockRemoved"}]],
            ],
        ),
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(TelemetryError, match="cannot be read"):
        told(message)


def test_what_later_writers_add_is_passed_over() -> None:
    message = msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "GPU", "more"]], 0, 0.0, "more"])
    assert told(message).events == (Removed(((1).to_bytes(8, "big"),), "device", b""),)


@pytest.mark.asyncio
async def test_who_comes_late_has_what_was_stored_before_and_what_comes_then() -> None:
    engine = Engine()
    engine.standing_now, engine.places = [stored(5)], ("disk",)
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, form="names")
    async with publisher.serving(engine):
        engine.log.note(stored(1, 2))
        await until(lambda: publisher.published == 3)
        async with mirrored(publisher.endpoint, publisher.replay_endpoint) as mirror:
            await until(lambda: mirror.there == device(5, 1, 2) | {("disk", digest(99))})
            engine.log.note(Removed((digest(1),), "device", SPACE))
            await until(lambda: mirror.there == device(5, 2) | {("disk", digest(99))})
            engine.standing_now, engine.places = [stored(2)], ()
            engine.log.note(Cleared("disk", TENANT))
            await until(lambda: mirror.there == device(2))
        assert (mirror.batches.gaps, mirror.batches.malformed) == (0, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", FORMS)
async def test_who_comes_when_the_beginning_is_gone_is_told_anew(form: Form) -> None:
    """Nothing happens in the engine meanwhile: asking for it is enough."""
    engine = Engine()
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, form=form, most=3)
    async with publisher.serving(engine):
        for number in range(6):
            engine.log.note(stored(number))
            await anyio.lowlevel.checkpoint()
        await until(lambda: publisher.published == 7)
        engine.standing_now = [stored(number) for number in range(6)]
        async with mirrored(publisher.endpoint, publisher.replay_endpoint) as mirror:
            await until(lambda: len(mirror.there) == 6, lambda: more(engine, 5) if publisher.published > 7 else None)
            told_anew = publisher.published
            async with mirrored(publisher.endpoint, publisher.replay_endpoint) as another:
                await until(lambda: another.there == mirror.there, lambda: more(engine, 5))
        assert told_anew >= 8


@pytest.mark.asyncio
async def test_a_publisher_that_comes_later_is_found() -> None:
    async with AsyncExitStack() as stack:
        probe = ZmqPublisher(ANY, replay_endpoint=ANY)
        async with probe.serving(Engine()):
            places = probe.endpoint, probe.replay_endpoint
        mirror = await stack.enter_async_context(mirrored(*places, wait=0.05))
        await anyio.sleep(0.1)
        engine = Engine()
        engine.standing_now = [stored(1)]
        publisher = ZmqPublisher(places[0], replay_endpoint=places[1], form="names")
        await stack.enter_async_context(publisher.serving(engine))
        await until(lambda: mirror.there == device(1))


@pytest.mark.asyncio
@pytest.mark.parametrize("form", FORMS)
async def test_a_publisher_that_was_started_again_is_not_taken_for_the_one_before(form: Form) -> None:
    """Neither when it has told less than that, nor, where the form says who tells, when it has told more."""
    first, second = Engine(), Engine()
    second.log._wall = lambda: 99.0
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, form=form)
    async with AsyncExitStack() as stack:
        async with publisher.serving(first):
            places = publisher.endpoint, publisher.replay_endpoint
            many = 4 if form == "names" else 2000
            for number in range(many):
                first.log.note(stored(number % 4))
                await anyio.lowlevel.checkpoint()
            await until(lambda: publisher.published == many + 1)
            mirror = await stack.enter_async_context(mirrored(*places, wait=0.1))
            await until(lambda: len(mirror.there) == 4, lambda: more(first, 3))
        again = ZmqPublisher(places[0], replay_endpoint=places[1], form=form)
        await stack.enter_async_context(again.serving(second))
        if form == "names":  # more than the one before
            for number in range(20, 20 + 2 * publisher.published):
                second.log.note(stored(number))
                await anyio.lowlevel.checkpoint()
        await until(lambda: bool(mirror.there) and not mirror.there & _wire(form, range(4)), lambda: more(second, 200))
        assert mirror.there >= _wire(form, range(20, 24)) or form != "names"


def _wire(form: Form, numbers: Sequence[int]) -> set[tuple[str, bytes]]:
    return {("device", digest(number) if form == "names" else digest(number)[-8:]) for number in numbers}


class Sender:
    """A publisher that sends what a test says, whatever it is."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.news = context.socket(zmq.PUB)
        self.news.bind(ANY)
        self.endpoint = self.news.getsockopt_string(zmq.LAST_ENDPOINT)

    async def send(self, *frames: bytes) -> None:
        await self.news.send_multipart(frames)

    async def tell(self, number: int, *events: KvEvent) -> None:
        await self.send(b"", number.to_bytes(8, "big"), message(number, *events))


def message(number: int, *events: KvEvent) -> bytes:
    return payload(EventBatch(number, 0.0, events), rank=0, form="names", since=5.0)


@asynccontextmanager
async def sender() -> AsyncIterator[Sender]:
    context = zmq.asyncio.Context()
    try:
        yield Sender(context)
    finally:
        context.destroy(linger=0)


@pytest.mark.asyncio
async def test_what_was_lost_for_good_clears_the_mirror() -> None:
    async with sender() as publisher, mirrored(publisher.endpoint) as mirror:
        while not mirror.there:
            await publisher.tell(0, Cleared(), stored(1))
            await anyio.sleep(0.01)
        await publisher.tell(1, stored(2))
        await publisher.tell(3, stored(4))
        await until(lambda: mirror.there == device(4))
        assert mirror.read[-1].has_gap
        assert mirror.batches.gaps == 1


@pytest.mark.asyncio
async def test_nonsense_is_counted_and_costs_no_more_than_a_gap() -> None:
    async with sender() as publisher, mirrored(publisher.endpoint) as mirror:
        while not mirror.there:
            await publisher.tell(0, Cleared(), stored(1))
            await anyio.sleep(0.01)
        for frames in ([b"x"], [b"", b"short", b""], [b"", bytes(8), b"\xc1"], [b"", bytes(8), message(0), b"more"]):
            await publisher.send(*frames)
        await publisher.tell(1, stored(2))
        await until(lambda: mirror.there == device(1, 2))
        assert mirror.batches.malformed == 4
        await publisher.send(b"", b"\xff" * 8, message(0, stored(7)))  # whoever says so cannot block what comes after
        await publisher.tell(2, stored(3))
        await publisher.tell(3, stored(4))
        await until(lambda: mirror.there >= device(4))


@pytest.mark.asyncio
async def test_a_peer_that_sends_without_end_leaves_others_their_turn() -> None:
    """Its messages lie in the socket when they are read, so that nothing has to be waited for."""
    turns, many = 0, 200

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with sender() as publisher, ZmqSubscriber(publisher.endpoint) as batches:
        first = asyncio.create_task(anext(batches))
        while not first.done():
            await publisher.tell(0, Cleared(), stored(1))
            await anyio.sleep(0.01)
        for number in range(1, many + 1):
            await publisher.tell(number, stored(number))
        await anyio.sleep(0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            for _ in range(many):
                await anext(batches)
            assert turns >= many
            tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_a_replay_that_nobody_answers_holds_up_no_news() -> None:
    async with sender() as publisher, mirrored(publisher.endpoint, "tcp://127.0.0.1:9", wait=0.05) as mirror:
        number = 0
        while len(mirror.read) < 50:
            await publisher.tell(number, stored(number % 256))
            number += 1
            await anyio.sleep(0.001)
        assert mirror.there


@pytest.mark.asyncio
@pytest.mark.parametrize("places", [("nonsense", None), ("tcp://127.0.0.1:1", "nonsense")])
async def test_what_is_no_endpoint_is_named(places: tuple[str, str | None]) -> None:
    with pytest.raises(TelemetryError, match="nonsense"):
        async with ZmqSubscriber(*places) as batches:
            await anext(batches)


@pytest.mark.asyncio
async def test_it_is_entered_once_before_it_is_read() -> None:
    batches = ZmqSubscriber("tcp://127.0.0.1:1")
    with pytest.raises(TelemetryError, match="entered before"):
        await anext(batches)
    async with batches:
        pass
    with pytest.raises(TelemetryError, match="used once"):
        async with batches:
            raise AssertionError


def threads() -> int:
    """Of this process, those of libraries, too."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.asyncio
async def test_many_share_one_context_which_stays_its_owners() -> None:
    context = wide_context()
    try:
        before = threads()
        async with AsyncExitStack() as readers:
            for _ in range(20):
                await readers.enter_async_context(ZmqSubscriber("tcp://127.0.0.1:9", context=context))
            assert threads() <= before + 2  # those of the context
        assert not context.closed
        with pytest.raises(TelemetryError):
            async with ZmqSubscriber("nowhere", context=context):
                pass
        assert not context.closed
    finally:
        context.destroy(linger=0)
