"""Eviction policies: the contract, the short way to write one, and those that come with Octavo."""

from .base import Entry, EvictionPolicy, Returned
from .cost_aware import CostAware
from .lfu import Lfu
from .lru import Lru
from .scored import ScoredPolicy

__all__ = ["CostAware", "Entry", "EvictionPolicy", "Lfu", "Lru", "Returned", "ScoredPolicy"]
