"""No log line shows what clients sent or what came out, whatever goes wrong; the caller gets the whole error."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import structlog

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.commit import Committer
from octavo.engine.model.runner import StepInput
from octavo.engine.scheduler import Scheduler
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, ModelError, OctavoError
from octavo.telemetry import configure_logging, setup
from octavo.telemetry.logging import fault_fields
from octavo.tests.telemetry.export.test_setup import Memory

MARKER = "MYSECRET"
"""A text of eight tokens of the fake codec."""
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


class QuotingCodec(FakeCodec):
    """Its errors name the text, as those of real tokenizers do."""

    def __init__(self, *, encodes: bool = True, decodes: bool = True) -> None:
        super().__init__()
        self._encodes = encodes
        self._decodes = decodes

    def encode(self, text: str) -> list[int]:
        if not self._encodes:
            raise ValueError(f"cannot read {text!r}")
        return super().encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not self._decodes:
            raise KeyError(f"after {MARKER!r}")
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def quotes(*_: object, **__: object) -> None:
    """Breaks off like the innermost part of something that works on a prompt."""
    try:
        raises(UnicodeError(f"in {MARKER!r}"))
    except UnicodeError as error:
        raise RuntimeError(f"while working on {MARKER!r}") from error


def raises(error: Exception) -> None:
    raise error


@pytest.fixture(params=["json", "console", "not configured", "root at debug"])
def log(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """Everything that was logged, by anybody, in each way that a host may have set logging up."""
    root, ours = logging.getLogger(), logging.getLogger("octavo")
    handlers, level = root.handlers[:], ours.level
    stream = io.StringIO()
    if request.param in {"json", "console"}:
        configure_logging(request.param, level="DEBUG", stream=stream)
    if request.param == "root at debug":
        caplog.set_level(logging.DEBUG)
    yield lambda: stream.getvalue() + caplog.text
    root.handlers[:] = handlers
    ours.setLevel(level)
    structlog.reset_defaults()


@asynccontextmanager
async def opened(
    codec: FakeCodec | None = None, before_step: Callable[[StepInput], None] | None = None
) -> AsyncIterator[AsyncEngine]:
    """An engine of which every request is traced."""
    config = EngineConfig(num_blocks=32, block_size=4)
    async with (
        setup(exporter=Memory()) as telemetry,
        AsyncEngine(
            runner=FakeRunner(before_step=before_step),
            codec=codec or FakeCodec(),
            config=config,
            tracer_provider=telemetry.tracer_provider,
        ) as engine,
        asyncio.timeout(60),
    ):
        yield engine


@pytest.mark.asyncio
async def test_a_tokenizer_that_cannot_read_the_prompt(log: Callable[[], str]) -> None:
    async with opened(QuotingCodec(encodes=False)) as engine:
        with pytest.raises(InvalidRequest, match=MARKER):
            await engine.complete(MARKER, PARAMS)
    assert MARKER not in log()


@pytest.mark.asyncio
async def test_a_tokenizer_that_cannot_write_the_answer(log: Callable[[], str]) -> None:
    async with opened(QuotingCodec(decodes=False)) as engine:
        with pytest.raises(OctavoError, match=MARKER):
            await engine.complete(MARKER, PARAMS)
    assert MARKER not in log()


@pytest.mark.asyncio
async def test_a_model_that_fails_in_a_step(log: Callable[[], str]) -> None:
    async with opened(before_step=quotes) as engine:
        with pytest.raises(ModelError, match=MARKER):
            await engine.complete(MARKER, PARAMS)
    text = log()
    assert MARKER not in text
    assert "a request failed in the model" in text
    assert "ModelError from RuntimeError from UnicodeError" in text
    assert "quotes" in text


@pytest.mark.asyncio
@pytest.mark.parametrize(("owner", "name"), [(Scheduler, "plan"), (Committer, "apply")])
async def test_a_loop_that_fails(
    owner: type, name: str, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, quotes)
            with pytest.raises(ModelError, match=MARKER):
                await engine.complete(MARKER, PARAMS)
    text = log()
    assert MARKER not in text
    assert "the engine loop failed" in text
    assert "RuntimeError from UnicodeError" in text


@pytest.mark.asyncio
async def test_a_loop_that_cannot_even_end_its_requests(
    log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "plan", quotes)
            patch.setattr(Scheduler, "abandon_plan", quotes)
            patch.setattr(Committer, "end", quotes)
            with pytest.raises(ModelError, match=MARKER):
                await engine.complete(MARKER, PARAMS)
    text = log()
    assert MARKER not in text
    assert "a change could not be made" in text
    assert "a request could not be ended cleanly" in text


@pytest.mark.asyncio
async def test_an_engine_that_is_ended_by_a_fault(log: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as engine:
        monkeypatch.setattr(Scheduler, "plan", end_of_the_world)
        await engine.complete(MARKER, PARAMS)
    text = log()
    assert MARKER not in text
    assert "the engine ended by a fault" in text


class EndOfTheWorld(BaseException):
    """What no handler of the loop catches."""


def end_of_the_world(*_: object, **__: object) -> None:
    raise EndOfTheWorld(MARKER)


@pytest.mark.asyncio
async def test_requests_that_go_well_or_are_broken_off(log: Callable[[], str]) -> None:
    stopping = SamplingParams(max_tokens=40, temperature=0.0, stop=[MARKER])
    async with opened() as engine:
        await engine.complete(MARKER, stopping)
        await engine.complete([{"role": "user", "content": MARKER}], PARAMS)
        generation = engine.generate(MARKER, stopping)
        await anext(generation)
        await generation.aclose()
    assert MARKER not in log()


@pytest.mark.asyncio
async def test_a_line_about_a_request_has_its_ids() -> None:
    stream = io.StringIO()
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger("octavo").level
    configure_logging(stream=stream)
    try:
        async with opened(before_step=quotes) as engine:
            with pytest.raises(ModelError):
                await engine.complete(MARKER, PARAMS, request_id="r1")
    finally:
        root.handlers[:] = handlers
        logging.getLogger("octavo").setLevel(level)
        structlog.reset_defaults()
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    [line] = [line for line in found if line["event"] == "a request failed in the model"]
    assert line["request_id"] == "r1"
    assert len(line["trace_id"]) == 32
    assert len(line["span_id"]) == 16


def test_fields_of_a_fault_name_its_causes_and_places_in_order() -> None:
    with pytest.raises(RuntimeError) as caught:
        quotes()
    fields = fault_fields(caught.value)
    assert fields["error"] == "RuntimeError from UnicodeError"
    assert [place.rpartition(" ")[2] for place in fields["raised_at"]][-3:] == ["quotes", "quotes", "raises"]
    assert all(place.startswith("test_logging_privacy.py:") for place in fields["raised_at"])


def test_fields_of_a_fault_are_bounded() -> None:
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        quotes()

    with pytest.raises(RuntimeError) as caught:
        deep(200)
    assert len(fault_fields(caught.value)["raised_at"]) <= 8 * 12
    error = caught.value
    error.__cause__ = error
    assert fault_fields(error)["error"] == "RuntimeError"


def test_a_cause_that_was_hidden_stays_hidden() -> None:
    error = ValueError()
    error.__context__, error.__suppress_context__ = KeyError(), True
    assert fault_fields(error) == {"error": "ValueError", "raised_at": []}
