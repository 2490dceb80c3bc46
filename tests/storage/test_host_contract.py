from __future__ import annotations

from typing import ClassVar

from octavo.storage.base import Tier, TierGeometry
from octavo.storage.host.slab import INLINE_BYTES
from octavo.storage.host.tier import HostOptions, HostTier
from octavo.storage.testing.contract import SampleBlocks, TierContract


class TestHostTier(TierContract):
    def make_tier(self, geometry: TierGeometry) -> Tier:
        return HostTier(HostOptions(bytes=32 * geometry.record_bytes), geometry)


class TestHostTierWithLargeBlocks(TierContract):
    """Copies go through threads."""

    samples: ClassVar[SampleBlocks] = SampleBlocks(payload_bytes=INLINE_BYTES // 2)

    def make_tier(self, geometry: TierGeometry) -> Tier:
        return HostTier(HostOptions(bytes=16 * geometry.record_bytes), geometry)
