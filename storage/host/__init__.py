"""The host tier: blocks in memory that was taken once."""

from .tier import HostOptions, HostTier

__all__ = ["HostOptions", "HostTier"]
