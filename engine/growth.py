"""Growth: how many blocks those that run will come to need before some of them end and give theirs back."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TypeAlias

from .kv import CacheManager
from .sequence import Sample

HORIZON = 256
"""Tokens of an answer that are looked ahead, at most: of a request without a bound nothing is known beyond."""
MEMORY = 32
"""Answers after which one more counts for so much less."""
_End: TypeAlias = tuple[int, int, int, int]
"""Of a sample the tokens to come, the blocks that its end gives back, the continuations it has or will have, and the
copies of a block begun by the prompt that these will need, all but one of them."""


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
        self._ends: dict[Sample, _End] = {}

    def ended(self, sample: Sample) -> None:
        """``sample`` came to its own end."""
        most = min(sample.group.max_tokens, HORIZON)
        if most:
            self._ended = min(self._ended + 1, MEMORY)
            self._share += (min(len(sample.token_ids) / most, 1.0) - self._share) / self._ended

    def expected(self, sample: Sample) -> int:
        """Tokens that each continuation of ``sample`` is likely to get."""
        return ceil(self._share * min(max(sample.group.max_tokens - len(sample.token_ids), 0), HORIZON))

    def changed(self) -> None:
        """Somebody got blocks or gave them back, or a new plan is made."""
        self._ends.clear()

    def peak(self, newcomer: Sample, admitted: Sequence[Sample]) -> int:
        """Blocks that ``newcomer`` and the ``admitted`` need beyond those they hold, or it begins with, at the worst
        time: when one of them ends, whoever goes on has grown by as much as it has, and the blocks of those that ended
        before, which nobody shares, are free.
        """
        ends = [self._ends.get(sample) or self._end(sample) for sample in (newcomer, *admitted)]
        ends.sort(reverse=True)
        lines = peak = 0
        beside = -sum(blocks for _, blocks, _, _ in ends)
        for tokens, blocks, together, copies in ends:
            lines += together
            beside += blocks + copies
            peak = max(peak, lines * self._cache.blocks_for(tokens) + beside)
        return peak

    def _end(self, sample: Sample) -> _End:
        """Found once until somebody comes or goes, for those that are admitted."""
        tokens, group = self.expected(sample), sample.group
        together = 1 if group.is_started else group.params.samples
        is_cut = tokens > 0 and len(sample.sequence.tokens) % self._cache.block_size > 0
        copies = together - 1 if is_cut else 0
        if not sample.is_admitted:
            return tokens, 0, together, copies
        end = self._ends[sample] = tokens, self._cache.exclusive_blocks(sample.sequence), together, copies
        return end
