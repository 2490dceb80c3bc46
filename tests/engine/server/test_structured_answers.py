"""Answers that keep to a format, by whichever field it is asked for, and calls that have to be made."""

from __future__ import annotations

import json
import re
from typing import Final

import pytest

from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.http_rig import Json, Server, ServerOf
from octavo.tests.engine.server.scripted import ASCII, AsciiCodec

pytest.importorskip("llguidance")
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED: Final = {"type": "json_schema", "json_schema": {"name": "ab", "schema": SCHEMA, "strict": True}}
PATTERN: Final = "[a-f]{3}-[0-9]{2}"
TOOLS: Final = [
    {"type": "function", "function": {"name": "weigh", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


def scene() -> dict[str, object]:
    runner = FakeRunner(vocab_size=ASCII, eos_token_ids=frozenset({0}))
    settings = ServerSettings(tool_format="octavo.engine.server.tools.hermes:Hermes")
    return {"runner": runner, "codec": AsciiCodec(), "settings": settings, "num_blocks": 256}


async def texts(server: Server, path: str, **body: object) -> list[str]:
    asked = {"messages": [{"role": "user", "content": "ab"}]} if path == CHAT else {"prompt": "ab"}
    answer = await server.post(path, **{**asked, "n": 3, "seed": 1, "max_tokens": 200, **body})
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]


def fits(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"a", "b"} and 0 <= found["a"] <= 99 and found["b"] in ("x", "y")


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_way_to_ask_for_a_format_is_kept_to(path: str, server_of: ServerOf) -> None:
    by_schema: tuple[dict[str, object], ...] = (
        {"response_format": NAMED},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    )
    by_pattern: tuple[dict[str, object], ...] = ({"guided_regex": PATTERN}, {"structured_outputs": {"regex": PATTERN}})
    by_choice: tuple[dict[str, object], ...] = (
        {"guided_choice": ["red", "blue"]},
        {"structured_outputs": {"choice": ["red", "blue"]}},
        {"guided_grammar": 'start: "red" | "blue"'},
        {"structured_outputs": {"grammar": 'start: "red" | "blue"'}},
    )
    async with server_of(**scene()) as server:
        for fields in by_schema:
            found = await texts(server, path, **fields)
            assert all(map(fits, found)), fields
        for fields in by_pattern:
            found = await texts(server, path, **fields)
            assert all(re.fullmatch(PATTERN, text) for text in found), fields
        for fields in by_choice:
            assert set(await texts(server, path, **fields)) <= {"red", "blue"}, fields


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(unclosed"},
        {"guided_grammar": "no grammar at all"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}},
        {"structured_outputs": {"regex": "(?=x)"}},
    ],
)
async def test_a_format_that_is_malformed_is_refused_by_the_name_of_its_field(
    fields: dict[str, object], server_of: ServerOf
) -> None:
    """LOOP-06."""
    async with server_of(**scene()) as server:
        for stream in (False, True):
            error = await server.refused(COMPLETIONS, prompt=["ab", "cd"], stream=stream, **fields)
            assert error["param"] == next(iter(fields))
        assert server.engine.stats().submitted == 0


@pytest.mark.asyncio
async def test_a_call_that_is_required_is_made(server_of: ServerOf) -> None:
    async def calls(server: Server, **body: object) -> list[Json]:
        answer = await server.post(
            CHAT, messages=[{"role": "user", "content": "ab"}], tools=TOOLS, seed=2, max_tokens=240, **body
        )
        choices = answer["choices"]
        assert isinstance(choices, list)
        (choice,) = choices
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        found = choice["message"]["tool_calls"]
        assert isinstance(found, list)
        return [call["function"] for call in found]

    async with server_of(**scene()) as server:
        for function in await calls(server, tool_choice="required", parallel_tool_calls=False):
            assert function["name"] in ("weigh", "time")
        chosen = {"type": "function", "function": {"name": "weigh"}}
        (function,) = await calls(server, tool_choice=chosen)
        assert function["name"] == "weigh"
        assert fits(str(function["arguments"]))
