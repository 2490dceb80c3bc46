from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CorruptBlock, FingerprintMismatch
from octavo.storage.base import Meta
from octavo.storage.files.filesystem import File, Filesystem
from octavo.storage.files.frame import ALIGN, Frame, decode, encode, seed_of
from octavo.storage.files.segment import Location, SegmentReader, SegmentWriter, wipe
from octavo.storage.testing.contract import SampleBlocks

FS = Filesystem()
SAMPLES = SampleBlocks(block_size=4, payload_bytes=512)
SHELF = SAMPLES.shelf("t")
IDENTITY = SAMPLES.identity.digest
SEED = seed_of(IDENTITY)
META = Meta(5.0, 1.0, 2, -3, None, 0.5)
FRAMES = [Frame.of(SHELF, record._replace(meta=META)) for record in SAMPLES.chain(SHELF, 5)]


def written(folder: Path, frames: list[Frame]) -> tuple[Path, list[Location]]:
    path = folder / "a.seg"
    writer = SegmentWriter(FS, path, number=7, identity=IDENTITY)
    locations = writer.append(frames[:2]) + writer.append(frames[2:])
    writer.sync()
    writer.close()
    return path, locations


def reader(path: Path, identity: str = IDENTITY) -> SegmentReader:
    return SegmentReader(FS, path, number=7, identity=identity)


def test_frames_come_back_one_by_one_together_and_by_scanning(tmp_path: Path) -> None:
    path, locations = written(tmp_path, FRAMES)
    with reader(path) as segment:
        segment.check()
        assert [segment.read(at.offset, at.length) for at in locations] == FRAMES
        assert segment.read_many(locations[::-1]) == FRAMES[::-1]
        assert list(segment.scan()) == list(zip(locations, FRAMES, strict=True))
        heads = [head for _, head in segment.walk()]
    assert [head and head.name for head in heads] == [frame.head.name for frame in FRAMES]
    assert path.stat().st_size == ALIGN + sum(at.length for at in locations)
    assert all(at.offset % ALIGN == 0 for at in locations)


def test_neighbours_are_read_into_one_buffer_without_a_copy(tmp_path: Path) -> None:
    path, locations = written(tmp_path, FRAMES)
    reads: list[tuple[int, int]] = []

    class Counting(Filesystem):
        def read_into(self, file: File, offset: int, buffer: memoryview) -> int:
            reads.append((offset, len(buffer)))
            return super().read_into(file, offset, buffer)

    with SegmentReader(Counting(), path, number=7, identity=IDENTITY) as segment:
        found = segment.read_many([*locations[:3], locations[4]])
    assert reads == [(ALIGN, 3 * ALIGN), (locations[4].offset, ALIGN)]
    views = [frame.data.obj for frame in found if isinstance(frame, Frame)]
    assert views[0] is views[1] is views[2]
    assert views[3] is not views[0]


metas = st.builds(
    Meta,
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.integers(-(2**70), 2**70),
    st.integers(),
    st.none() | st.floats(min_value=0, allow_nan=False),
    st.floats(allow_nan=False),
)


@given(data=st.binary(max_size=9000), tokens=st.binary(max_size=300), meta=metas, start=st.integers(0, 2**64 - 1))
def test_any_frame_survives(data: bytes, tokens: bytes, meta: Meta, start: int) -> None:
    head = FRAMES[0].head._replace(tokens=tokens, start=start)
    frame = Frame(SHELF, head, meta, memoryview(data), len(data))
    raw = b"".join(encode(frame, SEED))
    assert len(raw) % ALIGN == 0
    back = decode(memoryview(raw), SEED)
    assert back._replace(meta=meta) == frame
    bound = 2**63
    assert back.meta == meta._replace(
        hits=max(-bound, min(meta.hits, bound - 1)), priority=max(-bound, min(meta.priority, bound - 1))
    )


def damaged_is_noticed(raw: bytes, at: int) -> None:
    bad = bytearray(raw)
    bad[at] ^= 1 << (at % 8)
    with pytest.raises(CorruptBlock):
        decode(memoryview(bad), SEED)


RAW = b"".join(encode(FRAMES[0], SEED))


@pytest.mark.parametrize("first", range(13))
def test_a_flipped_bit_is_noticed_wherever_it_is(first: int) -> None:
    for at in range(first, len(RAW), 13):
        damaged_is_noticed(RAW, at)


@given(st.binary(max_size=2 * ALIGN))
def test_no_bytes_at_all_are_a_frame(noise: bytes) -> None:
    with pytest.raises(CorruptBlock):
        decode(memoryview(noise), SEED)


