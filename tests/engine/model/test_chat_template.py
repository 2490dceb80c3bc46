"""Chat templates: what they get, what they lack, what they raise; ids as the library makes them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.request import Chat, ChatMessage
from octavo.errors import InvalidRequest, ModelError
from octavo.tests.engine.model.tokenizer_rig import CHATML, MAKERS, SPECIALS, TOOLS, byte_level, wrap

TOOL = {"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": {}}}
HELLO: list[ChatMessage] = [{"role": "user", "content": "hello"}]
PARTS_ONLY = (
    "{% for message in messages %}{{ message.role }}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
CALLED: Mapping[str, object] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "日本", "deep": [1.5, null]}'},
}
CODECS = {name: HuggingFaceCodec(wrap(make(), TOOLS)) for name, make in MAKERS.items()}
TOKENIZERS = {name: wrap(make(), TOOLS) for name, make in MAKERS.items()}
every_kind = pytest.mark.parametrize("kind", list(MAKERS))
harmless = st.text(st.sampled_from([*'a<>|_im send\n"\\ {}é日', "\ue000"]), max_size=8).filter(
    lambda text: not any(special in text.lower() for special in SPECIALS)
)


def codec_for(template: str) -> HuggingFaceCodec:
    return HuggingFaceCodec(wrap(byte_level(), template))


def said(template: str, chat: Chat) -> str:
    codec = codec_for(template)
    return codec.decode(codec.encode_chat(chat), skip_special_tokens=False)


@every_kind
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(harmless, min_size=4, max_size=4), tools=st.booleans(), opens=st.booleans())
def test_ids_are_those_of_the_library(kind: str, texts: list[str], tools: bool, opens: bool) -> None:
    """TOK-01: with tools, calls, results and options, and with edges that look like a part of a special token."""
    question, key, value, answer = texts
    arguments = {key: [value, None]}
    call = {"id": "1", "type": "function", "function": {"name": value, "arguments": arguments}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": question, "name": key},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer, "tool_call_id": "1"},
    ]
    tool = {
        "type": "function",
        "function": {"name": key, "description": value, "parameters": {key: {"enum": [answer]}}},
    }
    chat = Chat(messages, tools=[tool] if tools else (), template_options={"extra": value}, opens_turn=opens)
    expected = TOKENIZERS[kind].apply_chat_template(
        messages,  # type: ignore[arg-type]  # its annotation knows text only
        tools=[tool] if tools else None,
        add_generation_prompt=opens,
        return_dict=False,
        extra=value,
    )
    ids = CODECS[kind].encode_chat(chat)
    assert ids == expected
    if kind != "lower_case":
        assert ids.count(TOKENIZERS[kind].bos_token_id) == 1


def test_a_harmless_edge_parts_nothing() -> None:
    """``s>`` could be the end of ``<s>``, and is not: the token ``us`` goes over the border."""
    tokenizer = wrap(MAKERS["byte_fallback"](), "hello u{{ messages[0].content }}")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "s>"}], return_dict=False)
    assert HuggingFaceCodec(tokenizer).encode_chat(Chat([{"role": "user", "content": "s>"}])) == ids
    assert tokenizer.convert_tokens_to_ids("us") in list(ids)


def test_arguments_are_written_once() -> None:
    """Not as a string of JSON inside JSON."""
    text = said(TOOLS, Chat([*HELLO, {"role": "assistant", "tool_calls": [CALLED]}]))
    assert '<tool>{"name": "look", "arguments": {"at": "日本", "deep": [1.5, null]}}<|im_end|>' in text


def test_the_last_message_goes_on() -> None:
    chat = Chat([*HELLO, {"role": "assistant", "content": "Well, <s>"}], continues_last=True)
    codec = codec_for(CHATML)
    ids = codec.encode_chat(chat)
    assert codec.decode(ids).endswith("assistant\nWell, <s>")
    assert ids.count(0) == 1
    assert codec.decode(codec.encode_chat(Chat(chat.messages))).endswith("Well, <s>\nassistant\n")


def test_a_template_that_drops_the_last_message_cannot_go_on() -> None:
    """The library's own words would quote the conversation."""
    chat = Chat([*HELLO, {"role": "assistant", "content": "secret words"}], continues_last=True)
    with pytest.raises(InvalidRequest, match="cannot go on with the last message") as refusal:
        codec_for("{{ messages[0].content }}").encode_chat(chat)
    assert "secret" not in str(refusal.value)


