"""What is in a store, for people: counts, shelves, the longest and the most used prefixes. No token, no tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ..base import Listed, Tier
from ..naming import BlockName, Shelf
from .sources import Found

_SHOWN: Final = 16
"""Hex digits of a digest that tell it from others at hand."""


class ShelfReport(msgspec.Struct, frozen=True):
    """The blocks of one namespace."""

    namespace: str
    """First digits of its digest."""
    tenant: str
    """First digits of the digest of the tenant's salt; the same on all shelves of a tenant."""
    blocks: int


class PrefixReport(msgspec.Struct, frozen=True):
    """One prefix, by its last block."""

    block: str
    """Its name, which ``export --block`` takes."""
    namespace: str
    tokens: int
    hits: int
    idle: float
    """Seconds since its last use, when that was noted."""


class Inspection(msgspec.Struct, frozen=True):
    """The blocks of one model at a place."""

    kind: str
    path: str
    version: int
    created: float | None
    """Wall clock, seconds since the epoch; ``None`` where it is written all the time."""
    identity: Sequence[tuple[str, str]]
    """What the blocks depend on, in parts."""
    model: str
    """Digest of all the parts."""
    block_size: int
    """Tokens."""
    blocks: int
    tokens: int
    bytes: int
    """On the disk."""
    shelves: list[ShelfReport]
    longest: list[PrefixReport]
    hottest: list[PrefixReport]


async def inspected(found: Found, tier: Tier, count: int) -> Inspection:
    """``tier``: the open store. At most ``count`` prefixes of each kind.

    :raises StorageError: when it cannot be read.
    """
    items = [item async for item in tier.listing()]
    identity = found.identity
    shelves = Counter(item.shelf for item in items)
    return Inspection(
        kind=found.kind,
        path=str(found.path),
        version=found.version,
        created=found.created,
        identity=identity.parts,
        model=identity.digest,
        block_size=identity.block_size,
        blocks=len(items),
        tokens=len(items) * identity.block_size,
        bytes=tier.stats().bytes,
        shelves=[_shelf_report(shelf, number) for shelf, number in shelves.most_common()],
        longest=[_prefix_report(item, identity.block_size) for item in longest(items, count)],
        hottest=[_prefix_report(item, identity.block_size) for item in hottest(items, count)],
    )


def longest(items: Sequence[Listed], count: int) -> list[Listed]:
    """The last blocks of the ``count`` longest prefixes, none of which is the beginning of another one."""
    inner = {(item.shelf, item.head.parent) for item in items}
    ends = [item for item in items if (item.shelf, item.head.name) not in inner]
    return sorted(ends, key=lambda item: -item.head.start)[:count]


def hottest(items: Iterable[Listed], count: int) -> list[Listed]:
    """The last blocks of the ``count`` most used prefixes; of prefixes used equally often, the whole one."""
    chosen: list[Listed] = []
    covered: set[tuple[Shelf, BlockName, int]] = set()
    for item in sorted(items, key=lambda item: (-item.meta.hits, -item.head.start)):
        if len(chosen) == count or not item.meta.hits:
            break
        if (item.shelf, item.head.name, item.meta.hits) not in covered:
            chosen.append(item)
        covered.add((item.shelf, item.head.parent, item.meta.hits))
    return chosen


def _shelf_report(shelf: Shelf, blocks: int) -> ShelfReport:
    return ShelfReport(shelf.namespace.hex()[:_SHOWN], shelf.tenant.hex()[:_SHOWN], blocks)


def _prefix_report(item: Listed, block_size: int) -> PrefixReport:
    return PrefixReport(
        block=item.head.name.hex(),
        namespace=item.shelf.namespace.hex()[:_SHOWN],
        tokens=item.head.start + block_size,
        hits=item.meta.hits,
        idle=item.meta.idle,
    )
