"""Digests: what they hold, how often they are wrong, and what they refuse to read."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.routing import Digest, DigestBuilder
from octavo.policies.routing.digest import MOST_BYTES

names_of = st.lists(st.binary(min_size=1, max_size=40), max_size=60)


def built(names: list[bytes], capacity: int = 100) -> bytes:
    builder = DigestBuilder(capacity)
    builder.add(names)
    return builder.to_bytes()


def some(count: int, kind: str, size: int = 32) -> list[bytes]:
    return [sha256(f"{kind} {number}".encode()).digest()[:size] for number in range(count)]


@given(names_of, names_of)
def test_it_holds_what_was_added_and_not_removed(added: list[bytes], removed: list[bytes]) -> None:
    builder = DigestBuilder(1000)
    builder.add(added)
    builder.add(added)
    builder.remove(removed)
    builder.remove(removed)
    left = [name for name in added if name not in removed]
    digest = Digest.from_bytes(builder.to_bytes())
    assert digest.holds(left).all()
    assert digest.blocks == len(builder) == len(set(left))
    assert builder.to_bytes() == built(left, 1000)


def test_a_cleared_one_holds_nothing() -> None:
    builder = DigestBuilder(100)
    builder.add(some(50, "gone"))
    builder.clear()
    assert builder.to_bytes() == built([])


@pytest.mark.parametrize("size", [32, 8])
@pytest.mark.parametrize("count", [100, 5000, 54_000])
def test_about_one_in_a_hundred_others_seems_to_be_there(count: int, size: int) -> None:
    digest = Digest.from_bytes(built(some(count, "mine", size), count))
    wrong = digest.holds(some(20_000, "foreign", size)).mean()
    assert 0.005 < wrong < 0.015


def test_names_that_only_count_are_spread_as_well() -> None:
    """Those of simulations need not look like hashes."""
    digest = Digest.from_bytes(built([number.to_bytes(8) for number in range(5000)], 5000))
    wrong = digest.holds([number.to_bytes(8) for number in range(5000, 25_000)]).mean()
    assert wrong < 0.015


def test_it_stays_within_its_bytes() -> None:
    assert len(DigestBuilder(10**7).to_bytes()) <= MOST_BYTES + 32
    assert len(DigestBuilder(10**7, max_bytes=100).to_bytes()) <= 132
    assert len(built(some(1000, "mine"), 1000)) < 1250


@given(st.binary(max_size=80))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="digest"):
        Digest.from_bytes(data)


@given(st.data())
def test_damaged_ones_are_refused(data: st.DataObject) -> None:
    whole = built(some(20, "mine"), 20)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    broken[at] ^= data.draw(st.integers(1, 255))
    if at in (6, 7):  # padding
        return
    with pytest.raises(ValueError, match="digest"):
        Digest.from_bytes(bytes(broken))
    with pytest.raises(ValueError, match="digest"):
        Digest.from_bytes(whole[:at])
