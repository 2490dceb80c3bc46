"""Traces of whole requests over the fake model: every one is whole, is where its caller is, and ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import anyio
import anyio.to_thread
import pytest

from octavo import AsyncEngine, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.runner import StepInput
from octavo.engine.sequence import Sample
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import (
    EngineClosed,
    InvalidRequest,
    ModelError,
    NeverFits,
    OctavoError,
    QueueFull,
)
from octavo.telemetry import names, record
from octavo.tests.engine.insight.trace_rig import (
    GREEDY,
    STEP,
    Spans,
    at_peace,
    check,
    check_whole_life,
    complaints,
    recording,
    traced,
    tracer_of,
    whole_life,
)
from octavo.tests.engine.tier_rig import memory, prompt, until

pytestmark = pytest.mark.asyncio
PreemptWhen = Callable[[AsyncEngine, Callable[[Sample], bool]], None]
ENDLESS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_logged_by_opentelemetry(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert complaints(caplog) == []


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError


async def test_the_whole_life_of_a_request_is_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    scene = await whole_life(monkeypatch, provider)
    check_whole_life(check(recorder), scene)


async def test_what_happens_to_a_request_is_shown_in_the_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    scene = await whole_life(monkeypatch, provider)
    events = recorder.spans.request(scene.hero).events
    assert [event.when for event in events] == sorted(event.when for event in events)
    order = [event.name for event in events]
    assert order.index("fork") < order.index("first_token") < order.index("preempt") < order.index("resume")


# many at a time


async def test_many_requests_some_of_them_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one has a trace of its own, whole, with the status of how it ended."""
    provider, recorder = recording()
    random, done, hit = Random(4), set[str](), set[str]()  # noqa: S311  # which ones, the same each time
    doomed: dict[str, Callable[[], object]] = {}

    async def on_step(number: int) -> None:
        if number > 2:  # before, they are to have begun
            for request_id in random.sample(sorted(doomed), min(len(doomed), 3)):
                doomed.pop(request_id)()
                hit.add(request_id)

    async def one(engine: AsyncEngine, number: int) -> None:
        request_id = f"r{number}"
        params = SamplingParams(max_tokens=2 + number % 9, n=1 + (number % 5 == 0), seed=number, ignore_eos=True)
        prefix = [number % 4] * (4 * (number % 3))
        with anyio.CancelScope() as scope:
            if number % 3 == 0:
                doomed[request_id] = scope.cancel
            elif number % 7 == 0:
                doomed[request_id] = partial(engine.abort, request_id)
            outputs = await engine.complete([*prefix, *prompt(number, 7)], params, request_id=request_id)
            if all(output.finish_reason != "abort" for output in outputs):
                done.add(request_id)

    settings = {"num_blocks": 40, "max_running": 12, "max_batch_tokens": 24, "check_every_step": False}
    async with traced(monkeypatch, provider, mounts={"m": memory()}, on_step=on_step, settings=settings) as engine:
        async with anyio.create_task_group() as work:
            for number in range(200):
                work.start_soon(one, engine, number)
        await at_peace(engine)
        tracing = engine._tracing
    spans = check(recorder)
    assert len(spans.requests) == len({span.trace_id for span in spans.requests}) == 200
    statuses = {span.attributes[names.REQUEST_ID]: span for span in spans.requests}
    well = {request_id for request_id, span in statuses.items() if span.status == "UNSET"}
    assert done <= well
    assert well - done <= hit  # over already when their readers were cancelled
    failed = [span.attributes[names.ERROR_TYPE] for span in spans.requests if span.status == "ERROR"]
    assert set(failed) == {"aborted"}
    assert 20 < len(failed) < 100
    assert +tracing.dropped == Counter()


# how requests end


async def test_refused_requests_have_a_span_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider, num_blocks=8, max_waiting=1, max_running=1) as engine:
        with pytest.raises(InvalidRequest):
            await engine.complete([70], GREEDY)
        with pytest.raises(NeverFits):
            await engine.complete([1], SamplingParams(max_tokens=100))
        running = await engine.generate([1], SamplingParams(max_tokens=20, ignore_eos=True)).start()
        with pytest.raises(QueueFull):
            await engine.complete([2], GREEDY)
        running.close()
    spans = check(recorder)
    refusals = [span for span in spans.requests if names.REQUEST_ID not in span.attributes]
    assert [span.attributes[names.ERROR_TYPE] for span in refusals] == ["InvalidRequest", "NeverFits", "QueueFull"]
    assert {span.status for span in refusals} == {"ERROR"}
    assert all([child.name for child in spans.below(span)] == ["add_request"] for span in refusals)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("bad", [5, None, b"abc", [1, "x"], [{"role": 1}], [{}], ["x"], [1.5]])
