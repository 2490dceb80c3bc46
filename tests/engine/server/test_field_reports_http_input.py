"""Field reports over HTTP, "bad inputs reaching the model": refused by name, or harmless.

Which report is tested where is in ``test_field_reports_http.py``.
"""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Final

import pytest

from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.model.tokenizer_rig import byte_level, wrap
from octavo.tests.engine.server.bystanders import bystanders
from octavo.tests.engine.server.http_rig import Json, ServerOf

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
USER: Final = [{"role": "user", "content": "abc"}]
GOOD: Final[Json] = {"prompt": "abcdefgh", "max_tokens": 6, "temperature": 0}


def choice_of(answer: Json) -> Json:
    choices = answer["choices"]
    assert isinstance(choices, list)
    (choice,) = choices
    assert isinstance(choice, dict)
    return choice


# INPUT-01


@pytest.mark.asyncio
async def test_a_tokenizer_that_knows_more_or_fewer_tokens_than_the_model(server_of: ServerOf) -> None:
    """Ids are the model's, wherever they come from and wherever they are named."""
    async with server_of(codec=FakeCodec(100), num_blocks=256) as server, bystanders(server):
        for prompt in (chr(48 + 64), chr(48 + 99), "ab" + chr(48 + 64)):
            assert (await server.refused(COMPLETIONS, prompt=prompt))["param"] == "prompt"
            chat = await server.refused(CHAT, messages=[{"role": "user", "content": prompt}])
            assert chat["param"] == "messages"
            await server.refused(RESPONSES, input=prompt)
        assert (await server.refused("/detokenize", tokens=[64]))["param"] == "tokens"
        assert choice_of(await server.post(COMPLETIONS, **{**GOOD, "prompt": [63]}))["finish_reason"] == "length"
    async with server_of(codec=FakeCodec(40), num_blocks=256) as server:
        body = {**GOOD, "prompt": [63], "return_token_ids": True, "logprobs": 3}
        choice = choice_of(await server.post(COMPLETIONS, **body))
        tokens = choice["token_ids"]
        assert isinstance(tokens, list)
        assert choice["text"] == "".join(chr(48 + token) for token in tokens if token < 40)
        assert (await server.post("/detokenize", tokens=[1, 63]))["prompt"] == "1"


# INPUT-03


@pytest.mark.asyncio
@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_bias_of_a_hundred_forces_or_forbids(temperature: float, server_of: ServerOf) -> None:
    async with server_of(num_blocks=256) as server, bystanders(server):
        body = {**GOOD, "temperature": temperature, "seed": 3, "return_token_ids": True, "max_tokens": 12}
        free = choice_of(await server.post(COMPLETIONS, **body))["token_ids"]
        assert isinstance(free, list)
        forced = choice_of(await server.post(COMPLETIONS, **body, logit_bias={"17": 100}))
        assert forced["token_ids"] == [17] * 12
        banned = choice_of(await server.post(COMPLETIONS, **body, logit_bias=dict.fromkeys(map(str, free), -100)))
        assert not set(free) & set(banned["token_ids"])  # type: ignore[call-overload]  # JSON


@pytest.mark.asyncio
async def test_ten_thousand_biases_are_as_good_as_one(server_of: ServerOf) -> None:
    size = 2**14
    runner, codec = FakeRunner(vocab_size=size), FakeCodec(size)
    async with server_of(runner=runner, codec=codec, num_blocks=256) as server, bystanders(server):
        biases = {**dict.fromkeys(map(str, range(10_000)), -100), "77": 100}
        body = {**GOOD, "prompt": [1, 2, 3], "return_token_ids": True}
        assert choice_of(await server.post(COMPLETIONS, **body, logit_bias=biases))["token_ids"] == [77] * 6
        error = await server.refused(COMPLETIONS, **body, logit_bias={**biases, str(size): 0})
        assert error["param"] == "logit_bias"


# INPUT-05


@pytest.mark.asyncio
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
async def test_temperatures_that_are_next_to_nothing_are_greedy(route: str, server_of: ServerOf) -> None:
    """And a ``top_p`` that keeps one token; all numbers that are told are numbers."""
    asked: Json = {"messages": USER, "logprobs": True} if route == CHAT else {"prompt": "abc", "logprobs": 5}
    asked |= {"max_tokens": 12, "seed": 1, "top_logprobs": 5 if route == CHAT else None}
    variants: list[Json] = [{"temperature": value} for value in (1e-4, 1e-5, 1e-8, 1e-30, 1e-300, 5e-324, 0.0)]
    variants += [{"temperature": 1, "top_p": value} for value in (1e-4, 1e-30, 0)]
    variants += [{"temperature": 100, "top_k": 1}, {"temperature": 1, "min_p": 1}]
    async with server_of() as server:
        greedy = choice_of(await server.post(route, **asked, temperature=0))
        assert greedy.get("text") != ""
        for variant in variants:
            choice = choice_of(await server.post(route, **asked, **variant))
            told = choice["text"] if "text" in choice else choice["message"]["content"]  # type: ignore[index]  # JSON
            meant = greedy["text"] if "text" in greedy else greedy["message"]["content"]  # type: ignore[index]  # JSON
            assert told == meant, variant
            numbers = re.findall(r'"?logprob"?\'?: (-?[\d.e-]+|\w+)', str(choice["logprobs"]))
            assert all(math.isfinite(float(number)) for number in numbers)


# INPUT-08


