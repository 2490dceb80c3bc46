"""``octavo serve`` as people run it: a process of its own, the demo model, signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from octavo.errors import ModelError

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENCE = 180.0
"""Seconds to load the model, and to answer, on a machine that is busy."""
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence, and you never use more words than are needed."},
    {"role": "user", "content": "What is the capital of France?"},
]


class Served(NamedTuple):
    process: subprocess.Popen[str]
    client: httpx.Client

    def chat(self) -> dict[str, object]:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage: dict[str, object] = answer.json()["usage"]
        return usage

    def wait_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.client.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.1)

    def end(self) -> str:
        """Its log. It must have ended well, or end so now."""
        _, log = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, log
        assert "Traceback" not in log
        assert not re.search(r'"level": "(warning|error|critical)"', log), log
        return log


@contextmanager
def served(*options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "octavo", "serve", "smollm2", "--port", "0", "--served-model-name", "tiny"]
    config = ["--num-blocks", "128", "--dtype", "bfloat16"]
    process = subprocess.Popen([*command, *config, *options], stderr=subprocess.PIPE, text=True)  # noqa: S603  # ours
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        with httpx.Client(base_url=found.group(), timeout=PATIENCE) as client:
            yield Served(process, client)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", autouse=True)
def _demo_model() -> None:
    from octavo.engine.model.loader import load  # noqa: PLC0415  # only where these tests run

    try:
        load("smollm2")
    except ModelError as missing:
        pytest.skip(str(missing))


def test_a_stream_outlives_the_signal_and_the_cache_the_process(tmp_path: Path) -> None:
    saved = tmp_path / "snapshot"
    with served("--snapshot-on-exit", str(saved), "--drain-timeout", "100") as first:
        first.wait_ready()
        assert first.chat()["prompt_tokens_details"] == {"cached_tokens": 0, "audio_tokens": 0}
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "stream": True, "ignore_eos": True}
        text = ""
        with first.client.stream("POST", "/v1/completions", json=body) as stream:
            for chunk in stream.iter_text():
                if not text:
                    first.process.send_signal(signal.SIGTERM)
                text += chunk
        assert text.endswith("data: [DONE]\n\n")
        assert len([line for line in text.split("\n") if line.startswith("data: {")]) > 1
        assert "snapshot_saved" in first.end()

    with served("--restore", str(saved)) as second:
        second.wait_ready()
        details = second.chat()["prompt_tokens_details"]
        assert isinstance(details, dict)
        assert details["cached_tokens"] >= 16
        second.process.send_signal(signal.SIGINT)
        second.end()


def test_a_signal_while_the_model_is_loaded_ends_it_at_once() -> None:
    with served() as server:
        server.process.send_signal(signal.SIGTERM)
        log = server.end()
        assert json.loads(log.strip().splitlines()[-1])["event"] == "stopped"


def test_a_model_that_is_not_there_is_one_line_and_status_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "serve", str(tmp_path / "nothing"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)  # noqa: S603  # ours
    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert ended.returncode == 1
    assert [line["event"] for line in lines] == ["model_not_loaded"]
