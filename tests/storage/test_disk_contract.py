from __future__ import annotations

import errno
from pathlib import Path
from typing import ClassVar

import pytest

from octavo.storage.base import Tier, TierGeometry
from octavo.storage.disk.tier import DiskOptions, DiskTier
from octavo.storage.files.filesystem import File
from octavo.storage.testing.contract import SampleBlocks, TierContract
from octavo.tests.storage.disk_samples import QuickFilesystem


class BreakableFilesystem(QuickFilesystem):
    def __init__(self) -> None:
        self.is_broken = False

    def open_read(self, path: Path) -> File:
        if self.is_broken:
            raise OSError(errno.EIO, "the disk is gone", str(path))
        return super().open_read(path)


class TestDiskTier(TierContract):
    samples: ClassVar[SampleBlocks] = SampleBlocks(payload_bytes=16 << 10)
    path: Path
    fs: BreakableFilesystem

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path, self.fs = tmp_path / "disk", BreakableFilesystem()

    def make_tier(self, geometry: TierGeometry) -> Tier:
        options = DiskOptions(path=str(self.path), bytes=2 << 20, free_floor=0)
        return DiskTier(options, geometry, fs=self.fs)

    async def break_tier(self, tier: Tier) -> bool:
        self.fs.is_broken = True
        return True


class TestCompressedDiskTier(TestDiskTier):
    def make_tier(self, geometry: TierGeometry) -> Tier:
        options = DiskOptions(path=str(self.path), bytes=2 << 20, free_floor=0, compression="zstd")
        return DiskTier(options, geometry, fs=self.fs)
