from __future__ import annotations

import os
import pickle
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore, ObjectStore

from octavo.errors import InvalidRequest, StorageError
from octavo.storage.base import Meta, Tier, TierGeometry
from octavo.storage.object_store.tier import ObjectStoreOptions, ObjectStoreTier
from octavo.storage.testing.contract import SampleBlocks, TierContract

SAMPLES = SampleBlocks()
SHELF = SAMPLES.shelf("tenant")


class TestObjectStoreTierInMemory(TierContract):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.store: ObjectStore = MemoryStore()

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return ObjectStoreTier(ObjectStoreOptions(url="memory:///"), geometry, store=self.store)


class TestObjectStoreTierInAFolder(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "a folder"

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return ObjectStoreTier(ObjectStoreOptions(url=self.folder.as_uri()), geometry)

    async def break_tier(self, tier: Tier) -> bool:
        """Everything below the folder is behind a file now."""
        self.folder.rename(self.folder.with_name("elsewhere"))
        self.folder.write_bytes(b"")
        return True


@asynccontextmanager
async def opened(store: ObjectStore, **options: object) -> AsyncIterator[ObjectStoreTier]:
    chosen = ObjectStoreOptions(url="memory:///", **options)  # type: ignore[arg-type]  # any of them
    tier = ObjectStoreTier(chosen, SAMPLES.geometry, store=store)
    await tier.open()
    yield tier
    await tier.close()


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["pickle", "empty", "short", "truncated", "longer", "huge", "swapped", "flipped"])
async def test_garbage_is_a_miss_and_goes(tmp_path: Path, kind: str) -> None:
    store = MemoryStore()
    records = SAMPLES.chain(SHELF, 2)
    names = [record.head.name for record in records]
    async with opened(store) as tier:
        await tier.put(SHELF, records)
        listed = [meta["path"] async for page in obstore.list(store) for meta in page]
        victim = next(path for path in listed if path.endswith(names[0].hex()))
        other = next(path for path in listed if path != victim)
        good = (await obstore.get_async(store, victim)).bytes().to_bytes()
        garbage = {
            "pickle": pickle.dumps(_Bomb(tmp_path / "executed")),
            "empty": b"",
            "short": good[:10],
            "truncated": good[:-1],
            "longer": good + b"x",
            "huge": good + bytes(3 << 20),
            "swapped": (await obstore.get_async(store, other)).bytes().to_bytes(),
            "flipped": good[:60] + bytes([good[60] ^ 1]) + good[61:],
        }[kind]
        await obstore.put_async(store, victim, garbage)
        stored = await tier.get(SHELF, names)
        assert [item is None for item in stored] == [True, False]
        assert tier.stats().corrupt == 1
        assert await tier.contains(SHELF, names) == [False, True]
        assert [item.head async for item in tier.listing()] == [records[1].head]
    assert not (tmp_path / "executed").exists()


@pytest.mark.asyncio
async def test_every_flipped_byte_before_the_record_is_found() -> None:
    """The record itself has its own checksum, which is not the tier's."""
    store = MemoryStore()
    record = SAMPLES.chain(SHELF, 1)[0]
    async with opened(store) as tier:
        await tier.put(SHELF, [record])
        (path,) = [meta["path"] async for page in obstore.list(store) for meta in page]
        good = (await obstore.get_async(store, path)).bytes().to_bytes()
        for at in range(len(good) - len(record.data)):
            await obstore.put_async(store, path, good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            stored = await tier.get(SHELF, [record.head.name])
            assert stored[0] is None or stored[0].data == record.data


@pytest.mark.asyncio
async def test_blocks_of_many_tokens_are_listed() -> None:
    samples = SampleBlocks(block_size=2000)
    shelf = samples.shelf()
    records = samples.chain(shelf, 2, meta=Meta(hits=5))
    tier = ObjectStoreTier(ObjectStoreOptions(url="memory:///"), samples.geometry, store=MemoryStore())
    await tier.open()
    await tier.put(shelf, records)
    listed = [item async for item in tier.listing(shelf)]
    assert [(item.head, item.meta.hits) for item in listed] == [(record.head, 5) for record in records]
    await tier.close()


@pytest.mark.asyncio
async def test_objects_of_others_are_left_alone() -> None:
    store = MemoryStore()
    digest = "0" * 64
    others = ["octavo/note", f"octavo/{digest}/{digest}/00/{'g' * 64}", f"other/{digest}/{digest}/00/{digest}", "x"]
    for path in others:
        await obstore.put_async(store, path, b"theirs")
    records = SAMPLES.chain(SHELF, 1)
    async with opened(store) as tier:
        await tier.put(SHELF, records)
        assert [item.head async for item in tier.listing()] == [records[0].head]
        assert await tier.erase(SHELF.tenant) == 1
    left = {meta["path"] async for page in obstore.list(store) for meta in page}
    assert left == set(others)


@pytest.mark.asyncio
async def test_two_tiers_share_their_blocks_if_they_agree_on_the_prefix() -> None:
    store = MemoryStore()
    records = SAMPLES.chain(SHELF, 2)
    names = [record.head.name for record in records]
    async with opened(store) as mine, opened(store) as theirs, opened(store, prefix="a/b") as apart:
        await mine.put(SHELF, records)
        assert await theirs.contains(SHELF, names) == [True, True]
        assert await apart.contains(SHELF, names) == [False, False]


@pytest.mark.asyncio
async def test_paths_hold_digests_only_and_the_folder_is_the_owners(tmp_path: Path) -> None:
    shelf = SAMPLES.shelf("s3cret")
    folder = tmp_path / "deep" / "store"
    tier = ObjectStoreTier.create({"url": folder.as_uri()}, SAMPLES.geometry)
    before = os.umask(0)
    try:
        await tier.open()
        await tier.put(shelf, SAMPLES.chain(shelf, 2))
    finally:
        os.umask(before)
    await tier.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path for path in folder.rglob("*") if "s3cret" in str(path)] == []
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 2


