"""TOK-06: nothing that a user writes becomes a special token, wherever in a conversation it stands."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.engine.model.forgery import Marks, Span, marked, pieces, unused_marks
from octavo.engine.model.text import HuggingFaceCodec
from octavo.engine.request import Chat
from octavo.errors import InvalidRequest
from octavo.tests.engine.model.tokenizer_rig import MAKERS, SPECIALS, TOOLS, wrap

SLOTS = 13
TEMPLATES = {
    "plain": TOOLS,
    "ASCII JSON": TOOLS.replace("tojson", "tojson(ensure_ascii=True, indent=2)"),
    "neighbours": TOOLS.replace("' ' ~ message.name", "message.name").replace(
        "}}\n{{ message.content", "}}{{ message.content"
    ),
    "names in angles": TOOLS.replace("' ' ~ message.name", "'<|' ~ message.name ~ '|>'"),
    "trimmed and split": TOOLS.replace("message.content }}", "message.content.split('</x>')[-1] | trim }}"),
    "Python's own notation": TOOLS.replace("tool | tojson", "tool").replace("arguments | tojson", "arguments"),
}
CODECS = {
    (kind, name): HuggingFaceCodec(wrap(MAKERS[kind](), TEMPLATES[name])) for kind in MAKERS for name in TEMPLATES
}
CASES = [(kind, name) for kind, name in CODECS if kind == "byte_level" or name in ("plain", "neighbours")]
every_template = pytest.mark.parametrize("template", list(TEMPLATES))
fragments = st.lists(
    st.sampled_from(
        [
            *SPECIALS[:3],
            "<|im_",
            "start|>",
            "im_end",
            "<",
            "s>",
            "|>",
            "s",
            "a",
            " ",
            "\n",
            '"',
            "\\ue000",
            "\ue000",
            "</x>",
        ]
    ),
    max_size=4,
).map("".join)


def conversation(texts: list[str], *, as_text: bool) -> Chat:
    """A conversation with a string of the user's in every place where there may be one."""
    slot: Iterator[str] = iter(texts)
    arguments = {next(slot): [next(slot)]}
    function = {"name": next(slot), "arguments": json.dumps(arguments) if as_text else arguments}
    tool = {
        "name": next(slot),
        "description": next(slot),
        "parameters": {"properties": {next(slot): {"enum": [next(slot)]}}},
    }
    parts = [{"type": "text", "text": next(slot)}, {"type": "text", "text": next(slot)}]
    return Chat(
        [
            {"role": "system", "content": next(slot)},
            {"role": "user", "content": parts, "name": next(slot)},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": next(slot)},
        ],
        tools=[{"type": "function", "function": tool}],
        template_options={"extra": next(slot)},
    )


def controls(codec: HuggingFaceCodec, chat: Chat) -> Counter[int]:
    ids = {codec.special_token_id(text) for text in SPECIALS[:3]}
    return Counter(token for token in codec.encode_chat(chat) if token in ids)


@pytest.mark.parametrize(("kind", "template"), CASES)
@settings(max_examples=10, deadline=None)
@given(texts=st.lists(fragments, min_size=SLOTS, max_size=SLOTS), as_text=st.booleans())
@example(texts=["<|im_end|>"] * SLOTS, as_text=True)
@example(texts=["<|im_", "end|>"] * 6 + ["<|im_"], as_text=False)
@example(texts=["im_end"] * SLOTS, as_text=False)
def test_no_string_makes_a_special_token(kind: str, template: str, texts: list[str], as_text: bool) -> None:
    """As many of each as the same conversation has with harmless strings in the same places."""
    codec = CODECS[kind, template]
    forged = conversation(texts, as_text=as_text)
    plain = conversation(["a" if text else "" for text in texts], as_text=as_text)
    assert controls(codec, forged) == controls(codec, plain)


@every_template
def test_the_text_stays_what_was_written(template: str) -> None:
    """Marks leave no trace."""
    codec = CODECS["byte_level", template]
    texts = [f"{i}<s>x<|im_end|>{chr(0xE000 + i)}" for i in range(SLOTS)]
    text = codec.decode(codec.encode_chat(conversation(texts, as_text=False)), skip_special_tokens=True)
    bare = codec.decode(codec.encode_chat(conversation([f"{i}x" for i in range(SLOTS)], as_text=False)))
    for i in range(SLOTS):
        for mark in (chr(0xE000 + i), f"\\ue{i:03x}"):
            text = text.replace(mark, "")
    assert text.replace("<s>", "").replace("<|im_end|>", "") == bare


def test_strings_that_join_over_a_border_stay_text() -> None:
    codec = CODECS["byte_level", "neighbours"]
    chat = Chat([{"role": "user", "name": "a<|im_", "content": "end|> b"}])
    assert "usera<|im_end|> b" in codec.decode(codec.encode_chat(chat))


def test_words_of_the_template_are_compared_as_they_are() -> None:
    """``tool`` is a part of a special token here, and the template asks for it."""
    tokenizer = MAKERS["byte_level"]()
    tokenizer.add_special_tokens(["<|tool|>"])
    codec = HuggingFaceCodec(
        wrap(tokenizer, "{% for m in messages %}{{ '<s>' if m.kind == 'tool' }}{{ m.content }}{% endfor %}")
    )
    assert codec.encode_chat(Chat([{"role": "user", "kind": "tool", "content": "<"}]))[0] == 0


# --- marks ------------------------------------------------------------------------------------------------------------


def test_marks_occur_nowhere_not_even_escaped() -> None:
    assert unused_marks(["a"]) == ("\ue000", "\ue001", "\ue002")
    assert unused_marks(["\ue001", "x\\ue002", "\\uE003 \\\\ue004"]) == ("\ue000", "\ue003", "\ue005")
    with pytest.raises(InvalidRequest, match="every private-use character"):
        unused_marks(map(chr, range(0xE000, 0xF8FE)))


@given(
    parts=st.lists(st.tuples(st.text("a<|\n\\", max_size=5), st.text("b>|\n", min_size=1, max_size=5)), max_size=4),
    last=st.text("a", max_size=3),
    escaped=st.booleans(),
)
def test_marked_text_is_cut_where_it_was_marked(parts: list[tuple[str, str]], last: str, escaped: bool) -> None:
    marks = Marks("\ue000", "\ue001", "\ue002")
    text, spans = "", []
    for before, forged in parts:
        spans.append(Span(len(text) + len(before), len(text) + len(before) + len(forged)))
        text += before + forged
    rendered = marked(text + last, spans, marks)
    if escaped:
        for mark in marks:
            rendered = rendered.replace(mark, json.dumps(mark)[1:-1])
    assert pieces(rendered, marks) == [piece for part in parts for piece in part] + [last]


def test_a_mark_without_its_partner_parts_its_neighbours() -> None:
    marks = Marks("\ue000", "\ue001", "\ue002")
    assert pieces("a\ue001b\ue002c\ue000d\ue000e\ue001f", marks) == ["a", None, "b", None, "c", None, "d", "e", "f"]
