"""Field reports over HTTP, "engine loop dying on one bad request": whatever one client sends, the others do not notice.

Which report is tested where is in ``test_field_reports_http.py``.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final

import anyio
import pytest

from octavo.engine.guiding import GuideMaker
from octavo.engine.model import guide_trial
from octavo.engine.model.guides import Guide, UInt32Array
from octavo.engine.model.runner import StepInput
from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.output_format import OutputFormat
from octavo.engine.testing import FakeRunner
from octavo.errors import ModelError
from octavo.tests.engine.model.tokenizer_rig import byte_level, wrap
from octavo.tests.engine.server.bystanders import bystanders, together
from octavo.tests.engine.server.http_rig import PATIENCE, Json, ServerOf

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
USER: Final = [{"role": "user", "content": "abc"}]
GOOD: Final[Json] = {"prompt": "abcdefgh", "max_tokens": 6, "temperature": 0}


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_prompt_among_running_streams(stream: bool, server_of: ServerOf) -> None:
    """LOOP-01."""
    prompts: list[object] = [[], "", [[]], [[1, 2], []], ["a", ""]]
    asked: list[tuple[str, Json]] = [(COMPLETIONS, {"prompt": prompt}) for prompt in prompts]
    asked += [(CHAT, {"messages": messages}) for messages in ([], [{"role": "user", "content": ""}])]
    asked += [(RESPONSES, {"input": ""}), (RESPONSES, {"input": []})]
    async with server_of(num_blocks=256) as server, bystanders(server):
        before = server.engine.stats().submitted
        sent = [(path, {**body, "stream": stream}) for path, body in asked]
        for status, body in await together(*sent, server=server):
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")  # type: ignore[index]  # JSON
        assert server.engine.stats().submitted == before


BAD: Final[tuple[Json, ...]] = (
    {"n": 0},
    {"n": 10**6},
    {"max_tokens": -1},
    {"max_tokens": 10**12},
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 2},
    {"seed": 2**64},
    {"stop": ""},
    {"stop_token_ids": [64]},
    {"logit_bias": {"64": 1}},
    {"logprobs": 10**6},
    {"min_tokens": 7},
    {"best_of": 0},
    {"repetition_penalty": 0},
    {"presence_penalty": 9},
    {"priority": 2**40},
    {"truncate_prompt_tokens": 0},
    {"guided_regex": "("},
    {"prompt": [64]},
    {"prompt": None},
    {"cache_salt": ""},
)


@pytest.mark.asyncio
async def test_bad_values_in_a_crowd_of_good_requests(server_of: ServerOf) -> None:
    """LOOP-04: of the bad ones nothing is seen inside, not even for a moment."""
    sizes: list[int] = []

    async def on_step(step: int) -> None:
        sizes.append(len(server.engine._loop.groups))

    async with server_of(num_blocks=256, on_step=on_step) as server:
        alone = (await server.post(COMPLETIONS, **GOOD))["choices"]
        before = server.engine.stats().submitted
        mixed = [pair for bad in BAD for pair in (GOOD, {**GOOD, **bad})]
        answers = await together(*((COMPLETIONS, body) for body in mixed), server=server)
        assert [status for status, _ in answers] == [200, 400] * len(BAD)
        assert all(body["choices"] == alone for status, body in answers if status == 200)
        assert server.engine.stats().submitted == before + len(BAD)
        assert max(sizes) <= len(BAD)


@pytest.mark.asyncio
async def test_numbers_that_json_has_not(server_of: ServerOf) -> None:
    """INPUT-03, LOOP-04: also such that only become infinite when they are read."""
    async with server_of() as server:
        for field in ("temperature", "top_p", "presence_penalty", "logit_bias", "seed", "max_tokens"):
            for raw in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
                value = f'{{"1": {raw}}}' if field == "logit_bias" else raw
                answer = await server.client.post(COMPLETIONS, content=f'{{"prompt": "abc", "{field}": {value}}}')
                assert answer.status_code == 400, (field, raw)
        assert server.engine.stats().submitted == 0


# LOOP-06


@pytest.mark.asyncio
async def test_a_format_that_takes_for_ever_to_compile_keeps_nobody_waiting(
    server_of: ServerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling is over when others have been served; one client waits for the refusal, one leaves before."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def slow(kind: str, text: str, seconds: float) -> str:
        begun.release()
        go_on.wait(PATIENCE)
        return f"it takes more than {seconds:g} seconds to compile"

    monkeypatch.setattr(guide_trial, "try_out", slow)
    async with server_of(num_blocks=256) as server:
        waiting = asyncio.create_task(server.refused(COMPLETIONS, **GOOD, guided_regex="(a{99}){99}"))
        async with server.open(CHAT, {"messages": USER, "guided_regex": "(b{99}){99}", "stream": True}) as leaving:
            for _ in range(2):
                await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
            async with bystanders(server):
                assert (await server.client.get("/health")).json()["status"] == "ok"
            leaving.leave()
            await leaving.ended()
            assert not waiting.done()
            go_on.set()
        error = await waiting
        assert (error["param"], error["type"]) == ("guided_regex", "invalid_request_error")
        assert "seconds to compile" in str(error["message"])
        assert set(server.engine.stats().finished) == {"length"}


class Breaking:
    """A guide that fails at the third token."""

    def __init__(self, guide: Guide, accepted: int = 0) -> None:
        self._guide = guide
        self._accepted = accepted

    @property
    def is_done(self) -> bool:
        return self._guide.is_done

    def allowed(self) -> UInt32Array:
        return self._guide.allowed()

    def accept(self, token: int) -> None:
        self._accepted += 1
        if self._accepted == 3:
            raise ModelError("secret of the grammar")
        self._guide.accept(token)

    def copy(self) -> Breaking:
        return Breaking(self._guide.copy(), self._accepted)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_format_that_fails_at_the_third_token(
    stream: bool, server_of: ServerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GuideMaker.make

    async def make(maker: GuideMaker, wanted: OutputFormat, tenant: str | None) -> Guide:
        return Breaking(await real(maker, wanted, tenant))

    monkeypatch.setattr(GuideMaker, "make", make)
    async with server_of(num_blocks=256) as server, bystanders(server):
        body = {**GOOD, "guided_regex": "[a-f]{9}", "stream": stream, "n": 2}
        answer = await server.client.post(COMPLETIONS, json=body)
        assert answer.status_code == (200 if stream else 500)
        assert ("[DONE]" in answer.text, '"error"' in answer.text) == (False, True)


@pytest.mark.asyncio
@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}"])
async def test_a_template_that_raises_refuses_the_conversation(template: str, server_of: ServerOf) -> None:
    codec = HuggingFaceCodec(wrap(byte_level(), template))
    runner = FakeRunner(vocab_size=400)
    async with server_of(runner=runner, codec=codec, num_blocks=256) as server, bystanders(server):
        for stream in (False, True):
            error = await server.refused(CHAT, messages=USER, stream=stream)
            assert (error["param"], error["type"]) == ("messages", "invalid_request_error")
        await server.refused("/tokenize", messages=USER)
        await server.refused(RESPONSES, input="abc")


# LOOP-07


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_too_little_memory_for_one_prompt_ends_one_request_at_most(stream: bool, server_of: ServerOf) -> None:
    failures: list[int] = []

    def too_large(step: StepInput) -> None:
        if len(step.tokens) > 40:
            failures.append(len(step.tokens))
            raise MemoryError

    runner = FakeRunner()
    async with server_of(runner=runner, max_batch_tokens=64, num_blocks=256) as server:
        bodies = [{**GOOD, "prompt": [number] * length} for number, length in ((1, 10), (2, 30), (3, 50))]
        alone = [await server.post(COMPLETIONS, **{**body, "cache_salt": "alone"}) for body in bodies]
        runner.before_step = too_large
        with anyio.fail_after(PATIENCE):
            answers = await asyncio.gather(
                *(server.client.post(COMPLETIONS, json={**body, "stream": stream}) for body in bodies)
            )
        assert failures
        for answer, whole in list(zip(answers, alone, strict=True))[:2]:
            assert answer.status_code == 200
            text = whole["choices"][0]["text"]  # type: ignore[index]  # JSON
            assert '"error"' not in answer.text
            assert stream or answer.json()["choices"][0]["text"] == text
        tried = len(failures)
        await server.engine._loop.wait_idle()
        assert len(failures) == tried
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.post(COMPLETIONS, **bodies[0]))["choices"] == alone[0]["choices"]
