"""Compare routers on chats of several turns: the cache-aware one, and Ray's own power of two choices.

    python examples/scale_out/measure.py --replicas 2,4 --chats 200 [--json] [--trace run.kvtrace.jsonl]

All replicas and the clients share this machine, so times say little about a real fleet; hits and balance do not depend
on them. ``--model smollm2`` takes a real model, which is slower and finds the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import EngineConfig
from octavo.engine.fleet.ray import Layout, ReplicaSpec
from octavo.engine.server.settings import ServerSettings
from octavo.policies.simulator.trace import Request, Trace

if TYPE_CHECKING:
    from octavo.examples.scale_out import tiny_model
    from octavo.examples.scale_out.chats import Plan, drive
    from octavo.examples.scale_out.cluster import loopback
    from octavo.examples.scale_out.trial import Outcome, deployed, outcome, simulated, tier_tokens, trace_of
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    import tiny_model
    from chats import Plan, drive
    from cluster import loopback
    from trial import Outcome, deployed, outcome, simulated, tier_tokens, trace_of

NAME = "chats"
TOKEN = "only-for-this-run"  # noqa: S105  # of a server on loopback
COLUMNS = ("replicas", "router", "hits", "tier", "simulated", "requests", "work", "first p50", "first p99", "seconds")


def options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny: a random one, made here")
    parser.add_argument("--replicas", default="2,4", help="one run of each router with each number")
    parser.add_argument("--routers", default="prefix,ray", help="policies by name; ray: its power of two choices")
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--turns", default="2-4", help="fewest and most turns of a chat")
    parser.add_argument("--users", type=int, default=24, help="who talk at the same time")
    parser.add_argument("--blocks", type=int, default=384, help="blocks of each replica's cache")
    parser.add_argument("--redis", help="URL of a shared tier")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", type=Path, help="write the last run for `octavo simulate`")
    return parser.parse_args()


def spec_of(chosen: argparse.Namespace, model: str) -> ReplicaSpec:
    """Every replica."""
    config = EngineConfig(num_blocks=chosen.blocks, max_running=16, eviction_policy="lru")
    if chosen.redis:
        redis = {"redis": {"url": chosen.redis}}
        config = replace(config, tiers=("redis",), tier_options=redis, demotion="write_through")
    return ReplicaSpec(
        model=model,
        engine=config,
        server=ServerSettings(admin_token=TOKEN, model_names=(NAME,)),
        drain_timeout=1.0,
        save_timeout=5.0,
    )


def plan_of(chosen: argparse.Namespace) -> Plan:
    """What is said."""
    fewest, _, most = chosen.turns.partition("-")
    return Plan(chats=chosen.chats, fewest_turns=int(fewest), most_turns=int(most or fewest), users=chosen.users)


async def run(chosen: argparse.Namespace, spec: ReplicaSpec, layout: Layout) -> dict[str, object]:
    """One run, and its simulation."""
    async with deployed(spec, layout) as client:
        turns = await drive(client, NAME, plan_of(chosen))
        came: Outcome = outcome(turns, layout.replicas, await tier_tokens(client, TOKEN))
    trace = await trace_of(turns, spec)
    if chosen.trace is not None:
        write(trace, chosen.trace)
    expected = simulated(trace, turns, layout, spec.engine)
    told = {"simulated_hit_ratio": expected.hit_ratio, "simulated_tier_ratio": expected.hit_ratio_with_tier}
    return {"replicas": layout.replicas, "router": layout.routing, **came._asdict(), **told}


def write(trace: Trace, path: Path) -> None:
    """As ``kvtrace-1``: prompts only, so of each answer no block is known that no later prompt holds."""
    ids: dict[bytes, int] = {}
    header = {"format": "kvtrace-1", "name": "chats", "block_tokens": trace.info.block_tokens, "arrivals": "absolute"}
    with path.open("w") as file:
        file.write(json.dumps(header) + "\n")
        for request in trace:
            file.write(json.dumps(line(request, ids)) + "\n")


def line(request: Request, ids: dict[bytes, int]) -> list[object]:
    """One request; ``ids`` of the blocks so far grow with it."""
    names = [request.names[at : at + 8] for at in range(0, len(request.names), 8)]
    runs = [[ids.setdefault(name, len(ids)), 1] for name in names]
    return [request.arrival, request.input_tokens, request.output_tokens, request.session, "", runs]


def show(rows: Sequence[dict[str, object]]) -> None:
    """A table."""
    keys = ("replicas", "router", "hit_ratio", "tier_ratio", "simulated_hit_ratio", "request_balance", "work_balance")
    print(" ".join(f"{name:>10}" for name in COLUMNS))
    for row in rows:
        cells = [row[key] for key in (*keys, "first_p50", "first_p99", "seconds")]
        print(" ".join(f"{cell:10.3f}" if isinstance(cell, float) else f"{cell:>10}" for cell in cells))


def main() -> None:
    """Run all and tell."""
    chosen = options()
    rows = []
    with tempfile.TemporaryDirectory() as folder, loopback():
        model = tiny_model.save(Path(folder)) if chosen.model == "tiny" else chosen.model
        for replicas in map(int, chosen.replicas.split(",")):
            for routing in chosen.routers.split(","):
                layout = Layout(replicas=replicas, routing=routing, cpus=0.5, report_interval=1.0, health_interval=1.0)
                rows.append(asyncio.run(run(chosen, spec_of(chosen, model), layout)))
                print(f"{replicas} replicas, {routing}: done", file=sys.stderr)
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main()
