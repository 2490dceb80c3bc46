"""What the application on Ray Serve tells of itself: one trace through all its processes, the metrics of each replica,
and which one is ill. And what it lets through: long questions and long answers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from opentelemetry import propagate
from ray import serve

from octavo import EngineConfig, telemetry
from octavo.engine.fleet.ray import Layout, ReplicaSpec, application
from octavo.engine.life import Loaded
from octavo.engine.model.runner import StepInput
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import ModelError
from octavo.examples.scale_out.cluster import loopback
from octavo.telemetry import names
from octavo.tests.engine.insight.trace_rig import Spans
from octavo.tests.system.scale_out_rig import LETTERS, MODEL, TOKEN, kill
from octavo.tests.telemetry.export.otlp_receiver import HttpReceiver
from octavo.tests.telemetry.export.received import Received, ReceivedSpan
from octavo.tests.telemetry.metrics.scraping import parse_text

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's
]
PATIENCE = 60.0
BLOCK = 4
PROMPT = "what_is_the_capital_of_france_" * 5
SERVER = "POST /v1/completions"
INSTANCE = "service.instance.id"
POISON = "OCTAVO_TEST_POISON"
"""Names a file that makes ill who finds it first."""


def load_mortal() -> Loaded:
    """Where replicas run."""
    poison = Path(os.environ[POISON])
    taken: list[Path] = []

    def fall_ill(step: StepInput) -> None:
        with suppress(FileNotFoundError):
            taken.append(poison.rename(poison.with_suffix(".taken")))
        if taken:
            raise ModelError("it is ill")

    return FakeRunner(vocab_size=LETTERS, max_context=2**23, before_step=fall_ill), FakeCodec(LETTERS)


class App(NamedTuple):
    """The application, and where it tells what it does."""

    client: httpx.Client
    received: Received
    endpoint: str
    poison: Path

    def ask(self, prompt: str, **headers: str) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def replicas(self) -> set[str]:
        answer = self.client.get("/health")
        assert "replicas" in answer.json(), answer.text
        return set(answer.json()["replicas"])

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    poison = tmp_path_factory.mktemp("poison") / "cup"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as environment, HttpReceiver() as receiver:
        environment.setenv(POISON, str(poison))
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        spec = ReplicaSpec(
            model="fake",
            load=load_mortal,
            engine=EngineConfig(block_size=BLOCK, num_blocks=64, eviction_policy="lru"),
            server=ServerSettings(model_names=(MODEL,), admin_token=TOKEN),
            otlp_endpoint=receiver.endpoint,
            drain_timeout=1.0,
            save_timeout=1.0,
        )
        layout = Layout(replicas=2, cpus=0.1, gateway_cpus=0.1, report_interval=0.5, health_interval=0.5)
        with loopback(port=port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            serve.run(application(spec, layout), name="octavo")
            found = App(client, receiver.received, receiver.endpoint, poison)
            found.until(lambda: len(found.replicas()) == 2)
            yield found


class Told(NamedTuple):
    """One trace, from the client down."""

    door: ReceivedSpan
    route: ReceivedSpan
    replica: ReceivedSpan
    request: ReceivedSpan
    spans: Spans

    @property
    def acts(self) -> list[ReceivedSpan]:
        return self.spans.within(self.request)


def told(received: Received, client: ReceivedSpan) -> Told:
    """The trace below ``client``: each of these is there once, one below the other."""
    spans = Spans([span for span in received.spans if span.trace_id == client.trace_id])
    [door] = spans.below(client)
    [route] = spans.below(door)
    [replica] = spans.below(route)
    [request] = spans.below(replica)
    return Told(door, route, replica, request, spans)


@pytest.mark.asyncio
async def test_one_trace_goes_from_the_client_through_all_processes_to_the_cache(app: App) -> None:
    """Prompts that fill the caches, and one of them again: each trace shows the acts of the replica that answered."""
    answered: list[str] = []
    prompts = [f"{number}{PROMPT}" for number in range(8)]
    async with telemetry.setup(endpoint=app.endpoint, service_name="client") as exported:
        tracer = exported.tracer_provider.get_tracer("client")
        for prompt in [*prompts, prompts[-1]]:
            with tracer.start_as_current_span("client"):
                headers: dict[str, str] = {}
                propagate.inject(headers)
                answer = app.ask(prompt, **headers)
            assert answer.status_code == httpx.codes.OK, answer.text
            answered.append(answer.headers["x-octavo-replica"])
    app.until(lambda: len([each for each in app.received.spans if each.name == names.FINISH]) == len(answered))
    clients = sorted(app.received.named("client"), key=lambda span: span.start)
    traces = [told(app.received, client) for client in clients]
    assert len({trace.door.trace_id for trace in traces}) == len(answered)
    for trace, replica in zip(traces, answered, strict=True):
        assert [span.name for span in trace[:4]] == [SERVER, names.ROUTE, SERVER, "text_completion fake"]
        assert [span.kind for span in trace[:3]] == ["SERVER", "CLIENT", "SERVER"]
        assert trace.route.attributes[names.FLEET_REPLICA] == replica
        assert trace.route.attributes[names.FLEET_TRIES] == 1
        gateway = trace.door.resource[INSTANCE]
        assert (trace.route.resource[INSTANCE], gateway in answered) == (gateway, False)
        assert {span.resource[INSTANCE] for span in [trace.replica, trace.request, *trace.acts]} == {replica}
        assert {names.QUEUE, names.PREFILL, names.DECODE} <= {span.name for span in trace.acts}
    assert any(span.name == names.EVICT for trace in traces for span in trace.acts)
    again = traces[-1]
    assert answered[-1] == answered[-2]  # it has the prompt
    assert again.route.attributes[names.FLEET_REASON] == "prefix"
    whole = len(prompts[-1]) // BLOCK * BLOCK
    assert again.route.attributes[names.FLEET_MATCHED] == whole
    cached = cached_of(again.acts)
    assert isinstance(cached, int)
    assert whole <= cached < len(prompts[-1])  # and some of its last block
    assert cached_of(traces[0].acts) == 0


def cached_of(spans: list[ReceivedSpan]) -> object:
    [found] = {span.attributes[names.CACHED_TOKENS] for span in spans if names.CACHED_TOKENS in span.attributes}
    return found


def labels(metrics: str) -> Mapping[str, set[str]]:
    """The families that each replica is in. What is shown is an exposition: no family and no sample comes twice."""
    families = parse_text(metrics)
    assert len({family.name for family in families}) == len(families)
    samples = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(set(samples)) == len(samples)
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            if "replica" in sample.labels:
                found.setdefault(sample.labels["replica"], set()).add(family.name)
    return found


def test_metrics_are_those_of_the_replicas_that_are_there(app: App) -> None:
    for number in range(8):
        app.ask(f"{number}{PROMPT}")
    before = labels(app.client.get("/metrics").text)
    there = app.replicas()
    assert set(before) == there
    one, other = there
    of_engines = {name for name in before[one] if not name.startswith("octavo_fleet")}
    assert of_engines == {name for name in before[other] if not name.startswith("octavo_fleet")}
    assert len(of_engines) > 10

    kill(one)
    app.until(lambda: len(app.replicas() - {one}) == 2)
    after = labels(app.client.get("/metrics").text)
    [new] = app.replicas() - {other}
    assert {name for name in after[new] if not name.startswith("octavo_fleet")} == of_engines
    assert {name for name in after.get(one, ()) if not name.startswith("octavo_fleet")} == set()
    assert set(after) - {one} == app.replicas()


def test_long_questions_and_long_answers_come_through(app: App) -> None:
    text = "long" * (2**20 + 2**19)
    body = {"model": MODEL, "prompt": text}

    def tokenized(_: int) -> int:
        answer = app.client.post("/tokenize", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text[:200]
        return len(answer.json()["tokens"])

    with ThreadPoolExecutor(3) as clients:
        assert list(clients.map(tokenized, range(3))) == [len(text)] * 3
    too_long = app.client.post("/tokenize", json={**body, "prompt": text + text})
    assert too_long.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE


def test_a_replica_whose_model_has_died_is_replaced(app: App) -> None:
    app.until(lambda: len(app.replicas()) == 2)
    there = app.replicas()
    app.poison.touch()
    statuses: set[int] = set()

    def is_replaced() -> bool:
        statuses.update(app.ask(f"{number}{PROMPT}").status_code for number in range(4))
        now = app.replicas()
        return len(now) == 2 and now != there

    app.until(is_replaced)
    assert statuses <= {httpx.codes.OK, httpx.codes.INTERNAL_SERVER_ERROR, httpx.codes.SERVICE_UNAVAILABLE}
    assert {app.ask(f"{number}{PROMPT}").status_code for number in range(16)} == {httpx.codes.OK}