async def test_whatever_is_no_prompt_is_refused_traced_or_not(
    bad: object, text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider, codec=FakeCodec(), trace_text=text) as engine:
        with pytest.raises(InvalidRequest):
            await engine.complete(bad, GREEDY)  # type: ignore[arg-type]  # what no type checker has seen
    (request,) = check(recorder).requests
    assert request.attributes[names.ERROR_TYPE] == "InvalidRequest"


async def test_a_fault_of_the_model_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that fails says so, and what it had published is not to be found any more, which is shown too."""
    provider, recorder = recording()

    def before_step(step: StepInput) -> None:
        if 61 in step.tokens:
            raise ModelError("no such thing")

    async with traced(monkeypatch, provider, runner=FakeRunner(before_step=before_step), max_batch_tokens=8) as engine:
        with pytest.raises(ModelError):
            await engine.complete([*range(10), 61], GREEDY, request_id="bad")
        await engine.complete([1, 2], GREEDY, request_id="good")
    spans = check(recorder)
    bad, good = spans.request("bad"), spans.request("good")
    assert (bad.status, bad.attributes[names.ERROR_TYPE]) == ("ERROR", "ModelError")
    assert (good.status, good.attributes.get(names.ERROR_TYPE)) == ("UNSET", None)
    (distrust,) = [span for span in spans.within(bad) if span.name == names.EVICT]
    assert (distrust.attributes[names.REASON], distrust.attributes[names.BLOCKS]) == ("distrust", 2)


async def test_a_fault_of_the_engine_is_shown_in_all_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        with monkeypatch.context() as during, anyio.fail_after(10):
            during.setattr(engine._loop._scheduler, "plan", broken)
            results = await asyncio.gather(
                *(engine.complete(prompt(number), GREEDY) for number in range(3)), return_exceptions=True
            )
        assert all(isinstance(result, ModelError) for result in results)
    spans = check(recorder)
    assert [(span.status, span.attributes[names.ERROR_TYPE]) for span in spans.requests] == [
        ("ERROR", "ModelError")
    ] * 3


async def test_a_request_that_cannot_be_ended_in_order_has_a_span_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()

    async with traced(monkeypatch, provider) as engine:
        with monkeypatch.context() as during:
            during.setattr(engine._loop._scheduler, "plan", broken)
            during.setattr(engine._loop._committer, "end", broken)
            with pytest.raises(ModelError):
                await engine.complete(prompt(1), GREEDY)
        await engine.close()  # its counters are not right any more
    (request,) = check(recorder).requests
    assert (request.status, request.attributes[names.ERROR_TYPE]) == ("ERROR", "ZeroDivisionError")


async def test_closing_the_engine_ends_every_span(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        outputs = engine.generate(prompt(1), ENDLESS)
        await anext(outputs)
        queued = await engine.generate(prompt(2), ENDLESS).start()
        await engine.close()
        assert [output.finish_reason async for output in queued] == ["abort"]
        with pytest.raises(EngineClosed):
            await engine.complete(prompt(3), GREEDY)
    spans = check(recorder)
    assert [span.attributes[names.ERROR_TYPE] for span in spans.requests] == ["aborted", "aborted"]


class Patient(FakeCodec):
    """Takes its time, in the thread that long texts are tokenised in."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.gate = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.began.set()
        assert self.gate.wait(15)
        return super().encode(text)


