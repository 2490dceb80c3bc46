from __future__ import annotations

import math

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CorruptBlock
from octavo.storage.base import Head, Meta
from octavo.storage.meta_codec import META_BYTES, pack_about, pack_meta, unpack_about, unpack_meta
from octavo.storage.naming import name_after

numbers = st.floats(0.0, 1e300)
metas = st.builds(
    Meta,
    written=numbers,
    idle=numbers,
    hits=st.integers(0, 2**62),
    priority=st.integers(-(2**62), 2**62),
    ttl=st.none() | numbers,
    recompute_seconds=numbers,
)


def head_of(parent: bytes, tokens: bytes, start: int) -> Head:
    return Head(name_after(parent, tokens), parent, start, tokens)


heads = st.builds(head_of, st.binary(min_size=32, max_size=32), st.binary(max_size=64), st.integers(0, 2**40))


@given(metas)
def test_meta_comes_back(meta: Meta) -> None:
    packed = pack_meta(meta)
    assert len(packed) <= META_BYTES
    assert unpack_meta(packed) == meta
    assert unpack_meta(memoryview(packed)) == meta


@given(heads, metas)
def test_head_and_meta_come_back(head: Head, meta: Meta) -> None:
    assert unpack_about(pack_about(head, meta), head.name) == (head, meta)


@given(heads, metas, st.data())
def test_every_changed_or_cut_byte_is_noticed(head: Head, meta: Meta, data: st.DataObject) -> None:
    packed = pack_about(head, meta)
    at = data.draw(st.integers(0, len(packed) - 1))
    changed = bytearray(packed)
    changed[at] ^= data.draw(st.integers(1, 255))
    for broken in (bytes(changed), packed[:at], packed + packed[:1]):
        with pytest.raises(CorruptBlock):
            unpack_about(broken, head.name)
    broken_meta = bytearray(pack_meta(meta))
    broken_meta[at % len(broken_meta)] ^= 1
    with pytest.raises(CorruptBlock):
        unpack_meta(bytes(broken_meta))


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptBlock):
        unpack_meta(data)
    with pytest.raises(CorruptBlock):
        unpack_about(data, b"x" * 32)


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=9) | st.floats(),
        lambda inner: st.lists(inner, max_size=7),
        max_leaves=12,
    )
)
def test_a_right_checksum_does_not_make_other_content_right(value: object) -> None:
    packed = msgspec.msgpack.encode(value)
    data = xxhash.xxh3_64_digest(packed) + packed
    with pytest.raises(CorruptBlock):
        unpack_about(data, b"x" * 32)


def test_another_blocks_is_refused() -> None:
    parent = b"p" * 32
    mine, other = head_of(parent, b"aaaa", 0), head_of(parent, b"bbbb", 0)
    with pytest.raises(CorruptBlock, match="another"):
        unpack_about(pack_about(other, Meta()), mine.name)
    with pytest.raises(CorruptBlock, match="another"):
        unpack_about(pack_about(mine._replace(tokens=b"bbbb"), Meta()), mine.name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nothing(value: float) -> None:
    meta = unpack_meta(pack_meta(Meta(value, value, 1, 2, value, value)))
    assert meta == Meta(0.0, 0.0, 1, 2, 0.0, 0.0)


def test_numbers_that_are_too_large_stay_large() -> None:
    meta = unpack_meta(pack_meta(Meta(hits=2**80, priority=-(2**80))))
    assert (meta.hits, meta.priority) == (2**62, -(2**62))