def test_a_frame_of_another_identity_is_none(tmp_path: Path) -> None:
    path, locations = written(tmp_path, FRAMES)
    with reader(path, "ab" * 32) as segment:
        assert all(isinstance(each, CorruptBlock) for each in segment.read_many(locations))
        assert list(segment.scan()) == []
        with pytest.raises(FingerprintMismatch):
            segment.check()


def test_a_scan_finds_its_way_after_a_bad_frame(tmp_path: Path) -> None:
    path, locations = written(tmp_path, FRAMES)
    raw = bytearray(path.read_bytes())
    raw[locations[1].offset + 10] ^= 1  # a header
    raw[locations[3].offset + 600] ^= 1  # data
    path.write_bytes(raw)
    with reader(path) as segment:
        assert [frame for _, frame in segment.scan()] == [FRAMES[0], FRAMES[2], FRAMES[4]]
        assert [head is None for _, head in segment.walk()] == [False, True, False, False, False]
        found = segment.read_many(locations)
    assert [isinstance(each, Frame) for each in found] == [True, False, True, False, True]


@pytest.mark.parametrize("cut", [1, 100, ALIGN - 1, ALIGN, ALIGN + 1])
def test_a_torn_end_is_passed_over(tmp_path: Path, cut: int) -> None:
    path, locations = written(tmp_path, FRAMES)
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    whole = (len(raw) - cut) // ALIGN - 1
    with reader(path) as segment:
        assert [frame for _, frame in segment.scan()] == FRAMES[:whole]
        assert [isinstance(each, Frame) for each in segment.read_many(locations)] == [at < whole for at in range(5)]


@pytest.mark.parametrize(
    "place", [(0, ALIGN), (ALIGN, 2**60), (2**60, ALIGN), (ALIGN + 1, ALIGN), (ALIGN, 0), (-ALIGN, ALIGN)]
)
def test_no_memory_is_taken_for_a_place_that_cannot_be(tmp_path: Path, place: tuple[int, int]) -> None:
    path, _ = written(tmp_path, FRAMES)
    with reader(path) as segment, pytest.raises(CorruptBlock):
        segment.read(*place)


@pytest.mark.parametrize("at", [*range(0, 96, 5), 200, ALIGN - 1])
def test_a_flipped_bit_in_the_files_header_is_noticed(tmp_path: Path, at: int) -> None:
    path, locations = written(tmp_path, FRAMES)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    with reader(path) as segment:
        with pytest.raises(CorruptBlock):
            segment.check()
        assert segment.read_many(locations) == FRAMES, "frames do not depend on it"


@pytest.mark.parametrize("content", [b"", b"x", pickle.dumps(print) * 300, bytes(3 * ALIGN)])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.seg").write_bytes(content)
    with reader(tmp_path / "a.seg") as segment:
        assert list(segment.scan()) == []
        with pytest.raises(CorruptBlock):
            segment.check()


def test_a_wiped_frame_is_gone(tmp_path: Path) -> None:
    path, locations = written(tmp_path, FRAMES)
    with FS.open_write(path) as file:
        wipe(FS, file, locations[2])
    assert bytes(FRAMES[2].data) not in path.read_bytes()
    with reader(path) as segment:
        assert [frame for _, frame in segment.scan()] == FRAMES[:2] + FRAMES[3:]


def test_a_failed_append_does_not_count(tmp_path: Path) -> None:
    class Full(Filesystem):
        is_full = False

        def write(self, file: File, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
            super().write(file, offset, buffers[:2] if self.is_full else buffers)
            if self.is_full:
                raise OSError(28, "full")

    fs = Full()
    writer = SegmentWriter(fs, tmp_path / "a.seg", number=7, identity=IDENTITY)
    writer.append(FRAMES[:1])
    fs.is_full = True
    with pytest.raises(OSError, match="full"):
        writer.append(FRAMES[1:3])
    writer.cut()
    fs.is_full = False
    writer.append(FRAMES[3:4])
    writer.close()
    with reader(tmp_path / "a.seg") as segment:
        assert [frame for _, frame in segment.scan()] == [FRAMES[0], FRAMES[3]]


def test_a_ttl_that_is_no_number_is_none() -> None:
    frame = FRAMES[0]._replace(meta=META._replace(ttl=math.nan))
    assert decode(memoryview(b"".join(encode(frame, SEED))), SEED).meta.ttl is None
