"""Eviction policies: the contract, the short way to write one, and those that come with Octavo."""

from .arc import Arc
from .base import Entry, EvictionPolicy, Returned
from .cost_aware import CostAware
from .fifo import Fifo
from .gdsf import Gdsf
from .lfu import Lfu
from .lru import Lru
from .lru_k import LruK
from .priority_ttl import PriorityTtl
from .s3_fifo import S3Fifo
from .scored import ScoredPolicy
from .sieve import Sieve
from .slru import Slru
from .two_q import TwoQ
from .w_tinylfu import WTinyLfu

__all__ = [
    "Arc",
    "CostAware",
    "Entry",
    "EvictionPolicy",
    "Fifo",
    "Gdsf",
    "Lfu",
    "Lru",
    "LruK",
    "PriorityTtl",
    "Returned",
    "S3Fifo",
    "ScoredPolicy",
    "Sieve",
    "Slru",
    "TwoQ",
    "WTinyLfu",
]
