"""One run of the chats through a deployment, and the same run simulated."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

import httpx
from ray import serve

from octavo import EngineConfig
from octavo.engine.fleet.gateway import Gateway
from octavo.engine.fleet.ray import Layout, RayFleet, ReplicaSpec
from octavo.engine.fleet.ray.build import replicas_of
from octavo.engine.fleet.ray.ingress import reader_of
from octavo.engine.fleet.routing import made_router
from octavo.engine.kv import encode_tokens
from octavo.engine.server.running import serving_app
from octavo.policies.simulator.fleet import FleetOutcome, FleetSetting, TierSetting, TierWrites, shortened, simulate
from octavo.policies.simulator.service import Service
from octavo.policies.simulator.trace import ListTrace, Request, TraceInfo
from octavo.storage.naming import names_after

if TYPE_CHECKING:
    from octavo.examples.scale_out.chats import Turn
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from chats import Turn

ROOT = bytes(32)
"""What the names of blocks begin with in a trace: one model, one tenant."""


@asynccontextmanager
async def deployed(spec: ReplicaSpec, layout: Layout, *, patience: float = 60.0) -> AsyncIterator[httpx.AsyncClient]:
    """Replicas on the Ray that is there, and a client of their gateway, which is in this process."""
    name = f"octavo-{uuid.uuid4().hex[:8]}"  # Ray keeps handles by name, and with them their routers
    handle = serve.run(replicas_of(spec, layout), name=name, route_prefix=None)
    try:
        fleet = RayFleet(handle, patience=patience)
        await fleet.meet()
        gateway = Gateway(fleet, reader_of(spec), spec.server)
        async with (
            serving_app(gateway.app, gateway.service) as address,
            httpx.AsyncClient(base_url=address.url, timeout=120.0) as client,
        ):
            yield client
    finally:
        serve.delete(name)


class Outcome(NamedTuple):
    """What came of a run."""

    requests: int
    retried: int
    """Requests that their client had to send again."""
    hit_ratio: float
    """Share of the prompt tokens that were on the device of the replica that was asked."""
    tier_ratio: float
    """Share of those that came from a tier."""
    request_balance: float
    """Requests of the busiest replica, over the mean."""
    work_balance: float
    """The same of the tokens that were computed."""
    first_p50: float
    """Seconds to the first token."""
    first_p99: float
    seconds: float
    """Of the run."""


def outcome(turns: Sequence[Turn], replicas: int, tier_tokens: int = 0) -> Outcome:
    """``tier_tokens``: of those that were cached, how many came from a tier."""
    prompts = sum(turn.prompt_tokens for turn in turns)
    requests, work = Counter[str](), Counter[str]()
    for turn in turns:
        requests[turn.replica] += 1
        work[turn.replica] += turn.prompt_tokens - turn.cached_tokens + turn.answer_tokens
    firsts = sorted(turn.first for turn in turns)
    return Outcome(
        requests=len(turns),
        retried=sum(turn.tries > 1 for turn in turns),
        hit_ratio=(sum(turn.cached_tokens for turn in turns) - tier_tokens) / prompts,
        tier_ratio=tier_tokens / prompts,
        request_balance=_peak_over_mean(requests, replicas),
        work_balance=_peak_over_mean(work, replicas),
        first_p50=median(firsts),
        first_p99=firsts[int(len(firsts) * 0.99)],
        seconds=max(turn.began + turn.seconds for turn in turns),
    )


def _peak_over_mean(loads: Mapping[str, int], replicas: int) -> float:
    return max(loads.values()) * replicas / sum(loads.values())


async def trace_of(turns: Sequence[Turn], spec: ReplicaSpec) -> ListTrace:
    """The run as a trace: when each prompt came, the names of its blocks and of those that its answer left."""
    reader, size = reader_of(spec), spec.engine.block_size
    requests = []
    for turn in turns:
        asked = await reader.tokenize(list(turn.messages))
        kept = [*asked, *await reader.tokenize(turn.text)][:-1]  # the last token of an answer is never computed
        names = names_after(ROOT, memoryview(encode_tokens(kept)).cast("B"), size)
        blocks = len(asked) // size
        about = shortened(names[:blocks]), shortened(names[blocks:])
        requests.append(Request(turn.began, turn.prompt_tokens, turn.answer_tokens, *about, session=turn.chat))
    return ListTrace(TraceInfo("chats", size, "measured"), requests)


def simulated(trace: ListTrace, turns: Sequence[Turn], layout: Layout, config: EngineConfig) -> FleetOutcome:
    """The same requests at the same moments through simulated replicas, as fast as the real ones were."""
    policy = "power_of_two" if layout.routing == "ray" else layout.routing
    setting = FleetSetting(
        replicas=layout.replicas,
        capacity=config.num_blocks,
        routing=lambda: made_router(policy, layout.routing_options),
        service=Service(prefill_tokens_per_second=1e9, decode_tokens_per_second=1.0 / mean(_per_token(turns))),
        max_running=config.max_running,
        tier=TierSetting(writes=TierWrites.THROUGH) if "redis" in config.tiers else None,
    )
    return simulate(trace, setting)


def _per_token(turns: Sequence[Turn]) -> list[float]:
    """Seconds of each request over the tokens of its answer; the simulator has no other cost of a step."""
    return [turn.seconds / turn.answer_tokens for turn in turns]


async def tier_tokens(client: httpx.AsyncClient, admin_token: str) -> int:
    """Prompt tokens that the replicas which are there have loaded from tiers."""
    answer = await client.get("/admin/stats", headers={"Authorization": f"Bearer {admin_token}"})
    found = answer.json()["replicas"].values()
    return sum(each["cache"]["tier_hit_tokens"] for each in found)
