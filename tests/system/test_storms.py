"""Storms of clients that leave: hundreds at once, over real sockets, each at a moment of its own.

Afterwards nothing of them is left, neither blocks nor tasks nor objects nor memory, the counters add up, and those who
stayed have read what they would have read alone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial

import pytest

from octavo.engine.server.transport import WRITE_HIGH, GuardedProtocol
from octavo.tests.engine.server.socket_rig import Wire, completion, until, wire
from octavo.tests.system.storm_rig import KINDS, STORM_PATIENCE, Storm, answers_alone, rig_of

pytestmark = pytest.mark.system
ROUNDS = 6
GROWTH = 2**18
"""Bytes that may stay of four storms: less than half a kilobyte for each of their clients."""


@pytest.fixture(autouse=True)
def no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """That clients leave is no news. (asyncio warns when it writes to one that has just left.)"""
    yield
    loud = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in loud if "socket.send() raised" not in record.getMessage()] == []


async def storm_passes(clients: int, rounds: int, **config: object) -> list[int]:
    """Bytes in use after each round, as far as they are counted."""
    used = []
    async with rig_of(**config) as rig:
        storm = Storm(rig.address, random.Random(7))  # noqa: S311  # repeatable
        alone, canary = await answers_alone(storm), await rig.canary()
        await rig.calm()
        for _ in range(rounds):
            await storm.rage(clients)
            await rig.empty()
            await rig.calm()
            assert threading.active_count() <= rig.threads + 4  # those of tokenizers and formats stay a while
            assert await rig.canary() == canary
            await rig.calm()
            used.append(tracemalloc.get_traced_memory()[0])
        assert set(storm.statuses) <= {200, 429}
        assert storm.read
        for kind, stream, answer in storm.read:
            assert answer == alone[kind, stream], KINDS[kind]
        finished = rig.engine.stats().finished
        assert finished["abort"] > clients / 20
        assert finished["length"] > 0
    return used


@pytest.mark.asyncio
async def test_eighty_clients_leave_at_moments_of_their_own_and_leave_nothing() -> None:
    await storm_passes(80, 2)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_blocks", [64, 96, 1000])
async def test_three_hundred_clients_leave_again_and_again_and_leave_nothing(num_blocks: int) -> None:
    await storm_passes(300, 4, num_blocks=num_blocks)


@pytest.mark.asyncio
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_storms_take_no_memory_with_them() -> None:
    tracemalloc.start()
    try:
        used = await storm_passes(150, ROUNDS)
    finally:
        tracemalloc.stop()
    assert used[-1] - used[1] < GROWTH, used


@pytest.mark.asyncio
async def test_it_is_a_storm_of_all_kinds() -> None:
    """Each kind of request can be answered, whole and as a stream, and says the same both ways."""
    async with rig_of() as rig:
        alone = await answers_alone(Storm(rig.address, random.Random(0)))  # noqa: S311  # repeatable
        for kind, asked in enumerate(KINDS):
            assert alone[kind, False] == alone[kind, True], asked
        said = [str(alone[kind, False]) for kind in range(len(KINDS))]
        assert len(set(said)) == len(KINDS), said
        await rig.calm()


@pytest.mark.asyncio
async def test_a_connection_that_is_kept_keeps_no_body() -> None:
    """INPUT-08: twenty idle connections, each of which has sent a megabyte."""
    async with rig_of() as rig, AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(wire(rig.address)) for _ in range(20)]
        tracemalloc.start()
        try:
            for connection in connections:
                await connection.send(completion(max_tokens=1, user="x" * 2**20))
                assert (await connection.answer()).status == 200
            await rig.calm(connections=len(connections))
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 4 * 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.asyncio
@pytest.mark.slow
async def test_a_crowd_that_reads_slowly_holds_up_nobody_and_little_memory() -> None:
    """FLOW-01: sixty clients that read a few bytes now and then, and one that reads nothing at all."""
    async with rig_of(num_blocks=4000, max_batch_tokens=2048, max_waiting=100) as rig, AsyncExitStack() as stack:
        slow = partial(wire, rig.address, receive_buffer=4096, patience=STORM_PATIENCE)
        crowd = [await stack.enter_async_context(slow()) for _ in range(61)]
        for number, connection in enumerate(crowd):
            prompt = chr(48 + number) * 8
            await connection.send(completion(prompt, max_tokens=150, stream=True, logprobs=20, ignore_eos=True))
        stops = asyncio.Event()
        readers = [asyncio.create_task(trickle(connection, stops)) for connection in crowd[1:]]
        await until(lambda: rig.engine.stats().running == 61)
        for number in range(3):
            steps = rig.engine.stats().steps
            async with wire(rig.address) as other:
                await other.send(completion(chr(112 + number) * 9, max_tokens=20, ignore_eos=True))
                assert (await other.answer()).status == 200
            assert rig.engine.stats().steps - steps < 40
        await until(lambda: rig.engine.stats().running == 0)
        protocols = [each for each in gc.get_objects() if type(each) is GuardedProtocol]
        assert len(protocols) >= 61
        assert max(each.transport.get_write_buffer_size() for each in protocols) < 4 * WRITE_HIGH
        stops.set()
        await asyncio.gather(*readers)
        await stack.aclose()
        del protocols
        await rig.empty()
        await rig.calm()


async def trickle(connection: Wire, stops: asyncio.Event) -> None:
    while not stops.is_set():
        await connection.read_some()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await stops.wait()
