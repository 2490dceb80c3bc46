"""The gateway's names of a prompt are those that the replica's cache publishes, for everything that can be sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import AsyncEngine, EngineConfig
from octavo.engine.fleet import naming
from octavo.engine.fleet.base import Scheme
from octavo.engine.fleet.naming import EXPECTED_TOKENS, PromptNaming, Reading, TextReader
from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.app import create_app
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.telemetry.events.log import Stored, Subscription
from octavo.tests.engine.conftest import DEFAULTS, EngineOf
from octavo.tests.engine.fleet.gateway_rig import CHAT, COMPLETIONS, PROMPT, RESPONSES
from octavo.tests.engine.server.scripted import ASCII, AsciiCodec

TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
FLAT_TOOL: Final = {"type": "function", "name": "look", "parameters": {"type": "object"}}
TALK: Final = [
    {"role": "system", "content": "0123456789"},
    {"role": "user", "content": [{"type": "text", "text": "abcdefg"}, {"type": "text", "text": "hijk"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "lmno"},
]
CALLS: Final = [
    {"role": "user", "content": "abcdefgh"},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "ijkl"},
]
BODIES: Final[tuple[tuple[str, Mapping[str, object]], ...]] = (
    (CHAT, {"messages": TALK, "max_tokens": 1}),
    (CHAT, {"messages": TALK, "max_completion_tokens": 1, "tools": [TOOL]}),
    (CHAT, {"messages": TALK, "max_tokens": 1, "tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"messages": TALK, "max_tokens": 1, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"messages": TALK, "max_tokens": 1, "add_generation_prompt": False}),
    (
        CHAT,
        {"messages": [*TALK, {"role": "assistant", "content": "0"}], "max_tokens": 1, "continue_final_message": True},
    ),
    (CHAT, {"messages": TALK, "max_tokens": 1, "truncate_prompt_tokens": 13}),
    (CHAT, {"messages": TALK, "max_tokens": 1, "return_token_ids": True, "cache_salt": "salt"}),
    (CHAT, {"messages": TALK, "max_tokens": 1, "n": 3, "stop": ["z"], "unknown": {"a": 1}}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": PROMPT[:8], "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "abc", "max_tokens": 1}),
    (COMPLETIONS, {"prompt": list(range(30)), "max_tokens": 1, "cache_salt": "another"}),
    (COMPLETIONS, {"prompt": list(range(30)), "max_tokens": 1, "truncate_prompt_tokens": 17}),
    (COMPLETIONS, {"prompt": [PROMPT], "max_tokens": 1, "best_of": 2}),
    (COMPLETIONS, {"prompt": [[5, 6, 7, 8, 9, 10]], "max_tokens": 1}),
    (RESPONSES, {"input": PROMPT, "max_output_tokens": 1}),
    (RESPONSES, {"input": CALLS, "max_output_tokens": 1, "instructions": "mnop", "tools": [FLAT_TOOL]}),
    (RESPONSES, {"input": [*CALLS, *CALLS], "max_output_tokens": 1, "truncation": "auto", "cache_salt": "s"}),
)
REFUSED: Final[tuple[tuple[str, Mapping[str, object] | bytes], ...]] = (
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": TALK, "audio": {}}),
    (CHAT, {"messages": TALK, "tools": [TOOL, TOOL]}),
    (CHAT, {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True}),
    (COMPLETIONS, {"prompt": "ü"}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": [1, "a"]}),
    (COMPLETIONS, {"prompt": [2**40]}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": list(range(64)) * 100}),
    (COMPLETIONS, {"suffix": "a", "prompt": "a"}),
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"\xff"),
    (COMPLETIONS, b"[" * 10000),
    (RESPONSES, {"input": [{"role": "user"}]}),
    (RESPONSES, {"input": "a", "background": True}),
    (RESPONSES, b""),
    ("/v1/cache/explain", {"prompt": "a", "messages": []}),
    ("/tokenize", {"prompt": PROMPT}),
)
KEYED: Final = Caller("a tenant", name="k")


def encoded(body: Mapping[str, object] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def reader_of(engine: AsyncEngine) -> TextReader:
    return TextReader(engine.model, engine.codec, engine.config)


async def read(engine: AsyncEngine, path: str, body: Mapping[str, object] | bytes, caller: Caller) -> Reading:
    scheme = Scheme(engine.identity, engine.config.block_size)
    return await PromptNaming(reader_of(engine)).read(path, encoded(body), caller, scheme)


async def ask(engine: AsyncEngine, path: str, body: Mapping[str, object] | bytes, *, keyed: bool) -> int:
    """The status of the server's own answer."""
    keys = Keys({digest("a good key"): KEYED} if keyed else {})
    app = create_app(engine, ServerSettings(keys=keys, tool_format="octavo.engine.server.tools.hermes:Hermes"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
        return (
            await client.post(path, content=encoded(body), headers={"authorization": "Bearer a good key"})
        ).status_code


def published(news: Subscription) -> list[bytes]:
    """The names of all blocks that were stored, in order."""
    found: list[bytes] = []
    while (batch := news.next_nowait()) is not None:
        found += [name for event in batch.events if isinstance(event, Stored) for name in event.names]
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("keyed", [False, True])
async def test_what_is_named_is_what_is_published(
    path: str, body: Mapping[str, object], keyed: bool, engine_of: EngineOf
) -> None:
    """One token is made, which is never computed: what is stored then are the whole blocks of the prompt."""
    runner = FakeRunner(vocab_size=ASCII, eos_token_ids=frozenset({0}))
    async with engine_of(codec=AsciiCodec(), runner=runner) as engine:
        asked = {name: value for name, value in body.items() if not (keyed and name == "cache_salt")}
        async with engine.kv_events() as news:
            published(news)
            assert await ask(engine, path, asked, keyed=keyed) == 200
            names = published(news)
        found = await read(engine, path, asked, KEYED if keyed else Caller())
        assert list(found.request.names) == names
        assert len(names) == found.request.prompt_tokens // 4
        assert found.request.block_tokens == 4
        assert found.follows is None


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_what_is_refused_has_no_names(path: str, body: Mapping[str, object] | bytes, engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        found = await read(engine, path, body, Caller())
        assert (list(found.request.names), found.follows) == ([], None)
        assert found.request.prompt_tokens == len(encoded(body)) // 4 + 1 or path == COMPLETIONS
        if path != "/tokenize":
            assert await ask(engine, path, body, keyed=False) in (400, 422)


texts = st.text(alphabet=[chr(48 + i) for i in range(64)], max_size=40)
salts = st.none() | st.text(alphabet="abc", min_size=1, max_size=3)
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=4,
)
forms = st.one_of(
    st.tuples(st.just(CHAT), st.fixed_dictionaries({"messages": chats, "cache_salt": salts, "max_tokens": st.just(1)})),
    st.tuples(
        st.just(COMPLETIONS),
        st.fixed_dictionaries(
            {
                "prompt": texts | st.lists(st.integers(0, 63), max_size=40),
                "cache_salt": salts,
                "max_tokens": st.just(1),
                "truncate_prompt_tokens": st.none() | st.integers(1, 30),
            }
        ),
    ),
    st.tuples(
        st.just(RESPONSES),
        st.fixed_dictionaries(
            {
                "input": texts | chats,
                "instructions": st.none() | texts,
                "cache_salt": salts,
                "max_output_tokens": st.just(1),
                "truncation": st.sampled_from(["auto", "disabled"]),
            }
        ),
    ),
)


@pytest.mark.asyncio
@given(asked=st.lists(forms, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_is_asked_it_is_named_as_it_is_kept(asked: list[tuple[str, dict[str, object]]]) -> None:
    config = EngineConfig(**{**DEFAULTS, "num_blocks": 256})  # type: ignore[arg-type]  # as the rig has them
    async with AsyncEngine(runner=FakeRunner(), codec=FakeCodec(), config=config) as engine:
        kept: set[bytes] = set()
        async with engine.kv_events() as news:
            for path, body in asked:
                status = await ask(engine, path, body, keyed=False)
                fresh = published(news)
                kept |= set(fresh)
                names = list((await read(engine, path, body, Caller())).request.names)
                assert status in (200, 400)
                if status == 200:
                    assert set(names) <= kept
                    assert set(fresh) <= set(names)


@pytest.mark.asyncio
async def test_of_several_prompts_the_first_is_named(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        one = await read(engine, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5}, Caller())
        three = await read(engine, COMPLETIONS, {"prompt": [PROMPT, "a", "b"], "max_tokens": 5, "n": 2}, Caller())
        assert three.request.names == one.request.names
        assert (one.request.prompt_tokens, one.request.output_tokens) == (25, 5)
        assert (three.request.prompt_tokens, three.request.output_tokens) == (75, 30)


@pytest.mark.asyncio
async def test_how_long_an_answer_may_get(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        for form, expected in (
            ({"max_tokens": 7}, 7),
            ({"max_completion_tokens": 9, "n": 2}, 18),
            ({}, EXPECTED_TOKENS),
        ):
            found = await read(engine, CHAT, {"messages": TALK, **form}, Caller())
            assert found.request.output_tokens == expected


@pytest.mark.asyncio
async def test_what_goes_on_from_a_response_lies_with_it(engine_of: EngineOf) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        body = {"input": PROMPT, "previous_response_id": "resp_1"}
        found = await read(engine, RESPONSES, body, Caller())
        assert (list(found.request.names), found.follows) == ([], "resp_1")
        for reader, scheme in ((None, Scheme(engine.identity, 4)), (reader_of(engine), None)):
            blind = PromptNaming(reader)
            assert (await blind.read(RESPONSES, encoded(body), Caller(), scheme)).follows == "resp_1"
            nothing = await blind.read(COMPLETIONS, encoded({"prompt": PROMPT}), Caller(), scheme)
            assert list(nothing.request.names) == []


@pytest.mark.asyncio
async def test_tenants_models_and_block_sizes_share_no_names(engine_of: EngineOf) -> None:
    body = {"prompt": PROMPT}
    async with engine_of(codec=FakeCodec()) as engine:
        schemes = [Scheme(engine.identity, 4), Scheme("another", 4), Scheme(engine.identity, 8)]
        found = [
            set((await PromptNaming(reader_of(engine)).read(COMPLETIONS, encoded(form), caller, scheme)).request.names)
            for scheme in schemes
            for caller, form in (
                (Caller(), body),
                (Caller("t"), body),
                (Caller("u"), body),
                (Caller(), {**body, "cache_salt": "s"}),
            )
        ]
        assert len(set().union(*found)) == sum(map(len, found)) > 0
        salted = await read(engine, COMPLETIONS, {**body, "cache_salt": "t"}, Caller())
        assert set(salted.request.names) == found[1]  # a salt and a tenant of that name are one


@pytest.mark.asyncio
async def test_long_prompts_are_named_off_the_loop(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_of(codec=FakeCodec()) as engine:
        short = await read(engine, COMPLETIONS, {"prompt": PROMPT}, Caller())
        monkeypatch.setattr(naming, "MANY_TOKENS", 1)
        assert (await read(engine, COMPLETIONS, {"prompt": PROMPT}, Caller())).request.names == short.request.names


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_demo_models_tokens_without_its_weights() -> None:
    """The tokenizer and the chat template come without the weights, and the names are those of the engine."""
    config = EngineConfig(num_blocks=128, block_size=16)
    reader = TextReader.open("smollm2", config)
    body = {"messages": [{"role": "user", "content": "Tell me of <|im_end|> and of the sea. " * 5}], "max_tokens": 1}
    async with AsyncEngine.open("smollm2", config) as engine, engine.kv_events() as news:
        assert reader.model.vocab_size == engine.model.vocab_size
        published(news)
        assert await ask(engine, CHAT, MappingProxyType(body) | {}, keyed=False) == 200
        names = published(news)
        scheme = Scheme(engine.identity, 16)
        found = await PromptNaming(reader).read(CHAT, encoded(body), Caller(), scheme)
        assert len(names) > 3
        assert list(found.request.names) == names
