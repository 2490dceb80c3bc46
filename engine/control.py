"""Control: what an operator does to the cache. Pin and keep, evict and erase, explain, snapshot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import anyio.to_thread

from ..errors import InvalidRequest, StorageError
from ..storage.base import Listed, PersistenceBackend, TierGeometry
from ..storage.naming import TOKEN_BYTES, BlockName, Namespace, Shelf, names_after, tenant_digest
from ..telemetry import names
from ..telemetry.tracing import parent_of
from .explanation import Explanation, explained
from .kv import CacheManager, encode_tokens
from .loop import StepLoop
from .pins import NOT_HELD, Pin, Pins
from .snapshotting import Prefix, SnapshotReport, Snapshots
from .surroundings import Surroundings
from .tiering import Tiering


class Evicted(NamedTuple):
    """What was given up."""

    device_blocks: int
    tier_blocks: int


class Control:
    """The operator's calls, for one engine. Each takes effect at one step edge; what is in tiers follows."""

    def __init__(
        self,
        cache: CacheManager,
        loop: StepLoop,
        tiering: Tiering,
        snapshots: Snapshots,
        pins: Pins,
        backend: PersistenceBackend,
        geometry: TierGeometry,
        outside: Surroundings,
    ) -> None:
        self._cache = cache
        self._learned = tiering.learned
        self._loop = loop
        self._tiering = tiering
        self._snapshots = snapshots
        self._pins = pins
        self._backend = backend
        self._geometry = geometry
        self._clock, _, _, self._tracing = outside
        self._erased: list[set[bytes]] = []
        """Of each snapshot and import under way, the tenants that were erased meanwhile."""

    async def try_pin(self, namespace: Namespace, ids: Sequence[int], ttl: float | None) -> Pin | None:
        """Keep the whole blocks of a prefix on the device; ``None`` when they are not all there.

        :raises OutOfBlocks: when too much of the pool would be pinned.
        """
        tokens = encode_tokens(ids)

        def pin() -> Pin | None:
            lease = self._cache.pin(namespace, tokens)
            return None if lease is None else self._pins.add(lease, self._until(ttl))

        return await self._loop.at_edge(pin, self._unpin)

    def _unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            self._pins.release(pin.pin_id)

    async def keep(self, namespace: Namespace, ids: Sequence[int], ttl: float | None, priority: int) -> Pin | None:
        """Give the blocks of a prefix a retention priority; ``None`` when they are not all on the device."""
        tokens = encode_tokens(ids)
        whole = len(tokens) // self._cache.block_size * self._cache.block_size

        def keep() -> Pin | None:
            until = self._until(ttl)
            kept = self._cache.keep(namespace, tokens, priority, until)
            return Pin(NOT_HELD, whole, until, namespace.salt) if kept == whole else None

        return await self._loop.at_edge(keep)

    async def unpin(self, pin: Pin) -> bool:
        """False when it had gone already."""

        def release() -> bool:
            self._pins.expire(self._clock())
            return self._pins.release(pin.pin_id)

        return await self._loop.at_edge(release)

    async def evict(self, namespace: Namespace, ids: Sequence[int], *, tiers: bool) -> Evicted:
        """Give up a prefix and everything that goes on from it. What a request or a pin holds stays."""
        tokens, shelf = encode_tokens(ids), namespace.shelf()

        def forget() -> tuple[list[BlockName], int]:
            before = self._cache.tree.blocks
            return self._cache.forget(namespace, tokens), before - self._cache.tree.blocks

        dropped, blocks = await self._loop.at_edge(forget)
        if not tiers:
            return Evicted(blocks, 0)
        await self._loop.at_edge(lambda: None)  # what the cache gave up a moment before has been copied out by then
        below = await self._names_of_region(shelf, tokens.tobytes())
        wanted = list(dict.fromkeys([*dropped, *below]))
        return Evicted(blocks, await self._tiering.manager.forget(shelf, wanted))

    async def erase(self, tenant: str | None, snapshots: Sequence[str]) -> int:
        """Abort the requests of a tenant and forget all its blocks, here, in all tiers, and in ``snapshots``; returns
        how many stored blocks there were.

        :raises StorageError: when a snapshot cannot be rewritten.
        """
        for group in list(self._loop.groups.values()):
            if group.namespace.salt == tenant:
                self._loop.abort(group)
        digest = tenant_digest(tenant)

        def forget() -> int:
            self._pins.release_tenant(tenant)
            self._tiering.warming.gives_way()
            blocks = self._cache.forget_tenant(tenant)
            for erased in self._erased:
                erased.add(digest)
            self._tiering.exports.withdraw(lambda export: export.shelf.tenant == digest)
            return blocks

        erased, errors = await self._loop.at_edge(forget), list[StorageError]()
        places: list[Callable[[bytes], Awaitable[int]]] = [self._tiering.manager.erase]
        places += [partial(self._backend.erase, location) for location in snapshots]
        for erase in places:
            try:
                erased += await erase(digest)
            except StorageError as error:
                errors.append(error)
        if errors:
            raise StorageError("; ".join(map(str, errors))) from errors[0]
        return erased

    async def explain(self, namespace: Namespace, ids: Sequence[int], *, others: bool) -> Explanation:
        """What a request with these tokens would find, and why not more."""
        tokens, shelf, size = encode_tokens(ids), namespace.shelf(), self._cache.block_size
        device = await self._loop.at_edge(lambda: self._cache.explain(namespace, tokens, others=others))
        whole = await anyio.to_thread.run_sync(names_after, shelf.namespace, tokens[:-1].tobytes(), size)
        missing = len(whole) if device.missing_from is None else device.missing_from // size
        manager = self._tiering.manager
        await manager.ask(shelf, whole[missing:])
        coverage = manager.peek(shelf, whole[missing:])
        return explained(len(ids), device, [manager.names[index] for index in coverage.tiers], size)

    async def set_eviction_policy(self, spec: str) -> str:
        """Let another policy say what goes, from the next step edge on; returns the name of the one before.

        :raises PluginError: when it cannot be had; nothing has changed.
        """
        policy = await anyio.to_thread.run_sync(self._learned.choose, spec)  # which may import a lot
        with self._tracing.acting(names.POLICY_SWITCH, parent_of(None)) as shown:
            before = await self._loop.at_edge(lambda: self._learned.switch(policy))
            shown |= {names.POLICY: policy.policy.name, names.POLICY_BEFORE: before}
        return before

    async def snapshot(
        self, location: str, *, within: tuple[Namespace, Sequence[int]] | None, tiers: bool
    ) -> SnapshotReport:
        """Write the cache, or one prefix of it, to ``location``.

        :raises StorageError: when it cannot be written; what was there before is untouched then.
        """
        if not self._geometry.identity.payload_bytes:
            raise StorageError("this runner does not say how many bytes a block has; it cannot be stored")
        path = None if within is None else Prefix(within[0], encode_tokens(within[1]).tobytes())
        with self._noting_erasures() as erased, self._tracing.acting(names.SNAPSHOT, parent_of(None)) as shown:
            sink = await self._backend.begin(location, self._geometry)
            report = await self._snapshots.write(sink, location, within=path, tiers=tiers)
            while erased:  # while it was written
                gone = await self._backend.erase(location, erased.pop())
                report = report._replace(blocks=report.blocks - gone)
            shown |= {names.BLOCKS: report.blocks, names.DEVICE_BLOCKS: report.device_blocks, names.LOST: report.lost}
            return report

    async def import_snapshot(self, location: str) -> int:
        """Copy the blocks of a snapshot into the tiers; returns how many they took.

        :raises FingerprintMismatch: when it belongs to another model, geometry or format.
        :raises StorageError: when it cannot be read.
        :raises InvalidRequest: when there is no tier to take them.
        """
        manager = self._tiering.manager
        if not manager.takes_blocks:
            raise InvalidRequest("importing needs a tier to put the blocks in: EngineConfig(tiers=...)")
        with self._tracing.acting(names.RESTORE, parent_of(None)) as shown:
            shown[names.KIND] = "import"
            snapshot = await self._backend.open(location, self._geometry)
            try:
                with self._noting_erasures() as erased:
                    shown[names.BLOCKS] = taken = await self._snapshots.take_in(snapshot, erased)
            finally:
                await snapshot.close()
        return taken

    async def _names_of_region(self, shelf: Shelf, tokens: bytes) -> list[BlockName]:
        """Names of the block that ends a prefix (int32), and of what continues it as far as local tiers know."""
        size = self._cache.block_size
        whole = names_after(shelf.namespace, tokens, size)
        rest = tokens[len(whole) * size * TOKEN_BYTES :]
        parent = whole[-1] if whole else shelf.namespace
        ahead = [child for child in await self._children(shelf, parent) if child.head.tokens.startswith(rest)]
        found = [] if rest else whole[-1:]
        while ahead:
            name = ahead.pop().head.name
            found.append(name)
            ahead += await self._children(shelf, name)
        return found

    async def _children(self, shelf: Shelf, parent: BlockName) -> list[Listed]:
        return await self._tiering.manager.children(shelf, parent)

    @contextmanager
    def _noting_erasures(self) -> Iterator[set[bytes]]:
        erased: set[bytes] = set()
        self._erased.append(erased)
        try:
            yield erased
        finally:
            self._erased = [other for other in self._erased if other is not erased]

    def _until(self, ttl: float | None) -> float | None:
        return None if ttl is None else self._clock() + ttl
