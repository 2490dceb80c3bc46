"""What lies in one tier and its queue, as far as the tier tells."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import partial

import anyio

from ...errors import StorageError
from ..base import Listed, Tier
from ..naming import BlockName, Shelf
from .mount import Mount
from .verification import as_iterator, as_listed, as_nothing

_PULL = 256
"""Blocks of a listing that are fetched under one deadline."""


async def children_of(mount: Mount, shelf: Shelf, parent: BlockName) -> list[Listed]:
    """The blocks right after ``parent``, the queue first; some may be there twice."""
    waiting = [Listed(item.shelf, item.head, item.meta) for item in mount.queue.items()]
    there = [item for item in waiting if item.shelf == shelf and item.head.parent == parent]
    if mount.readable():
        with suppress(StorageError):
            there += await mount.call(
                "children", lambda: mount.tier.children(shelf, parent), as_listed, gate=mount.reads
            )
    return there


async def listing_of(mount: Mount, shelf: Shelf | None) -> AsyncGenerator[Listed, None]:
    """Everything there, the queue first, some perhaps twice; ends early when the tier fails."""
    for item in mount.queue.items():
        if shelf in (None, item.shelf):
            yield Listed(item.shelf, item.head, item.meta)
    async with aclosing(kept_in(mount, shelf)) as kept:
        async for listed in kept:
            yield listed


async def kept_in(mount: Mount, shelf: Shelf | None) -> AsyncGenerator[Listed, None]:
    """The same without the queue."""
    if not mount.readable():
        return
    with suppress(StorageError):
        blocks = await mount.call("listing", partial(_begin, mount.tier, shelf), as_iterator, gate=mount.reads)
        try:
            while pulled := await mount.call("listing", partial(_pull, blocks), as_listed, gate=mount.reads):
                for listed in pulled:
                    yield listed
        finally:
            await _end(mount, blocks)


async def _begin(tier: Tier, shelf: Shelf | None) -> AsyncIterator[Listed]:
    return tier.listing(shelf)


async def _pull(blocks: AsyncIterator[Listed]) -> list[Listed]:
    pulled = []
    async for listed in blocks:
        pulled.append(listed)
        if len(pulled) == _PULL:
            break
    return pulled


async def _end(mount: Mount, blocks: AsyncIterator[Listed]) -> None:
    """Let a listing that was left early tidy up."""
    if isinstance(blocks, AsyncGenerator):
        with anyio.CancelScope(shield=True), suppress(StorageError):
            await mount.call("listing", blocks.aclose, as_nothing)
