"""The shared tier: a store of blocks below all replicas, and the time that it takes.

Of blocks that are used together the deepest counts as used first, so the end of a prefix leaves before its start: what
is left of it can be found.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from .setting import TierSetting


class Line:
    """Bytes go through it one transfer after another."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def send(self, size: int, now: float) -> float:
        """So many bytes; returns when they are through."""
        self._free_at = max(self._free_at, now) + size / self._rate
        return self._free_at


class SharedTier:
    """Least recently used blocks go first. About 200 bytes of memory for each block that it holds."""

    def __init__(self, setting: TierSetting, block_tokens: int) -> None:
        self.setting = setting
        self.block_bytes = setting.token_bytes * block_tokens
        self.blocks_up = 0
        """Written: blocks that were there already are not written again."""
        self.blocks_down = 0
        """Loaded."""
        self.dropped = 0
        """Evicted, or gone with the store."""
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._line = Line(setting.store_bytes_per_second)

    def __len__(self) -> int:
        """Blocks in it."""
        return len(self._held)

    def leading(self, names: Sequence[bytes], now: float) -> int:
        """How many of ``names`` are there, up to the first that is not. Changes nothing but what was lost."""
        self._pass(now)
        held = self._held
        for number, name in enumerate(names):
            if name not in held:
                return number
        return len(names)

    def write(self, names: Sequence[bytes], now: float) -> None:
        """Blocks go down; nobody waits for them, but they take their share of the store's bandwidth."""
        self._pass(now)
        if now >= self.setting.lost_at:
            return
        held, before = self._held, self.blocks_up
        most = math.inf if self.setting.capacity is None else self.setting.capacity
        for name in reversed(names):
            if name in held:
                held.move_to_end(name)
                continue
            held[name] = None
            self.blocks_up += 1
            if len(held) > most:
                held.popitem(last=False)
                self.dropped += 1
        self._line.send((self.blocks_up - before) * self.block_bytes, now)

    def load(self, names: Sequence[bytes], now: float, link: Line) -> float:
        """Blocks that were found by ``leading`` come up by the ``link`` of a replica. Returns when they are there."""
        for name in reversed(names):
            if name in self._held:
                self._held.move_to_end(name)
        self.blocks_down += len(names)
        size = len(names) * self.block_bytes
        return max(self._line.send(size, now), link.send(size, now)) + self.setting.latency

    def _pass(self, now: float) -> None:
        if now >= self.setting.lost_at and self._held:
            self.dropped += len(self._held)
            self._held.clear()
