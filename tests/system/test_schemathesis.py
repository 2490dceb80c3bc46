"""Requests drawn from the app's own description, good and bad: every answer is one that is described there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias

import anyio.from_thread
import httpx
import hypothesis
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.jsonschema.types import JsonValue
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.result import Ok
from starlette.types import ASGIApp

from octavo import AsyncEngine, EngineConfig
from octavo.engine.server.access import Caller, Keys
from octavo.engine.server.app import app_of
from octavo.engine.server.openapi import document
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner

AnyCase: TypeAlias = schemathesis.Case[Any]
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ADMIN_TOKEN, KEY = "admin token", "client key"
KEYS = Keys({hashlib.sha256(KEY.encode()).digest(): Caller(tenant="drawn")})
BASE_URL = "http://octavo"
FEW = 4
MANY = 60
"""Cases for each route: with 34 routes more than 2,000."""
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
"""Not ``positive_data_acceptance``: fields that are good one by one may contradict each other."""
CHAT: list[JsonValue] = [{"role": "user", "content": "abc"}]
GOOD: dict[str, dict[str, JsonValue]] = {
    "POST /v1/chat/completions": {"messages": CHAT, "model": None},
    "POST /v1/completions": {"prompt": "abc", "model": None},
    "POST /v1/responses": {"input": "abc", "model": None, "previous_response_id": None},
    "POST /tokenize": {"messages": CHAT, "prompt": None, "model": None},
    "POST /detokenize": {"tokens": [1, 63], "model": None},
    "POST /v1/cache/explain": {"prompt": "abcdefgh", "messages": None},
    "POST /admin/explain": {"prompt": [1, 2, 3], "messages": None},
    "POST /admin/pins": {"prompt": "abcdefgh", "messages": None},
    "POST /admin/evict": {"prompt": "abcdefgh", "messages": None},
    "PUT /admin/policy": {"eviction_policy": "lfu"},
    "POST /admin/shadows": {"policy": "lfu"},
}
"""What makes a body good in itself. With few drawn fields beside it, most requests get as far as the model."""
MOST_BESIDE = 3


class ObligingCodec(FakeCodec):
    """Knows every character, so that drawn texts get through to the model."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]


def _description() -> dict[str, object]:
    made = document(app_of(Service(ServerSettings())).routes, needs_key=True)
    described = json.loads(msgspec.json.encode(made))
    assert isinstance(described, dict)
    return described


SCHEMA = schemathesis.openapi.from_dict(_description())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)}


class Driven(NamedTuple):
    """An app in an event loop of its own, and a client for it."""

    portal: anyio.from_thread.BlockingPortal
    client: httpx.AsyncClient
    engine: AsyncEngine

    def answer(self, case: AnyCase) -> httpx.Response:
        """What the app says to a drawn request."""
        token = ADMIN_TOKEN if case.path.startswith("/admin/") else KEY
        spoilt = case.meta is not None and case.meta.is_negative_at(ParameterLocation.HEADER)  # by leaving it out
        sent = case.as_transport_kwargs(BASE_URL, {} if spoilt else {"Authorization": f"Bearer {token}"})
        sent.pop("cookies", None)
        data = sent.pop("data", None)
        if isinstance(data, bytes | str):
            sent["content"] = data
        return self.portal.call(lambda: self.client.request(**sent))


@contextmanager
def driven(folder: Path) -> Iterator[Driven]:
    settings = ServerSettings(keys=KEYS, admin_token=ADMIN_TOKEN, snapshot_dir=folder, tool_format="hermes")
    config = EngineConfig(num_blocks=64, block_size=4, max_running=8)
    with anyio.from_thread.start_blocking_portal() as portal:
        engine = AsyncEngine(runner=FakeRunner(max_context=48), codec=ObligingCodec(), config=config)
        with portal.wrap_async_context_manager(engine):
            app: ASGIApp = app_of(Service(settings, engine))
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), timeout=60.0)
            yield Driven(portal, client, engine)
            assert portal.call(engine.stats).running == 0


def cases_for(label: str) -> st.SearchStrategy[AnyCase]:
    """Requests as described, requests that are not, and good ones with something beside it."""
    operation = OPERATIONS[label]
    fitting = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    drawn = [fitting]
    if operation.body or operation.path_parameters or operation.query:
        drawn.append(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    if label in GOOD:
        drawn.append(st.builds(_made_good, fitting, st.just(GOOD[label]), st.randoms(use_true_random=False)))
    return st.one_of(drawn)


def _made_good(case: AnyCase, good: dict[str, JsonValue], random: Random) -> AnyCase:
    assert isinstance(case.body, dict)
    beside = random.sample(sorted(case.body), min(MOST_BESIDE, len(case.body)))
    case.body = {**{name: case.body[name] for name in beside}, **good}
    return case


def check_route(label: str, cases: int, folder: Path) -> None:
    load_all_checks()
    checks = CHECKS.get_by_names(CHECKED)
    with driven(folder) as app:

        @hypothesis.settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @given(cases_for(label))
        def check(case: AnyCase) -> None:
            case.validate_response(app.answer(case), checks=checks)  # type: ignore[arg-type]  # none of them is a class

        check()


@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_as_described(label: str, tmp_path: Path) -> None:
    check_route(label, FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_as_described_in_many_cases(label: str, tmp_path: Path) -> None:
    check_route(label, MANY, tmp_path)
