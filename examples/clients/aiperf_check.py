"""aiperf against Octavo: a short run of NVIDIA's load generator, to its end.

    python examples/clients/aiperf_check.py --aiperf .venv-clients/bin/aiperf

Serves SmolLM2 and lets aiperf send streamed chats. Prints what it has measured; ends with status 1 when a request
failed or there is no report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio.to_thread
import torch

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.gguf_file import converted
from octavo.engine.model.loader import default_cache_dir
from octavo.engine.model.sources import demo_model_path
from octavo.engine.server.running import serving

PATIENCE = {"AIPERF_SERVICE_REGISTRATION_TIMEOUT": "300", "AIPERF_SERVICE_PROFILE_CONFIGURE_TIMEOUT": "300"}
"""Seconds; its many processes take their time on a small machine."""
SHOWN = ("time_to_first_token", "inter_token_latency", "request_latency", "output_token_throughput", "request_count")


async def main() -> int:
    """Serve, run, show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", default="aiperf", help="the program, of an environment of its own")
    parser.add_argument("--requests", type=int, default=20)
    options = parser.parse_args()
    folder = converted(demo_model_path(), torch.bfloat16, default_cache_dir(), lambda *_: None)
    config = EngineConfig(dtype="bfloat16", num_blocks=1024)
    async with AsyncEngine.open(str(folder), config) as engine, serving(engine) as address:
        name = engine.model.name
        report = await anyio.to_thread.run_sync(run_aiperf, options.aiperf, address.url, name, folder, options.requests)
        finished = dict(engine.stats().finished)
    for metric in SHOWN:
        if metric in report:
            print(f"{metric}: {json.dumps(report[metric])[:200]}")
    print(f"the engine finished {finished}")
    return int(sum(finished.values()) < options.requests or finished.get("error", 0) > 0)


def run_aiperf(program: str, url: str, model: str, tokenizer: Path, requests: int) -> dict[str, object]:
    """Its own summary of one run."""
    with tempfile.TemporaryDirectory() as out:
        command = [program, "profile", "-m", model, "--url", url, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", str(tokenizer), "--concurrency", "4", "--request-count", str(requests)]
        command += ["--isl", "64", "--osl", "16", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
        command += ["--artifact-dir", out]
        surroundings = {**os.environ, **PATIENCE}
        surroundings.pop("HF_HUB_OFFLINE", None)  # with it aiperf 0.13 takes the folder for a name on the hub
        subprocess.run(command, check=True, env=surroundings)  # noqa: S603  # the user's own program
        (summary,) = Path(out).rglob("profile_export_aiperf.json")
        report: dict[str, object] = json.loads(summary.read_text())
        return report


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