@pytest.mark.asyncio
async def test_stop_strings_by_the_thousand_and_by_the_megabyte(server_of: ServerOf) -> None:
    async with server_of(num_blocks=256) as server, bystanders(server):
        for stops in (["x" * 2**20], ["xyz"] * 10_000, ["x" * 1024] * 65):
            assert str((await server.refused(COMPLETIONS, **GOOD, stop=stops))["param"]).startswith("stop")
        error = await server.refused(COMPLETIONS, 413, **GOOD, stop=["x" * 2**20] * 10)
        assert error["code"] == "body_too_large"


def nested(depth: int, kind: str) -> str:
    """A JSON value that is ``depth`` objects, or lists, deep."""
    if kind == "lists":
        return '{"a":' + "[" * depth + "]" * depth + "}"
    return f'{{"{kind}":' * depth + "{}" + "}" * depth


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["lists", "properties", "items"])
@pytest.mark.parametrize("depth", [900, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (150, 1500))])
async def test_fields_that_are_nested_deeply_are_used_or_refused(depth: int, kind: str, server_of: ServerOf) -> None:
    """Deep enough that reading them is possible, and going through them may not be."""
    deep = nested(depth, kind)
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    call = f'{{"id": "1", "type": "function", "function": {{"name": "f", "arguments": {json.dumps(deep)}}}}}'
    chat, words = f'"messages": {json.dumps(USER)}', '"prompt": "abc"'
    schema = f'{{"name": "a", "schema": {deep}}}'
    forms = [
        (COMPLETIONS, f'{{{words}, "metadata": {deep}}}'),
        (COMPLETIONS, f'{{{words}, "unheard_of": {deep}}}'),
        (COMPLETIONS, f'{{{words}, "guided_json": {deep}}}'),
        (CHAT, f'{{{chat}, "response_format": {{"type": "json_schema", "json_schema": {schema}}}}}'),
        (CHAT, f'{{{chat}, "chat_template_kwargs": {deep}}}'),
        (CHAT, f'{{{chat}, "tools": [{tool}]}}'),
        (CHAT, f'{{{chat}, "tools": [{tool}], "tool_choice": "required"}}'),
        (CHAT, f'{{"messages": [{json.dumps(USER[0])}, {{"role": "assistant", "tool_calls": [{call}]}}]}}'),
        ("/tokenize", f'{{{chat}, "tools": [{tool}], "chat_template_kwargs": {deep}}}'),
        (RESPONSES, f'{{"input": "abc", "metadata": {deep}}}'),
        (RESPONSES, f'{{"input": "abc", "text": {{"format": {{"type": "json_schema", {schema[1:]}}}}}'),
        ("/v1/cache/explain", f'{{{chat}, "tools": [{tool}]}}'),
    ]
    codec = HuggingFaceCodec(wrap(byte_level(), TEMPLATE))
    async with server_of(runner=FakeRunner(vocab_size=400), codec=codec, num_blocks=1024) as server:
        for path, body in forms:
            answer = await server.client.post(path, content=body.replace('{"', '{"max_tokens": 2, "', 1))
            assert answer.status_code in (200, 400), (path, body[:60], answer.text)
        canary = await server.post(COMPLETIONS, **GOOD)
        assert choice_of(canary)["finish_reason"] == "length"


TEMPLATE: Final = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}"
)


# INPUT-10

SESAME: Final = "sesame"
ODD: Final = (
    f"{SESAME}\x00",
    f"{SESAME}\x1b[31mred\x1b[0m",
    f"{SESAME}\n2026-01-01 [error] forged=1\r\n",
    f"{SESAME}\u2028\u2029\x85\ufeff\u202e",
    SESAME + "\ufffd" * 2**14,
    f"{SESAME}\ud800",
    f"\udfff{SESAME}",
)


@pytest.mark.asyncio
@pytest.mark.parametrize("level", [logging.DEBUG, pytest.param(logging.WARNING, marks=pytest.mark.slow)])
async def test_odd_text_is_the_same_with_and_without_logging(
    level: int, server_of: ServerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing of it gets into the log: neither the text nor another line."""
    codec = HuggingFaceCodec(wrap(byte_level(), TEMPLATE))
    caplog.set_level(level)
    statuses: dict[str, list[int]] = {}
    async with server_of(runner=FakeRunner(vocab_size=400), codec=codec, num_blocks=4096) as server:
        for text in ODD:
            bodies: list[tuple[str, Json]] = [
                (COMPLETIONS, {"prompt": text, "echo": True, "logprobs": 1}),
                (CHAT, {"messages": [{"role": "user", "content": text}]}),
                (CHAT, {"messages": USER, "user": text, "model": None, text[:100]: 1}),
                (RESPONSES, {"input": text}),
                ("/tokenize", {"prompt": text}),
                ("/v1/cache/explain", {"prompt": text}),
            ]
            for path, body in bodies:
                sent = json.dumps({"max_tokens": 2, "max_output_tokens": 16, "temperature": 0} | body)
                answer = await server.client.post(path, content=sent)
                assert answer.status_code in (200, 400), answer.text[:300]
                statuses.setdefault(text[:20], []).append(answer.status_code)
        for ids in ([-1], [400], [2**40]):
            await server.refused(COMPLETIONS, prompt=ids, max_tokens=2)
        await server.refused(CHAT, messages=[{"role": ODD[0], "content": "a"}])
    assert [statuses[text[:20]] for text in ODD[:4]] == [[200] * 6] * 4
    for record in caplog.records:
        line = record.getMessage()
        if record.name.startswith("octavo"):
            assert line.isprintable(), line
            assert SESAME not in line or "fields_ignored" in line
            assert record.levelno < logging.ERROR, line
