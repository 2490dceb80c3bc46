"""What a step was given stays as it was, however the tokens grow."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.token_log import TokenLog


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), min_size=1, max_size=12))
def test_all_that_was_handed_out_stays(pieces: list[list[int]]) -> None:
    """Each look shows all tokens so far, and what comes later changes no earlier look."""
    log, tokens = TokenLog(), array("i")
    looks = []
    for piece in pieces:
        tokens.extend(piece)
        looks.append((log.upto_now(tokens), tokens.tolist()))
    for seen, expected in looks:
        assert seen.tolist() == expected
        assert seen.dtype.name == "int32"


def test_a_look_cannot_be_written_to() -> None:
    """It belongs to the model's thread and to every later look."""
    look = TokenLog().upto_now(array("i", [1, 2]))
    with pytest.raises(ValueError, match="read-only"):
        look[0] = 5


def test_one_more_token_copies_no_others() -> None:
    """Two looks share their memory unless it had to grow between them."""
    log, tokens = TokenLog(), array("i", range(100))
    first = log.upto_now(tokens)
    tokens.append(7)
    second = log.upto_now(tokens)
    assert second.base is first.base
    assert second.tolist() == [*range(100), 7]
