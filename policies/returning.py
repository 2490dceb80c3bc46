"""Runs that were evicted and are on their way back: found when a request asks for them, told when they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .eviction.base import Entry, EvictionPolicy, Returned


class Return(NamedTuple):
    """An evicted run, or what is left of it to be told, in a request that wants it."""

    memory: object
    first: int
    """Number of its first block in the request."""
    blocks: int
    idle: float
    """Seconds between its eviction and the request."""


def tell_returns(
    policy: EvictionPolicy,
    returns: Sequence[Return],
    *,
    new_from: int,
    stop: int,
    block_tokens: int,
    entry_at: Callable[[int], tuple[Entry, int]],
    now: float,
) -> Sequence[Return]:
    """Blocks ``new_from`` to ``stop`` of a request have just entered the cache: tell ``policy`` which evicted runs that
    brings back. Returns those that are still to come. A run whose head somebody else had brought before is not told any
    more: a memory begins where its run does.

    A policy that does not want to hear of it is told nothing. ``entry_at``: the entry that holds a block of the
    request, and the number of the entry's first block in it.
    """
    wanted = policy.wants_returns
    for number, back in enumerate(returns):
        if back.first >= stop:
            return returns[number:]
        if back.first < new_from:
            continue
        first, end = back.first, min(back.first + back.blocks, stop)
        while wanted and first < end:
            entry, begins = entry_at(first)
            blocks = min(end, begins + entry.blocks) - first
            known = Returned(back.memory, first * block_tokens, back.idle, first - begins, blocks)
            policy.on_ghost_hit(entry, known, now)
            first += blocks
        if back.first + back.blocks > stop:
            rest = back._replace(first=stop, blocks=back.first + back.blocks - stop)
            return [rest, *returns[number + 1 :]]
    return ()
