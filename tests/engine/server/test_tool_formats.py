"""Each tool format on its own: what its models write, right and wrong, and by what it is chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from octavo.engine.server.tools.base import Piece, TextPiece, Tool, ToolCall, ToolFormat
from octavo.engine.server.tools.choosing import TOOL_FORMATS, choose_format
from octavo.engine.server.tools.hermes import Hermes
from octavo.engine.server.tools.llama3_json import Llama3Json
from octavo.engine.server.tools.mistral import Mistral
from octavo.engine.server.tools.pythonic import Pythonic
from octavo.engine.server.tools.qwen3_coder import Qwen3Coder
from octavo.engine.server.tools.smollm import SmolLM
from octavo.errors import UnknownPlugin

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "flag": {"type": "boolean"},
    "maybe": {"type": ["string", "null"]},
    "some": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "list": {"type": "array"},
    "free": {},
    "unit": {"enum": ["1", "2"]},
}
TOOLS = (Tool("f", {"type": "object", "properties": PROPERTIES}), Tool("g"))


def read(notation: ToolFormat, text: str, tools: Sequence[Tool] = TOOLS) -> list[Piece]:
    reader = notation.reader(tools, lambda: "0" * 32)
    return [*reader.push(text), *reader.finish()]


def calls(notation: ToolFormat, text: str) -> list[tuple[str, object]]:
    """The calls of an answer that is nothing else."""
    pieces = read(notation, text)
    assert not [piece for piece in pieces if isinstance(piece, TextPiece)]
    return [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]


def is_text(notation: ToolFormat, text: str) -> bool:
    return "".join(piece.text for piece in read(notation, text) if isinstance(piece, TextPiece)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
        ('<tool_call>{"name": "f"}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', {"a": "1\n2"}),
        ('<tool_call>{"name": "f", "arguments": {}}', {}),  # the end is missing
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', {}),
    ],
)
def test_json_calls_are_read_as_models_write_them(text: str, expected: object) -> None:
    assert calls(Hermes(), text) == [("f", expected)]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "f()",
        "3",
        "{}",
        '{"name": "f", "arguments": {}',
        '{"name": "f", "arguments": {}]',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {}} and more',
        '[{"name": "f"}, 3]',
        '{"name": "f", "arguments": ' + "[" * 200 + "]" * 200 + "}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_what_only_looks_like_a_json_call_is_text(body: str) -> None:
    assert is_text(Hermes(), f"<tool_call>{body}</tool_call>")


def test_a_call_behind_a_bad_one_is_found() -> None:
    *bad, call = read(Hermes(), '<tool_call>{bad}</tool_call> <tool_call>{"name": "f"}</tool_call>')
    assert "".join(piece.text for piece in bad if isinstance(piece, TextPiece)) == "<tool_call>{bad}</tool_call>"
    assert call == ToolCall("f", "{}", "call_" + "0" * 32)


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    (piece,) = read(Hermes(), '<tool_call>{"name": "f", "arguments": {"a": "é\\ud83d"}}</tool_call>')
    assert isinstance(piece, ToolCall)
    assert piece.arguments.isascii()
    assert json.loads(piece.arguments) == {"a": "é\ud83d"}


def test_an_empty_list_is_no_call_and_no_text() -> None:
    assert calls(SmolLM(), "<tool_call>[]</tool_call>") == []


def test_llama_calls_have_the_name_of_a_tool_and_arguments() -> None:
    assert calls(Llama3Json(), '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}') == [
        ("f", {"a": 1})
    ]
    assert calls(Llama3Json(), '{"name": "f", "parameters": {}};{"name": "g", "arguments": {}} ;') == [
        ("f", {}),
        ("g", {}),
    ]
    assert is_text(Llama3Json(), '{"name": "Bob", "parameters": {}}')
    assert is_text(Llama3Json(), '{"name": "f"}')
    assert is_text(Llama3Json(), '{"answer": 42}')
    assert is_text(Llama3Json(), 'So: {"name": "f", "parameters": {}}')


def test_mistral_calls_in_all_three_notations() -> None:
    assert calls(Mistral(), '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]') == [("f", {"a": 1})]
    assert calls(Mistral(), '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}') == [("f", {"a": 1}), ("g", {})]
    assert calls(Mistral(), '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}') == [("f", {"a": 1})]
    assert is_text(Mistral(), "[TOOL_CALLS] are what I write to call")
    assert is_text(Mistral(), "[TOOL_CALLS]f[ARGS][1]")
    assert Mistral().call_id("0123456789abcdef") == "012345678"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[f()]", {}),
        ("[f(a=1, b=-2.5,)]", {"a": 1, "b": -2.5}),
        ("[ f( a = 'x' , b=1 ) ]", {"a": "x", "b": 1}),
        ("[f(a='it\\'s', b=\"[(,)]\")]", {"a": "it's", "b": "[(,)]"}),
        ("[f(a={'b': [1, (2, 3)]}, c=None, d=True)]", {"a": {"b": [1, [2, 3]]}, "c": None, "d": True}),
        ("[f(a=null, b=true, c=[false])]", {"a": None, "b": True, "c": [False]}),
        ("[f(from='a', to-where='b')]", {"from": "a", "to-where": "b"}),
        ("<|python_start|>[f(a=1)]<|python_end|>", {"a": 1}),
        ("<|python_tag|>[f(a=1)]", {"a": 1}),
        ("[f(a='\\d')]", {"a": "\\d"}),
        ('[f(a="\\ud83d\\ude00")]', {"a": "😀"}),
    ],
)
def test_python_calls(text: str, expected: object) -> None:
    assert calls(Pythonic(), text) == [("f", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[f]",
        "[f(1)]",
        "[f(**{})]",
        "[f(a=g())]",
        "[f(a=__import__('os').getcwd())]",
        "[f(a=f'{1}')]",
        "[f(a=b'x')]",
        "[f(a={1, 2})]",
        "[f(a=1e999)]",
        "[f(a=1), h(a=2)]",
        "[f(a=1)",
        "[f(a='x]",
        "[f(a=)]",
        "[f(a=" + "-" * 50_000 + "1)]",
        "[f(a=" + "[" * 500 + "]" * 500 + ")]",
        "So: [f(a=1)]",
        "[f](http://example.org)",
    ],
)
def test_what_is_no_literal_call_is_text_and_is_not_run(text: str) -> None:
    assert is_text(Pythonic(), text)


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("text", "42", "42"),
        ("text", "\na\n", "\na\n"),
        ("text", "null", "null"),
        ("text", "<b>x</b>", "<b>x</b>"),
        ("count", "42", 42),
        ("count", " 42 ", 42),
        ("count", "many", "many"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "7", "7"),
        ("some", "None", None),
        ("some", "7", 7),
        ("list", "[1, 2]", [1, 2]),
        ("free", "[1, 2]", [1, 2]),
        ("free", "so", "so"),
        ("unit", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_the_schema_says_what_an_xml_argument_means(key: str, written: str, meant: object) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert calls(Qwen3Coder(), text) == [("f", {key: meant})]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("<function=f>\n</function>", 1),
        ("<function=f>\n</function>\n</tool_call>", 1),
        ("<tool_call><function=f><parameter=text>x</parameter></function>", 1),
        (
            "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            2,
        ),
    ],
)
def test_xml_calls_without_all_their_tags(text: str, count: int) -> None:
    assert len(calls(Qwen3Coder(), text)) == count


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n<function>",
        "<tool_call>\n<function=f",
        "<tool_call>\n<function=f>\n<parameter=text>\nx",
        "<tool_call>\n<function=f>\n<parameter=>\nx</parameter>",
        "<tool_call>\n<function=f>\nx</function></tool_call>",
        "<tool_call>\n<function=f></function>x</tool_call>",
        "<function=>\n</function>",
    ],
)
def test_what_is_no_xml_call_is_text(text: str) -> None:
    assert is_text(Qwen3Coder(), text)


TEMPLATES = {
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}',
    "smollm": 'is as follows.\n<tool_call>[\n{"name": "func_name1", "arguments": {}},\n]</tool_call>',
    "llama3_json": '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}. ' }}",
    "mistral": "{{ '[TOOL_CALLS]' + message['content'] }}",
    "pythonic": "MUST put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_chat_template_shows_the_format_and_no_other(name: str) -> None:
    fitting = [
        each.name for each in TOOL_FORMATS.report() if TOOL_FORMATS.resolve(each.name)().matches(TEMPLATES[name])
    ]
    assert fitting == [name]
    assert type(choose_format(None, TEMPLATES[name])) is TOOL_FORMATS.resolve(name)


def test_a_format_can_be_named_or_be_none() -> None:
    assert isinstance(choose_format("pythonic", TEMPLATES["hermes"]), Pythonic)
    assert isinstance(choose_format("octavo.engine.server.tools.smollm:SmolLM", None), SmolLM)
    assert choose_format(None, None) is None
    assert choose_format(None, "{% for message in messages %}{{ message.content }}{% endfor %}") is None
    with pytest.raises(UnknownPlugin, match="hermes"):
        choose_format("hermez", None)


def test_formats_that_need_special_tokens_say_so() -> None:
    assert Mistral.has_special_tokens
    assert not SmolLM.has_special_tokens
