"""Mounting: names become tiers, with their settings, or the reason why not is told in time."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.mounting import SNAPSHOT_TIER, check_tiers, mount
from octavo.engine.testing import FakeRunner
from octavo.errors import ContractBroken, InvalidRequest, PluginError, StorageError, UnknownPlugin
from octavo.storage.base import Options, TierGeometry
from octavo.storage.disk.tier import DiskTier
from octavo.storage.host.tier import HostTier
from octavo.storage.snapshot.backend import FolderBackend
from octavo.storage.testing.contract import SampleBlocks
from octavo.storage.testing.fakes import MemoryTier
from octavo.telemetry.logging import get_logger
from octavo.tests.engine.conftest import DEFAULTS, FakeClock
from octavo.tests.engine.tier_rig import EngineOf, ask, memory, prompt

GEOMETRY = SampleBlocks().geometry
MEMORY = "octavo.storage.testing.contract:MemoryTier"
LOGGER = get_logger("octavo.test")


class Untidy(MemoryTier):
    """Raises something that is no error of Octavo's when it is made."""

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:  # noqa: ARG003  # as in the contract
        raise KeyError("oops")


class FromTomorrow(MemoryTier):
    api_version = (2, 0)


class NoTier:
    pass


def unheard(where: str, error: BaseException | str) -> None:
    raise AssertionError(f"{where}: {error}")


def here(name: str) -> str:
    return f"octavo.tests.engine.test_mounting:{name}"


def config(**values: object) -> EngineConfig:
    return EngineConfig(**values)  # type: ignore[arg-type]  # names and values come from the tests


@pytest.mark.asyncio
async def test_tiers_are_made_in_order_with_their_settings(tmp_path: Path) -> None:
    settings = config(
        tiers=("host", "disk", MEMORY),
        host_bytes=1 << 20,
        disk_path=tmp_path / "disk",
        disk_bytes=32 << 20,
        dtype="bfloat16",
        tier_options={MEMORY: {"blocks": 3}, "disk": {"compression": "none", "free_floor": 0}},
    )
    check_tiers(settings)
    mounts = await mount(settings, GEOMETRY, None, LOGGER, on_fault=unheard, clock=FakeClock())
    assert [mounted.name for mounted in mounts.tiers] == ["host", "disk", MEMORY]
    assert [type(mounted.tier) for mounted in mounts.tiers[:2]] == [HostTier, DiskTier]
    assert mounts.tiers[2].tier.stats().capacity == 3 * GEOMETRY.record_bytes
    assert (type(mounts.backend), mounts.refused) == (FolderBackend, None)


@pytest.mark.asyncio
async def test_dedicated_fields_reach_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Options] = {}
    for cls, name in ((HostTier, "host"), (DiskTier, "disk")):
        monkeypatch.setattr(cls, "create", lambda options, _, name=name: given.setdefault(name, options))
    settings = config(tiers=("host", "disk"), host_bytes=5000, disk_path=tmp_path, disk_bytes=6000, strict_tiers=True)
    await mount(settings, GEOMETRY, None, LOGGER, on_fault=unheard, clock=FakeClock())
    assert given["host"]["bytes"] == 5000
    assert given["host"]["pin"] is False
    assert (given["disk"]["path"], given["disk"]["bytes"]) == (str(tmp_path), 6000)
    assert given["disk"]["strict"] is True


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("hots", {}, UnknownPlugin, "host"),
        ("no.such.module:Tier", {}, PluginError, "no.such.module"),
        (here("NoTier"), {}, ContractBroken, "NoTier"),
        (here("FromTomorrow"), {}, ContractBroken, "version"),
        (here("Untidy"), {}, ContractBroken, "oops"),
        (MEMORY, {"blokcs": 3}, InvalidRequest, "blokcs"),
        (MEMORY, {"blocks": -1}, InvalidRequest, "blocks"),
    ],
)
async def test_what_cannot_be_a_tier_is_told_by_name(
    name: str, options: Options, error: type[Exception], says: str
) -> None:
    settings = config(tiers=(name,), tier_options={name: options} if options else {})
    with pytest.raises(error, match=says):
        await AsyncEngine(runner=FakeRunner(), config=settings).__aenter__()


@pytest.mark.asyncio
async def test_a_wrong_name_is_told_before_a_model_is_loaded() -> None:
    def load() -> None:
        raise AssertionError("it was loaded")

    for settings in (config(tiers=("hots",)), config(persistence_backend="foldre")):
        with pytest.raises(UnknownPlugin):
            await AsyncEngine(load=load, config=settings).__aenter__()  # type: ignore[arg-type]  # never called


@pytest.mark.asyncio
async def test_a_snapshot_is_the_last_of_the_tiers(engine_of: EngineOf, tmp_path: Path) -> None:
    async with engine_of() as engine:
        await ask(engine, prompt(1))
        await engine.snapshot(tmp_path / "s")
    async with engine_of(mounts={"m": memory()}, restore=tmp_path / "s") as engine:
        assert [report.name for report in engine.stats().tiers] == ["m", SNAPSHOT_TIER]
        assert (await ask(engine, prompt(1))).cached_tokens == 16


@pytest.mark.asyncio
@pytest.mark.parametrize("strict", [False, True])
async def test_a_folder_that_cannot_be_used(strict: bool, tmp_path: Path) -> None:
    """DISK-16: a parent that is a file. Without a tier and saying so, or not at all, as configured."""
    (tmp_path / "file").write_text("x")
    settings = config(
        **DEFAULTS
        | {
            "tiers": ("octavo.storage.disk.tier:DiskTier",),
            "tier_options": {
                "octavo.storage.disk.tier:DiskTier": {
                    "path": str(tmp_path / "file" / "disk"),
                    "bytes": 32 << 20,
                    "strict": strict,
                }
            },
            "strict_tiers": strict,
        }
    )
    engine = AsyncEngine(runner=FakeRunner(), config=settings)
    if strict:
        with pytest.raises(StorageError, match="disk"):
            await engine.__aenter__()
        return
    async with engine:
        (report,) = engine.stats().tiers
        assert not report.tier.healthy
        assert report.tier.problem
        assert len((await ask(engine, prompt(1))).token_ids) == 4


@pytest.mark.asyncio
async def test_the_same_folder_is_found_again_by_path(tmp_path: Path) -> None:
    """HASH-04: names on disk do not depend on the process; DISK-03: nothing is written twice."""
    settings = config(
        **DEFAULTS
        | {
            "tiers": ("octavo.storage.disk.tier:DiskTier",),
            "tier_options": {
                "octavo.storage.disk.tier:DiskTier": {"path": str(tmp_path / "d"), "bytes": 32 << 20, "free_floor": 0}
            },
        }
    )
    for turn in range(3):
        # by a clock that stands: computing is never found to be faster than reading
        async with AsyncEngine(runner=FakeRunner(), config=settings, clock=FakeClock()) as engine:
            assert engine.stats().restore.stored_blocks == (0, 25, 25)[turn]
            for number in range(5):
                assert (await ask(engine, prompt(number))).cached_tokens == (16 if turn else 0)
            assert engine.stats().tiers[0].put_blocks == 0
