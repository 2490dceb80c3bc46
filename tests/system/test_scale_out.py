"""Whole fleets on Ray Serve: chats through the OpenAI routes, a replica that is killed, routers and the simulator
side by side.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.engine.fleet.ray import Layout, ReplicaSpec
from octavo.examples.scale_out import tiny_model
from octavo.examples.scale_out.chats import Plan, Turn, drive, scripts
from octavo.examples.scale_out.cluster import loopback
from octavo.examples.scale_out.trial import deployed, outcome, simulated, tier_tokens, trace_of
from octavo.tests.system.scale_out_rig import MODEL, TOKEN, config_of, kill, spec_of, texts_of_one_engine

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's
]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    with loopback():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"))


def layout(replicas: int, routing: str = "prefix") -> Layout:
    return Layout(replicas=replicas, routing=routing, cpus=0.1, report_interval=1.0, health_interval=1.0)


async def survived(spec: ReplicaSpec, replicas: int, plan: Plan) -> None:
    """All chats are answered as one engine answers them, though a replica is killed in the middle of them."""
    expected = sum(map(len, scripts(plan)))
    seen, killed = Counter[str](), list[str]()

    def on_turn(turn: Turn) -> None:
        seen[turn.replica] += 1
        if not killed and seen.total() >= expected // 2:
            killed.append(turn.replica)
            kill(turn.replica)

    async with deployed(spec, layout(replicas)) as client:
        turns = await drive(client, MODEL, plan, on_turn)
        loaded = await tier_tokens(client, TOKEN)
    assert len(turns) == expected
    assert len(seen) >= replicas
    assert killed
    assert loaded > 0, "nothing was found in the shared tier"
    assert [turn.text for turn in turns] == await texts_of_one_engine(spec, turns, plan)


@pytest.mark.usefixtures("_ray")
@pytest.mark.asyncio
async def test_a_killed_replica_costs_no_answer(redis_socket: Path) -> None:
    spec = spec_of(config_of(128, redis_socket, uuid.uuid4().hex))
    await survived(spec, 2, Plan(chats=40, users=8, think_seconds=0.05))


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.asyncio
async def test_a_killed_replica_costs_no_answer_of_a_model(tiny: str, redis_socket: Path, replicas: int) -> None:
    spec = spec_of(config_of(384, redis_socket, uuid.uuid4().hex), tiny)
    await survived(spec, replicas, Plan(chats=200))


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.asyncio
async def test_the_cache_aware_router_finds_more_and_the_simulator_agrees(tiny: str, replicas: int) -> None:
    spec, plan, found = spec_of(config_of(384), tiny), Plan(chats=200), dict[str, float]()
    for routing in ("prefix", "ray"):
        async with deployed(spec, layout(replicas, routing)) as client:
            turns = await drive(client, MODEL, plan)
        came = outcome(turns, replicas)
        found[routing] = came.hit_ratio
        expected = simulated(await trace_of(turns, spec), turns, layout(replicas, routing), spec.engine)
        assert abs(came.hit_ratio - expected.hit_ratio) <= 0.05, (routing, came, expected)
        if routing == "prefix":
            assert max(came.request_balance, came.work_balance) <= 1.5, came
    assert found["prefix"] >= 1.5 * found["ray"], found
