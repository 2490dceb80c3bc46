"""``/v1/models``, ``/tokenize``, ``/detokenize``, and what is not served at all."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.tests.engine.server.http_rig import ServerOf

TEXTS = st.text([chr(48 + token) for token in range(64)], max_size=30)
UNSERVED = ("/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations", "/v1/rerank")


class WithMarks(FakeCodec):
    """Puts ``front`` before every text and ``back`` behind it, as tokenizers do with BOS and EOS."""

    def __init__(self, front: list[int], back: list[int]) -> None:
        super().__init__()
        self._front = front
        self._back = back

    def encode(self, text: str) -> list[int]:
        return [*self._front, *super().encode(text), *self._back]


@pytest.mark.asyncio
async def test_each_name_is_a_model(server_of: ServerOf) -> None:
    names = ("small", "org/small")
    async with server_of(settings=ServerSettings(model_names=names), runner=FakeRunner(max_context=128)) as server:
        listed = (await server.client.get("/v1/models")).json()
        alone = [(await server.client.get(f"/v1/models/{name}")).json() for name in names]
        unknown = await server.client.get("/v1/models/other")
    assert listed == {"object": "list", "data": alone}
    for name, model in zip(names, alone, strict=True):
        assert {"id": name, "object": "model", "owned_by": "octavo", "max_model_len": 128, "root": "fake"}.items() <= (
            model.items()
        )
        assert isinstance(model["created"], int)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert unknown.json()["error"]["param"] == "model"


@pytest.mark.asyncio
async def test_tokens_are_those_that_the_engine_computes(server_of: ServerOf) -> None:
    async with server_of() as server:
        for form, prompt in (
            ({"prompt": "abcdefg"}, "abcdefg"),
            ({"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "ijk"}]}, None),
        ):
            found = await server.post("/tokenize", **form)
            messages = form.get("messages")
            given_ = prompt if prompt is not None else messages
            [output] = await server.engine.complete(given_, SamplingParams(max_tokens=1))  # type: ignore[arg-type]
            assert found["count"] == len(found["tokens"]) == output.prompt_tokens  # type: ignore[arg-type]
            assert found["max_model_len"] == server.engine.model.max_context
            assert found["token_strs"] is None


@pytest.mark.asyncio
async def test_texts_there_and_back(server_of: ServerOf) -> None:
    async with server_of(codec=FakeCodec(special=frozenset({7}))) as server:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(TEXTS)
        def draw(text: str) -> None:
            drawn.append(text)

        drawn: list[str] = []
        draw()
        for text in drawn:
            found = await server.post("/tokenize", prompt=text, return_token_strs=True)
            assert found["count"] == len(text)
            assert "".join(found["token_strs"]) == text.replace("7", "<7>")  # type: ignore[arg-type]
            back = await server.post("/detokenize", tokens=found["tokens"])
            assert back == {"prompt": text.replace("7", "<7>")}


@pytest.mark.asyncio
@pytest.mark.parametrize(("front", "back"), [([], []), ([1], []), ([], [2]), ([1, 3], [2]), ([1], [1])])
async def test_what_a_tokenizer_puts_around_texts_can_be_left_out(
    server_of: ServerOf, front: list[int], back: list[int]
) -> None:
    async with server_of(codec=WithMarks(front, back)) as server:
        for text in ("", "abc", "1", "11"):
            plain = FakeCodec().encode(text)
            for add, expected in ((True, [*front, *plain, *back]), (None, [*front, *plain, *back]), (False, plain)):
                found = await server.post("/tokenize", prompt=text, add_special_tokens=add)
                assert found["tokens"] == expected


@pytest.mark.asyncio
async def test_tools_and_options_reach_the_template(server_of: ServerOf) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "abc"}]
    async with server_of() as server:
        plain = await server.post("/tokenize", messages=messages, add_generation_prompt=False)
        told = await server.post("/tokenize", messages=messages, tools=[tool], chat_template_kwargs={"x": 1})
    assert told["count"] == 1 + int(str(plain["count"]))


@pytest.mark.asyncio
async def test_long_texts_leave_the_loop_free(server_of: ServerOf) -> None:
    """They are done in a thread, and the same comes out."""
    text = "abcdefghij" * 1000
    async with server_of() as server:
        found = await server.post("/tokenize", prompt=text, return_token_strs=True)
        assert (await server.post("/detokenize", tokens=found["tokens"]))["prompt"] == text
        assert "".join(found["token_strs"]) == text  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_malformed_requests_name_the_field(server_of: ServerOf) -> None:
    async with server_of() as server:
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
            ("/tokenize", {"prompt": "ABC\U0001f600"}, "prompt"),
            (
                "/tokenize",
                {"messages": [{"role": "user"}], "continue_final_message": True, "add_generation_prompt": True},
                "continue_final_message",
            ),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": [64]}, "tokens"),
            ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
            ("/detokenize", {"tokens": [1, 1.5]}, "tokens[1]"),
            ("/detokenize", {"tokens": [True]}, "tokens[0]"),
            ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ):
            assert (await server.refused(path, **body))["param"] == param, (path, body)
        assert (await server.refused("/tokenize", 404, prompt="a", model="b"))["code"] == "model_not_found"


@pytest.mark.asyncio
async def test_without_a_tokenizer_there_is_nothing_to_tell(server_of: ServerOf) -> None:
    async with server_of(codec=None) as server:
        assert "token" in str((await server.refused("/tokenize", prompt="a"))["message"])
        assert "token" in str((await server.refused("/detokenize", tokens=[1]))["message"])


@pytest.mark.asyncio
@pytest.mark.parametrize("path", UNSERVED)
async def test_what_is_not_served_says_what_is(server_of: ServerOf, path: str) -> None:
    """404 and no 501, which clients would try again."""
    async with server_of() as server:
        error = await server.refused(path, 404, input="abc")
    assert error["type"] == "not_found_error"
    assert path in str(error["message"])
    assert "/v1/chat/completions" in str(error["message"])
