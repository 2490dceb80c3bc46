"""The cache itself: plain Python, no torch, no asyncio, no I/O. ``CacheManager`` is the only door."""

from ...storage.naming import Namespace
from .block_pool import Block, BlockPool
from .block_table import BlockTable
from .cache_manager import Admission, CacheManager
from .census import Census
from .explain import DeviceExplanation, EvictedBefore, Relative
from .image import ImageRun, meta_of, most_valuable
from .leases import Lease
from .prefix_tree import PrefixTree
from .retention import Retention
from .runs import CachedRun, EvictedRun
from .sequence import Sequence, encode_tokens
from .stats import CacheStats
from .watching import EvictionHook

__all__ = [
    "Admission",
    "Block",
    "BlockPool",
    "BlockTable",
    "CacheManager",
    "CacheStats",
    "CachedRun",
    "Census",
    "DeviceExplanation",
    "EvictedBefore",
    "EvictedRun",
    "EvictionHook",
    "ImageRun",
    "Lease",
    "Namespace",
    "PrefixTree",
    "Relative",
    "Retention",
    "Sequence",
    "encode_tokens",
    "meta_of",
    "most_valuable",
]
