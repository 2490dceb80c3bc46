"""The longest cached prefix first, with bounded delay.

The order is the cache-aware one of L. Zheng, L. Yin, Z. Xie et al., "SGLang: Efficient Execution of Structured Language
Model Programs", NeurIPS 2024, section 3: whoever finds most of its prompt cached goes first, so that a prefix is used
while it is there instead of being evicted and computed again. The bound on the delay is ours.
"""

from __future__ import annotations

from ...errors import InvalidRequest
from .base import Job, SchedulingPolicy


class PrefixFirst(SchedulingPolicy):
    """By cached tokens, most first; equal ones in order of arrival; nothing is displaced for a newcomer.

    A request that came more than ``max_delay`` seconds ago goes before all that did not, in order of arrival, so that
    nobody is starved by prompts with more luck. The price: where everybody waits that long, the order is first come,
    first served. Of waiting requests that lack the same block the first computes it and the others are held back until
    they find it: they rank behind all others.
    """

    wants_cached_prefix = True

    def __init__(self, max_delay: float = 5.0) -> None:
        """:raises InvalidRequest: when ``max_delay`` is negative."""
        if not max_delay >= 0:
            raise InvalidRequest(f"prefix_first: max_delay must be 0 or more seconds, not {max_delay}")
        self._max_delay = max_delay

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        if now - job.arrival > self._max_delay:
            return (0, job.order)
        return (1, job.repeats, -job.cached_tokens, job.order)
