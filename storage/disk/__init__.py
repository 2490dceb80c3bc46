"""The disk tier: segments of frames, found through an index, safe against crashes, full disks and foreign hands."""

from .tier import DiskOptions, DiskTier

__all__ = ["DiskOptions", "DiskTier"]
