"""As many replicas as the waiting tokens ask for: more of them under load, fewer when it is over, and what one leaves
is there for the next.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from octavo import EngineConfig
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.ray import Layout, RayFleet, Replica, ReplicaSpec
from octavo.engine.fleet.ray.ingress import reader_of
from octavo.engine.fleet.ray.layout import replica_options
from octavo.engine.fleet.ray.slots import claimed
from octavo.engine.life import Loaded
from octavo.engine.server.running import serving_app
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.examples.scale_out.cluster import loopback
from octavo.tests.system.scale_out_rig import LETTERS, MODEL, TOKEN

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's
]
PATIENCE = 60.0
STREAM_TOKENS = 600
"""Of a stream that is still running when its replica is told to end, and not yet when it has to."""


def load_slow() -> Loaded:
    """Where replicas run."""
    return FakeRunner(vocab_size=LETTERS, step_seconds=0.02), FakeCodec(LETTERS)


@asynccontextmanager
async def scaled(snapshots: Path) -> AsyncIterator[httpx.AsyncClient]:
    """One to three replicas, and a client of their gateway."""
    spec = ReplicaSpec(
        model="fake",
        load=load_slow,
        engine=EngineConfig(block_size=4, num_blocks=2048, max_running=2, max_waiting=100, eviction_policy="lru"),
        server=ServerSettings(model_names=(MODEL,), admin_token=TOKEN),
        snapshots=snapshots,
        drain_timeout=PATIENCE,
        save_timeout=10.0,
    )
    layout = Layout(
        replicas=1,
        most=3,
        cpus=0.1,
        waiting_tokens=400.0,
        upscale_delay=0.5,
        downscale_delay=1.0,
        report_interval=0.5,
        health_interval=1.0,
    )
    options = replica_options(spec, layout)
    scaling = options["autoscaling_config"]
    assert isinstance(scaling, AutoscalingConfig)
    options["autoscaling_config"] = scaling.model_copy(  # Ray means its interval to be one of a whole cluster
        update={"metrics_interval_s": 0.5, "look_back_period_s": 2.0}
    )
    name = f"octavo-{uuid.uuid4().hex[:8]}"
    handle = serve.run(serve.deployment(Replica, **options).bind(spec), name=name, route_prefix=None)
    fleet = RayFleet(handle)
    await fleet.meet()
    gateway = Gateway(fleet, reader_of(spec), spec.server)
    async with (
        serving_app(gateway.app, gateway.service) as address,
        httpx.AsyncClient(base_url=address.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=200)) as client,
    ):
        yield client
    serve.delete(name)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def replicas(client: httpx.AsyncClient) -> set[str]:
    return set((await client.get("/health")).json()["replicas"])


async def stats(client: httpx.AsyncClient) -> Mapping[str, Mapping[str, object]]:
    answer = await client.get("/admin/stats", headers={"Authorization": f"Bearer {TOKEN}"})
    found: Mapping[str, Mapping[str, object]] = answer.json()["replicas"]
    return found


async def restored(client: httpx.AsyncClient, replica: str) -> int:
    """Blocks that it took up when it started."""
    report = (await stats(client)).get(replica, {}).get("restore")
    return int(report["stored_blocks"]) if isinstance(report, dict) else 0


def prompt(number: int) -> str:
    return f"{number:03}_what_waits_" * 16


def body(number: int, tokens: int, **more: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


@dataclass
class Stream:
    """One answer as it comes."""

    number: int
    replica: str = ""
    tokens: int = 0
    is_whole: bool = False
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: httpx.AsyncClient) -> None:
        asked = body(self.number, STREAM_TOKENS, stream=True)
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            self.replica = answer.headers["x-octavo-replica"]
            async for line in answer.aiter_lines():
                self.is_whole = line == "data: [DONE]" or self.is_whole
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    self.tokens += sum(bool(choice["text"]) for choice in chunk["choices"])
                    self.began.set()


async def cached(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """Who answers a prompt, and how much of it was there."""
    answer = await client.post("/v1/completions", json=body(number, 1))
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer.headers["x-octavo-replica"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def waits(client: httpx.AsyncClient, first: int) -> None:
    """Far more than one replica does in time, until it is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(first, first + 40):
            tasks.create_task(client.post("/v1/completions", json=body(number, 400)))


async def grown(client: httpx.AsyncClient, first: int) -> set[str]:
    """Let so much wait that there are three replicas."""
    burst = asyncio.create_task(waits(client, first))
    await until(lambda: _has(client, 3))
    burst.cancel()
    with pytest.raises(asyncio.CancelledError):
        await burst
    return await replicas(client)


async def _has(client: httpx.AsyncClient, count: int) -> bool:
    return len(await replicas(client)) == count


async def _idle(client: httpx.AsyncClient) -> bool:
    return not any(each["running"] or each["waiting"] for each in (await stats(client)).values())


@pytest.fixture
def _ray() -> Iterator[None]:
    with loopback():
        yield


@pytest.mark.usefixtures("_ray")
@pytest.mark.asyncio
async def test_replicas_come_with_the_load_and_leave_their_caches_when_they_go(tmp_path: Path) -> None:
    async with scaled(tmp_path) as client:
        assert len(await replicas(client)) == 1
        before = await grown(client, 100)
        await until(lambda: _idle(client))

        streams = [Stream(number) for number in range(3)]
        reading = [asyncio.create_task(stream.read(client)) for stream in streams]
        await asyncio.gather(*(stream.began.wait() for stream in streams))
        await until(lambda: _fewer(client, before))  # three streams need two replicas of two requests each
        await asyncio.gather(*reading)
        assert [(stream.tokens, stream.is_whole) for stream in streams] == [(STREAM_TOKENS, True)] * 3

        await until(lambda: _has(client, 1))  # nothing runs any more
        left = before - await replicas(client)
        theirs = [stream.number for stream in streams if stream.replica in left]
        assert theirs, "every stream was at the replica that stays"
        leavers = {stream.replica for stream in streams} & left  # one that has computed nothing leaves nothing
        await until(lambda: _written(tmp_path, len(leavers)))

        after = await grown(client, 200)
        new = after - before
        assert [await restored(client, replica) > 0 for replica in new].count(True) == len(leavers)
        for number in theirs:
            who, tokens = await cached(client, number)
            assert (who in new, tokens) == (True, len(prompt(number)) // 4 * 4 - 4)
        await until(lambda: _idle(client))

    await until(_nobody)
    with claimed(tmp_path) as first, claimed(tmp_path) as second, claimed(tmp_path) as third:
        assert {first.parent, second.parent, third.parent} == {tmp_path}
        assert {first.name, second.name, third.name} == {"0", "1", "2"}  # nobody holds one any more


async def _fewer(client: httpx.AsyncClient, before: set[str]) -> bool:
    return len(await replicas(client) & before) < len(before)


async def _written(folder: Path, count: int) -> bool:
    return len(list(folder.glob("*/snapshot"))) >= count  # noqa: ASYNC240  # of a test


async def _nobody() -> bool:
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return not any(name.startswith("SERVE_REPLICA::") for name in names)
