"""What the tests of whole fleets on Ray share: models, kills, and what one engine alone would have said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import ray

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.fleet.ray import ReplicaSpec
from octavo.engine.life import Loaded
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.examples.scale_out.chats import Plan, Turn

MODEL = "chats"
TOKEN = "only-for-this-test"  # noqa: S105  # of a server in a test
LETTERS = 79
"""Of the fake model: ``0`` to ``~``."""


def load_fake() -> Loaded:
    """Where replicas run."""
    return FakeRunner(vocab_size=LETTERS), FakeCodec(LETTERS)


def spec_of(config: EngineConfig, model: str | None = None) -> ReplicaSpec:
    return ReplicaSpec(
        model=model or "fake",
        load=load_fake if model is None else None,
        engine=config,
        server=ServerSettings(model_names=(MODEL,), admin_token=TOKEN),
        drain_timeout=1.0,
        save_timeout=5.0,
    )


def config_of(blocks: int, socket: Path | None = None, prefix: str = "") -> EngineConfig:
    """``socket``: of a Redis server that all replicas share."""
    if socket is None:
        return EngineConfig(num_blocks=blocks, max_running=16, eviction_policy="lru")
    return EngineConfig(
        num_blocks=blocks,
        max_running=16,
        eviction_policy="lru",
        tiers=("redis",),
        tier_options={"redis": {"url": f"unix://{socket}", "prefix": prefix}},
        demotion="write_through",
    )


def kill(replica: str) -> None:
    """At once, as ``SIGKILL`` does: nothing is drained or saved."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    [name] = [each for each in names if each.startswith("SERVE_REPLICA::") and each.endswith(f"#{replica}")]
    ray.kill(ray.get_actor(name, namespace="serve"))


async def texts_of_one_engine(spec: ReplicaSpec, turns: Sequence[Turn], plan: Plan) -> list[str]:
    """What a single engine says to the same prompts, without any tier."""
    config = EngineConfig(num_blocks=4096, max_running=64, max_waiting=10_000)
    params = SamplingParams(max_tokens=plan.answer_tokens, temperature=0.0, ignore_eos=True)
    engine = AsyncEngine.open(spec.model, config) if spec.load is None else AsyncEngine(load=spec.load, config=config)
    async with engine:
        answers = await asyncio.gather(*(engine.complete(list(turn.messages), params) for turn in turns))
    return [answer[0].text for answer in answers]