@pytest.mark.asyncio
async def test_a_store_that_fails_is_told_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    records = SAMPLES.chain(SHELF, 2)
    names = [record.head.name for record in records]
    tier = ObjectStoreTier.create({"url": folder.as_uri()}, SAMPLES.geometry)
    await tier.open()
    await tier.put(SHELF, records)
    folder.rename(tmp_path / "away")
    folder.write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be used"):
        await tier.put(SHELF, records)
    assert not tier.stats().healthy
    assert "\n" not in tier.stats().problem
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert [item is not None for item in await tier.get(SHELF, names)] == [True, True]
    assert tier.stats().healthy
    await tier.close()


@pytest.mark.asyncio
async def test_a_block_that_cannot_be_written_alone_is_declined(tmp_path: Path) -> None:
    first, second = SAMPLES.chain(SHELF, 2)
    tier = ObjectStoreTier.create({"url": tmp_path.as_uri()}, SAMPLES.geometry)
    await tier.open()
    digits = second.head.name.hex()
    shelf_folder = tmp_path / "octavo" / SHELF.tenant.hex() / SHELF.namespace.hex()
    shelf_folder.mkdir(parents=True)
    (shelf_folder / digits[:2]).write_bytes(b"in the way")
    assert first.head.name.hex()[:2] != digits[:2]
    assert await tier.put(SHELF, [first, second]) == [True, False]
    assert tier.stats().declined == 1
    await tier.close()


@pytest.mark.asyncio
async def test_a_record_of_another_length_is_declined() -> None:
    record = SAMPLES.chain(SHELF, 1)[0]
    async with opened(MemoryStore()) as tier:
        assert await tier.put(SHELF, [record._replace(data=record.data[:-1])]) == [False]
        assert tier.stats().declined == 1


@pytest.mark.asyncio
async def test_a_remote_store_that_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    settings = {
        "aws_region": "nowhere",
        "aws_endpoint": "http://127.0.0.1:1",
        "aws_access_key_id": "me",
        "aws_secret_access_key": "hunter2",
    }
    options = {"url": "s3://bucket/path", "options": settings, "allow_http": True, "timeout": 0.5}
    strict = ObjectStoreTier.create({**options, "strict": True}, SAMPLES.geometry)
    with pytest.raises(StorageError, match="cannot be used") as caught:
        await strict.open()
    lenient = ObjectStoreTier.create(options, SAMPLES.geometry)
    await lenient.open()
    assert not lenient.stats().healthy
    await lenient.close()
    assert "object_store_unreachable" in caplog.text
    assert "hunter2" not in caplog.text + str(caught.value)


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    tier = ObjectStoreTier.create({"url": (tmp_path / "file" / "folder").as_uri()}, SAMPLES.geometry)
    with pytest.raises(StorageError, match="cannot be made"):
        await tier.open()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"url": "nonsense://hunter2"}, "describe no store"),
        ({"url": "no url hunter2"}, "describe no store"),
        ({"url": "memory:///", "options": {"region": "hunter2"}}, "takes none"),
        ({"url": "s3://bucket", "options": {"aws_region": "x", "no_such_setting": "hunter2"}}, "no_such_setting"),
        ({"url": "s3://bucket", "options": {"aws_allow_http": "hunter2"}}, "describe no store"),  # a panic
        ({"url": "memory:///", "prefix": "a/../b"}, "prefix"),
        ({"url": "memory:///", "prefix": "/a"}, "prefix"),
        ({"url": "memory:///", "prefix": "a*"}, "prefix"),
        ({"url": "memory:///", "concurrency": 0}, "concurrency"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, object], part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as caught:
        ObjectStoreTier.create(options, SAMPLES.geometry)
    assert "hunter2" not in str(caught.value)
