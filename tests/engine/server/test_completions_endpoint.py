"""``POST /v1/completions``: prompts of all kinds, side by side, with and without their echo."""

from __future__ import annotations

import dataclasses
from typing import Final

import pytest

from octavo import SamplingParams
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.http_rig import Json, Server, ServerOf

COMPLETIONS = "/v1/completions"
CODEC = FakeCodec()


def choices(answer: Json) -> list[Json]:
    found = answer["choices"]
    assert isinstance(found, list)
    return found


async def expected(server: Server, prompt: str, **params: object) -> list[str]:
    wanted = SamplingParams.from_mapping({"max_tokens": 5, "temperature": 0.0, **params})
    return [output.text for output in await server.engine.complete(prompt, wanted)]


async def ask(server: Server, prompt: object, **body: object) -> list[Json]:
    return choices(await server.post(COMPLETIONS, prompt=prompt, **{"max_tokens": 5, "temperature": 0, **body}))


@pytest.mark.asyncio
async def test_the_answer_has_the_form_that_clients_know(server_of: ServerOf) -> None:
    async with server_of() as server:
        (text,) = await expected(server, "abcdefgh", max_tokens=16)
        answer = await server.post(COMPLETIONS, prompt="abcdefgh", temperature=0)
    assert str(answer.pop("id")).startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    usage = answer.pop("usage")
    assert isinstance(usage, dict)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 16, 24)
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "system_fingerprint": "fp_fake",
    }


@pytest.mark.asyncio
async def test_text_ids_and_lists_of_them_mean_the_same(server_of: ServerOf) -> None:
    async with server_of() as server:
        first, second = await expected(server, "abcde"), await expected(server, "fghi")
        ids = [CODEC.encode("abcde"), CODEC.encode("fghi")]
        for one in ("abcde", ids[0], ["abcde"], [ids[0]]):
            assert [choice["text"] for choice in await ask(server, one)] == first
        for two in (["abcde", "fghi"], ids, ["abcde", ids[1]]):
            assert [choice["text"] for choice in await ask(server, two)] == first + second


@pytest.mark.asyncio
async def test_prompts_run_side_by_side_and_choices_come_in_order(server_of: ServerOf) -> None:
    texts = ["abc", "defghijk", "lm", "nabcd"]
    async with server_of(num_blocks=256) as server:
        alone = [text for each in texts for text in await expected(server, each, n=3, temperature=1.0, seed=7)]
        before = server.engine.stats().steps
        found = await ask(server, texts, n=3, temperature=1, seed=7)
        assert server.engine.stats().steps - before < 12, "one after the other would take 20 steps"
        stream = await server.stream(COMPLETIONS, prompt=texts, max_tokens=5, temperature=1, n=3, seed=7)
    assert [choice["index"] for choice in found] == list(range(12))
    assert [choice["text"] for choice in found] == alone
    assert [stream.text(index) for index in range(12)] == alone
    assert all(stream.finish_reasons(index) == ["length"] for index in range(12))


@pytest.mark.asyncio
async def test_usage_counts_each_prompt_once_and_every_sample(server_of: ServerOf) -> None:
    async with server_of() as server:
        await server.post(COMPLETIONS, prompt="abcdefgh", max_tokens=1)
        answer = await server.post(COMPLETIONS, prompt=["abcdefgh", "lmn"], max_tokens=4, n=2)
    usage = answer["usage"]
    assert isinstance(usage, dict)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 16, 27)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7


@pytest.mark.asyncio
@pytest.mark.parametrize("prompt", ["abcdefgh", CODEC.encode("abcdefgh")])
async def test_echo_begins_with_the_prompt(prompt: object, server_of: ServerOf) -> None:
    async with server_of() as server:
        (text,) = await expected(server, "abcdefgh")
        assert [choice["text"] for choice in await ask(server, prompt, echo=True)] == ["abcdefgh" + text]
        assert [choice["text"] for choice in await ask(server, prompt, echo=True, max_tokens=0)] == ["abcdefgh"]
        stream = await server.stream(COMPLETIONS, prompt=prompt, echo=True, max_tokens=5, temperature=0, n=2)
        assert (stream.text(0), stream.text(1)) == ("abcdefgh" + text, "abcdefgh" + text)
        cut = await ask(server, prompt, echo=True, max_tokens=0, truncate_prompt_tokens=2)
        assert [choice["text"] for choice in cut] == ["gh"]


