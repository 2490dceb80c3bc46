from __future__ import annotations

import os
import pickle
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from octavo.errors import InvalidRequest, StorageError
from octavo.storage.base import Meta, Record, Tier, TierGeometry
from octavo.storage.redis.tier import RedisOptions, RedisTier
from octavo.storage.testing.contract import SampleBlocks, TierContract

StartRedis = Callable[..., subprocess.Popen[bytes]]

SAMPLES = SampleBlocks()
SHELF = SAMPLES.shelf("tenant")


class TestRedisTier(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, redis_socket: Path) -> None:
        self.options = RedisOptions(url=f"unix://{redis_socket}", prefix=f"test-{uuid.uuid4().hex}")

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return RedisTier(self.options, geometry)


class TestRedisTierInPieces(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, redis_socket: Path) -> None:
        url = f"unix://{redis_socket}"
        self.options = RedisOptions(url=url, prefix=f"test-{uuid.uuid4().hex}", value_bytes=200)

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return RedisTier(self.options, geometry)


class TestRedisTierWhoseServerDies(TierContract):
    @pytest.fixture(autouse=True)
    def place(self, start_redis: StartRedis, socket_path: Path) -> None:
        self.server = start_redis(socket_path)
        self.options = RedisOptions(url=f"unix://{socket_path}")

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return RedisTier(self.options, geometry)

    async def break_tier(self, tier: Tier) -> bool:
        self.server.kill()
        self.server.wait()
        return True


class TestRedisTierWhoseServerRefuses(TierContract):
    """Not the connection breaks: the server answers every command with an error."""

    @pytest.fixture(autouse=True)
    def place(self, start_redis: StartRedis, socket_path: Path) -> None:
        start_redis(socket_path)
        self.path = socket_path

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return RedisTier(RedisOptions(url=f"unix://{self.path}"), geometry)

    async def break_tier(self, tier: Tier) -> bool:
        async with Redis(unix_socket_path=str(self.path)) as client:
            await client.acl_setuser("default", enabled=True, nopass=True, commands=["-@all", "+acl|setuser"])
        return True


@asynccontextmanager
async def opened(path: Path, prefix: str, **options: object) -> AsyncIterator[RedisTier]:
    tier = RedisTier.create({"url": f"unix://{path}", "prefix": prefix, **options}, SAMPLES.geometry)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex}"


def names(records: Sequence[Record]) -> list[bytes]:
    return [record.head.name for record in records]


async def keys_of(path: Path, prefix: str) -> list[bytes]:
    async with Redis(unix_socket_path=str(path)) as client:
        return sorted([key async for key in client.scan_iter(f"{prefix}:*", count=1000)])


@pytest.mark.asyncio
async def test_two_tiers_share_their_blocks(redis_socket: Path, prefix: str) -> None:
    records = SAMPLES.chain(SHELF, 4, meta=Meta(hits=3))
    async with opened(redis_socket, prefix) as mine, opened(redis_socket, prefix) as theirs:
        await mine.put(SHELF, records)
        stored = await theirs.get(SHELF, names(records))
        assert [item and bytes(item.data) for item in stored] == [bytes(record.data) for record in records]
        assert await theirs.delete(SHELF, names(records[:1])) == 1
        assert await mine.contains(SHELF, names(records)) == [False, True, True, True]


@pytest.mark.asyncio
async def test_engines_that_cut_records_differently_do_not_disturb_each_other(redis_socket: Path, prefix: str) -> None:
    records = SAMPLES.chain(SHELF, 2)
    async with opened(redis_socket, prefix) as whole, opened(redis_socket, prefix, value_bytes=100) as cut:
        await whole.put(SHELF, records)
        assert await cut.contains(SHELF, names(records)) == [False, False]
        await cut.put(SHELF, records)
        for tier in (whole, cut):
            stored = await tier.get(SHELF, names(records))
            assert [item and bytes(item.data) for item in stored] == [bytes(record.data) for record in records]
        assert await cut.erase(SHELF.tenant) == 2
    assert await keys_of(redis_socket, prefix) == []


