"""What is known of blocks that come back from a tier, as traits of the runs that they make up in the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...storage.base import Meta
from .keep import Keep
from .node import Traits


class Arrival(NamedTuple):
    """A block that was loaded, on this process's clock."""

    meta: Meta
    keep: Keep
    last_use: float


class TierCost(NamedTuple):
    """Where blocks came from."""

    tier: str
    seconds: float | None
    """Measured, for one block."""


class Run(NamedTuple):
    """Neighbouring blocks with the same retention."""

    blocks: int
    traits: Traits


def arrivals(metas: Sequence[Meta], *, now: float, wall_now: float, used: bool) -> list[Arrival]:
    """``metas`` brought up to date. ``now`` is on the monotonic clock. ``used``: they are in use from now on; otherwise
    they were last used when they were last used before they left.
    """
    found = []
    for meta in metas:
        aged = meta.aged(wall_now)
        keep = Keep.until(aged.priority, None if aged.ttl is None else now + aged.ttl, now)
        found.append(Arrival(aged._replace(hits=aged.hits + used), keep, now if used else now - aged.idle))
    return found


def runs(arrived: Sequence[Arrival], cost: TierCost, recompute_seconds: float) -> Iterator[Run]:
    """Cut where the retention changes; of hits and uses a run has the most and the latest.

    ``recompute_seconds``: for runs of which no measurement came along.
    """
    start = 0
    for stop in range(1, len(arrived) + 1):
        if stop < len(arrived) and arrived[stop].keep.agrees(arrived[start].keep):
            continue
        run = arrived[start:stop]
        yield Run(
            stop - start,
            Traits(
                recompute_seconds=run[-1].meta.recompute_seconds or recompute_seconds,
                keep=run[0].keep,
                hits=max(each.meta.hits for each in run),
                last_use=max(each.last_use for each in run),
                reload_tier=cost.tier,
                reload_seconds=cost.seconds,
            ),
        )
        start = stop
