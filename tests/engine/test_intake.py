"""What callers hand in: everything malformed is refused before any state exists, and harms nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from octavo import AsyncEngine, Chat, FinishReason, RequestOutput, SamplingParams
from octavo.engine.request import Prompt
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import CannotContinue, ContextExceeded, InvalidRequest

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
V = 64
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)

BAD_PROMPTS: list[object] = [
    [],
    "",
    (),
    b"01",
    bytearray(b"01"),
    None,
    5,
    {1, 2},
    {"role": "user", "content": "0"},
    np.array([1, 2]),
    [V],
    [-1],
    [0, 2**31],
    [2**63],
    [-(2**63)],
    [10**400],
    [1.5],
    [1.0],
    [float("nan")],
    [True],
    [1, False],
    ["1"],
    [None],
    [[1, 2]],
    [[1], [2]],
    [np.int64(1)],
    [1, {"role": "user", "content": "0"}],
    [{"role": "user", "content": "0"}, 1],
    "a text with characters that the tokenizer does not know",
]


@pytest.mark.asyncio
async def test_bad_prompts_are_refused_and_disturb_nobody(engine_of: EngineOf, alone: Alone) -> None:
    """INPUT-01, LOOP-01: three streams run while every kind of malformed prompt comes in; then a canary."""
    refused: list[object] = []
    codec = FakeCodec(V)
    before: list[tuple[int, ...]] = []

    async def on_step(step: int) -> None:
        if step != 3:
            return
        for prompt in BAD_PROMPTS:
            before.append((len(engine._loop.groups), engine.stats().waiting, engine.census().free))
            with pytest.raises(InvalidRequest):
                await engine.generate(prompt, GREEDY).start()  # type: ignore[arg-type]  # what is tested
            refused.append(prompt)
            assert (len(engine._loop.groups), engine.stats().waiting, engine.census().free) == before[0]

    async with engine_of(codec=codec, on_step=on_step) as engine:
        streams = await asyncio.gather(*(engine.complete([i, V - 1], GREEDY) for i in range(3)))
        (canary,) = await engine.complete("0123", GREEDY)
        assert engine.stats().rejected == len(refused) == len(BAD_PROMPTS)
        assert engine.stats().submitted == 4
    for i, outputs in enumerate(streams):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in await alone([i, V - 1], GREEDY)]
    assert [canary.token_ids] == [o.token_ids for o in await alone([0, 1, 2, 3], GREEDY)]
    assert canary.prompt_tokens == 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([V - 1], 1),
        ((1, 2, 3), 3),
        (range(5), 5),
        ("0o", 2),
        ([{"role": "user", "content": "012"}, {"role": "assistant", "content": "3"}], 4),
    ],
)
async def test_every_form_of_prompt_is_taken(prompt: list[int], tokens: int, engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec(V)) as engine:
        (output,) = await engine.complete(prompt, GREEDY)
        assert output.prompt_tokens == tokens


@pytest.mark.asyncio
async def test_a_model_without_a_tokenizer_takes_ids_only(engine_of: EngineOf) -> None:
    async with engine_of() as engine:
        for prompt in ("0", [{"role": "user", "content": "0"}]):
            with pytest.raises(InvalidRequest, match="tokenizer"):
                await engine.complete(prompt, GREEDY)
        with pytest.raises(InvalidRequest, match="stop string"):
            await engine.complete([1], SamplingParams(stop="x"))
        (output,) = await engine.complete([1], GREEDY)
        assert (output.text, len(output.token_ids)) == ("", 6)


@pytest.mark.asyncio
async def test_parameters_are_checked_against_the_model(engine_of: EngineOf) -> None:
    """INPUT-03, INPUT-11: ids beyond the vocabulary and lengths beyond the context."""
    async with engine_of(runner=FakeRunner(max_context=20), codec=FakeCodec(V)) as engine:
        for params in (
            SamplingParams(max_tokens=1, logit_bias={V: 1.0}),
            SamplingParams(max_tokens=1, logit_bias={1: 1.0, 10**6: -1.0}),
            SamplingParams(max_tokens=1, stop_token_ids=[V]),
            SamplingParams(max_tokens=18),
            SamplingParams(max_tokens=10**6),
            SamplingParams(max_tokens=2, beam_width=2, stop="12"),
        ):
            with pytest.raises(InvalidRequest):
                await engine.complete([1, 2, 3], params)
        for wrong in ({"max_tokens": 1}, "greedy", SamplingParams):
            with pytest.raises(InvalidRequest, match="SamplingParams"):
                await engine.complete([1], wrong)  # type: ignore[arg-type]  # what is tested
        (full,) = await engine.complete([1, 2, 3], SamplingParams(max_tokens=17, temperature=0.0))
        assert (len(full.token_ids), full.finish_reason) == (17, FinishReason.LENGTH)
        assert engine.stats().submitted == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "call",
    [
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"request_id": 5},
        {"priority": True},
        {"priority": 1.0},
        {"priority": float("nan")},
        {"priority": 2**31},
        {"priority": -(2**31)},
        {"priority": 10**5000},
        {"priority": "1"},
        {"priority": None},
        {"tenant": 5},
        {"tenant": []},
        {"tenant": b"t"},
    ],
    ids=lambda call: f"{next(iter(call))} {type(next(iter(call.values()))).__name__}",
)
async def test_bad_names_priorities_and_tenants_are_refused(call: dict[str, object], engine_of: EngineOf) -> None:
    """SCHED-08, HASH-07: nothing malformed is read as "none"."""
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest):
            await engine.generate([1], GREEDY, **call).start()  # type: ignore[arg-type]  # what is tested
        assert engine.stats().submitted == 0
        assert engine._loop.groups == {}


@pytest.mark.asyncio
async def test_an_id_in_use_is_refused_and_free_afterwards(engine_of: EngineOf) -> None:
    """TENANT-04: at once as well as one after the other."""
    async with engine_of() as engine:
        answers = await asyncio.gather(
            *(engine.complete([i], GREEDY, request_id="same") for i in range(3)), return_exceptions=True
        )
        assert sum(isinstance(answer, InvalidRequest) for answer in answers) == 2
        (again,) = await engine.complete([9], GREEDY, request_id="same")
        assert again.request_id == "same"


@pytest.mark.asyncio
@pytest.mark.parametrize("greedy", [True, False])
async def test_bias_forces_and_bans_and_leaves_the_neighbour_alone(
    greedy: bool, engine_of: EngineOf, alone: Alone
) -> None:
    """INPUT-03: +100 forces a token, -100 removes it, also with nearly as many entries as there are tokens."""
    heat = 0.0 if greedy else 1.0
    async with engine_of() as engine:
        (free,) = await engine.complete([1, 2], GREEDY)
        requests = {
            "forced": {7: 100.0},
            "banned": {free.token_ids[0]: -100.0},
            "all but two": {token: -100.0 for token in range(V) if token not in (3, 4)},
        }
        outputs = await asyncio.gather(
            *(
                engine.complete([1, 2], SamplingParams(max_tokens=6, temperature=heat, seed=1, logit_bias=bias))
                for bias in requests.values()
            ),
            engine.complete([1, 2], GREEDY),
        )
    forced, banned, few, neighbour = (set(answer[0].token_ids) for answer in outputs)
    assert forced == {7}
    assert free.token_ids[0] not in banned
    assert few <= {3, 4}
    assert neighbour == set((await alone([1, 2], GREEDY))[0].token_ids)


@pytest.mark.asyncio
async def test_a_request_that_may_draw_nothing_fails_alone(engine_of: EngineOf) -> None:
    """LOOP-04: every token is banned, which only the step can know."""
    nothing = SamplingParams(max_tokens=2, logit_bias=dict.fromkeys(range(V), -100.0))
    async with engine_of() as engine:
        bad, good = await asyncio.gather(
            engine.complete([1], nothing), engine.complete([2], GREEDY), return_exceptions=True
        )
        assert isinstance(bad, CannotContinue)
        assert "banned" in str(bad)
        assert isinstance(good, list)
        assert engine.stats().finished == {"length": 1, "error": 1}


@pytest.mark.asyncio
async def test_bans_are_no_fault_of_the_model_and_cost_nobody_the_cache(engine_of: EngineOf) -> None:
    prompt = list(range(40))
    nothing = SamplingParams(max_tokens=2, logit_bias=dict.fromkeys(range(V), -100.0))
    async with engine_of() as engine:
        await engine.complete(prompt, GREEDY)
        cached = engine.census().idle
        for _ in range(3):
            with pytest.raises(CannotContinue):
                await engine.complete(prompt, nothing)
        stats = engine.stats()
        assert (stats.failed_in_a_row, stats.failed_rows, stats.cache.evictions) == (0, 0, {})
        assert engine.census().idle == cached
        assert (await engine.complete(prompt, GREEDY))[0].cached_tokens >= 32


@pytest.mark.asyncio
@pytest.mark.parametrize("n", [1, 3])
async def test_max_tokens_0_gives_an_empty_answer(n: int, engine_of: EngineOf) -> None:
    """INPUT-11."""
    async with engine_of() as engine:
        outputs = await engine.complete([1, 2], SamplingParams(max_tokens=0, n=n))
        for output in outputs:
            assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.LENGTH)
            assert (output.metrics.scheduled, output.metrics.first_token) == (None, None)
        assert engine.stats().steps == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "prompt", [[-1], [64], "a\x00b", "a\ud800", "\ufffd" * 50, "\x1b[31mred", "two\nlines"], ids=ascii
)
async def test_no_prompt_text_is_ever_logged(prompt: list[int] | str, caplog: pytest.LogCaptureFixture) -> None:
    """INPUT-10: the same error or result with the loudest log, and nothing of the prompt in it."""
    caplog.set_level(logging.DEBUG)
    async with AsyncEngine(runner=FakeRunner(), codec=FakeCodec()) as engine:
        with pytest.raises(InvalidRequest):
            await engine.complete(prompt, SamplingParams(max_tokens=2))
        await engine.complete("0123456789", SamplingParams(max_tokens=2, temperature=0.0))
        assert engine.census().held == 0
    told = [record.getMessage() for record in caplog.records if record.name.startswith("octavo")]
    assert not [line for line in told if str(prompt) in line or "0123456789" in line or "\n" in line]


class Untouched(FakeCodec):
    def encode(self, text: str) -> list[int]:
        raise AssertionError("this is not to be tokenised")

    def encode_chat(self, chat: Chat) -> list[int]:
        raise AssertionError("this is not to be tokenised")


@pytest.mark.asyncio
@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_text_that_cannot_possibly_fit_is_not_even_tokenised(is_chat: bool, engine_of: EngineOf) -> None:
    """INPUT-08: to find out with a tokenizer takes seconds per megabyte."""
    text = "a" * (20 * 128 + 1)
    prompt: Prompt = Chat([{"role": "user", "content": text[:1500]}, {"role": "user", "content": text[1500:]}])
    async with engine_of(runner=FakeRunner(max_context=20), codec=Untouched()) as engine:
        for ask in (engine.complete, engine.tokenize):
            with pytest.raises(ContextExceeded, match="more than 2560 characters"):
                await ask(prompt if is_chat else text)
        assert engine.stats().submitted == 0
