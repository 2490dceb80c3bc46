"""Streams: they join to the answer that is not streamed, whatever is asked for and however slowly they are read."""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.engine.model.runner import StepInput
from octavo.engine.server.endpoints.side_by_side import outputs_of, start_all
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, ModelError
from octavo.tests.engine.server.http_rig import Json, Server, ServerOf, Stream, read_stream, until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ROUTES: Final = (CHAT, COMPLETIONS)


def asking(route: str, prompt: str = "abcdefgh") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}]} if route == CHAT else {"prompt": prompt}


def random_body(rng: np.random.Generator, route: str) -> dict[str, object]:
    """Any mixture of what may be asked for."""
    texts = ["".join(chr(48 + int(token)) for token in rng.integers(0, 64, rng.integers(1, 20))) for _ in range(3)]
    body: dict[str, object] = {
        "max_tokens": int(rng.integers(0, 25)),
        "n": int(rng.integers(1, 4)),
        "temperature": float(rng.choice([0.0, 0.7, 1.5])),
        "seed": int(rng.integers(100)),
        "stop": [chr(48 + int(token)) * int(rng.integers(1, 3)) for token in rng.integers(0, 64, rng.integers(0, 5))],
        "stop_token_ids": [int(token) for token in rng.integers(0, 64, rng.integers(0, 3))],
        "include_stop_str_in_output": bool(rng.integers(2)),
        "skip_special_tokens": bool(rng.integers(2)),
        "return_token_ids": bool(rng.integers(2)),
        "stream_options": {"include_usage": True, "continuous_usage_stats": bool(rng.integers(2))},
    }
    if route == CHAT:
        body |= asking(route, texts[0])
        body |= {"logprobs": True, "top_logprobs": int(rng.integers(4))} if rng.integers(2) else {}
    else:
        body |= {"prompt": texts[: rng.integers(1, 4)], "echo": bool(rng.integers(2))}
        body |= {"logprobs": int(rng.integers(4))} if rng.integers(2) else {}
    return body


def joined(stream: Stream, index: int) -> Json:
    """What the chunks of one choice make together, in the form of a whole choice."""
    parts = stream.choices(index)
    (reason,) = stream.finish_reasons(index)
    whole: Json = {"index": index, "finish_reason": reason, "stop_reason": parts[-1]["stop_reason"]}
    if "delta" in parts[0]:
        whole["message"] = {"role": "assistant", "content": stream.text(index), "refusal": None}
    else:
        whole["text"] = stream.text(index)
    for name in ("token_ids", "prompt_token_ids"):
        if any(name in part for part in parts):
            whole[name] = [token for part in parts for token in part.get(name, [])]  # type: ignore[attr-defined]  # JSON
    whole["logprobs"] = joined_logprobs([part["logprobs"] for part in parts if part["logprobs"] is not None])
    return whole


def without_nothing(choice: Json) -> Json:
    """A choice without its empty lists: no chunk tells of them."""
    logprobs = choice["logprobs"]
    assert logprobs is None or isinstance(logprobs, dict)
    is_empty = logprobs is not None and not (logprobs.get("content") or logprobs.get("tokens"))
    return {name: value for name, value in choice.items() if value != []} | ({"logprobs": None} if is_empty else {})


