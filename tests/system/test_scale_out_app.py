"""The whole application on Ray Serve: OpenAI's client in front, an end, and a warm start."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from ray import serve

from octavo import EngineConfig
from octavo.engine.fleet.ray import Layout, ReplicaSpec, application
from octavo.engine.server.settings import ServerSettings
from octavo.examples.scale_out.cluster import loopback
from octavo.tests.system.scale_out_rig import MODEL, TOKEN, load_fake

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's
]
PATIENCE = 60.0
QUESTION = "what_is_the_capital_of_france_" * 8


@pytest.fixture
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with loopback(port=port):
        yield f"http://127.0.0.1:{port}"


def run(snapshots: Path, replicas: int) -> None:
    spec = ReplicaSpec(
        model="fake",
        load=load_fake,
        engine=EngineConfig(block_size=4, eviction_policy="lru"),
        server=ServerSettings(model_names=(MODEL,), admin_token=TOKEN),
        snapshots=snapshots,
        drain_timeout=2.0,
        save_timeout=5.0,
    )
    layout = Layout(replicas=replicas, cpus=0.1, gateway_cpus=0.1, report_interval=0.5, health_interval=1.0)
    serve.run(application(spec, layout), name="octavo")


def replicas(client: httpx.Client) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = client.get("/health").json()["replicas"]
    return found


def wait_for(client: httpx.Client, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(replicas(client)) != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_application_answers_and_its_replicas_leave_their_caches_to_the_next(url: str, tmp_path: Path) -> None:
    run(tmp_path, 2)
    ai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        wait_for(client, 2)
        said = ai.chat.completions.create(model=MODEL, messages=asked, max_tokens=8, temperature=0)
        stream = ai.chat.completions.create(model=MODEL, messages=asked, max_tokens=8, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == said.choices[0].message.content
        metrics = client.get("/metrics").text
        assert all(f'replica="{replica}"' in metrics for replica in replicas(client))
        for number in range(12):  # so that both have something to leave
            answered = client.post("/v1/completions", json={"prompt": f"{number}{QUESTION}", "max_tokens": 1})
            assert answered.headers["x-octavo-replica"] in replicas(client)

        serve.delete("octavo")  # each replica leaves what it has, as it does when there are to be fewer
        run(tmp_path, 2)
        wait_for(client, 2)
        assert all(restored(client, replica) > len(QUESTION) // 4 for replica in replicas(client))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def restored(client: httpx.Client, replica: str) -> int:
    """Blocks that it took up when it started."""
    headers = {"Authorization": f"Bearer {TOKEN}", "x-octavo-replica": replica}
    found: int = client.get("/admin/stats", headers=headers).json()["restore"]["stored_blocks"]
    return found
