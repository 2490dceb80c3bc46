"""Octavo and the yardstick as sides of ``bookkeeping.py``."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from octavo import EngineConfig
from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.policies.eviction import Lru, PriorityTtl

if TYPE_CHECKING:
    from octavo.examples.benchmarks.bookkeeping_acts import BLOCK_SIZE
    from octavo.examples.benchmarks.yardstick import ChainedSequence, HashChainManager
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from bookkeeping_acts import BLOCK_SIZE
    from yardstick import ChainedSequence, HashChainManager


class Octavo:
    """The cache manager of this package, as the engine makes it: LRU within each priority, with a time limit."""

    def __init__(self, num_blocks: int) -> None:
        self._manager = CacheManager(
            num_blocks,
            BLOCK_SIZE,
            PriorityTtl(num_blocks, Lru),
            clock=monotonic,
            on_fault=_fail,
            policy_timeout=EngineConfig().policy_timeout,
        )
        self._namespace = Namespace("weights")
        self._next_id = 0

    def encode(self, tokens: list[int]) -> array[int]:
        return encode_tokens(tokens)

    def admit(self, prompt: array[int]) -> Sequence:
        self._next_id += 1
        sequence = Sequence(self._next_id, prompt, self._namespace, block_size=BLOCK_SIZE)
        self._manager.copied(self._manager.admit(sequence).copies)
        return sequence

    def commit(self, handle: Sequence) -> None:
        self._manager.commit(handle, handle.uncomputed, 1)

    def decode(self, handle: Sequence, token: int) -> None:
        manager = self._manager
        manager.extend(handle, 1)
        manager.commit(handle, 1, token)

    def finish(self, handle: Sequence) -> None:
        self._manager.finish(handle)


class Yardstick:
    """The hash-chain manager."""

    def __init__(self, num_blocks: int, *, packed: bool = False) -> None:
        self._manager = HashChainManager(num_blocks, BLOCK_SIZE, packed=packed)

    def encode(self, tokens: list[int]) -> list[int]:
        return tokens

    def admit(self, prompt: list[int]) -> ChainedSequence:
        return self._manager.admit(prompt)

    def commit(self, handle: ChainedSequence) -> None:
        self._manager.commit(handle, len(handle.tokens) - handle.computed, 1)

    def decode(self, handle: ChainedSequence, token: int) -> None:
        self._manager.decode(handle, token)

    def finish(self, handle: ChainedSequence) -> None:
        self._manager.finish(handle)


def _fail(where: str, error: BaseException | str) -> None:
    raise RuntimeError(f"{where}: {error}")
