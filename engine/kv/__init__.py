"""The cache itself: plain Python, no torch, no asyncio, no I/O. ``CacheManager`` is the only door."""

from .block_pool import Block, BlockPool
from .block_table import BlockTable
from .cache_manager import Admission, CacheManager
from .census import Census
from .eviction import EvictedRun
from .namespace import Namespace
from .prefix_tree import PrefixTree
from .sequence import Sequence, encode_tokens
from .stats import CacheStats

__all__ = [
    "Admission",
    "Block",
    "BlockPool",
    "BlockTable",
    "CacheManager",
    "CacheStats",
    "Census",
    "EvictedRun",
    "Namespace",
    "PrefixTree",
    "Sequence",
    "encode_tokens",
]