@pytest.mark.asyncio
async def test_more_ids_than_the_context_takes_are_refused_unless_they_are_cut(server_of: ServerOf) -> None:
    async with server_of() as server:
        ids = CODEC.encode("abcdefgh") * 1000
        assert (await server.refused(COMPLETIONS, prompt=ids, max_tokens=1))["code"] == "context_length_exceeded"
        assert (await server.refused(COMPLETIONS, prompt=[ids], max_tokens=1))["param"] == "prompt"
        cut = await ask(server, ids, echo=True, max_tokens=0, truncate_prompt_tokens=2)
        assert [choice["text"] for choice in cut] == ["gh"]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_hot", [False, True])
async def test_log_likelihoods_are_told_as_evaluation_harnesses_ask_for_them(is_hot: bool, server_of: ServerOf) -> None:
    """Ids, ``max_tokens=1``, ``echo``, ``logprobs=1``: the same numbers whatever is cached."""
    ids = CODEC.encode("abcdefghijkl")
    async with server_of() as server:
        if is_hot:
            await server.post(COMPLETIONS, prompt=ids, max_tokens=1)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1)
        (output,) = await server.engine.complete(ids, params)
        (choice,) = await ask(server, [ids], max_tokens=1, echo=True, logprobs=1)
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    scores = [score for score in (*output.prompt_logprobs, *output.logprobs) if score is not None]
    assert logprobs["tokens"] == [CODEC.decode([token]) for token in (*ids, *output.token_ids)]
    assert logprobs["token_logprobs"] == [None, *(score.logprob for score in scores)]
    assert logprobs["text_offset"] == list(range(13))
    assert logprobs["top_logprobs"][0] is None
    for top, score in zip(logprobs["top_logprobs"][1:], scores, strict=True):
        ((best, value),) = score.top
        assert max(top.values()) == value
        assert top == {CODEC.decode([score.token_id]): score.logprob} | {CODEC.decode([best]): value}


@pytest.mark.asyncio
async def test_prompt_logprobs_and_the_echo_each_have_their_own_number_of_alternatives(server_of: ServerOf) -> None:
    async with server_of() as server:
        (choice,) = await ask(server, "abcdef", echo=True, logprobs=1, prompt_logprobs=3)
        assert isinstance(choice["prompt_logprobs"], list)
        assert isinstance(choice["logprobs"], dict)
        assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {3, 4}
        assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
        (plain,) = await ask(server, "abcdef", prompt_logprobs=3)
        assert (plain["prompt_logprobs"], plain["logprobs"]) == (choice["prompt_logprobs"], None)


@pytest.mark.asyncio
async def test_token_ids_are_told_on_demand(server_of: ServerOf) -> None:
    async with server_of() as server:
        found = await ask(server, ["abc", "de"], return_token_ids=True)
        stream = await server.stream(
            COMPLETIONS, prompt=["abc", "de"], max_tokens=5, temperature=0, return_token_ids=True
        )
    assert [choice["prompt_token_ids"] for choice in found] == [CODEC.encode("abc"), CODEC.encode("de")]
    for choice in found:
        assert CODEC.decode(choice["token_ids"]) == choice["text"]  # type: ignore[arg-type]  # JSON
        parts = stream.choices(choice["index"])  # type: ignore[arg-type]  # JSON
        joined = [token for part in parts for token in part.get("token_ids", [])]  # type: ignore[attr-defined]  # JSON
        assert joined == choice["token_ids"]
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [
            choice["prompt_token_ids"]
        ]


BAD_PROMPTS: Final[tuple[object, ...]] = (
    [64],
    [63, -1],
    [2**31],
    [2**63],
    [2**70],
    [1.5],
    [True],
    [["1"]],
    [[[1]]],
    [1, [1]],
    [1, "a"],
    [],
    [[]],
    "",
    ["abc", ""],
    [[1, 2], []],
    [[1, 2], [64]],
    ["abc", "\u00e9"],
    {"a": 1},
    5,
    None,
)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_refuses_all_before_anything_runs(stream: bool, server_of: ServerOf) -> None:
    """INPUT-01, LOOP-01."""
    async with server_of() as server:
        for prompt in BAD_PROMPTS:
            error = await server.refused(COMPLETIONS, prompt=prompt, max_tokens=2, stream=stream)
            assert str(error["param"]).startswith("prompt"), prompt
        assert (server.engine.stats().submitted, server.engine.stats().steps) == (0, 0)
        assert [choice["text"] for choice in await ask(server, [63])] == await expected(server, chr(48 + 63))


