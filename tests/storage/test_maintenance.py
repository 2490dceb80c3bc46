"""Tools over folders: snapshots and disk tiers, with no engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.errors import FingerprintMismatch, StorageError
from octavo.storage.base import Head, Listed, Meta, Record
from octavo.storage.disk.tier import DiskOptions, DiskTier
from octavo.storage.maintenance import tools as maintenance
from octavo.storage.maintenance.copying import ByBlock, ByTokens
from octavo.storage.maintenance.inspection import hottest, longest
from octavo.storage.naming import Shelf, tenant_digest
from octavo.storage.record import RecordCodec
from octavo.storage.testing.contract import SampleBlocks
from octavo.tests.storage.snapshot_samples import SAMPLES, Content, blocks, content, files, read, settings, write

SHELF, OTHER = SAMPLES.shelf(), SAMPLES.shelf("a")
HOW = settings()


def fill(path: Path, of: Content, samples: SampleBlocks = SAMPLES) -> None:
    async def run() -> None:
        tier = DiskTier(DiskOptions(path=str(path), bytes=1 << 30, free_floor=0), samples.geometry)
        await tier.open()
        for shelf, records in of.items():
            assert all(await tier.put(shelf, records))
        await tier.flush()
        await tier.close()

    asyncio.run(run())


def stored(path: Path, of: Content) -> int:
    """How many blocks of ``of`` a disk tier has, each with the right bytes."""

    async def run() -> int:
        tier = DiskTier(DiskOptions(path=str(path), bytes=1 << 30, free_floor=0, read_only=True), SAMPLES.geometry)
        await tier.open()
        count = 0
        for shelf, records in of.items():
            for record, found in zip(records, await tier.get(shelf, [each.head.name for each in records]), strict=True):
                assert found is None or bytes(found.data) == bytes(record.data)
                count += found is not None
        await tier.close()
        return count

    return asyncio.run(run())


def test_a_disk_tier_becomes_a_snapshot_and_a_disk_tier_again(tmp_path: Path) -> None:
    fill(tmp_path / "disk", content(1))
    before = {path: path.read_bytes() for path in files(tmp_path / "disk") if path.suffix == ".seg"}
    copied = asyncio.run(maintenance.create(tmp_path / "disk", tmp_path / "snap", HOW))
    assert copied == (6, 0, 0)
    assert read(tmp_path / "snap") == blocks(content(1))
    assert {path: path.read_bytes() for path in before} == before
    assert asyncio.run(maintenance.import_snapshot(tmp_path / "snap", tmp_path / "new", HOW)) == (6, 0, 0)
    assert stored(tmp_path / "new", content(1)) == 6


@pytest.mark.parametrize("place", ["snap", "disk"])
def test_one_prefix_is_taken_elsewhere(tmp_path: Path, place: str) -> None:
    records = SAMPLES.chain(SHELF, 4)
    branch = SAMPLES.chain(SHELF, 2, seed=5, after=records[1].head)
    source = {SHELF: [*records, *branch], OTHER: SAMPLES.chain(OTHER, 2)}
    write(tmp_path / "snap", source, HOW)
    fill(tmp_path / "disk", source)
    tokens = array("i", b"".join(record.head.tokens for record in [*records[:2], *branch])).tolist()
    wanted = blocks({SHELF: [*records[:2], *branch]})

    def export(prefix: ByTokens | ByBlock) -> int:
        return asyncio.run(maintenance.export_prefix(tmp_path / place, tmp_path / "one", HOW, prefix=prefix)).blocks

    assert export(ByTokens([*tokens, 7])) == 4  # the rest of a block is not stored
    assert read(tmp_path / "one") == wanted
    assert export(ByBlock(branch[-1].head.name.hex()[:20])) == 4
    assert read(tmp_path / "one") == wanted
    with pytest.raises(StorageError, match="not one whole block"):
        export(ByTokens(tokens, tenant="b"))
    with pytest.raises(StorageError, match="not one whole block"):
        export(ByTokens([1, 2]))
    with pytest.raises(StorageError, match="no number that a model"):
        export(ByTokens([2**40]))
    with pytest.raises(StorageError, match="8 blocks have names"):
        export(ByBlock(""))
    assert read(tmp_path / "one") == wanted
    asyncio.run(maintenance.import_snapshot(tmp_path / "one", tmp_path / "there", HOW))
    assert stored(tmp_path / "there", source) == 4


def test_a_prefix_with_a_hole_is_not_exported(tmp_path: Path) -> None:
    records = SAMPLES.chain(SHELF, 3)
    write(tmp_path / "snap", {SHELF: [records[0], records[2]]}, HOW)
    with pytest.raises(StorageError, match="before this one is not stored"):
        asyncio.run(
            maintenance.export_prefix(
                tmp_path / "snap", tmp_path / "one", HOW, prefix=ByBlock(records[2].head.name.hex())
            )
        )


def test_an_import_goes_to_its_own_model_only(tmp_path: Path) -> None:
    write(tmp_path / "snap", content(1), HOW)
    other = SampleBlocks(block_size=8, payload_bytes=128)
    fill(tmp_path / "disk", {other.shelf(): other.chain(other.shelf(), 2)}, other)
    with pytest.raises(FingerprintMismatch, match="block size is 8 here and 4 there"):
        asyncio.run(maintenance.import_snapshot(tmp_path / "snap", tmp_path / "disk", HOW))
    assert stored(tmp_path / "disk", content(1)) == 0
    copied = asyncio.run(maintenance.import_snapshot(tmp_path / "snap", tmp_path / "disk", HOW, new_model=True))
    assert copied.blocks == stored(tmp_path / "disk", content(1)) == 6
    with pytest.raises(StorageError, match="blocks of 2 models"):
        asyncio.run(maintenance.create(tmp_path / "disk", tmp_path / "all", HOW))
    model = SAMPLES.identity.digest[:8]
    assert asyncio.run(maintenance.create(tmp_path / "disk", tmp_path / "all", HOW, model=model)).blocks == 6


def test_bad_blocks_and_those_after_them_are_left_out(tmp_path: Path) -> None:
    """A record that is whole as far as its frame goes, and is not what it should be."""
    records = SAMPLES.chain(SHELF, 3)
    forged = bytearray(records[1].data)
    forged[-1] ^= 1
    source = {SHELF: [records[0], records[1]._replace(data=memoryview(forged)), records[2]]}
    write(tmp_path / "snap", source, HOW)
    copied = asyncio.run(maintenance.create(tmp_path / "snap", tmp_path / "copy", HOW))
    assert copied == (1, 2, 0)
    assert read(tmp_path / "copy") == blocks({SHELF: records[:1]})
    report = asyncio.run(maintenance.verify(tmp_path / "snap", HOW))
    assert [problem.partition(": ")[2] for problem in report.problems] == ["the checksum of a stored block is wrong"]
    fill(tmp_path / "disk", source)
    assert any("other records" in each for each in asyncio.run(maintenance.verify(tmp_path / "disk", HOW)).problems)


def signed(key: bytes) -> Sequence[Record]:
    codec = RecordCodec(block_size=4, payload_bytes=512, run=b"signed--", key=key)
    records = []
    for record in SAMPLES.chain(SHELF, 2):
        row = codec.buffer(1)[0]
        row[:] = list(record.data)
        records.append(record._replace(data=codec.seal(row, SHELF, record.head, 1.0)))
    return records


def test_signatures_are_checked_with_the_key_and_counted_without(tmp_path: Path) -> None:
    write(tmp_path / "snap", {SHELF: signed(b"right")}, HOW)
    assert asyncio.run(maintenance.verify(tmp_path / "snap", HOW, key=b"right"))[3:] == (0, [])
    assert asyncio.run(maintenance.verify(tmp_path / "snap", HOW))[3:] == (2, [])
    assert len(asyncio.run(maintenance.verify(tmp_path / "snap", HOW, key=b"wrong")).problems) == 2
    assert asyncio.run(maintenance.create(tmp_path / "snap", tmp_path / "copy", HOW)) == (2, 0, 2)
    assert asyncio.run(maintenance.import_snapshot(tmp_path / "snap", tmp_path / "disk", HOW, key=b"wrong")) == (
        0,
        2,
        0,
    )
    assert asyncio.run(maintenance.import_snapshot(tmp_path / "snap", tmp_path / "disk", HOW, key=b"right")) == (
        2,
        0,
        0,
    )
    write(tmp_path / "plain", content(1), HOW)
    assert asyncio.run(maintenance.create(tmp_path / "plain", tmp_path / "copy", HOW, key=b"right")).blocks == 0


@pytest.mark.parametrize("place", ["snap", "disk"])
def test_a_tenant_is_erased(tmp_path: Path, place: str) -> None:
    write(tmp_path / "snap", content(1), HOW)
    fill(tmp_path / "disk", content(1))
    secrets = [bytes(record.data)[-64:] for record in content(1)[OTHER]]
    assert asyncio.run(maintenance.erase(tmp_path / place, tenant_digest("a"), HOW)) == 3
    assert not [path for path in files(tmp_path / place) for secret in secrets if secret in path.read_bytes()]
    assert asyncio.run(maintenance.erase(tmp_path / place, tenant_digest("a"), HOW)) == 0
    [report] = asyncio.run(maintenance.inspect(tmp_path / place, HOW))
    assert [shelf.blocks for shelf in report.shelves] == [3]
    assert asyncio.run(maintenance.verify(tmp_path / place, HOW)).problems == []


@pytest.mark.parametrize("place", ["snap", "disk"])
def test_inspect_says_what_there_is_and_keeps_secrets(tmp_path: Path, place: str) -> None:
    hot = Meta(hits=9, written=1.0)
    source = {
        SHELF: [record._replace(meta=hot) for record in SAMPLES.chain(SHELF, 2)],
        OTHER: SAMPLES.chain(OTHER, 5),
    }
    write(tmp_path / "snap", source, HOW)
    fill(tmp_path / "disk", source)
    [report] = asyncio.run(maintenance.inspect(tmp_path / place, HOW, prefixes=1))
    assert (report.kind, report.blocks, report.tokens, report.block_size) == (
        {"snap": "snapshot", "disk": "disk"}[place],
        7,
        28,
        4,
    )
    assert report.created == (1000.0 if place == "snap" else None)
    assert report.identity == (("weights", "sample"),)
    assert report.bytes > 7 * 512
    assert [shelf.blocks for shelf in report.shelves] == [5, 2]
    assert [prefix.tokens for prefix in report.longest] == [20]
    assert [(prefix.block, prefix.hits) for prefix in report.hottest] == [(source[SHELF][1].head.name.hex(), 9)]


def test_verify_finds_what_is_wrong_in_a_disk_tier(tmp_path: Path) -> None:
    fill(tmp_path / "disk", content(1))
    assert asyncio.run(maintenance.verify(tmp_path / "disk", HOW)).problems == []
    path = next((tmp_path / "disk").rglob("*.seg"))
    data = bytearray(path.read_bytes())
    data[4096 + 900] ^= 1
    path.write_bytes(data)
    report = asyncio.run(maintenance.verify(tmp_path / "disk", HOW))
    assert report.blocks == 6
    assert report.problems


def test_a_disk_tier_in_use_is_read_and_not_written(tmp_path: Path) -> None:
    async def run() -> int:
        tier = DiskTier(DiskOptions(path=str(tmp_path / "disk"), bytes=1 << 30, free_floor=0), SAMPLES.geometry)
        await tier.open()
        [report] = await maintenance.inspect(tmp_path / "disk", HOW)
        with pytest.raises(StorageError):
            await maintenance.compact(tmp_path / "disk", HOW)
        await tier.close()
        return report.blocks

    fill(tmp_path / "disk", content(1))
    assert asyncio.run(run()) == 6


def test_verify_reports_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "snap", content(1), HOW)
    (tmp_path / "snap" / "manifest.json").write_bytes(b"{}")
    assert asyncio.run(maintenance.verify(tmp_path / "snap", HOW)).problems


def test_compact_gives_back_space(tmp_path: Path) -> None:
    async def delete() -> None:
        tier = DiskTier(DiskOptions(path=str(tmp_path / "disk"), bytes=1 << 30, free_floor=0), SAMPLES.geometry)
        await tier.open()
        await tier.delete(SHELF, [record.head.name for record in content(1)[SHELF]])
        await tier.close()

    fill(tmp_path / "disk", content(1))
    asyncio.run(delete())
    before = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.seg"))
    asyncio.run(maintenance.compact(tmp_path / "disk", HOW))
    assert sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.seg")) < before
    assert stored(tmp_path / "disk", content(1)) == 3


def test_what_is_neither_is_said_to_be_neither(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("empty", "file", "none"):
        for call in (maintenance.inspect, maintenance.verify, maintenance.compact):
            with pytest.raises(StorageError):
                asyncio.run(call(tmp_path / name, HOW))
        with pytest.raises(StorageError):
            asyncio.run(maintenance.erase(tmp_path / name, tenant_digest("a"), HOW))
        with pytest.raises(StorageError):
            asyncio.run(maintenance.create(tmp_path / name, tmp_path / "target", HOW))
    write(tmp_path / "snap", content(1), HOW)
    with pytest.raises(StorageError, match="nothing that could be compacted"):
        asyncio.run(maintenance.compact(tmp_path / "snap", HOW))


def listed(shelf: Shelf, path: str, hits: int) -> Listed:
    """A block named by its path; its parent is the path without the last letter."""
    return Listed(shelf, Head(path.encode(), path[:-1].encode(), len(path) - 1, b""), Meta(hits=hits))


def test_prefixes_are_shown_by_their_last_block() -> None:
    items = [
        listed(SHELF, path, hits) for path, hits in [("a", 9), ("ab", 9), ("abc", 2), ("abd", 1), ("abde", 0), ("x", 5)]
    ]
    assert [item.head.name for item in longest(items, 9)] == [b"abde", b"abc", b"x"]
    assert [item.head.name for item in hottest(items, 9)] == [b"ab", b"x", b"abc", b"abd"]
    assert [item.head.name for item in hottest(items, 2)] == [b"ab", b"x"]
