"""Blocks on their way from one store to another, checked as they pass."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final, NamedTuple

import anyio
import numpy as np

from ...errors import StorageError
from ..base import Listed, Record, Stored, Tier
from ..identity import Identity
from ..naming import BlockName, Namespace, Shelf, names_after
from ..record import RecordCodec
from ..snapshot.verify import record_problem

_BATCH: Final = 32
"""Blocks that are in memory at a time."""


class Copying:
    """Reads blocks of a tier and lets the good ones through."""

    def __init__(self, tier: Tier, codec: RecordCodec, *, has_key: bool) -> None:
        """``codec``: of the engine whose blocks they are. Without its key, signatures are not checked."""
        self.bad = 0
        """Blocks that were left out: gone, wrong bytes, or after one of those."""
        self.unsigned = 0
        """Blocks that were let through with a signature that could not be checked."""
        self._tier = tier
        self._codec = codec
        self._has_key = has_key
        self._left_out: set[tuple[Shelf, BlockName]] = set()

    async def records(self, items: Sequence[Listed]) -> AsyncIterator[tuple[Shelf, list[Record]]]:
        """What is good among ``items``, in their order, in batches of one shelf.

        :raises StorageError: when the tier cannot be read.
        """
        for shelf, batch in _batches(items):
            found = await self._tier.get(shelf, [item.head.name for item in batch])
            records = await anyio.to_thread.run_sync(self._good, batch, found)
            if records:
                yield shelf, records

    def _good(self, batch: Sequence[Listed], found: Sequence[Stored | None]) -> list[Record]:
        records = []
        for item, stored in zip(batch, found, strict=True):
            after_bad = (item.shelf, item.head.parent) in self._left_out
            if stored is None or after_bad or not self._is_right(item, stored):
                self.bad += 1
                self._left_out.add((item.shelf, item.head.name))
            else:
                records.append(Record(item.head, stored.data, stored.meta))
        return records

    def _is_right(self, item: Listed, stored: Stored) -> bool:
        problem = record_problem(self._codec, item.shelf, item.head.name, stored.data, has_key=self._has_key)
        self.unsigned += problem == ""
        return not problem


class ByTokens(NamedTuple):
    """A prefix by what it says."""

    tokens: Sequence[int]
    tenant: str | None = None
    adapter: str | None = None

    async def find(self, tier: Tier, identity: Identity) -> list[Listed]:
        """Its blocks, from the first one on, as far as they are there.

        :raises StorageError: when there is none.
        """
        shelf = Namespace(identity.digest, self.adapter, self.tenant).shelf()
        names = names_after(shelf.namespace, _packed(self.tokens), identity.block_size)
        there = {item.head.name: item async for item in tier.listing(shelf)}
        found = [there[name] for name in itertools.takewhile(there.__contains__, names)]
        if not found:
            raise StorageError(
                f"not one whole block ({identity.block_size} tokens) of this prefix is stored for this tenant"
            )
        return found


class ByBlock(NamedTuple):
    """A prefix by the name of its last block, which ``inspect`` shows."""

    digits: str
    """The first hex digits, enough to tell it from all others."""

    async def find(self, tier: Tier, identity: Identity) -> list[Listed]:
        """Its blocks, from the first one on.

        :raises StorageError: when there is not exactly one such block, or a block before it is missing.
        """
        there = {(item.shelf, item.head.name): item async for item in tier.listing()}
        ends = [item for item in there.values() if item.head.name.hex().startswith(self.digits.lower())]
        if len(ends) != 1:
            raise StorageError(f"{len(ends)} blocks have names that start with {self.digits!r}; give more digits")
        path = ends
        while path[-1].head.start > 0:
            before = there.get((path[-1].shelf, path[-1].head.parent))
            if before is None:
                raise StorageError("a block before this one is not stored; without it the prefix cannot be used")
            path.append(before)
        return path[::-1]


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return np.asarray(array("i", tokens)).astype("<i4").tobytes()
    except (OverflowError, TypeError) as error:
        raise StorageError("a token is no number that a model can have") from error


def _batches(items: Sequence[Listed]) -> Iterator[tuple[Shelf, list[Listed]]]:
    for shelf, group in itertools.groupby(items, key=operator.attrgetter("shelf")):
        while batch := list(itertools.islice(group, _BATCH)):
            yield shelf, batch
