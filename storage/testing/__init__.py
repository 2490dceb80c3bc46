"""For those who write a tier, and for those who test against one: the contract's tests, and fakes that misbehave."""

from .contract import TierContract
from .fakes import Fault, FaultyTier, MemoryStore, MemoryTier, SharedMemoryTier
from .samples import SampleBlocks

__all__ = ["Fault", "FaultyTier", "MemoryStore", "MemoryTier", "SampleBlocks", "SharedMemoryTier", "TierContract"]
