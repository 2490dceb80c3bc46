from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.storage.options import NaturalFloat, NaturalInt, PositiveFloat, PositiveInt, Text, read_options


class Example(msgspec.Struct, frozen=True, kw_only=True):
    size: PositiveInt
    floor: NaturalInt = 0
    folder: Path = Path("here")
    name: Text = "x"
    pause: PositiveFloat = 1.0
    delay: NaturalFloat = 0.0
    strict: bool = False
    more: dict[str, str] = {}


@dataclass(frozen=True)
class Plain:
    size: int
    name: str = "x"

    def __post_init__(self) -> None:
        if self.size % 2:
            raise ValueError("must be even")


def test_what_is_given_is_taken_and_the_rest_has_defaults() -> None:
    options = read_options(Example, {"size": 3, "pause": 2, "more": {"a": "b"}}, "example tier")
    assert options == Example(size=3, pause=2.0, more={"a": "b"})


def test_a_dataclass_will_do() -> None:
    assert read_options(Plain, {"size": 4}, "plain tier") == Plain(4)
    with pytest.raises(InvalidRequest, match="must be even"):
        read_options(Plain, {"size": 3}, "plain tier")


def test_paths_and_text_stand_for_each_other() -> None:
    options = read_options(Example, {"size": 1, "folder": "/a", "name": Path("/b")}, "example tier")
    assert options.folder == Path("/a")
    assert options.name == "/b"


def test_an_unknown_option_is_named_with_those_that_are_known() -> None:
    with pytest.raises(InvalidRequest, match=r"example tier has no option 'sise'\. Did you mean 'size'") as caught:
        read_options(Example, {"size": 1, "sise": 2}, "example tier")
    for name in ("size", "floor", "folder", "strict"):
        assert name in str(caught.value)


def test_a_missing_option_is_named() -> None:
    with pytest.raises(InvalidRequest, match="example tier: needs the option `size`"):
        read_options(Example, {}, "example tier")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", "1"),
        ("size", True),
        ("size", 1.0),
        ("size", 0),
        ("size", None),
        ("floor", -1),
        ("folder", 3),
        ("name", ""),
        ("name", b"x"),
        ("pause", 0.0),
        ("pause", float("nan")),
        ("pause", float("inf")),
        ("delay", -0.5),
        ("strict", 1),
        ("more", {"a": 1}),
        ("more", "a"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"option '{name}.*' of example tier"):
        read_options(Example, {"size": 1, name: value}, "example tier")


@given(st.dictionaries(st.text() | st.integers(), st.text() | st.integers() | st.none() | st.binary(), max_size=4))
def test_anything_else_is_refused_with_the_one_error(options: dict[str, object]) -> None:
    try:
        read = read_options(Example, options, "example tier")
    except InvalidRequest:
        return
    assert set(options) <= set(Example.__struct_fields__)
    assert read.size >= 1


def test_a_refusal_never_shows_the_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_options(Example, {"size": "hunter2"}, "example tier")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.__cause__)
