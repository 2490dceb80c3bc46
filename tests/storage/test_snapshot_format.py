"""Manifest and tree of a snapshot: what is written is read, and nothing else is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import FingerprintMismatch, StorageError
from octavo.storage.base import Head, Meta, TierGeometry
from octavo.storage.files.segment import Location
from octavo.storage.identity import Identity
from octavo.storage.naming import Namespace, Shelf, name_after
from octavo.storage.snapshot.format import (
    FileEntry,
    Manifest,
    decode_manifest,
    encode_manifest,
    is_generation,
    segment_name,
)
from octavo.storage.snapshot.tree import Tree, TreeWriter, decode_tree

BLOCK = 2
PARTS = {"weights": "w1", "dtype": "bfloat16", "position encoding": "rope 10000", "tokenizer": "t1"}
IDENTITY = Identity.of(PARTS, block_size=BLOCK, payload_bytes=64)
SHELVES = [Namespace(IDENTITY.digest, salt=salt).shelf() for salt in (None, "a", "b")]
HEX = st.text("0123456789abcdef", min_size=32, max_size=32)
ENTRIES = st.builds(FileEntry, bytes=st.integers(0, 2**50), xxh3_128=HEX)


def manifest(**changed: object) -> Manifest:
    entry = FileEntry(10, "0" * 32)
    made = Manifest("0123456789abcdef", 1.5, IDENTITY, 320, 3, entry, (entry, entry))
    return msgspec.structs.replace(made, **changed)


@given(
    created=st.floats(0, 1e12), blocks=st.integers(0, 2**31 - 1), tree=ENTRIES, segments=st.lists(ENTRIES, max_size=4)
)
def test_a_manifest_comes_back_as_it_was(
    created: float, blocks: int, tree: FileEntry, segments: list[FileEntry]
) -> None:
    made = manifest(created=created, blocks=blocks, tree=tree, segments=tuple(segments))
    assert decode_manifest(encode_manifest(made)) == made


def test_every_altered_byte_of_a_manifest_shows() -> None:
    data = encode_manifest(manifest())
    for at in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[at] ^= 1 << bit
            with pytest.raises(StorageError):
                decode_manifest(bytes(altered))


GOOD = encode_manifest(manifest())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[: len(GOOD) // 2],
        GOOD[:-1],
        GOOD + b"\n",
        b" " + GOOD,
        GOOD * 2,
        b"[" * 100_000,
        GOOD.replace(b"{", b'{"x":' + b"[" * 50_000, 1),
        b"SQLite format 3\x00" + bytes(4096),
        b"cos\nsystem\n(S'touch marker'\ntR.",
        b'{"format":"octavo-snapshot","version":1,"check":"","snapshot":{}}\n',
        b'{"format":"octavo-snapshot","version":1e400,"check":"","snapshot":{}}\n',
        b"null",
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StorageError):
        decode_manifest(data)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_of_manifests_raise_anything_else(data: bytes) -> None:
    with pytest.raises(StorageError):
        decode_manifest(data)


def test_a_version_from_the_future_is_refused_and_said_to_be_one() -> None:
    data = encode_manifest(manifest()).replace(b'"version":1', b'"version":7')
    with pytest.raises(StorageError, match="version 7, this Octavo reads 1"):
        decode_manifest(data)


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": "../../../../etc"},
        {"generation": "0123456789ABCDEF"},
        {"record_bytes": 0},
        {"record_bytes": -5},
        {"blocks": -1},
        {"blocks": 2**60},
        {"tree": FileEntry(-1, "0" * 32)},
        {"tree": FileEntry(1, "0" * 31 + "/")},
        {"identity": Identity.of({}, block_size=0, payload_bytes=1)},
    ],
)
def test_values_out_of_range_are_refused_with_a_right_checksum_too(changed: dict[str, object]) -> None:
    with pytest.raises(StorageError, match="out of range"):
        decode_manifest(encode_manifest(manifest(**changed)))


@pytest.mark.parametrize(
    ("part", "value"),
    [("weights", "w2"), ("dtype", "float32"), ("position encoding", "rope 20000"), ("tokenizer", "t2")],
)
def test_another_model_is_refused_by_what_differs(part: str, value: str) -> None:
    theirs = Identity.of({**PARTS, part: value}, block_size=BLOCK, payload_bytes=64)
    with pytest.raises(FingerprintMismatch, match=f"{part} is {value} here and {PARTS[part]} there"):
        manifest().admit(TierGeometry(theirs, 320))


def test_another_block_size_or_record_is_refused() -> None:
    with pytest.raises(FingerprintMismatch, match="block size is 4 here and 2 there"):
        manifest().admit(TierGeometry(Identity.of(PARTS, block_size=4, payload_bytes=64), 320))
    with pytest.raises(FingerprintMismatch, match="records of 320 bytes"):
        manifest().admit(TierGeometry(IDENTITY, 640))
    manifest().admit(TierGeometry(IDENTITY, 320))


def test_names_of_files_say_nothing_and_lead_nowhere() -> None:
    assert segment_name(3) == "blocks-00003.seg"
    assert not any(is_generation(name) for name in ("", "..", "0123456789abcde", "0123456789abcdef/", "lock"))


@dataclass(frozen=True)
class Block:
    shelf: Shelf
    head: Head
    meta: Meta
    place: Location


METAS = st.builds(
    Meta,
    written=st.floats(0, 1e10),
    idle=st.floats(0, 1e10),
    hits=st.integers(0, 2**40),
    priority=st.integers(-(2**40), 2**40),
    ttl=st.none() | st.floats(0, 1e10),
    recompute_seconds=st.floats(0, 1e5),
)


@st.composite
def forests(draw: st.DrawFn) -> list[Block]:
    """Blocks of several namespaces, parents before children, some with a parent that is not among them."""
    blocks: list[Block] = []
    for number in range(draw(st.integers(0, 12))):
        shelf = draw(st.sampled_from(SHELVES))
        tokens = array("i", [number, draw(st.integers(0, 2**31 - 1))]).tobytes()
        mine = [block.head for block in blocks if block.shelf == shelf]
        parent, start = draw(
            st.sampled_from(
                [(shelf.namespace, 0), (bytes([number]) * 32, 64), *((head.name, head.start + BLOCK) for head in mine)]
            )
        )
        head = Head(name_after(parent, tokens), parent, start, tokens)
        blocks.append(Block(shelf, head, draw(METAS), Location(number % 2, number * 10, 10)))
    return blocks


def written(blocks: Sequence[Block]) -> bytes:
    writer = TreeWriter()
    for block in blocks:
        writer.add(block.shelf, block.head, block.meta, block.place)
    return writer.encode()


@given(forests())
def test_a_tree_comes_back_as_it_was(blocks: list[Block]) -> None:
    tree = decode_tree(written(blocks), BLOCK)
    assert [(tree.shelf(row), tree.head(row), tree.meta(row), tree.place(row)) for row in tree.rows()] == [
        (block.shelf, block.head, block.meta, block.place) for block in blocks
    ]
    for row, block in enumerate(blocks):
        assert tree.row(block.shelf, block.head.name) == row
        children = [
            other.head for other in blocks if (other.shelf, other.head.parent) == (block.shelf, block.head.name)
        ]
        assert [tree.head(child) for child in tree.children(block.shelf, block.head.name)] == children
    for shelf in SHELVES:
        mine = [block.head for block in blocks if block.shelf == shelf]
        assert [tree.head(row) for row in tree.rows(shelf)] == mine
        first = [head for head in mine if head.parent == shelf.namespace]
        assert [tree.head(row) for row in tree.children(shelf, shelf.namespace)] == first


def test_a_block_that_came_before_its_parent_is_still_its_child() -> None:
    shelf = SHELVES[0]
    first = Head(name_after(shelf.namespace, bytes(8)), shelf.namespace, 0, bytes(8))
    second = Head(name_after(first.name, bytes(8)), first.name, BLOCK, bytes(8))
    places = [Location(0, 0, 1), Location(0, 1, 1)]
    tree = decode_tree(
        written([Block(shelf, head, Meta(), at) for head, at in zip([second, first], places, strict=True)]), BLOCK
    )
    assert tree.children(shelf, first.name) == [0]
    assert tree.head(0) == second


@given(forests(), st.data())
def test_an_altered_tree_is_refused_or_names_blocks_by_their_tokens(blocks: list[Block], data: st.DataObject) -> None:
    """The manifest's checksum finds every accident; this is about files that were made to pass it."""
    good = bytearray(written(blocks))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(good)))
    for altered in (bytes(good), bytes(good[:cut])):
        try:
            tree = decode_tree(altered, BLOCK)
        except StorageError:
            continue
        assert_sound(tree)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_of_trees_raise_anything_else(data: bytes) -> None:
    try:
        assert_sound(decode_tree(data, BLOCK))
    except StorageError:
        return


