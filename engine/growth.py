"""Growth: how many blocks those that run will come to need before some of them end and give theirs back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from .kv import CacheManager
from .sequence import Sample

HORIZON = 256
"""Tokens of an answer that are looked ahead, at most: of a request without a bound nothing is known beyond."""
MEMORY = 32
"""Answers after which one more counts for so much less."""


class Growth:
    """Expects of an answer the part of its ``max_tokens``, within the horizon, that the last ones used of theirs; all
    of it before any has ended.

    The peak is the one of R. Gong, S. Bai, S. Wu et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees",
    ASPLOS 2025, section 4, with expected lengths in place of sampled ones.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._share = 1.0
        self._ended = 0

    def ended(self, sample: Sample) -> None:
        """``sample`` came to its own end."""
        most = min(sample.group.max_tokens, HORIZON)
        if most:
            self._ended = min(self._ended + 1, MEMORY)
            self._share += (min(len(sample.token_ids) / most, 1.0) - self._share) / self._ended

    def expected(self, sample: Sample) -> int:
        """Tokens that each continuation of ``sample`` is likely to get."""
        return ceil(self._share * min(max(sample.group.max_tokens - len(sample.token_ids), 0), HORIZON))

    def peak(self, newcomer: Sample, admitted: Sequence[Sample]) -> int:
        """Blocks that ``newcomer`` and the ``admitted`` need beyond those they hold, or it begins with, at the worst
        time: when one of them ends, whoever goes on has grown by as much as it has, and the blocks of those that ended
        before, which nobody shares, are free.
        """
        ends = sorted(self._ends([newcomer, *admitted]), reverse=True)
        freed = sum(blocks for _, blocks, _ in ends)
        lines = peak = 0
        for tokens, blocks, together in ends:
            lines += together
            freed -= blocks
            peak = max(peak, lines * self._cache.blocks_for(tokens) - freed)
        return peak

    def _ends(self, samples: Iterable[Sample]) -> Iterable[tuple[int, int, int]]:
        """Of each sample the tokens to come, the blocks that its end gives back, and the continuations it has or will
        have.
        """
        for sample in samples:
            blocks = self._cache.exclusive_blocks(sample.sequence) if sample.is_admitted else 0
            yield self.expected(sample), blocks, 1 if sample.group.is_started else sample.group.params.samples
