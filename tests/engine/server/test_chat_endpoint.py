"""``POST /v1/chat/completions``: the form of its answers, and what its own fields do."""

from __future__ import annotations

import pytest

from octavo import SamplingParams
from octavo.engine.request import Chat
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.http_rig import Json, Server, ServerOf, Stream

CHAT = "/v1/chat/completions"
ASK: dict[str, object] = {"messages": [{"role": "user", "content": "abcdefgh"}], "temperature": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def only(answer: Json) -> Json:
    choices = answer["choices"]
    assert isinstance(choices, list)
    (choice,) = choices
    assert isinstance(choice, dict)
    return choice


async def text(server: Server, **body: object) -> object:
    return only(await server.post(CHAT, **{**ASK, "max_tokens": 6, **body}))["message"]["content"]  # type: ignore[index]  # JSON


@pytest.mark.asyncio
async def test_the_answer_has_the_form_that_clients_know(server_of: ServerOf) -> None:
    async with server_of() as server:
        (expected,) = await server.engine.complete("abcdefgh", GREEDY)
        answer = await server.post(CHAT, **ASK, max_tokens=6)
    assert str(answer.pop("id")).startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": expected.text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 7, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "system_fingerprint": "fp_fake",
    }


@pytest.mark.asyncio
async def test_a_stream_is_role_then_content_then_finish_then_usage(server_of: ServerOf) -> None:
    async with server_of() as server:
        whole = await server.post(CHAT, **ASK, max_tokens=6)
        stream = await server.stream(CHAT, **ASK, max_tokens=6, stream_options={"include_usage": True})
        bare = await server.stream(CHAT, **ASK, max_tokens=6)
    first, *contents, finish, usage = stream.chunks
    assert only(first)["delta"] == {"role": "assistant", "content": ""}
    assert [set(only(chunk)["delta"]) for chunk in contents] == [{"content"}] * 6  # type: ignore[call-overload]  # JSON
    assert all(only(chunk)["finish_reason"] is None for chunk in (first, *contents))
    assert (only(finish)["delta"], only(finish)["finish_reason"]) == ({}, "length")
    assert all(chunk["usage"] is None for chunk in (first, *contents, finish))
    assert usage["choices"] == []
    assert counted(usage) == counted(whole)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks}) == 1
    assert len(bare.chunks) == len(stream.chunks) - 1
    assert all("usage" not in chunk for chunk in bare.chunks)


def counted(answer: Json) -> tuple[object, object]:
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.asyncio
async def test_usage_can_come_with_every_chunk(server_of: ServerOf) -> None:
    async with server_of() as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = await server.stream(CHAT, **ASK, max_tokens=5, n=2, stream_options=options)
    counts = [counted(chunk)[1] for chunk in stream.chunks]
    assert counts == sorted(counts, key=lambda each: int(str(each)))
    assert counts[-1] == 10


@pytest.mark.asyncio
async def test_logprobs_name_tokens_bytes_and_alternatives(server_of: ServerOf) -> None:
    async with server_of() as server:
        (expected,) = await server.engine.complete(
            "abcdefgh", SamplingParams(max_tokens=4, temperature=0.0, logprobs=2)
        )
        body = {**ASK, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
        whole = only(await server.post(CHAT, **body))
        stream = await server.stream(CHAT, **body)
        as_ids = only(await server.post(CHAT, **body, return_tokens_as_token_ids=True))
        alone = only(await server.post(CHAT, **{**body, "top_logprobs": None}))
    assert expected.logprobs is not None
    codec = FakeCodec()

    def written(token: int, logprob: float) -> Json:
        return {"token": codec.decode([token]), "logprob": logprob, "bytes": list(codec.token_bytes(token))}

    entries = [
        {**written(each.token_id, each.logprob), "top_logprobs": [written(*top) for top in each.top]}
        for each in expected.logprobs
    ]
    assert whole["logprobs"] == {"content": entries, "refusal": None}
    assert joined_logprobs(stream) == entries
    assert [each["token"] for each in content(as_ids)] == [f"token_id:{each.token_id}" for each in expected.logprobs]
    assert [each["top_logprobs"] for each in content(alone)] == [[]] * 4


def content(choice: Json) -> list[Json]:
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    found = logprobs["content"]
    assert isinstance(found, list)
    return found


def joined_logprobs(stream: Stream, index: int = 0) -> list[Json]:
    return [entry for choice in stream.choices(index) if choice["logprobs"] is not None for entry in content(choice)]


@pytest.mark.asyncio
async def test_without_max_tokens_the_answer_ends_where_the_room_does(server_of: ServerOf) -> None:
    async with server_of(runner=FakeRunner(max_context=20)) as server:
        answer = await server.post(CHAT, **ASK)
        assert counted(answer) == (8, 12)
        assert only(answer)["finish_reason"] == "length"
    async with server_of(num_blocks=4, block_size=4) as server:
        assert only(await server.post(CHAT, **ASK))["finish_reason"] == "length"


@pytest.mark.asyncio
async def test_the_newer_name_of_max_tokens_wins_and_two_that_differ_are_refused(server_of: ServerOf) -> None:
    async with server_of() as server:
        for body in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}):
            assert counted(await server.post(CHAT, **ASK, **body)) == (8, 3)
        error = await server.refused(CHAT, **ASK, max_completion_tokens=3, max_tokens=4)
        assert error["param"] == "max_tokens"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_at_all_is_an_answer(stream: bool, server_of: ServerOf) -> None:
    """INPUT-11."""
    async with server_of() as server:
        if stream:
            whole = await server.stream(CHAT, **ASK, max_tokens=0)
            assert (whole.text(), whole.finish_reasons()) == ("", ["length"])
        else:
            answer = await server.post(CHAT, **ASK, max_tokens=0)
            assert only(answer)["finish_reason"] == "length"
            assert only(answer)["message"]["content"] == ""  # type: ignore[index]  # JSON
            assert counted(answer) == (8, 0)


