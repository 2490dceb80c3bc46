"""Forced calls: the grammar of a format lets through what the format reads, and what the schema allows."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Sequence

import llguidance
import llguidance.numpy
import pytest

from octavo.engine.server.tools.base import TextPiece, Tool, ToolCall, ToolFormat
from octavo.engine.server.tools.grammar import arguments_schema
from octavo.engine.server.tools.hermes import Hermes
from octavo.engine.server.tools.llama3_json import Llama3Json
from octavo.engine.server.tools.mistral import Mistral
from octavo.engine.server.tools.pythonic import Pythonic
from octavo.engine.server.tools.qwen3_coder import Qwen3Coder
from octavo.engine.server.tools.smollm import SmolLM
from octavo.errors import InvalidRequest

FORMATS = [Hermes(), SmolLM(), Llama3Json(), Mistral(), Pythonic(), Qwen3Coder()]
every_format = pytest.mark.parametrize("notation", FORMATS, ids=lambda value: type(value).__name__)

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "exact": {"type": "boolean"},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "exact"],
        "$defs": {
            "place": {"type": "object", "properties": {"lat": {"$ref": "#/$defs/degrees"}}, "required": ["lat"]},
            "degrees": {"type": "number", "minimum": -90, "maximum": 90},
        },
    },
)
NOW = Tool("now")
LOG = Tool("log-it", {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "integer"}}}})
TOOLS = (WEATHER, NOW, LOG)
REQUIRED = {"get_weather": {"city", "exact"}, "now": set[str](), "log-it": set[str]()}
KNOWN = {"get_weather": {"city", "days", "unit", "exact", "where"}, "now": set[str](), "log-it": {"tags"}}


def test_a_call_has_a_schema_as_narrow_as_its_meaning_allows() -> None:
    assert arguments_schema(NOW) == {"type": "object", "additionalProperties": False, "properties": {}}
    assert arguments_schema(LOG)["additionalProperties"] is False
    assert "additionalProperties" not in arguments_schema(Tool("f", {"type": "object"}))
    assert arguments_schema(Tool("f", {"properties": {}, "additionalProperties": True}))["additionalProperties"] is True
    assert "additionalProperties" not in arguments_schema(Tool("f", {"properties": {}, "$ref": "#/$defs/x"}))


def matcher(notation: ToolFormat, choice: str | None = None, *, parallel: bool = True) -> llguidance.LLMatcher:
    grammar = notation.output_format(TOOLS, choice, parallel=parallel)
    assert grammar.kind == "grammar"
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.definition)
    assert not found.get_error()
    return found


def takes(notation: ToolFormat, text: str, choice: str | None = None, *, parallel: bool = True) -> bool:
    """Whether the grammar lets ``text`` through, as a whole answer."""
    found = matcher(notation, choice, parallel=parallel)
    return all(found.consume_token(byte) for byte in text.encode()) and found.is_accepting()


def calls_in(notation: ToolFormat, text: str) -> list[ToolCall]:
    """The calls of an answer that is nothing but calls."""
    reader = notation.reader(TOOLS, lambda: "0" * 32)
    pieces = [*reader.push(text), *reader.finish()]
    assert not any(isinstance(piece, TextPiece) for piece in pieces), pieces
    return [piece for piece in pieces if isinstance(piece, ToolCall)]


WEATHER_CALL = {"city": "Bern", "exact": True}
ONE = {
    "Hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "exact": true}}\n</tool_call>',
    "SmolLM": '<tool_call>[{"name": "get_weather", "arguments": {"city": "Bern", "exact": true}}]</tool_call>',
    "Llama3Json": '{"name": "get_weather", "parameters": {"city": "Bern", "exact": true}}',
    "Mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern", "exact": true}}]',
    "Pythonic": '[get_weather(city="Bern", exact=true)]',
    "Qwen3Coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=exact>\n"
    "true\n</parameter>\n</function>\n</tool_call>",
}
TWO = {
    "Hermes": ONE["Hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "SmolLM": ONE["SmolLM"].replace("}]<", '}, {"name": "now", "arguments": {}}]<'),
    "Llama3Json": ONE["Llama3Json"] + '; {"name": "now", "parameters": {}}',
    "Mistral": ONE["Mistral"].replace("}}]", '}}, {"name": "now", "arguments": {}}]'),
    "Pythonic": ONE["Pythonic"].replace(")]", "), now()]"),
    "Qwen3Coder": ONE["Qwen3Coder"] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}


@every_format
def test_the_model_has_to_call_and_may_call_several(notation: ToolFormat) -> None:
    one, two = ONE[type(notation).__name__], TWO[type(notation).__name__]
    assert takes(notation, one)
    assert takes(notation, two)
    assert not takes(notation, "")
    assert not takes(notation, "I would rather not.")
    assert not takes(notation, one + " Done.")
    assert [(call.name, json.loads(call.arguments)) for call in calls_in(notation, two)] == [
        ("get_weather", WEATHER_CALL),
        ("now", {}),
    ]


@every_format
def test_one_call_and_no_more_where_one_is_wanted(notation: ToolFormat) -> None:
    one, two = ONE[type(notation).__name__], TWO[type(notation).__name__]
    assert takes(notation, one, parallel=False)
    assert not takes(notation, two, parallel=False)
    assert takes(notation, one, "get_weather")
    assert not takes(notation, two, "get_weather")
    assert not takes(notation, one, "now")


@every_format
@pytest.mark.parametrize("change", [("get_weather", "get_money"), ("true", "7"), ("exact", "extra")])
def test_what_the_tool_does_not_take_is_not_let_through(notation: ToolFormat, change: tuple[str, str]) -> None:
    assert not takes(notation, ONE[type(notation).__name__].replace(*change))


def wandering(found: llguidance.LLMatcher, chance: random.Random, limit: int) -> str | None:
    """A text that the grammar lets through, byte by byte at random; ``None``: there was no end within the limit."""
    written = bytearray()
    bitmask = llguidance.numpy.allocate_token_bitmask(1, 257)
    while not (found.is_stopped() or (found.is_accepting() and chance.random() < 0.5)):
        llguidance.numpy.fill_next_token_bitmask(found, bitmask)
        allowed = [byte for byte in range(256) if bitmask[0, byte // 32] >> (byte % 32) & 1]
        ends = [byte for byte in allowed if chr(byte) in '"}]),']
        near = b"</parameter>" if len(allowed) > 150 and chance.random() < 0.1 else b""
        taken = near[: found.try_consume_tokens(list(near))]
        if not taken:
            taken = bytes([chance.choice(ends if ends and chance.random() < 0.4 else allowed)])
            assert found.consume_token(taken[0])
        written += taken
        if len(written) > limit:
            return None
    return written.decode()


@every_format
@pytest.mark.parametrize("choice", [None, "get_weather"])
def test_whatever_the_grammar_lets_through_is_read(notation: ToolFormat, choice: str | None) -> None:
    chance = random.Random(20)  # noqa: S311  # no secret
    texts = [wandering(matcher(notation, choice), chance, 1500) for _ in range(12)]
    written = [text for text in texts if text is not None]
    assert len(written) >= 3
    for text in written:
        calls = calls_in(notation, text)
        assert calls
        for call in calls:
            arguments = json.loads(call.arguments)
            assert REQUIRED[call.name] <= arguments.keys() <= KNOWN[call.name]
            assert isinstance(arguments.get("exact", False), bool)
            assert isinstance(arguments.get("city", ""), str)
            assert choice in {None, call.name}


@every_format
def test_a_tool_that_is_not_there_cannot_be_forced(notation: ToolFormat) -> None:
    with pytest.raises(InvalidRequest, match="'nothing'"):
        notation.output_format(TOOLS, "nothing")
    with pytest.raises(InvalidRequest, match="offers no such tool"):
        notation.output_format([])


def test_schemas_are_kept_to_as_far_as_can_be_and_to_the_letter_when_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "not": {"required": ["a"]}}
    for strict in (False, True):
        grammar = Hermes().output_format([Tool("f", schema, strict)]).definition
        found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        assert bool(found.get_error()) == strict


def test_marks_are_special_tokens_where_the_tokenizer_has_them() -> None:
    special = {"<tool_call>": 5, "</tool_call>": 6, "[TOOL_CALLS]": 7, "[ARGS]": 8}
    hermes = Hermes().output_format([NOW], special_token_id=special.get).definition
    assert "<[5]>" in hermes
    assert "<[6]>" in hermes
    assert "tool_call" not in hermes
    mistral = Mistral().output_format([NOW], special_token_id=special.get).definition
    assert '<[7]> "now" <[8]> %json' in mistral


def test_newer_mistral_models_get_the_newer_notation() -> None:
    grammar = Mistral().output_format(TOOLS, special_token_id={"[ARGS]": 8}.get).definition.replace("<[8]>", '"[ARGS]"')
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    text = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]log-it[ARGS]{"tags": [1, 2]}'
    assert all(found.consume_token(byte) for byte in text.encode())
    assert found.is_accepting()
    assert [call.name for call in calls_in(Mistral(), text)] == ["now", "log-it"]


@pytest.mark.parametrize(
    ("required", "texts", "others"),
    [
        ([], ["", "a=1", "b=2", "c=3", "a=1, b=2", "a=1, c=3", "b=2, c=3", "a=1, b=2, c=3"], ["b=2, a=1", ", a=1"]),
        (["b"], ["b=2", "b=2, a=1", "b=2, c=3", "b=2, a=1, c=3"], ["", "a=1", "a=1, b=2"]),
        (["a", "c"], ["a=1, c=3", "a=1, c=3, b=2"], ["a=1", "a=1, b=2, c=3"]),
    ],
)
def test_python_calls_take_what_is_required_and_then_the_rest(
    required: list[str], texts: Sequence[str], others: Sequence[str]
) -> None:
    schema = {"properties": {name: {"type": "integer"} for name in "abc"}, "required": required}
    grammar = Pythonic().output_format([Tool("f", schema)], parallel=False).definition
    for text in [*texts, *others]:
        found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
        is_taken = all(found.consume_token(byte) for byte in f"[f({text})]".encode()) and found.is_accepting()
        assert is_taken == (text in texts), text


@pytest.mark.parametrize("notation", [Pythonic(), Qwen3Coder()], ids=["Pythonic", "Qwen3Coder"])
@pytest.mark.parametrize("name", ["a b", "", "a>"])
def test_names_that_the_notation_cannot_have_are_refused(notation: ToolFormat, name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot have"):
        notation.output_format([Tool("f", {"properties": {name: {"type": "string"}}})])


@pytest.mark.parametrize("notation", [Pythonic(), Qwen3Coder()], ids=["Pythonic", "Qwen3Coder"])
@pytest.mark.parametrize("schema", [{"properties": 3}, {"properties": {}, "required": 3}])
def test_schemas_of_nothing_are_refused(notation: ToolFormat, schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="no JSON schema of an object"):
        notation.output_format([Tool("f", schema)])


def test_plain_text_cannot_be_held_to_a_pattern() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^[a-z]$"}}}
    Qwen3Coder().output_format([Tool("f", schema)])
    with pytest.raises(InvalidRequest, match="set strict to false"):
        Qwen3Coder().output_format([Tool("f", schema, strict=True)])


@every_format
def test_tools_that_would_make_a_huge_grammar_are_refused_before_it_is_made(notation: ToolFormat) -> None:
    """Some notations write each parameter several times, and the definitions with each of them."""
    many = {"properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    huge = {"properties": {f"p{i}": {} for i in range(400)}, "$defs": {"a": {"enum": ["x" * 40_000]}}}
    tracemalloc.start()
    try:
        for tools in ([Tool("f", many)], [Tool(f"f{i}", huge) for i in range(100)]):
            with pytest.raises(InvalidRequest, match=r"parameters here|more than 65536 characters|at most 65536"):
                notation.output_format(tools)
        assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
    finally:
        tracemalloc.stop()
