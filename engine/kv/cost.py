"""CostModel: what it takes to compute a block at a given depth, from measurements of this very machine."""

from __future__ import annotations


class CostModel:
    """Seconds of prefill per block, apart for depths a factor of two apart (attention makes deep blocks dearer)."""

    WEIGHT = 0.2  # of a new measurement in the running average

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # bit length of the depth -> running average

    def observe(self, depth: int, blocks: int, seconds: float) -> None:
        """``blocks`` blocks that end at ``depth`` tokens took ``seconds`` of prefill together."""
        bucket = depth.bit_length()
        new = seconds / blocks
        old = self._seconds.get(bucket, new)
        self._seconds[bucket] = old + self.WEIGHT * (new - old)

    def seconds(self, depth: int) -> float:
        """Expected seconds for a block that ends at ``depth`` tokens: the nearest depth measured; 0 before any was."""
        bucket = depth.bit_length()
        if bucket in self._seconds:
            return self._seconds[bucket]
        if not self._seconds:
            return 0.0
        return self._seconds[min(self._seconds, key=lambda known: abs(known - bucket))]