@pytest.mark.asyncio
@pytest.mark.parametrize("numbers", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_one_prompt_that_is_too_long_refuses_all_before_anything_runs(
    numbers: tuple[int, ...], server_of: ServerOf
) -> None:
    texts = ["a" * 30, "b" * 5, "c" * 10]
    prompt = [texts[number] for number in numbers]
    async with server_of(runner=FakeRunner(max_context=32)) as server:
        assert (await server.refused(COMPLETIONS, prompt=prompt, max_tokens=5))["param"] == "prompt"
        assert (server.engine.stats().submitted, server.engine.stats().steps) == (0, 0)
    async with server_of(num_blocks=8) as server:
        assert (await server.refused(COMPLETIONS, prompt=prompt, max_tokens=5))["code"] == "never_fits"
        assert (server.engine.stats().submitted, server.engine.stats().steps) == (0, 0)


@pytest.mark.asyncio
async def test_prompts_that_the_queue_cannot_take_are_all_given_back(server_of: ServerOf) -> None:
    async with server_of(max_waiting=3) as server:
        answer = await server.client.post(COMPLETIONS, json={"prompt": ["abc"] * 5, "max_tokens": 2})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        await server.engine._loop.wait_idle()
        assert server.engine.stats().steps == 0
        assert len(await ask(server, ["abc"] * 3)) == 3


@pytest.mark.asyncio
async def test_prompts_are_limited(server_of: ServerOf) -> None:
    async with server_of(settings=ServerSettings(max_prompts=2)) as server:
        assert len(await ask(server, ["abc", "def"])) == 2
        assert (await server.refused(COMPLETIONS, prompt=["a", "b", "c"]))["param"] == "prompt"
        assert len(await ask(server, [1, 2, 3])) == 1, "three ids are one prompt"


@pytest.mark.asyncio
async def test_nothing_fills_gaps(server_of: ServerOf) -> None:
    async with server_of() as server:
        assert (await server.refused(COMPLETIONS, prompt="abc", suffix="def"))["param"] == "suffix"
        assert await ask(server, "abc", suffix=None)


@pytest.mark.asyncio
async def test_a_model_without_a_tokenizer_takes_and_gives_ids(server_of: ServerOf) -> None:
    async with server_of(codec=None) as server:
        (choice,) = await ask(server, [1, 2, 3], return_token_ids=True, logprobs=1, echo=True)
        assert choice["text"] == ""
        assert isinstance(choice["logprobs"], dict)
        assert isinstance(choice["token_ids"], list)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [1, 2, 3, *choice["token_ids"]]]
        assert choice["logprobs"]["text_offset"] == [0] * 8
        assert (await server.refused(COMPLETIONS, prompt="abc"))["param"] == "prompt"


@pytest.mark.asyncio
async def test_the_best_of_several_is_returned(server_of: ServerOf) -> None:
    async with server_of() as server:
        wanted = SamplingParams(max_tokens=5, n=2, best_of=4, seed=3)
        texts = [output.text for output in await server.engine.complete("abcd", wanted)]
        found = await ask(server, "abcd", temperature=1, n=2, best_of=4, seed=3)
        beams = [
            o.text
            for o in await server.engine.complete("abcd", dataclasses.replace(wanted, best_of=None, beam_width=2))
        ]
        searched = await ask(server, "abcd", n=2, use_beam_search=True)
        stream = await server.stream(COMPLETIONS, prompt="abcd", max_tokens=5, n=1, best_of=2, use_beam_search=True)
    assert [(choice["index"], choice["text"]) for choice in found] == list(enumerate(texts))
    assert [(choice["index"], choice["text"]) for choice in searched] == list(enumerate(beams))
    assert stream.text() == beams[0]


@pytest.mark.asyncio
async def test_samples_with_a_seed_are_the_same_again(server_of: ServerOf) -> None:
    async with server_of() as server:
        for seed in (-(2**63), 0, 2**63 - 1):
            texts = [
                [choice["text"] for choice in await ask(server, "abc", temperature=1, seed=seed)] for _ in range(2)
            ]
            assert texts[0] == texts[1]