@pytest.mark.parametrize("closes", [False, True])
async def test_a_request_that_ends_while_it_is_prepared(closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled, or overtaken by the engine's end."""
    provider, recorder = recording()
    codec = Patient()
    async with traced(monkeypatch, provider, codec=codec, num_blocks=1024) as engine:
        task = asyncio.create_task(engine.complete("1" * 3000, GREEDY))
        await until(codec.began.is_set)
        if closes:
            await engine.close()
        else:
            task.cancel()
        codec.gate.set()
        with pytest.raises(EngineClosed if closes else asyncio.CancelledError):
            await task
        await until(lambda: not engine._tracing._waiting)
    spans = check(recorder)
    (request,) = spans.requests
    assert (request.status, request.attributes[names.ERROR_TYPE]) == (
        "ERROR",
        "EngineClosed" if closes else "CancelledError",
    )


# shapes of requests


async def ask_shape(monkeypatch: pytest.MonkeyPatch, params: SamplingParams, **settings: object) -> Spans:
    """The spans of one such request, whose id is ``one``."""
    provider, recorder = recording()
    async with traced(monkeypatch, provider, settings={"num_blocks": 512, "max_running": 128} | settings) as engine:
        outputs = await engine.complete(prompt(1, 9), params, request_id="one")
    spans = check(recorder, slack=int(STEP * 1e9))  # samples that are not shown take their time, too
    request = spans.request("one")
    reasons = [str(output.finish_reason) for output in outputs]
    assert request.attributes[names.RESPONSE_FINISH_REASONS] == reasons
    assert request.status == "UNSET"
    return spans


async def test_a_beam_search_has_one_track(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = await ask_shape(monkeypatch, SamplingParams(max_tokens=6, beam_width=4, n=3))
    request = spans.request("one")
    assert {sample: [phase.name for phase in chain] for sample, chain in spans.phases(request).items()} == {
        -1: ["add_request", "finish"],
        0: ["queue", "prefill", "decode"],
    }
    assert [event.name for event in request.events].count("first_token") == 1


async def test_a_beam_search_that_is_preempted_has_phases_one_after_the_other(
    preempt_when: PreemptWhen, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, recorder = recording()
    beams = SamplingParams(max_tokens=10, beam_width=3, ignore_eos=True)
    async with traced(monkeypatch, provider) as engine:
        preempt_when(engine, lambda sample: len(sample.token_ids) == 4 and not sample.group.metrics.preemptions)
        await engine.complete(prompt(2, 9), beams, request_id="beams")
    spans = check(recorder)
    request = spans.request("beams")
    assert request.attributes[names.PREEMPTIONS] == 1
    phases = spans.phases(request)
    assert set(phases) == {-1, 0}
    assert [phase.name for phase in phases[0]][:4] == ["queue", "prefill", "decode", "queue"]
    assert phases[0][-1].name == names.DECODE
    assert {event.name for event in request.events} == {"first_token", "preempt", "resume"}


async def drained(outputs: Generation) -> None:
    async for _ in outputs:
        pass


async def test_best_of_shows_what_was_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = await ask_shape(monkeypatch, SamplingParams(max_tokens=5, n=2, best_of=4, seed=1))
    request = spans.request("one")
    assert request.attributes[names.USAGE_OUTPUT_TOKENS] == 20  # what was computed
    assert set(spans.phases(request)) == {-1, 0, 1, 2, 3}


async def test_a_hundred_samples_have_a_bounded_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = await ask_shape(monkeypatch, SamplingParams(max_tokens=6, n=100, seed=1), max_batch_tokens=128)
    request = spans.request("one")
    assert set(spans.phases(request)) == {-1, *range(record.MOST_TRACKS)}
    assert request.attributes[names.REQUEST_CHOICE_COUNT] == 100
    assert request.attributes[names.USAGE_OUTPUT_TOKENS] == 600


async def test_the_number_of_acts_is_bounded_and_what_is_missing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_ACTS", 5)
    spans = await ask_shape(monkeypatch, SamplingParams(max_tokens=1), max_batch_tokens=1)
    request = spans.request("one")
    assert len([span for span in spans.within(request) if span.name == names.PREFILL_CHUNK]) == 5
    assert request.attributes[names.SPANS_DROPPED] == 4


async def test_scores_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = await ask_shape(monkeypatch, SamplingParams(max_tokens=0, prompt_logprobs=2), max_batch_tokens=4)
    phases = spans.phases(spans.request("one"))
    assert [phase.name for phase in phases[0]] == ["queue", "prefill"]
    chunks = spans.below(phases[0][1])
    assert [(chunk.name, chunk.attributes[names.TOKENS]) for chunk in chunks] == [
        ("prefill_chunk", 4),
        ("prefill_chunk", 4),
        ("prefill_chunk", 1),
    ]


async def test_a_request_for_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = await ask_shape(monkeypatch, SamplingParams(max_tokens=0, n=3))
    request = spans.request("one")
    assert [span.name for span in spans.below(request)] == ["add_request", "queue", "finish"]
    assert request.attributes[names.USAGE_OUTPUT_TOKENS] == 0


async def test_a_fork_links_to_whom_it_was_forked_from(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        outputs = engine.generate(prompt(1), SamplingParams(max_tokens=12, ignore_eos=True), request_id="source")
        await anext(outputs)
        with tracer_of(provider).start_as_current_span("branch"):
            fork = await engine.fork("source", SamplingParams(max_tokens=9, ignore_eos=True, seed=5), new_id="fork")
        await asyncio.gather(drained(fork), drained(outputs))
        with pytest.raises(InvalidRequest):
            await engine.fork("nobody")
    spans = check(recorder)
    source, child = spans.request("source"), spans.request("fork")
    assert spans.linked(child, "forked_from") == [source.span_id]
    assert spans.by_id[child.parent_id or ""].name == "branch"
    (event,) = [event for event in source.events if event.name == names.FORK]
    assert event.attributes[names.REQUEST_ID] == "fork"
    assert [phase.name for phase in spans.phases(child)[0]] == ["decode"]
    copies = [span for span in (*spans.within(child), *spans.within(source)) if span.name == names.COW_FORK]
    assert len(copies) == 1


async def test_a_fork_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        outputs = await engine.generate(prompt(1), GREEDY, request_id="source").start()
        with pytest.raises(InvalidRequest):
            await engine.fork("source", SamplingParams(n=2))
        await drained(outputs)
    refusal = next(span for span in check(recorder).requests if names.REQUEST_ID not in span.attributes)
    assert refusal.attributes[names.ERROR_TYPE] == "InvalidRequest"


# what may be read in a trace

MARKER = "ZEBRA"
STOP = "QUAGGA"


def everything(spans: Spans) -> str:
    """Whatever the spans say."""
    return json.dumps(
        [
            [span.name, span.status_text, span.trace_state, span.attributes, span.events, span.links, span.resource]
            for span in spans.all
        ],
        default=str,
    )


async def chat(monkeypatch: pytest.MonkeyPatch, *, text: bool) -> tuple[Spans, list[RequestOutput]]:
    """Requests that succeed, are refused, fail and are cut off, all with the marker in their prompts."""
    provider, recorder = recording()
    codec = FakeCodec(vocab_size=80)

    def before_step(step: StepInput) -> None:
        if 79 in step.tokens:
            raise ModelError(f"cannot stand {MARKER}")

    runner = FakeRunner(vocab_size=80, before_step=before_step)
    async with traced(monkeypatch, provider, runner=runner, codec=codec, trace_text=text) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.0, stop=[STOP], logit_bias={79: -100.0})
        messages = [{"role": "system", "content": "BE" + MARKER}, {"role": "user", "content": MARKER}]
        outputs = await engine.complete(messages, params, request_id="chat")
        await engine.complete(MARKER, params, request_id="text", tenant="t")
        for bad in (MARKER + "\n", MARKER + chr(48 + 79)):
            with pytest.raises(OctavoError):
                await engine.complete(bad, params)
        (await engine.generate(MARKER, ENDLESS).start()).close()
    return check(recorder), outputs


async def test_nothing_of_a_prompt_is_shown_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, outputs = await chat(monkeypatch, text=False)
    said = everything(spans)
    assert len(spans.requests) == 5
    assert MARKER not in said
    assert STOP not in said
    assert not any(output.text in said for output in outputs)


async def test_prompts_and_answers_in_the_form_of_the_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, (output,) = await chat(monkeypatch, text=True)
    shown = spans.request("chat").attributes
    assert json.loads(str(shown[names.INPUT_MESSAGES])) == [
        {"role": "system", "parts": [{"type": "text", "content": "BE" + MARKER}]},
        {"role": "user", "parts": [{"type": "text", "content": MARKER}]},
    ]
    assert json.loads(str(shown[names.OUTPUT_MESSAGES])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": output.text}], "finish_reason": "length"}
    ]
    assert shown[names.REQUEST_STOP_SEQUENCES] == [STOP]
    plain = spans.request("text").attributes
    assert json.loads(str(plain[names.INPUT_MESSAGES])) == [
        {"role": "user", "parts": [{"type": "text", "content": MARKER}]}
    ]
    assert (shown[names.OPERATION_NAME], plain[names.OPERATION_NAME]) == ("chat", "text_completion")


async def test_what_the_convention_wants_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, recorder = recording()
    async with traced(monkeypatch, provider) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, seed=3, ignore_eos=True)
        await engine.complete(prompt(1), params, request_id="a", tenant="t", priority=2)
        async with engine.generate(prompt(1), params, request_id="b", tenant="t") as outputs:
            await drained(outputs)
    spans = check(recorder)
    first, again = spans.request("a"), spans.request("b")
    assert (first.name, first.kind, first.scope) == ("text_completion fake", "INTERNAL", "octavo")
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": "a",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 18,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "octavo.request.priority": 2,
        "octavo.tenant": "t",
    }
    assert {name: first.attributes[name] for name in wanted} == wanted
    assert (again.attributes["gen_ai.request.stream"], again.attributes["gen_ai.usage.cache_read.input_tokens"]) == (
        True,
        17,
    )