def assert_sound(tree: Tree) -> None:
    for row in tree.rows():
        head, meta = tree.head(row), tree.meta(row)
        assert head.name == name_after(head.parent, head.tokens)
        assert min(meta.written, meta.idle, meta.hits, meta.recompute_seconds, meta.ttl or 0) >= 0
        assert np.isfinite([meta.written, meta.idle, meta.recompute_seconds]).all()
        tree.place(row)
        tree.listed(row)


@pytest.mark.parametrize(
    "declared", [b"\xdd\xff\xff\xff\xff", b"\x9f", b"\x9f\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_declared_sizes_allocate_nothing(declared: bytes) -> None:
    with pytest.raises(StorageError):
        decode_tree(declared, BLOCK)


def test_a_tree_with_a_record_outside_of_its_segments_is_refused() -> None:
    head = Head(name_after(SHELVES[0].namespace, bytes(8)), SHELVES[0].namespace, 0, bytes(8))
    for place in (Location(0, 90, 11), Location(1, 0, 1), Location(0, 2**63, 2**63)):
        tree = decode_tree(written([Block(SHELVES[0], head, Meta(), place)]), BLOCK)
        with pytest.raises(StorageError, match="segment"):
            tree.check_places([100])
    decode_tree(written([Block(SHELVES[0], head, Meta(), Location(0, 90, 10))]), BLOCK).check_places([100])


@pytest.mark.parametrize("parent", [0, 1, -3, 2**31 - 1])
def test_a_parent_that_is_no_earlier_block_is_refused(parent: int) -> None:
    head = Head(name_after(SHELVES[0].namespace, bytes(8)), SHELVES[0].namespace, 0, bytes(8))
    columns = msgspec.msgpack.decode(written([Block(SHELVES[0], head, Meta(), Location(0, 0, 0))]))
    columns[2] = array("i", [parent]).tobytes()
    with pytest.raises(StorageError, match="before its parent"):
        decode_tree(msgspec.msgpack.encode(columns), BLOCK)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (0, bytes(64) * 2),  # a shelf twice
        (0, b""),
        (0, bytes(63)),
        (1, b"\x01\x00\x00\x00"),  # a shelf that there is not
        (3, bytes(32)),  # an orphan too many
        (4, bytes(8)),
        (5, bytes(7)),
        (5, bytes(16)),
        (9, bytes(7)),
        (14, b""),
    ],
)
def test_columns_that_contradict_each_other_are_refused(column: int, value: bytes) -> None:
    head = Head(name_after(SHELVES[0].namespace, bytes(8)), SHELVES[0].namespace, 0, bytes(8))
    columns = msgspec.msgpack.decode(written([Block(SHELVES[0], head, Meta(), Location(0, 0, 0))]))
    columns[column] = value
    with pytest.raises(StorageError, match="the tree of the snapshot"):
        decode_tree(msgspec.msgpack.encode(columns), BLOCK)


def test_a_block_twice_is_refused() -> None:
    head = Head(name_after(SHELVES[0].namespace, bytes(8)), SHELVES[0].namespace, 0, bytes(8))
    block = Block(SHELVES[0], head, Meta(), Location(0, 0, 0))
    with pytest.raises(StorageError, match="a block twice"):
        decode_tree(written([block, block]), BLOCK)


def test_meta_that_makes_no_sense_is_mended_on_the_way() -> None:
    head = Head(name_after(SHELVES[0].namespace, bytes(8)), SHELVES[0].namespace, 0, bytes(8))
    odd = Meta(float("inf"), -1.0, 2**80, -(2**80), float("-inf"), float("nan"))
    meta = decode_tree(written([Block(SHELVES[0], head, odd, Location(0, 0, 0))]), BLOCK).meta(0)
    assert meta.idle == meta.ttl == meta.recompute_seconds == 0.0
    assert np.isfinite(meta.written)
    assert meta.aged(100.0).idle == 0.0  # written in the future: read as now
    assert meta.hits > 2**60
    assert meta.priority < -(2**60)
