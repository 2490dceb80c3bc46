"""``octavo serve`` under ``torchrun``: one server in front of three ranks, and all of them end with it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.errors import ModelError

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 180.0
"""Seconds to load the model, and to answer, on a machine that is busy."""
RANKS = 3
"""The demo model has three K/V heads."""
BODY = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


def test_three_ranks_serve_the_text_of_one_and_end_at_the_signal() -> None:
    expected = alone()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    options = ["--port", "0", "--num-blocks", "128", "--tensor-parallel", str(RANKS)]
    command = [*torchrun, *where, "-m", "octavo", "serve", "smollm2", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603  # ours
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "http://" in line)
        found = re.search(r"http://\S+", line)
        assert found
        with httpx.Client(base_url=found.group(), timeout=PATIENCE) as client:
            wait_ready(client, process)
            answer = client.post("/v1/completions", json={"model": "smollm2", **BODY})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
    finally:
        end(process)
    assert '"event": "stopped"' in log, log
    assert log.count("Traceback") == log.count("SignalException: ") == 1, log  # torchrun's own, to say why it ended
    assert not re.search(r'"level": "(warning|error|critical)"', log), log


def end(process: subprocess.Popen[str]) -> None:
    """And its ranks, which live in sessions of their own: only torchrun can end them."""
    process.terminate()
    try:
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()


def alone() -> str:
    """What one rank says."""

    async def ask() -> str:
        async with AsyncEngine.open("smollm2", EngineConfig(num_blocks=128)) as engine:
            return (await engine.complete(str(BODY["prompt"]), SamplingParams(max_tokens=12, temperature=0.0)))[0].text

    try:
        return asyncio.run(ask())
    except ModelError as missing:
        pytest.skip(str(missing))


def wait_ready(client: httpx.Client, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
