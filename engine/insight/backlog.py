"""Backlog: how many prompt tokens an engine has still to compute, what routers and autoscalers go by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..kv import CacheManager
from ..sequence import SequenceGroup

LOOKS: Final = 256
"""Requests of those that wait that are looked up in the cache. What is cached when the turn of those behind them comes
is not known yet: they count whole."""


def waiting_tokens(groups: Iterable[SequenceGroup], cache: CacheManager) -> int:
    """Prompt tokens that are not computed yet, each request's prompt once: of one that runs or loads, those that are
    not on its blocks; of one that waits, those that the device does not have.

    One walk down the tree for each request that waits. ``groups``: the oldest first.
    """
    total, looks = 0, LOOKS
    for group in groups:
        done = max((sample.sequence.computed for sample in group.samples if sample.is_admitted), default=0)
        waits = not any(sample.is_admitted for sample in group.samples)
        if waits and looks and group.samples:
            looks -= 1
            done = cache.outlook(group.samples[0].sequence).cached_tokens
        total += max(len(group.prompt_ids) - done, 0)
    return total
