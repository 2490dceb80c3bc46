"""Conversations, and answers without a bound, through the whole engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from octavo import AsyncEngine, Chat, FinishReason, SamplingParams
from octavo.engine.intake import LONG_TEXT
from octavo.engine.prompts import as_chat, is_longer
from octavo.engine.request import ChatMessage, Prompt
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import EngineClosed, InvalidRequest

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
OPEN = SamplingParams(max_tokens=None, temperature=0.0)
TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES: list[ChatMessage] = [{"role": "system", "content": "01234567"}, {"role": "user", "content": "89"}]


# --- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_list_of_messages_is_a_conversation(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        ids = await engine.tokenize(MESSAGES)
        assert ids == list(range(10)) == await engine.tokenize(Chat(MESSAGES)) == await engine.tokenize("0123456789")
        (plain,) = await engine.complete(ids, GREEDY)
        for prompt in (MESSAGES, Chat(MESSAGES)):
            (output,) = await engine.complete(prompt, GREEDY)
            assert (output.token_ids, output.prompt_tokens, output.cached_tokens) == (plain.token_ids, 10, 9)


@pytest.mark.asyncio
async def test_tools_change_the_prompt(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        tools = await engine.tokenize(Chat(MESSAGES, tools=[TOOL]))
        assert tools[1:] == await engine.tokenize(MESSAGES)
        assert tools[0] != (await engine.tokenize(Chat(MESSAGES, tools=[{**TOOL, "strict": True}])))[0]


@pytest.mark.asyncio
async def test_every_call_that_takes_a_prompt_takes_a_conversation(engine_of: EngineOf, tmp_path: Path) -> None:
    prefix = Chat(MESSAGES[:1])
    async with engine_of(codec=FakeCodec()) as engine:
        pin = await engine.pin(prefix)
        assert (await engine.explain(Chat(MESSAGES))).cached_tokens == 8
        assert (await engine.snapshot(tmp_path / "s", prefix=prefix)).blocks == 2
        assert await engine.unpin(pin)
        await engine.evict(prefix)
        assert (await engine.explain(prefix)).cached_tokens == 0


@pytest.mark.asyncio
async def test_a_model_without_a_template_says_so(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec(has_chat_template=False)) as engine:
        for prompt in (MESSAGES, Chat(MESSAGES)):
            with pytest.raises(InvalidRequest, match="no chat template"):
                await engine.complete(prompt, GREEDY)
        assert await engine.tokenize("012") == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["a", [], [1], (), b"a", [{"role": "user"}, 1], {"role": "user"}, None, 5])
def test_other_prompts_are_none(prompt: Prompt) -> None:
    assert as_chat(prompt) is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "chat",
    [
        Chat([]),
        Chat([{"role": "user", "content": None}]),
        Chat([{"role": "user"}]),
        Chat([{"role": "user", "content": [{"type": "image_url"}]}]),
    ],
)
async def test_bad_conversations_are_refused(chat: Chat, engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        with pytest.raises(InvalidRequest):
            await engine.complete(chat, GREEDY)
        assert engine.stats().submitted == 0


# --- tokenize ---------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_tokenize_takes_what_generate_would_refuse(engine_of: EngineOf) -> None:
    """Nothing is computed, so there may be nothing, and ids are only looked at."""
    async with engine_of(codec=FakeCodec()) as engine:
        assert [await engine.tokenize(prompt) for prompt in ("", [], [10**6])] == [[], [], [10**6]]
        with pytest.raises(InvalidRequest, match="integers"):
            await engine.tokenize([True, "1"])  # type: ignore[arg-type]  # what is tested
    with pytest.raises(EngineClosed):
        await engine.tokenize("0")


@pytest.mark.asyncio
async def test_long_prompts_are_tokenised_in_another_thread(engine_of: EngineOf) -> None:
    threads: list[bool] = []

    class Watched(FakeCodec):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().encode(text)

    short, long = "0" * LONG_TEXT, "0" * (LONG_TEXT + 1)
    async with engine_of(codec=Watched()) as engine:
        for text in (short, long):
            assert await engine.tokenize(text) == [0] * len(text)
        assert await engine.tokenize(Chat([{"role": "user", "content": "1"}])) == [1]
        tools = [{**TOOL, "description": long}]
        await engine.tokenize(Chat([{"role": "user", "content": "1"}], tools=tools))
    assert threads == [True, False, True, False]


def test_length_counts_wherever_the_text_is() -> None:
    text = "a" * 50
    message: ChatMessage = {"role": "user", "content": [{"type": "text", "text": text}]}
    for chat in (
        Chat([message]),
        Chat([], tools=[{"a": {"b": [text]}}]),
        Chat([], template_options={"a": text}),
        Chat([{}] * 50),
    ):
        assert is_longer(chat, 45)
        assert not is_longer(chat, 100)


# --- answers without a bound ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_open_answer_ends_with_the_context(engine_of: EngineOf) -> None:
    async with engine_of(runner=FakeRunner(max_context=20)) as engine:
        (output,) = await engine.complete([1, 2, 3], OPEN)
        assert (len(output.token_ids), output.finish_reason) == (17, FinishReason.LENGTH)
        with pytest.raises(InvalidRequest, match="no room"):
            await engine.complete(list(range(20)), OPEN)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("params", "length"),
    [
        (OPEN, 30),  # 8 blocks of 4, less the prompt; the K and V of the last token are not needed
        (SamplingParams(max_tokens=None, n=2, seed=1), 14),
        (SamplingParams(max_tokens=None, beam_width=2), 14),
    ],
)
async def test_an_open_answer_ends_with_the_pool(params: SamplingParams, length: int, engine_of: EngineOf) -> None:
    async with engine_of(num_blocks=8) as engine:
        outputs = await engine.complete([1, 2, 3], params)
        assert {(len(output.token_ids), output.finish_reason) for output in outputs} == {(length, FinishReason.LENGTH)}
        assert engine.stats().preemptions == 0


@pytest.mark.asyncio
async def test_an_open_answer_ends_at_its_end_too(engine_of: EngineOf) -> None:
    async with engine_of(runner=FakeRunner(eos_token_ids=frozenset(range(0, 64, 2)))) as engine:
        (output,) = await engine.complete([1, 2, 3], OPEN)
        assert output.finish_reason is FinishReason.STOP


@pytest.mark.asyncio
async def test_a_fork_of_an_open_answer_is_open(engine_of: EngineOf) -> None:
    async with engine_of(runner=FakeRunner(max_context=40)) as engine:
        source = await engine.generate([1, 2, 3], OPEN, request_id="a").start()
        await anext(source)
        fork = await engine.fork("a", SamplingParams(max_tokens=None, seed=5))
        lengths = [len([output async for output in stream][-1].token_ids) for stream in (source, fork)]
        assert lengths == [37, 37]