def joined_logprobs(parts: list[object]) -> Json | None:
    if not parts:
        return None
    found: Json = {}
    for part in parts:
        assert isinstance(part, dict)
        for name, values in part.items():
            found[name] = None if values is None else [*found.get(name, []), *values]  # type: ignore[misc]  # JSON
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_joins_to_the_answer_that_is_not_streamed(route: str, server_of: ServerOf) -> None:
    rng = np.random.default_rng(ROUTES.index(route))
    runner, codec = FakeRunner(eos_token_ids=frozenset({5, 6})), FakeCodec(special=frozenset({5, 7, 20}))
    async with server_of(runner=runner, codec=codec, num_blocks=256) as server:
        for _ in range(16):
            body = random_body(rng, route)
            stream = await server.stream(route, **body)
            whole = await server.post(route, **{**body, "stream_options": None})
            for choice in whole["choices"]:  # type: ignore[attr-defined]  # JSON
                assert without_nothing(joined(stream, choice["index"])) == without_nothing(choice), body
            usage, counted = stream.chunks[-1]["usage"], whole["usage"]
            assert isinstance(usage, dict)
            assert isinstance(counted, dict)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert usage[name] == counted[name]


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_text_ends_before_the_first_stop_and_nothing_of_it_is_sent(route: str, server_of: ServerOf) -> None:
    """TEXT-01, over all places and lengths of the stop; the reader sees each chunk as it comes."""
    rng = np.random.default_rng(3)
    async with server_of() as server:
        (free,) = await server.engine.complete("abcdefgh", SamplingParams(max_tokens=24, temperature=0.0))
        for _ in range(12):
            places = [(int(at), int(at + rng.integers(1, 6))) for at in rng.integers(0, 20, 2)]
            stops = [free.text[start:end] for start, end in places]
            ends = min(free.text.find(stop) for stop in stops)
            first = min((stop for stop in stops if free.text.find(stop) == ends), key=len)
            stream = await server.stream(route, **asking(route), max_tokens=24, temperature=0, stop=stops)
            assert stream.text() == free.text[: free.text.find(first)], stops
            assert stream.finish_reasons() == ["stop"]
            assert stream.choices()[-1]["stop_reason"] in stops


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_tokens_show_only_where_that_is_asked_for(route: str, stream: bool, server_of: ServerOf) -> None:
    """TEXT-06, TEXT-07: an ordinary stop token, a special one, and a stop string that is a special token."""

    async def said(server: Server, **body: object) -> tuple[object, object]:
        asked = {**asking(route), "max_tokens": 9, "temperature": 0, "return_token_ids": True, **body}
        if stream:
            told = await server.stream(route, **asked)
            return told.text(), told.choices()[-1]["stop_reason"]
        choices = (await server.post(route, **asked))["choices"]
        assert isinstance(choices, list)
        (choice,) = choices
        return choice["text"] if "text" in choice else choice["message"]["content"], choice["stop_reason"]

    (free,) = await _free(server_of)
    token = free[4]
    before = FakeCodec().decode(free[:4])
    async with server_of(codec=FakeCodec()) as server:
        assert await said(server, stop_token_ids=[token]) == (before, token)
    async with server_of(codec=FakeCodec(special=frozenset({token}))) as server:
        for skip in (True, False):
            assert await said(server, stop_token_ids=[token], skip_special_tokens=skip) == (before, token)
            assert await said(server, stop=f"<{token}>", skip_special_tokens=skip) == (before, f"<{token}>")


