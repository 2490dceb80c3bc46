"""Every tool format: whatever the text and however it is cut, nothing of it is lost and nothing of a call leaks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.engine.server.tools.base import Cursor, Piece, Reading, TextPiece, Tool, ToolCall, ToolFormat
from octavo.engine.server.tools.hermes import Hermes
from octavo.engine.server.tools.llama3_json import Llama3Json
from octavo.engine.server.tools.mistral import Mistral
from octavo.engine.server.tools.pythonic import Pythonic
from octavo.engine.server.tools.qwen3_coder import Qwen3Coder
from octavo.engine.server.tools.smollm import SmolLM

Json = Mapping[str, object]
Calls = Sequence[tuple[str, Json]]

TOOLS = (Tool("get_weather"), Tool("add-one"), Tool("f"))
NAMES = [tool.name for tool in TOOLS]


def as_json(name: str, arguments: Json, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {json.dumps(arguments)}}}'


def in_tags(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls)


def in_one_list(calls: Calls) -> str:
    return "<tool_call>[" + ",\n".join(as_json(*call) for call in calls) + "]</tool_call>"


def as_llama(calls: Calls) -> str:
    return "; ".join(as_json(*call, "parameters") for call in calls)


def as_mistral(calls: Calls) -> str:
    return "[TOOL_CALLS][" + ", ".join(as_json(*call) for call in calls) + "]"


def as_new_mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def as_python(calls: Calls) -> str:
    return "[" + ", ".join(f"{name}({pairs(arguments)})" for name, arguments in calls) + "]"


def pairs(arguments: Json) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def in_xml(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{lines(values)}</function>\n</tool_call>" for name, values in calls
    )


def lines(arguments: Json) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MARKS = st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '"}]', "{", "\\", "<|python_tag|>", "</parameter"]
)
KEYS = st.from_regex(r"[a-z][a-z0-9_-]{0,5}", fullmatch=True)
ANY_ARGUMENTS = st.dictionaries(st.text(max_size=4) | MARKS, JSON | MARKS, max_size=3)
PYTHON_ARGUMENTS = st.dictionaries(KEYS, JSON | MARKS, max_size=3)
TEXT_ARGUMENTS = st.dictionaries(KEYS, st.text().filter(lambda text: "</parameter>" not in text) | MARKS, max_size=3)

Writer = Callable[[Calls], str]
NOTATIONS: list[tuple[ToolFormat, Writer, st.SearchStrategy[Json]]] = [
    (Hermes(), in_tags, ANY_ARGUMENTS),
    (Hermes(), in_one_list, ANY_ARGUMENTS),
    (SmolLM(), in_one_list, ANY_ARGUMENTS),
    (SmolLM(), in_tags, ANY_ARGUMENTS),
    (Llama3Json(), as_llama, ANY_ARGUMENTS),
    (Mistral(), as_mistral, ANY_ARGUMENTS),
    (Mistral(), as_new_mistral, ANY_ARGUMENTS),
    (Pythonic(), as_python, PYTHON_ARGUMENTS),
    (Qwen3Coder(), in_xml, TEXT_ARGUMENTS),
]
FORMATS = [Hermes(), SmolLM(), Llama3Json(), Mistral(), Pythonic(), Qwen3Coder()]
every_notation = pytest.mark.parametrize(
    ("notation", "write", "arguments"), NOTATIONS, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
every_format = pytest.mark.parametrize("notation", FORMATS, ids=lambda value: type(value).__name__)

PROSE = st.text(st.characters(exclude_characters="<[{", codec="utf-8"), max_size=12).filter(lambda text: text.strip())
TAGS = ("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>")
MORE_MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<tool", "f>", "f(", "a=", "[]", "{}")
WORDS = ('"name"', '"f"', '"arguments"', "get_weather", "text")
DEBRIS = st.lists(st.sampled_from([*TAGS, *MORE_MARKS, *WORDS, *"[]{}()<>,:;'1 \"\\\n"]), max_size=20).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def numbers() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"{next(counter):032x}"


def read(notation: ToolFormat, deltas: Iterable[str], tools: Sequence[Tool] = TOOLS) -> list[Piece]:
    """The pieces, with texts that follow each other joined."""
    reader = notation.reader(tools, numbers())
    pieces: list[Piece] = []
    for piece in [*itertools.chain.from_iterable(map(reader.push, deltas)), *reader.finish()]:
        if isinstance(piece, TextPiece) and pieces and isinstance(pieces[-1], TextPiece):
            pieces[-1] = TextPiece(pieces[-1].text + piece.text)
        else:
            pieces.append(piece)
    return pieces


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def calls_of(pieces: Iterable[Piece]) -> list[tuple[str, Json]]:
    return [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, ToolCall)]


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


@every_notation
@given(data=st.data(), places=CUTS)
def test_what_a_model_writes_is_read_wherever_it_is_cut(
    notation: ToolFormat, write: Writer, arguments: st.SearchStrategy[Json], data: st.DataObject, places: list[int]
) -> None:
    calls = data.draw(st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3))
    before = "" if notation.openings_in_front else data.draw(st.just("") | PROSE)
    after = data.draw(st.just("") | PROSE)
    pieces = read(notation, cut(f"{before}\n{write(calls)}\n{after}", places))
    assert calls_of(pieces) == calls
    assert text_of(pieces) == before.rstrip(" \t\r\n") + after.lstrip(notation.padding)
    assert [piece.id for piece in pieces if isinstance(piece, ToolCall)] == [
        notation.call_id(f"{number:032x}") for number in range(len(calls))
    ]


@every_format
@given(text=DEBRIS, places=CUTS)
@example(text="<tool_call><tool_call>{}", places=[])
@example(text="<tool_call>[]<tool_call>[]</tool_call>", places=[11])
def test_the_cuts_change_nothing(notation: ToolFormat, text: str, places: list[int]) -> None:
    whole = read(notation, [text])
    assert read(notation, cut(text, places)) == whole
    assert read(notation, text) == whole  # character by character


@every_format
@given(text=DEBRIS)
def test_what_is_no_call_goes_through_as_it_is(notation: ToolFormat, text: str) -> None:
    pieces = read(notation, [text])
    if not calls_of(pieces) and "[]" not in text:  # a list of no calls is a notation, too
        assert text_of(pieces) == text


@every_format
@given(text=st.text())
def test_text_without_marks_is_not_touched(notation: ToolFormat, text: str) -> None:
    assert text_of(read(notation, text)) == text


@every_format
@given(text=PROSE)
def test_text_is_not_held_back(notation: ToolFormat, text: str) -> None:
    reader = notation.reader(TOOLS, numbers())
    assert text_of(reader.push(text)) == text.rstrip(" \t\r\n")


@every_notation
@given(data=st.data())
def test_a_call_that_breaks_off_comes_out_whole(
    notation: ToolFormat, write: Writer, arguments: st.SearchStrategy[Json], data: st.DataObject
) -> None:
    text = write([(data.draw(st.sampled_from(NAMES)), data.draw(arguments))])
    end = data.draw(st.integers(1, len(text) - 1))
    pieces = read(notation, [text[:end]])
    assert calls_of(pieces) or text_of(pieces) == text[:end]
    reader = notation.reader(TOOLS, numbers())
    assert not text_of(reader.push(text[:end]))  # while more may come, nothing of it is shown


@every_format
@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", '<tool_call>["', "<tool_call>{", "[TOOL_CALLS]", "[TOOL_CALLS][", "[f(", "{", "<", "<function=f>"],
)
def test_no_character_is_looked_at_again_and_again(
    notation: ToolFormat, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    peek = Cursor.peek

    def counted(cursor: Cursor) -> Reading[str]:
        next(looks)
        return peek(cursor)

    monkeypatch.setattr(Cursor, "peek", counted)
    text = unit * (4000 // len(unit))
    assert text_of(read(notation, cut(text, range(0, len(text), 1000)))) == text
    assert next(looks) <= 4 * len(text)


def test_a_number_is_taken_for_each_call_and_no_other() -> None:
    taken = []

    def new_number() -> str:
        taken.append(1)
        return "0123456789abcdef" * 2

    reader = Hermes().reader(TOOLS, new_number)
    pieces = [*reader.push(in_tags([("f", {})]) + "<tool_call>{}</tool_call>"), *reader.finish()]
    assert len(taken) == 1
    assert [piece.id for piece in pieces if isinstance(piece, ToolCall)] == ["call_" + "0123456789abcdef" * 2]
