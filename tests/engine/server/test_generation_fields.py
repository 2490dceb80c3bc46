"""Every field that says how to generate, on both routes: what it does, what null means, what is refused."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Mapping
from typing import Final

import msgspec
import pytest

from octavo import SamplingParams
from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.call import Call
from octavo.engine.server.service import Service
from octavo.engine.server.settings import ServerSettings
from octavo.engine.server.wire.chat import ChatForm
from octavo.engine.server.wire.completions import CompletionForm
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.http_rig import Json, Server, ServerOf

ROUTES = ("/v1/chat/completions", "/v1/completions")
CODEC = FakeCodec()
TEXT = "abcdefgh"
BASE: Mapping[str, object] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}


def asking(route: str, prompt: str = TEXT) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}]} if "chat" in route else {"prompt": prompt}


def told(answer: Json) -> list[tuple[object, object, object]]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return [(one_text(choice), choice["finish_reason"], choice["stop_reason"]) for choice in choices]


def one_text(choice: Json) -> object:
    message = choice.get("message")
    return message["content"] if isinstance(message, dict) else choice["text"]


async def ask(server: Server, route: str, **body: object) -> list[tuple[object, object, object]]:
    return told(await server.post(route, **{**asking(route), **BASE, **body}))


CASES: Final[tuple[tuple[Mapping[str, object], Mapping[str, object]], ...]] = (
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"n": 3}, {"n": 3}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.3}, {"temperature": 0.3}),
    ({"temperature": None}, {}),
    ({"top_p": 0.4}, {"top_p": 0.4}),
    ({"top_p": 0}, {"top_p": 0.0}),
    ({"seed": 6}, {"seed": 6}),
    ({"top_k": 2}, {"top_k": 2}),
    ({"top_k": -1}, {}),
    ({"top_k": 0}, {}),
    ({"min_p": 0.5}, {"min_p": 0.5}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
    ({"repetition_penalty": 3}, {"repetition_penalty": 3.0}),
    ({"logit_bias": {"20": 5, "21": -100}}, {"logit_bias": {20: 5.0, 21: -100.0}}),
    ({"logit_bias": {"49": 100}}, {"logit_bias": {49: 100.0}}),
    ({"logit_bias": {}}, {}),
    ({"stop_token_ids": list(range(32))}, {"stop_token_ids": list(range(32))}),
    ({"stop": [chr(48 + token) for token in range(32)]}, {"stop": [chr(48 + token) for token in range(32)]}),
    (
        {"stop": [chr(48 + token) for token in range(32)], "include_stop_str_in_output": True},
        {"stop": [chr(48 + token) for token in range(32)], "include_stop": True},
    ),
    ({"stop_token_ids": list(range(63)), "min_tokens": 4}, {"stop_token_ids": list(range(63)), "min_tokens": 4}),
    ({"n": 1, "best_of": 4}, {"n": 1, "best_of": 4}),
    ({"n": 2, "use_beam_search": True}, {"n": 2, "beam_width": 2, "temperature": 0.0}),
    (
        {"best_of": 3, "use_beam_search": True, "length_penalty": 3, "early_stopping": True},
        {"beam_width": 3, "length_penalty": 3.0, "early_stopping": True},
    ),
    ({"use_beam_search": True}, {"temperature": 0.0}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
)
"""Fields of a form, and what they mean to the engine."""


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_field_does_what_the_engine_does(route: str, server_of: ServerOf) -> None:
    runner, codec = FakeRunner(eos_token_ids=frozenset(range(40, 48))), FakeCodec(special=frozenset({1, 2, 3, 62}))
    async with server_of(runner=runner, codec=codec) as server:
        for fields, params in CASES:
            wanted = SamplingParams.from_mapping({**BASE, **params})
            outputs = await server.engine.complete(TEXT, wanted)
            found = await ask(server, route, **fields)
            stream = await server.stream(route, **{**asking(route), **BASE, **fields})
            told = [(output.text, str(output.finish_reason), output.stop_reason) for output in outputs]
            assert found == told, fields
            assert [stream.text(index) for index in range(len(found))] == [text for text, _, _ in found], fields
            assert [stream.finish_reasons(index) for index in range(len(found))] == [[end] for _, end, _ in found]


def test_the_cases_above_name_every_parameter_of_the_engine() -> None:
    """So that a parameter that is added to the engine is not forgotten here."""
    told_otherwise = {"logprobs", "prompt_logprobs", "output_format"}  # where their form is tested
    renamed = {"include_stop": "include_stop_str_in_output", "beam_width": "use_beam_search"}
    names = {renamed.get(field.name, field.name) for field in dataclasses.fields(SamplingParams)}
    for form in (ChatForm, CompletionForm):
        assert names - told_otherwise <= set(form.__struct_fields__)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", [ChatForm, CompletionForm])
async def test_null_is_absent(form: type[msgspec.Struct], server_of: ServerOf) -> None:
    route = ROUTES[form is CompletionForm]
    optional = {field.name: None for field in msgspec.structs.fields(form) if not field.required}
    async with server_of(runner=FakeRunner(max_context=24)) as server:
        bare = await server.post(route, **asking(route))
        nulls = await server.post(route, **{**optional, **asking(route)})
        assert bare["usage"] == {**nulls["usage"], "prompt_tokens_details": bare["usage"]["prompt_tokens_details"]}  # type: ignore[dict-item, index]  # JSON
        assert told(await server.post(route, **{**optional, **asking(route), "seed": 1})) == told(
            await server.post(route, **asking(route), seed=1)
        )
        stream = await server.stream(route, **{**optional, **asking(route), "stream": True})
        assert stream.finish_reasons() == ["length"]
        assert "usage" not in stream.chunks[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_known_and_without_effect_is_not_logged_and_the_rest_once(
    route: str, server_of: ServerOf, caplog: pytest.LogCaptureFixture
) -> None:
    known = {
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": True,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "spaces_between_special_tokens": True,
    }
    caplog.set_level(logging.INFO, "octavo.server")
    async with server_of() as server:
        expected = await ask(server, route)
        assert await ask(server, route, **known) == expected
        assert caplog.messages == []
        assert await ask(server, route, **known, unheard_of="secret", another={"x": "secret"}) == expected
    (line,) = caplog.messages
    assert "fields_ignored" in line
    assert "['another', 'unheard_of']" in line
    assert "secret" not in line


BAD: Final[tuple[tuple[str, tuple[object, ...]], ...]] = (
    ("n", (0, -1, 1.5, True, 10**6, "2", 10**30)),
    ("max_tokens", (-1, 1.0, "5", 10**12, True, [5])),
    ("min_tokens", (-1, 13, "1")),
    ("temperature", (-1, 101, "hot", True, [1])),
    ("top_p", (-0.1, 1.1, "0.5")),
    ("min_p", (-0.1, 1.1)),
    ("top_k", (-2, 1.5, 2**40)),
    ("frequency_penalty", (-3, 3, "x")),
    ("presence_penalty", (-3, 3)),
    ("repetition_penalty", (0, -1, 1000)),
    ("seed", (1.5, "1", 2**64, -(2**64))),
    ("stop", ("", ["a", ""], 5, ["a"] * 65, ["x" * 1025], [5])),
    ("stop_token_ids", ([64], [-1], ["1"], 3, [2**40], [1] * 1025)),
    ("best_of", (0, "x")),
    ("logit_bias", ({"64": 1}, {"-1": 1}, {"abc": 1}, {"1.0": 1}, {"1e3": 1}, {"1": "5"}, {"1": None}, {"1": 1e9})),
    ("logit_bias", ([1], "x", {"": 1}, {"99999999999": 1}, {"1": True}, dict.fromkeys(map(str, range(2**14 + 1)), 1))),
    ("stream", ("yes", 1)),
    ("stream_options", ({"include_usage": True}, {}, True)),
    ("prompt_logprobs", (-1, 21, 5000, True)),
    ("truncate_prompt_tokens", (0, -1, "x")),
    ("priority", (2**40, 1.5)),
    ("ignore_eos", (1, "true")),
    ("cache_salt", ("", 5)),
    ("response_format", ("json", {"type": "yaml"}, {"type": "json_schema"}, {})),
    ("structured_outputs", ({}, {"regex": "a", "choice": ["b"]}, {"json": 5})),
    ("guided_choice", ([], "abc", [1])),
    ("model", (5,)),
)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_bad_value_is_refused_by_the_name_of_its_field(route: str, server_of: ServerOf) -> None:
    """INPUT-03, INPUT-11, LOOP-04: before any state is created."""
    async with server_of() as server:
        expected = await ask(server, route, stop=[], logit_bias=None)
        before = server.engine.stats()
        for field, value in ((field, value) for field, values in BAD for value in values):
            error = await server.refused(route, **{**asking(route), **BASE, field: value})
            assert str(error["param"]).startswith(field), value
            assert (error["type"], TEXT in str(error["message"])) == ("invalid_request_error", False)
        after = server.engine.stats()
        assert (after.submitted, after.steps) == (before.submitted, before.steps)
        assert await ask(server, route) == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_fields_that_contradict_each_other_are_refused(route: str, server_of: ServerOf) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"use_beam_search": True, "n": 2, "stop": "ab"}, "stop"),
    ]
    async with server_of() as server:
        for fields, param in cases:
            assert (await server.refused(route, **{**asking(route), **BASE, **fields}))["param"] == param
        chat = {**asking(ROUTES[0]), **BASE}
        assert (await server.refused(ROUTES[0], **chat, top_logprobs=2))["param"] == "top_logprobs"
        assert (await server.refused(ROUTES[0], **chat, top_logprobs=2, logprobs=False))["param"] == "top_logprobs"
        assert await server.post(ROUTES[0], **chat, top_logprobs=0)


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'"a"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}', b"null"])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_that_is_no_form_is_refused(route: str, body: bytes, server_of: ServerOf) -> None:
    async with server_of() as server:
        answer = await server.client.post(route, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_context_that_is_full_to_the_last_token_works_and_one_more_is_refused(
    route: str, server_of: ServerOf
) -> None:
    """INPUT-11: at the edge."""
    async with server_of(runner=FakeRunner(max_context=20)) as server:
        assert [reason for _, reason, _ in await ask(server, route, max_tokens=12)] == ["length"]
        error = await server.refused(route, **{**asking(route), **BASE, "max_tokens": 13})
        assert (error["param"], error["code"]) == (
            "messages" if "chat" in route else "prompt",
            "context_length_exceeded",
        )


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_bans_of_all_tokens_are_the_fault_of_the_client(route: str, server_of: ServerOf) -> None:
    async with server_of() as server:
        for _ in range(6):
            error = await server.refused(route, **asking(route), logit_bias={str(token): -100 for token in range(64)})
            assert (error["type"], error["code"]) == ("invalid_request_error", "cannot_continue")
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_salt_parts_the_cache_of_callers_without_a_tenant(route: str, server_of: ServerOf) -> None:
    async def cached(server: Server, **body: object) -> object:
        answer = await server.post(route, **{**asking(route), **BASE, **body})
        usage = answer["usage"]
        assert isinstance(usage, dict)
        return usage["prompt_tokens_details"]["cached_tokens"]

    async with server_of() as server:
        assert [await cached(server, cache_salt=salt) for salt in ("a", "b", None, "a", "b")] == [0, 0, 0, 7, 7]
    keys = Keys({digest("of-acme"): Caller(name="acme", tenant="acme")})
    async with server_of(settings=ServerSettings(keys=keys)) as server:
        server.headers["authorization"] = "Bearer of-acme"
        assert await cached(server) == 0
        error = await server.refused(route, **asking(route), cache_salt="b")
        assert error["param"] == "cache_salt"


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_is_at_most_as_urgent_as_its_key(route: str, server_of: ServerOf) -> None:
    seen: list[int] = []

    async def on_step(step: int) -> None:
        seen.extend(group.job.priority for group in current[0].engine._loop.groups.values())

    current: list[Server] = []
    async with server_of(on_step=on_step) as server:
        current.append(server)
        for asked in (None, 5, -3):
            seen.clear()
            await ask(server, route, max_tokens=1, priority=asked)
            assert seen == [min(asked or 0, 0)]


@pytest.mark.asyncio
async def test_the_collector_does_not_run_over_a_large_body(server_of: ServerOf) -> None:
    """It would stop everybody's streams for seconds."""
    runs: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        runs.append(phase)

    async with server_of() as server:
        service = Service(ServerSettings(), server.engine)
        scope = {"type": "http", "path": "/", "headers": []}
        body = b'{"prompt":[' + b"[1]," * 100_000 + b'[1]],"more":[' + b"[]," * 100_000 + b"1]}"
        call = Call(service, scope, Caller(), body)
        gc.callbacks.append(note)
        try:
            form = call.read(CompletionForm)
        finally:
            gc.callbacks.remove(note)
        assert len(runs) < 20  # of hundreds
        assert len(form.prompt) == 100_001
        assert gc.isenabled()


@pytest.mark.asyncio
@pytest.mark.parametrize("beside", [b'"x":"\xff"', b'"\xff":1', b'"x":' + b"[" * 100_000 + b"]" * 100_000, b'"x":NaN'])
async def test_what_is_ignored_must_be_json_all_the_same(server_of: ServerOf, beside: bytes) -> None:
    async with server_of() as server:
        answer = await server.client.post("/v1/completions", content=b'{"prompt":"a","max_tokens":1,' + beside + b"}")
        assert answer.status_code == 400
        assert "not valid JSON" in answer.text