def test_no_turn_is_opened_where_none_is_wanted() -> None:
    assert said(CHATML, Chat(HELLO, opens_turn=False)) == "<s><|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, CHATML + "{{ 'no tools' }}", CHATML + " no tools here"])
def test_tools_need_a_template_that_has_them(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template has no tools"):
        codec_for(template).encode_chat(Chat(HELLO, tools=[TOOL]))
    assert "look" in said(TOOLS, Chat(HELLO, tools=[TOOL]))


def test_a_model_may_have_another_template_for_tools() -> None:
    tokenizer = wrap(byte_level())
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOLS}
    codec = HuggingFaceCodec(tokenizer)
    assert "look" in codec.decode(codec.encode_chat(Chat(HELLO, tools=[TOOL])))
    assert "look" not in codec.decode(codec.encode_chat(Chat(HELLO)))
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(InvalidRequest, match="no chat template"):
        HuggingFaceCodec(tokenizer).encode_chat(Chat(HELLO))


def test_templates_that_know_only_parts_get_parts() -> None:
    """A text would be gone without a word."""
    chat = Chat(
        [*HELLO, {"role": "user", "content": [{"type": "text", "text": "a<s>"}, {"type": "text", "text": "b"}]}]
    )
    assert said(PARTS_ONLY, chat) == "userhellousera<s>b"


@pytest.mark.parametrize(
    "name",
    ["tools", "chat_template", "tokenize", "bos_token", "eos_token", "messages", "conversation", "return_tensors"],
)
def test_options_do_not_take_the_place_of_what_is_the_engines(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"template_options must not set {name}"):
        CODECS["byte_level"].encode_chat(Chat(HELLO, template_options={name: "x"}))


def test_options_reach_the_template_and_unknown_ones_do_no_harm() -> None:
    template = CHATML + "{% if enable_thinking is defined and not enable_thinking %}{{ 'no thoughts' }}{% endif %}"
    assert said(template, Chat(HELLO, template_options={"enable_thinking": False, "x": [1]})).endswith("no thoughts")
    assert "thoughts" not in said(template, Chat(HELLO))


def test_what_a_template_raises_is_about_the_messages() -> None:
    for template, told in (
        ("{{ raise_exception('no ' * 500) }}", "does not accept these messages: no no"),
        ("{{ messages[0].content + messages[0].content.missing.deep }}", "does not accept these messages"),
        ("{{ messages[0].content + 1 }}", r"cannot write these messages \(TypeError\)"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
    ):
        with pytest.raises(InvalidRequest, match=told) as refusal:
            codec_for(template).encode_chat(Chat(HELLO))
        assert len(str(refusal.value)) < 300


def test_a_template_of_ones_own() -> None:
    codec = HuggingFaceCodec(wrap(byte_level(), CHATML), "{{ messages[-1].content }}!")
    assert codec.decode(codec.encode_chat(Chat(HELLO))) == "hello!"
    assert codec.chat_template == "{{ messages[-1].content }}!"
    assert HuggingFaceCodec(wrap(byte_level(), None)).chat_template is None
    codec = HuggingFaceCodec(wrap(byte_level(), None), CHATML)
    assert codec.encode_chat(Chat(HELLO)) == codec_for(CHATML).encode_chat(Chat(HELLO))


def test_a_template_of_ones_own_is_checked_at_once() -> None:
    with pytest.raises(ModelError, match="no valid Jinja: line 2"):
        HuggingFaceCodec(wrap(byte_level(), CHATML), "{{ bos_token }}\n{% for %}")
    with pytest.raises(InvalidRequest, match="does not accept"):
        codec_for("{% for %}").encode_chat(Chat(HELLO))
    HuggingFaceCodec(wrap(byte_level()), "{{ raise_exception('roles must alternate') }}")
