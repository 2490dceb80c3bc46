"""RayFleet over two real replicas of a fake model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing

import anyio
import msgspec
import pytest
import pytest_asyncio
from ray import serve

from octavo import EngineConfig
from octavo.engine.fleet.base import AnswerHead, HttpRequest, Wanted
from octavo.engine.fleet.ray import Layout, RayFleet, ReplicaSpec
from octavo.engine.fleet.ray.build import replicas_of
from octavo.engine.fleet.ray.seams import Handle
from octavo.engine.life import Loaded
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ReplicaLost
from octavo.examples.scale_out.cluster import loopback
from octavo.policies.routing.base import RoutedRequest

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's
]
ANY = RoutedRequest((), 40, 8, 4)
TOKEN = "only-for-this-test"  # noqa: S105  # of a server in a test


def load() -> Loaded:
    """Where replicas run."""
    return FakeRunner(step_seconds=0.001), FakeCodec()


@pytest.fixture(scope="module")
def handle() -> Iterator[Handle]:
    spec = ReplicaSpec(
        model="fake",
        load=load,
        engine=EngineConfig(block_size=4, eviction_policy="lru"),
        server=ServerSettings(admin_token=TOKEN),
        drain_timeout=1.0,
        save_timeout=2.0,
    )
    with loopback():
        layout = Layout(cpus=0.1, report_interval=0.5, health_interval=1.0)
        yield serve.run(replicas_of(spec, layout), name="fleet", route_prefix=None)


@pytest_asyncio.fixture
async def fleet(handle: Handle) -> AsyncIterator[RayFleet]:
    made = RayFleet(handle, patience=1.0)
    await made.meet()
    yield made


def get(path: str) -> HttpRequest:
    return HttpRequest("GET", path, b"", [(b"authorization", f"Bearer {TOKEN}".encode())], b"")


def asked(tokens: int) -> HttpRequest:
    body = {"prompt": "0123456789", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return HttpRequest(
        "POST", "/v1/completions", b"", [(b"content-type", b"application/json")], msgspec.json.encode(body)
    )


async def running(fleet: RayFleet) -> Mapping[str, int]:
    answers = await fleet.ask_all(get("/admin/stats"))
    return {replica: msgspec.json.decode(answer.body)["running"] for replica, answer in answers.items()}


async def at_rest(fleet: RayFleet) -> None:
    """Until nothing runs anywhere."""
    with anyio.fail_after(20.0):
        while sum((await running(fleet)).values()):  # noqa: ASYNC110  # they are in other processes
            await anyio.sleep(0.01)


async def test_an_answer_comes_as_the_replica_gives_it_with_why_it_was_chosen(fleet: RayFleet) -> None:
    async with aclosing(fleet.send(asked(8), Wanted(ANY))) as pieces:
        head, *body = [piece async for piece in pieces]
    assert isinstance(head, AnswerHead)
    assert head.status == 200
    assert head.routed is not None
    assert head.replica in await running(fleet)
    assert b"".join(piece for piece in body if isinstance(piece, bytes)).endswith(b"data: [DONE]\n\n")
    assert fleet.scheme is not None
    assert fleet.scheme.block_tokens == 4


async def test_closing_an_answer_ends_it_in_the_engine(fleet: RayFleet) -> None:
    async with aclosing(fleet.send(asked(3000), Wanted(ANY))) as pieces:
        for _ in range(4):
            await anext(pieces)
        assert sum((await running(fleet)).values()) == 1
    await at_rest(fleet)


async def test_a_cancelled_reader_is_cancelled_and_nothing_runs_on(fleet: RayFleet) -> None:
    async def read() -> None:
        async with aclosing(fleet.send(asked(3000), Wanted(ANY))) as pieces:
            async for _ in pieces:
                started.set()

    started = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await started.wait()
        tasks.cancel_scope.cancel()
    assert tasks.cancel_scope.cancelled_caught
    await at_rest(fleet)


async def test_every_replica_can_be_asked_alone(fleet: RayFleet) -> None:
    for replica in await running(fleet):
        async with aclosing(fleet.send(get("/health"), Wanted(ANY, only=replica))) as pieces:
            head = await anext(pieces)
            assert isinstance(head, AnswerHead)
            assert (head.replica, head.routed and head.routed.reason) == (replica, None)
            async for _ in pieces:
                pass


async def test_one_that_is_not_there_is_lost_at_once(fleet: RayFleet) -> None:
    with pytest.raises(ReplicaLost, match="gone is not there") as lost:
        await anext(fleet.send(get("/health"), Wanted(ANY, only="gone")))
    assert lost.value.replica == "gone"


async def test_all_are_asked(fleet: RayFleet) -> None:
    answers = await fleet.ask_all(get("/health"))
    assert len(answers) == 2
    assert all(answer.head.status == 200 and answer.head.replica == name for name, answer in answers.items())