@pytest.mark.asyncio
async def test_keys_hold_digests_only_and_all_expire(redis_socket: Path, prefix: str) -> None:
    shelf = SAMPLES.shelf("s3cret")
    records = SAMPLES.chain(shelf, 2)
    async with opened(redis_socket, prefix, ttl_seconds=1000, value_bytes=300) as tier:
        await tier.put(shelf, records)
        await tier.put(shelf, records)
        await tier.touch(shelf, {records[0].head.name: Meta(hits=2)})
    found = await keys_of(redis_socket, prefix)
    assert len(found) == 2 * (1 + -(-SAMPLES.geometry.record_bytes // 300))
    async with Redis(unix_socket_path=str(redis_socket)) as client:
        for key in found:
            assert 990 <= await client.ttl(key) <= 1000
            assert b"s3cret" not in key
            assert b"s3cret" not in (await client.get(key) or b"")


@pytest.mark.asyncio
async def test_use_renews_the_time_to_live(redis_socket: Path, prefix: str) -> None:
    records = SAMPLES.chain(SHELF, 1)
    async with opened(redis_socket, prefix, ttl_seconds=1000) as tier:
        await tier.put(SHELF, records)
        async with Redis(unix_socket_path=str(redis_socket)) as client:
            for renew in (
                lambda: tier.get(SHELF, names(records)),
                lambda: tier.touch(SHELF, {records[0].head.name: Meta()}),
                lambda: tier.put(SHELF, records),
            ):
                for key in await keys_of(redis_socket, prefix):
                    await client.expire(key, 5)
                await renew()
                assert [await client.ttl(key) > 900 for key in await keys_of(redis_socket, prefix)] == [True, True]


@pytest.mark.asyncio
async def test_touch_changes_what_is_known_and_makes_nothing(redis_socket: Path, prefix: str) -> None:
    there, absent = SAMPLES.chain(SHELF, 2)
    async with opened(redis_socket, prefix) as tier:
        await tier.put(SHELF, [there])
        await tier.touch(SHELF, {there.head.name: Meta(hits=9), absent.head.name: Meta(hits=9)})
        stored = await tier.get(SHELF, names([there, absent]))
        assert [item and item.meta.hits for item in stored] == [9, None]
    assert len(await keys_of(redis_socket, prefix)) == 2


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["pickle", "empty", "list", "hash", "truncated", "longer", "swapped", "missing"])
@pytest.mark.parametrize("piece", [False, True])
async def test_garbage_is_a_miss_and_goes(
    redis_socket: Path, prefix: str, tmp_path: Path, kind: str, piece: bool
) -> None:
    records = SAMPLES.chain(SHELF, 2)
    marker = tmp_path / "executed"
    async with opened(redis_socket, prefix) as tier:
        await tier.put(SHELF, records)
        found = [key for key in await keys_of(redis_socket, prefix) if key.count(b":") == (4 if piece else 3)]
        victim = next(key for key in found if records[0].head.name.hex().encode() in key)
        other = next(key for key in found if key != victim)
        async with Redis(unix_socket_path=str(redis_socket)) as client:
            good, foreign = await client.get(victim), await client.get(other)
            assert isinstance(good, bytes)
            assert isinstance(foreign, bytes)
            await client.delete(victim)
            match kind:
                case "pickle":
                    await client.set(victim, pickle.dumps(_Bomb(marker)))
                case "empty":
                    await client.set(victim, b"")
                case "list":
                    await client.rpush(victim, b"x")
                case "hash":
                    await client.hset(victim, "x", "y")
                case "truncated":
                    await client.set(victim, good[:-1])
                case "longer":
                    await client.set(victim, good + b"x")
                case "swapped" if not piece:
                    await client.set(victim, foreign)
        stored = await tier.get(SHELF, names(records))
        assert stored[0] is None
        assert stored[1] is not None
        listed = [item.head async for item in tier.listing(SHELF)]
        assert listed == [records[1].head]
        assert tier.stats().corrupt == (piece or kind != "missing")
        assert await tier.contains(SHELF, names(records)) == [False, True]
        assert await tier.put(SHELF, records) == [True, True]
        restored = await tier.get(SHELF, names(records))
        assert [item is not None for item in restored] == [True, True]
    assert not marker.exists()


@pytest.mark.asyncio
async def test_other_keys_on_the_server_are_left_alone(redis_socket: Path, prefix: str) -> None:
    hexes = "0" * 64
    strangers = [f"{prefix}x:1", f"{prefix}:note", f"{prefix}:{hexes}:{hexes}:{'g' * 64}", f"{prefix}:{hexes}"]
    records = SAMPLES.chain(SHELF, 1)
    async with opened(redis_socket, prefix) as tier, Redis(unix_socket_path=str(redis_socket)) as client:
        for key in strangers:
            await client.set(key, b"theirs")
        await tier.put(SHELF, records)
        assert [item.head async for item in tier.listing()] == [records[0].head]
        assert await tier.erase(SHELF.tenant) == 1
        assert [await client.get(key) for key in strangers] == [b"theirs"] * 4


@pytest.mark.asyncio
async def test_what_the_server_has_no_memory_for_is_declined(start_redis: StartRedis, socket_path: Path) -> None:
    start_redis(socket_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    samples = SampleBlocks(payload_bytes=200_000)
    records = samples.chain(SHELF, 20)
    tier = RedisTier(RedisOptions(url=f"unix://{socket_path}", prefix="full", value_bytes=50_000), samples.geometry)
    await tier.open()
    kept = [(await tier.put(SHELF, [record]))[0] for record in records]
    assert True in kept
    assert False in kept
    assert tier.stats().declined == kept.count(False)
    assert tier.stats().healthy
    assert await tier.contains(SHELF, names(records)) == kept
    stored = await tier.get(SHELF, names(records))
    assert [item is not None for item in stored] == kept
    assert len(await keys_of(socket_path, "full")) == 6 * kept.count(True), "pieces of declined blocks stayed"
    assert await tier.delete(SHELF, names(records)) == kept.count(True)
    assert await tier.put(SHELF, records[-1:]) == [True]
    await tier.close()


@pytest.mark.asyncio
async def test_comes_back_with_its_server(start_redis: StartRedis, socket_path: Path) -> None:
    records = SAMPLES.chain(SHELF, 2)
    server = start_redis(socket_path)
    async with opened(socket_path, "again") as tier:
        await tier.put(SHELF, records)
        server.kill()
        server.wait()
        with pytest.raises(StorageError, match="cannot be used"):
            await tier.get(SHELF, names(records))
        assert not tier.stats().healthy
        assert "Error" in tier.stats().problem
        start_redis(socket_path)
        assert await tier.get(SHELF, names(records)) == [None, None]
        assert tier.stats().healthy
        assert await tier.put(SHELF, records) == [True, True]


@pytest.mark.asyncio
async def test_a_server_that_is_not_there_yet(start_redis: StartRedis, socket_path: Path) -> None:
    records = SAMPLES.chain(SHELF, 1)
    strict = RedisTier(RedisOptions(url=f"unix://{socket_path}", strict=True), SAMPLES.geometry)
    with pytest.raises(StorageError, match="cannot be used"):
        await strict.open()
    with pytest.raises(StorageError, match="not open"):
        await strict.get(SHELF, names(records))
    async with opened(socket_path, "later") as tier:
        assert not tier.stats().healthy
        start_redis(socket_path)
        assert await tier.put(SHELF, records) == [True]


@pytest.mark.asyncio
async def test_a_wrong_password_is_told_but_not_shown(start_redis: StartRedis, socket_path: Path) -> None:
    start_redis(socket_path, "--requirepass", "right")
    url = f"unix://{socket_path}?password=wr0ng"
    tier = RedisTier(RedisOptions(url=url, strict=True), SAMPLES.geometry)
    with pytest.raises(StorageError) as caught:
        await tier.open()
    assert "wr0ng" not in str(caught.value)
    good = RedisTier(RedisOptions(url=f"unix://{socket_path}?password=right", strict=True), SAMPLES.geometry)
    await good.open()
    await good.close()


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("http://host", "begins with"),
        ("redis://", "names no host"),
        ("unix://", "names no host"),
        ("redis://user:hunter2@host:port", "cannot be read"),
        ("redis://:hunter2@host?decode_responses=True", "decode_responses"),
        ("redis://:hunter2@host?ssl_ca_certs=/x", "does not begin with rediss"),
        ("rediss://:hunter2@host?ssl_cert_reqs=none", "ssl_cert_reqs off"),
        ("rediss://:hunter2@host?ssl_check_hostname=False", "ssl_check_hostname off"),
        ("redis://:hunter2@host?garbage", "cannot be read"),
    ],
)
def test_urls_that_cannot_be_used_safely_are_refused(url: str, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as caught:
        RedisTier.create({"url": url}, SAMPLES.geometry)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["a*", "a b", "a[b]", "a?"])
def test_prefixes_with_wildcards_are_refused(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match="prefix"):
        RedisTier.create({"url": "redis://host", "prefix": prefix}, SAMPLES.geometry)


@pytest.mark.asyncio
async def test_an_unreachable_server_is_logged_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    tier = RedisTier(RedisOptions(url="redis://user:hunter2@127.0.0.1:1/0"), SAMPLES.geometry)
    await tier.open()
    await tier.close()
    assert "redis_unreachable" in caplog.text
    assert "127.0.0.1:1" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.asyncio
async def test_a_record_of_another_length_is_declined(redis_socket: Path, prefix: str) -> None:
    record = SAMPLES.chain(SHELF, 1)[0]
    async with opened(redis_socket, prefix) as tier:
        assert await tier.put(SHELF, [record._replace(data=record.data[:-1])]) == [False]
        assert tier.stats().declined == 1
    assert await keys_of(redis_socket, prefix) == []