@pytest.mark.asyncio
async def test_messages_reach_the_template_whole(server_of: ServerOf) -> None:
    """Nulls are absent, parts stay parts, and what the template may know is handed on."""

    class Watching(FakeCodec):
        def encode_chat(self, chat: Chat) -> list[int]:
            seen.append(chat)
            return super().encode_chat(chat)

    seen: list[Chat] = []
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "ab", "name": None, "tool_calls": None, "annotations": []},
        {"role": "user", "name": "max", "content": [{"type": "text", "text": "cd"}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "fg"},
    ]
    async with server_of(codec=Watching()) as server:
        await server.post(CHAT, messages=messages, max_tokens=1, chat_template_kwargs={"enable_thinking": False})
        await server.post(CHAT, messages=messages, max_tokens=1, continue_final_message=True)
        await server.post(CHAT, messages=messages, max_tokens=1, add_generation_prompt=False)
        error = await server.refused(CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert error["param"] == "continue_final_message"
    first, continued, bare = seen
    assert list(first.messages) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "name": "max", "content": [{"type": "text", "text": "cd"}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "fg"},
    ]
    assert first.template_options == {"enable_thinking": False}
    assert [(chat.continues_last, chat.opens_turn) for chat in seen] == [(False, True), (True, False), (False, False)]
    assert continued.messages == bare.messages == first.messages


@pytest.mark.asyncio
async def test_a_long_conversation_can_be_cut_at_its_front(server_of: ServerOf) -> None:
    async with server_of() as server:
        cut = await server.post(CHAT, **ASK, max_tokens=4, truncate_prompt_tokens=3, return_token_ids=True)
        (expected,) = await server.engine.complete("fgh", SamplingParams(max_tokens=4, temperature=0.0))
        assert only(cut)["token_ids"] == list(expected.token_ids)
        assert cut["prompt_token_ids"] == FakeCodec().encode("fgh")
        assert counted(cut) == (3, 4)
        longer = await server.post(CHAT, **ASK, max_tokens=4, truncate_prompt_tokens=100)
        assert counted(longer) == (8, 4)


@pytest.mark.asyncio
async def test_token_ids_are_told_on_demand(server_of: ServerOf) -> None:
    async with server_of() as server:
        whole = await server.post(CHAT, **ASK, max_tokens=4, return_token_ids=True)
        stream = await server.stream(CHAT, **ASK, max_tokens=4, return_token_ids=True)
    told = [token for choice in stream.choices() for token in choice.get("token_ids", [])]  # type: ignore[attr-defined]  # JSON
    assert told == only(whole)["token_ids"]
    assert whole["prompt_token_ids"] == FakeCodec().encode("abcdefgh")
    assert [chunk.get("prompt_token_ids") for chunk in stream.chunks].count(whole["prompt_token_ids"]) == 1


@pytest.mark.asyncio
async def test_prompt_logprobs_are_told_in_the_form_of_vllm(server_of: ServerOf) -> None:
    async with server_of() as server:
        answer = await server.post(CHAT, **ASK, max_tokens=1, prompt_logprobs=2)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
        (expected,) = await server.engine.complete("abcdefgh", params)
        error = await server.refused(CHAT, **ASK, prompt_logprobs=2, stream=True)
    assert error["param"] == "prompt_logprobs"
    told, scores = answer["prompt_logprobs"], expected.prompt_logprobs
    assert isinstance(told, list)
    assert scores is not None
    assert told[0] is None
    for entry, score in zip(told[1:], scores[1:], strict=True):
        assert score is not None
        own = entry[str(score.token_id)]
        assert (own["logprob"], own["decoded_token"]) == (score.logprob, FakeCodec().decode([score.token_id]))
        assert {str(token) for token, _ in score.top} <= set(entry)
        assert [entry[str(token)]["rank"] for token, _ in score.top] == [1, 2]


@pytest.mark.asyncio
async def test_the_model_goes_by_the_names_it_is_served_under(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(model_names=("first", "second"))) as server:
        assert (await server.post(CHAT, **ASK, max_tokens=1))["model"] == "first"
        assert (await server.post(CHAT, **ASK, max_tokens=1, model="second"))["model"] == "second"
        error = await server.refused(CHAT, 404, **ASK, model="fake")
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["audio", "functions", "function_call", "modalities"])
async def test_what_would_need_another_kind_of_answer_is_refused(field: str, server_of: ServerOf) -> None:
    values = {
        "audio": {"voice": "alloy", "format": "wav"},
        "functions": [{"name": "f"}],
        "function_call": "auto",
        "modalities": ["text", "audio"],
    }
    async with server_of() as server:
        assert (await server.refused(CHAT, **ASK, **{field: values[field]}))["param"] == field
        assert await text(server, **{field: None}) == await text(server, modalities=["text"])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("abc", "messages"),
        ([{"content": "abc"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ""}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
        ([{"role": "user"}], "messages"),
    ],
)
async def test_bad_messages_are_refused(messages: object, param: str, server_of: ServerOf) -> None:
    async with server_of() as server:
        error = await server.refused(CHAT, messages=messages)
        assert str(error["param"]).startswith(param)
        assert server.engine.stats().submitted == 0


@pytest.mark.asyncio
async def test_a_model_without_a_tokenizer_takes_no_conversations(server_of: ServerOf) -> None:
    async with server_of(codec=None) as server:
        assert (await server.refused(CHAT, **ASK))["type"] == "invalid_request_error"