async def _free(server_of: ServerOf) -> list[tuple[int, ...]]:
    async with server_of() as server:
        params = SamplingParams(max_tokens=9, temperature=0.0)
        outputs = await server.engine.complete("abcdefgh", params)
        found = [output.token_ids for output in outputs]
        assert all(tokens.index(tokens[4]) == 4 for tokens in found)
        return found


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_slow_reader_gets_fewer_events_and_the_same_text(route: str, server_of: ServerOf) -> None:
    """FLOW-01: what is not read is merged and waits in no queue."""
    body = {**asking(route), "max_tokens": 60, "temperature": 0, "stream": True}
    async with server_of() as server:
        fast = await server.stream(route, **body)
        async with server.open(route, body, window=1) as exchange:
            while await exchange.read() is not None:
                for _ in range(40):
                    await asyncio.sleep(0)
            slow = read_stream(exchange.body)
    assert slow.text() == fast.text()
    assert len(slow.chunks) < len(fast.chunks) / 2


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fails_at", [1, 4])
async def test_a_model_that_fails_ends_a_stream_with_one_error(route: str, fails_at: int, server_of: ServerOf) -> None:
    """FLOW-09: no finish, no end of a success."""

    def fail(step: StepInput) -> None:
        if runner.steps >= fails_at - 1:
            raise RuntimeError("secret of the model")

    runner = FakeRunner()
    async with server_of(runner=runner) as server:
        runner.before_step = fail
        async with server.open(route, {**asking(route), "max_tokens": 9, "n": 2, "stream": True}) as exchange:
            raw = await exchange.whole()
        stream = read_stream(raw)
        assert stream.error is not None
        assert (stream.error["type"], stream.error["code"]) == ("server_error", "internal_error")
        assert b"secret" not in raw
        assert stream.finish_reasons(0) == stream.finish_reasons(1) == []
        answer = await server.client.post(route, json={**asking(route), "max_tokens": 9})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        runner.before_step = None
        assert (await server.stream(route, **asking(route), max_tokens=2)).finish_reasons() == ["length"]


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_what_the_server_ends_is_told_as_an_error(route: str, server_of: ServerOf) -> None:
    """By drain, by erase, by an operator: the client has not asked for it."""

    async def on_step(step: int) -> None:
        if step in ends_at:
            for request_id in list(current[0].engine._loop.groups):
                current[0].engine.abort(request_id)

    current: list[Server] = []
    ends_at = {3, 5}
    body = {**asking(route), "max_tokens": 9}
    async with server_of(on_step=on_step) as server:
        current.append(server)
        async with server.open(route, {**body, "stream": True}) as exchange:
            stream = read_stream(await exchange.whole())
        assert stream.error is not None
        assert stream.error["code"] == "aborted"
        assert stream.finish_reasons() == []
        answer = await server.client.post(route, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_refused_is_refused_with_a_status_before_the_stream(route: str, server_of: ServerOf) -> None:
    gate = asyncio.Event()

    begun = asyncio.Event()

    async def on_step(step: int) -> None:
        begun.set()
        await gate.wait()

    async with server_of(max_waiting=1, max_running=1, on_step=on_step) as server:
        error = await server.refused(route, **asking(route), stream=True, max_tokens=5000)
        assert error["type"] == "invalid_request_error"
        body = {**asking(route), "max_tokens": 4, "stream": True}
        async with server.open(route, body) as first:
            await begun.wait()
            async with server.open(route, body) as second:
                await until(lambda: server.engine.stats().submitted == 2)
                assert (await server.refused(route, 429, **body))["code"] == "queue_full"
                gate.set()
                for exchange in (first, second):
                    assert read_stream(await exchange.whole()).finish_reasons() == ["length"]
        server.engine._submission.is_draining = True
        assert (await server.refused(route, 503, **asking(route), stream=True))["code"] == "shutting_down"
        server.engine._submission.is_draining = False


@pytest.mark.asyncio
async def test_starting_several_is_all_or_nothing(server_of: ServerOf) -> None:
    few = SamplingParams(max_tokens=9)
    async with server_of() as server:
        good, bad = server.engine.generate([1, 2], few), server.engine.generate([], few)
        with pytest.raises(InvalidRequest):
            await start_all([good, bad])
        await server.engine._loop.wait_idle()
        assert server.engine.stats().finished == {"abort": 1}


@pytest.mark.asyncio
async def test_leaving_the_outputs_of_several_ends_all_of_them(server_of: ServerOf) -> None:
    async with server_of() as server:
        before = len(asyncio.all_tasks())
        generations = [server.engine.generate([1, number], SamplingParams(max_tokens=50)) for number in range(4)]
        await start_all(generations)
        outputs = outputs_of(generations)
        async for _ in outputs:
            break
        await outputs.aclose()
        await server.engine._loop.wait_idle()
        assert server.engine.stats().finished == {"abort": 4}
        assert len(asyncio.all_tasks()) == before


@pytest.mark.asyncio
async def test_one_that_fails_ends_those_beside_it(server_of: ServerOf) -> None:
    def fail(step: StepInput) -> None:
        if 7 in step.tokens:
            raise RuntimeError

    async with server_of(runner=FakeRunner(before_step=fail)) as server:
        params = SamplingParams(max_tokens=50, logit_bias={1: 100.0})
        generations = [server.engine.generate([number, number], params) for number in (2, 7, 3)]
        await start_all(generations)
        with pytest.raises(ModelError):
            async for _ in outputs_of(generations):
                pass
        await server.engine._loop.wait_idle()
        assert server.engine.stats().finished == {"abort": 2, "error": 1}
