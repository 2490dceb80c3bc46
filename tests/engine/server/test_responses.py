"""``/v1/responses`` over HTTP, with the fake model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.server.access import Caller, Keys
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.http_rig import Server, ServerOf, read_events
from octavo.tests.engine.server.scripted import AsciiCodec, Scripted

Json: TypeAlias = dict[str, "object"]
PATH = "/v1/responses"
ADMIN = "admin token"
ORDER = re.compile(
    r"created in_progress "
    r"(output_item.added content_part.added (output_text.delta )+output_text.done content_part.done output_item.done "
    r"|output_item.added content_part.added output_text.done content_part.done output_item.done )"
    r"(completed|incomplete) "
)
CHANGING = {"id", "created_at", "completed_at"}


def said(response: Mapping[str, object]) -> str:
    """The text of a response."""
    items = response["output"]
    assert isinstance(items, list)
    return "".join(part["text"] for item in items for part in item["content"])


def steady(value: object) -> object:
    """A response without what differs each time."""
    if isinstance(value, dict):
        return {name: steady(each) for name, each in value.items() if name not in CHANGING}
    return [steady(each) for each in value] if isinstance(value, list) else value


async def events_of(server: Server, **body: object) -> list[Json]:
    """The data of a whole stream, whose form is checked."""
    async with server.open(PATH, {"stream": True, **body}) as exchange:
        raw = await exchange.whole()
        assert exchange.status == 200, raw
        assert exchange.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, event in enumerate(read_events(raw)):
        data = json.loads(event.data)
        assert data["type"] == event.name
        assert data["sequence_number"] == number
        found.append(data)
    return found


def items_of(response: Mapping[str, object]) -> list[dict[str, Any]]:
    items = response["output"]
    assert isinstance(items, list)
    return items


def joined(events: list[Json]) -> str:
    return "".join(str(event["delta"]) for event in events if event["type"] == "response.output_text.delta")


def last_response(events: list[Json]) -> Json:
    response = events[-1]["response"]
    assert isinstance(response, dict)
    return response


@pytest.mark.asyncio
async def test_the_text_is_the_engines(server_of: ServerOf) -> None:
    async with server_of() as server:
        await server.engine.complete("abcdijkl", SamplingParams(max_tokens=1))
        response = await server.post(PATH, input="abcdefgh", max_output_tokens=7, temperature=0)
        expected = await server.engine.complete("abcdefgh", SamplingParams(max_tokens=7, temperature=0.0))
        assert said(response) == expected[0].text
        assert response["usage"] == {
            "input_tokens": 8,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 4},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        }
        assert (response["object"], response["model"]) == ("response", "fake")
        assert str(response["id"]).startswith("resp_")


@pytest.mark.asyncio
async def test_settings_are_echoed(server_of: ServerOf) -> None:
    given_: Json = {
        "instructions": "abc",
        "max_output_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "metadata": {"a": "b"},
        "user": "somebody",
        "truncation": "auto",
        "parallel_tool_calls": False,
    }
    defaults: Json = {
        "instructions": None,
        "max_output_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "metadata": {},
        "user": None,
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "error": None,
        "previous_response_id": None,
        "store": True,
    }
    async with server_of(runner=FakeRunner(max_context=32)) as server:
        response = await server.post(PATH, input="abc", **given_)
        assert given_.items() <= response.items()
        bare = await server.post(PATH, input="abc", **dict.fromkeys([*given_, "text", "tools", "tool_choice", "store"]))
        assert defaults.items() <= bare.items()


@pytest.mark.asyncio
async def test_streams_say_the_same(server_of: ServerOf) -> None:
    bodies: list[Json] = []

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.fixed_dictionaries(
            {"input": st.text("abcdefghij", min_size=1, max_size=12), "seed": st.integers(0, 2**32)},
            optional={
                "max_output_tokens": st.integers(1, 12),
                "temperature": st.sampled_from([0, 0.7, 1.5]),
                "top_p": st.sampled_from([0.1, 1]),
                "top_k": st.integers(0, 5),
                "min_p": st.sampled_from([0, 0.2]),
                "stop": st.sampled_from(["a", ["b", "cd"]]),
                "repetition_penalty": st.sampled_from([1, 1.5]),
            },
        )
    )
    def draw(body: Json) -> None:
        bodies.append(body)

    draw()
    async with server_of(runner=FakeRunner(max_context=40, eos_token_ids=frozenset({3, 9}))) as server:
        for body in bodies:
            whole = await server.post(PATH, **body)
            events = await events_of(server, **body)
            kinds = "".join(f"{str(event['type']).removeprefix('response.')} " for event in events)
            assert ORDER.fullmatch(kinds), kinds
            assert joined(events) == said(whole) == said(last_response(events))
            for response in (whole, last_response(events)):  # the prompt was cached for the second
                usage = response["usage"]
                assert isinstance(usage, dict)
                usage.pop("input_tokens_details")
            assert steady(last_response(events)) == steady(whole)


@pytest.mark.asyncio
async def test_the_events_agree_with_each_other(server_of: ServerOf) -> None:
    async with server_of() as server:
        events = {str(event["type"]): event for event in await events_of(server, input="abc", max_output_tokens=5)}
    response = events["response.incomplete"]["response"]
    assert isinstance(response, dict)
    [item] = response["output"]
    assert events["response.created"]["response"]["status"] == "in_progress"  # type: ignore[index]
    assert events["response.created"]["response"]["output"] == []  # type: ignore[index]
    assert events["response.output_item.added"]["item"] == {**item, "content": [], "status": "in_progress"}
    assert events["response.output_item.done"]["item"] == item
    assert events["response.content_part.done"]["part"] == item["content"][0]
    assert events["response.output_text.done"]["text"] == item["content"][0]["text"]
    for name in ("content_part.added", "output_text.delta", "output_text.done", "content_part.done"):
        event = events[f"response.{name}"]
        assert (event["item_id"], event["output_index"], event["content_index"]) == (item["id"], 0, 0)


@pytest.mark.asyncio
async def test_how_it_ends(server_of: ServerOf) -> None:
    async with server_of(runner=FakeRunner(eos_token_ids=frozenset(range(64)))) as server:
        response = await server.post(PATH, input="abc")
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert isinstance(response["completed_at"], int)
        assert [item["status"] for item in items_of(response)] == ["completed"]
        cut = await server.post(PATH, input="abc", max_output_tokens=2, ignore_eos=True)
        assert (cut["status"], cut["completed_at"]) == ("incomplete", None)
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in items_of(cut)] == ["incomplete"]


@pytest.mark.asyncio
async def test_conversations_in_all_forms(server_of: ServerOf) -> None:
    """What the fake template makes of them: the contents one after the other, with a token for each call."""
    text = {"type": "input_text", "text": "ab"}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    forms: list[tuple[object, int]] = [
        ("abcd", 4),
        ([{"role": "user", "content": "abcd"}], 4),
        ([{"type": "message", "role": "user", "content": [text, text]}], 4),
        ([{"role": "developer", "content": "ab"}, {"role": "user", "content": "cd"}], 4),
        (
            [
                {"role": "user", "content": "ab"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            ],
            3,
        ),
        ([{"role": "user", "content": "ab"}, call], 3),
        ([{"role": "user", "content": "ab"}, call, {**call, "call_id": "c2"}], 4),
        (
            [
                {"role": "user", "content": "ab"},
                call,
                {"type": "function_call_output", "call_id": "c1", "output": "42"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "43"}]},
            ],
            7,
        ),
    ]
    async with server_of() as server:
        for items, tokens in forms:
            response = await server.post(PATH, input=items, max_output_tokens=1)
            assert response["usage"]["input_tokens"] == tokens, items  # type: ignore[index]
        first = await server.post(PATH, input="cd", instructions="ab", max_output_tokens=4, temperature=0)
        assert said(first) == said(await server.post(PATH, input="abcd", max_output_tokens=4, temperature=0))


@pytest.mark.asyncio
async def test_a_conversation_goes_on(server_of: ServerOf) -> None:
    async with server_of(runner=FakeRunner(max_context=200)) as server:
        bodies = [{"input": text, "max_output_tokens": 6, "temperature": 0} for text in ("abcd", "efgh", "ijk")]
        whole, previous, answers = "", None, []
        for number, body in enumerate(bodies):
            whole += str(body["input"])
            if number == 1:
                response = last_response(await events_of(server, **body, previous_response_id=previous))
            else:
                response = await server.post(PATH, **body, previous_response_id=previous)
            [expected] = await server.engine.complete(whole, SamplingParams(max_tokens=6, temperature=0.0))
            assert said(response) == expected.text
            assert response["previous_response_id"] == previous
            previous = response["id"]
            whole += expected.text
            answers.append(response)
            assert (await server.client.get(f"{PATH}/{previous}")).json() == response
        # the instructions of a turn are its own
        again = await server.post(PATH, **bodies[1], previous_response_id=answers[0]["id"])
        assert said(again) == said(answers[1])
        # an early one can go without taking the later ones along
        gone = answers[0]["id"]
        deleted = await server.client.delete(f"{PATH}/{gone}")
        assert deleted.json() == {"id": gone, "object": "response.deleted", "deleted": True}
        assert (await server.client.get(f"{PATH}/{gone}")).status_code == 404
        assert (await server.client.delete(f"{PATH}/{gone}")).status_code == 404
        assert said(await server.post(PATH, **bodies[2], previous_response_id=answers[1]["id"])) == said(answers[2])
        error = await server.refused(PATH, 404, input="a", previous_response_id=gone)
        assert error["param"] == "previous_response_id"


@pytest.mark.asyncio
async def test_instructions_are_not_carried_over(server_of: ServerOf) -> None:
    async with server_of() as server:
        body: Json = {"max_output_tokens": 3, "temperature": 0}
        first = await server.post(PATH, input="abc", instructions="ooo", **body)
        second = await server.post(PATH, input="d", previous_response_id=first["id"], **body)
        assert said(second) == said(await server.post(PATH, input="abc" + said(first) + "d", **body))


@pytest.mark.asyncio
async def test_what_is_not_to_be_stored_is_not(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(max_responses=2)) as server:
        hidden = await server.post(PATH, input="abc", max_output_tokens=1, store=False)
        assert hidden["store"] is False
        assert (await server.client.get(f"{PATH}/{hidden['id']}")).status_code == 404
        ids = [(await server.post(PATH, input="abc", max_output_tokens=1))["id"] for _ in range(3)]
        found = [(await server.client.get(f"{PATH}/{each}")).status_code for each in ids]
        assert found == [404, 200, 200]


@pytest.mark.asyncio
async def test_nobody_finds_anothers(server_of: ServerOf) -> None:
    keys = Keys({hashlib.sha256(name.encode()).digest(): Caller(tenant=name) for name in ("ann", "bob")})
    async with server_of(settings=ServerSettings(keys=keys, admin_token=ADMIN)) as server:
        server.headers = {"Authorization": "Bearer ann"}
        mine = (await server.post(PATH, input="abcd", max_output_tokens=1))["id"]
        server.headers = {"Authorization": "Bearer bob"}
        error = await server.refused(PATH, 404, input="a", previous_response_id=mine)
        never = await server.refused(PATH, 404, input="a", previous_response_id="resp_never")
        assert str(error["message"]).replace(str(mine), "resp_never") == never["message"]  # not even that it is there
        for method in ("GET", "DELETE"):
            answer = await server.client.request(method, f"{PATH}/{mine}", headers=server.headers)
            assert answer.status_code == 404
        server.headers = {"Authorization": "Bearer ann"}
        assert (await server.client.get(f"{PATH}/{mine}", headers=server.headers)).status_code == 200
        erased = await server.client.post(
            "/admin/erase", json={"tenant": "ann"}, headers={"Authorization": f"Bearer {ADMIN}"}
        )
        assert erased.status_code == 200
        assert (await server.client.get(f"{PATH}/{mine}", headers=server.headers)).status_code == 404


@pytest.mark.asyncio
async def test_the_oldest_turns_make_way(server_of: ServerOf) -> None:
    """With ``truncation`` ``auto``: as few as it takes, never what comes first, never the last turn."""
    turns = [{"role": "user", "content": letter * 4} for letter in "abcdefgh"]
    head = {"role": "system", "content": "oo"}
    async with server_of(runner=FakeRunner(max_context=20)) as server:
        for given_, most, kept in (
            (turns, 4, "ddddeeeeffffgggghhhh"[4:]),
            (turns[:2], 4, "aaaabbbb"),
            ([head, *turns], 4, "ooffffgggghhhh"),
            ([head, *turns], None, "ooeeeeffffgggghhhh"),
            ([*turns, {"role": "assistant", "content": "iii"}], 8, "gggghhhhiii"),
        ):
            body: Json = {"temperature": 0, "max_output_tokens": most}
            response = await server.post(PATH, input=given_, truncation="auto", **body)
            assert said(response) == said(await server.post(PATH, input=kept, **body)), given_
            await server.refused(PATH, 400, input=[*turns, *turns], **body)
        await server.refused(PATH, input="a" * 40, truncation="auto")
        body = {"temperature": 0, "max_output_tokens": 4}
        huge = [{"role": "user", "content": "a" * 3000}, {"role": "user", "content": "bbbb"}]
        assert said(await server.post(PATH, input=huge, truncation="auto", **body)) == said(
            await server.post(PATH, input="bbbb", **body)
        )
        assert (await server.refused(PATH, input=huge, **body))["code"] == "context_length_exceeded"


@pytest.mark.asyncio
async def test_failures(server_of: ServerOf) -> None:
    """A model that fails in the middle: a status, or the last event of a stream; nothing is stored."""

    def fail(step: StepInput) -> None:
        if runner.steps >= 3:
            raise RuntimeError("the device is gone: secret")

    runner = FakeRunner(before_step=fail)
    async with server_of(runner=runner) as server:
        events = await events_of(server, input="abc", max_output_tokens=10)
        assert events[-1]["type"] == "response.failed"
        response = last_response(events)
        assert response["status"] == "failed"
        assert response["error"]["code"] == "server_error"  # type: ignore[index]
        assert (await server.client.get(f"{PATH}/{response['id']}")).status_code == 404
        error = await server.refused(PATH, 500, input="abc", max_output_tokens=10)
        assert error["type"] == "server_error"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_a_client_that_leaves_ends_its_request(server_of: ServerOf, *, stream: bool, steps: int) -> None:
    async with server_of(runner=FakeRunner(max_context=4096), num_blocks=1024) as server:
        body = {"input": "abc", "stream": stream, "ignore_eos": True}
        async with server.open(PATH, body, window=1) as exchange:
            for _ in range(steps if stream else 0):
                await exchange.read()
            exchange.leave()
            await exchange.ended()
        assert server.engine.stats().running == 0
        assert len(server.engine.requests()) == 0


@pytest.mark.asyncio
async def test_what_is_refused_names_the_field(server_of: ServerOf) -> None:
    tool = {"type": "function", "name": "f"}
    cases: list[tuple[Json, str | None]] = [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "f"}]}, "input[1]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": "5"}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 10**6}, "input"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "top_p": 1.5}, "top_p"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "truncation": "yes"}, "truncation"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "web_search", "name": "w"}]}, "tools[0].type"),
        ({"input": "a", "tools": [tool, tool]}, "tools"),
        ({"input": "a", "tools": [tool]}, "tools"),  # nobody knows how the fake model calls
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tools": [tool], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": "a", "tool_choice": "perhaps"}, "tool_choice"),
    ]
    async with server_of() as server:
        for body, param in cases:
            for stream in (False, True):
                assert (await server.refused(PATH, 400, **body, stream=stream))["param"] == param, body
        await server.refused(PATH, 404, input="a", model="other")
        answer = await server.client.get(f"{PATH}/resp_0")
        assert answer.json()["error"]["code"] == "response_not_found"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_function_calls_come_out_and_their_results_go_in(server_of: ServerOf, *, stream: bool) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    runner = Scripted("Well." + call, prompt_tokens=4)  # one for the tool
    settings_ = ServerSettings(tool_format="hermes")
    async with server_of(codec=AsciiCodec(), runner=runner, settings=settings_) as server:
        body: Json = {"input": "1+1", "tools": [tool]}
        response = last_response(await events_of(server, **body)) if stream else await server.post(PATH, **body)
        assert response["status"] == "completed"
        assert response["tools"] == [{**tool, "strict": None}]
        message, made = items_of(response)
        assert message["content"][0]["text"] == "Well."
        assert (made["type"], made["name"], json.loads(made["arguments"])) == ("function_call", "add", {"a": 1})
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "2"}
        following: Json = {"tools": [tool], "max_output_tokens": 1}
        after = await server.post(PATH, input=[result], previous_response_id=response["id"], **following)
        said_again = [{"role": "user", "content": "1+1"}, message, made, result]
        again = await server.post(PATH, input=said_again, **following)
        for each in (after, again):  # tool, text, "Well.", call, result
            assert each["usage"]["input_tokens"] == 1 + 3 + 5 + 1 + 1  # type: ignore[index]
        assert said(after) == said(again)
        silent = await server.post(PATH, **body, tool_choice="none", max_output_tokens=1)
        assert silent["usage"]["input_tokens"] == 3  # type: ignore[index]


@pytest.mark.asyncio
async def test_an_abort_by_the_server_is_no_success(server_of: ServerOf) -> None:
    def end(step: StepInput) -> None:
        if runner.steps % 5 == 4:
            [request] = server.engine.requests()
            server.engine.abort(request.request_id)

    runner = FakeRunner(before_step=end)
    async with server_of(runner=runner) as server:
        events = await events_of(server, input="abc", max_output_tokens=50)
        assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "response.failed"]
        assert (await server.refused(PATH, 503, input="abc", max_output_tokens=50))["code"] == "aborted"


@pytest.mark.asyncio
async def test_the_format_of_the_text_is_kept(server_of: ServerOf) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    runner = FakeRunner(vocab_size=128, eos_token_ids=frozenset({0}))
    async with server_of(codec=AsciiCodec(), runner=runner, num_blocks=1024) as server:
        response = await server.post(PATH, input="abc", text={"format": wanted}, max_output_tokens=500, seed=1)
        assert response["text"]["format"] == wanted  # type: ignore[index]
        assert response["status"] == "completed"
        assert json.loads(said(response)) in ({"a": 1}, {"a": 2})


@pytest.mark.asyncio
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "pick"}])
async def test_a_call_can_be_required(server_of: ServerOf, choice: object) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "name": "pick", "parameters": schema, "strict": True}
    runner = FakeRunner(vocab_size=128, eos_token_ids=frozenset({0}))
    settings_ = ServerSettings(tool_format="hermes")
    async with server_of(codec=AsciiCodec(), runner=runner, settings=settings_, num_blocks=1024) as server:
        body: Json = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 500}
        response = await server.post(PATH, input="abc", **body)
        assert response["tool_choice"] == choice
        [made] = items_of(response)
        assert (made["type"], made["name"]) == ("function_call", "pick")
        assert json.loads(made["arguments"]) in ({"a": 1}, {"a": 2})


@pytest.mark.asyncio
async def test_erasing_forgets_what_a_client_stored_under_a_salt(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(admin_token=ADMIN)) as server:
        mine = await server.post(PATH, input="0123", max_output_tokens=16, cache_salt="mine")
        other = await server.post(PATH, input="0123", max_output_tokens=16)
        erased = await server.client.post(
            "/admin/erase", json={"tenant": "mine"}, headers={"Authorization": f"Bearer {ADMIN}"}
        )
        assert erased.status_code == 200
        assert (await server.client.get(f"{PATH}/{mine['id']}")).status_code == 404
        assert (await server.client.get(f"{PATH}/{other['id']}")).status_code == 200


@pytest.mark.asyncio
async def test_a_conversation_keeps_its_salt(server_of: ServerOf) -> None:
    """Else what was said under one salt would stay, with another, when the first one is erased."""
    async with server_of() as server:
        first = await server.post(PATH, input="0123", max_output_tokens=16, cache_salt="mine")
        more: Json = {"input": "4", "max_output_tokens": 16, "previous_response_id": first["id"]}
        for body in (more, {**more, "cache_salt": "other"}):
            refused = await server.client.post(PATH, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
        assert (await server.client.post(PATH, json={**more, "cache_salt": "mine"})).status_code == 200


@pytest.mark.asyncio
async def test_erasing_forgets_what_is_not_yet_read_to_its_end(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(admin_token=ADMIN)) as server:
        body = {"input": "0123", "max_output_tokens": 16, "cache_salt": "mine", "stream": True}
        async with server.open(PATH, body, window=1) as exchange:
            await exchange.read()
            await exchange.read()
            await server.engine._loop.wait_idle()
            await server.client.post(
                "/admin/erase", json={"tenant": "mine"}, headers={"Authorization": f"Bearer {ADMIN}"}
            )
            response_id = re.search(rb"resp_[0-9a-f]+", await exchange.whole())
        assert response_id is not None
        assert (await server.client.get(f"{PATH}/{response_id[0].decode()}")).status_code == 404
