from __future__ import annotations

from array import array
from itertools import combinations

import pytest

from octavo.engine.kv import Namespace, Sequence, encode_tokens
from octavo.engine.kv.sequence import State
from octavo.errors import CacheMisuse, InvalidRequest


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        Sequence(1, array("i"), Namespace("w"), block_size=4)


@pytest.mark.parametrize("ids", [[], [0], [1, -1, 2**31 - 1, -(2**31)], (5, 6), range(3)])
def test_tokens_are_int32(ids: list[int]) -> None:
    encoded = encode_tokens(ids)
    assert list(encoded) == list(ids)
    assert encoded.itemsize == 4


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], ["a"], [None], [1.5]])
def test_what_is_no_int32_is_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="32 bits"):
        encode_tokens(ids)


def test_namespaces_with_different_parts_differ() -> None:
    """HASH-05: every part has its own field, and nothing is concatenated."""
    spaces = [
        Namespace("w"),
        Namespace("v"),
        Namespace("w", adapter="x"),
        Namespace("w", salt="x"),
        Namespace("w", adapter="x", salt="x"),
        Namespace("w", adapter="a", salt="b"),
        Namespace("w", salt="ab"),
        Namespace("w", adapter="ab"),
        Namespace("w", salt=""),
        Namespace("w", adapter=""),
        Namespace("w", adapter="", salt=""),
    ]
    assert all(a != b for a, b in combinations(spaces, 2))
    assert len(set(spaces)) == len(spaces)


@pytest.mark.parametrize("malformed", [0, False, [], b"x", ("x",), {}])
def test_malformed_parts_are_refused_and_never_read_as_none(malformed: object) -> None:
    """HASH-07: fail closed."""
    with pytest.raises(InvalidRequest, match="tenant"):
        Namespace("w", salt=malformed).checked()  # type: ignore[arg-type]  # the malformed input that is tested
    with pytest.raises(InvalidRequest, match="adapter"):
        Namespace("w", adapter=malformed).checked()  # type: ignore[arg-type]  # the same
    with pytest.raises(InvalidRequest, match="identity"):
        Namespace(malformed).checked()  # type: ignore[arg-type]  # the same


def test_a_namespace_needs_a_model() -> None:
    with pytest.raises(InvalidRequest, match="identity"):
        Namespace("").checked()
    space = Namespace("w", adapter="", salt="s")
    assert space.checked() is space


def test_state_is_named_in_the_error_and_in_the_repr() -> None:
    sequence = Sequence(7, encode_tokens([1, 2, 3]), Namespace("w"), block_size=4)
    sequence.require(State.OUTSIDE)
    with pytest.raises(CacheMisuse, match="sequence 7 is outside; this call needs it admitted"):
        sequence.require(State.ADMITTED)
    assert repr(sequence) == "<Sequence 7: 0/3 tokens, outside>"
    assert sequence.uncomputed == 3
