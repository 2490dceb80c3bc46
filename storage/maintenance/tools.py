"""What can be done with stored blocks while no engine runs: look, check, compact, copy, erase.

Functions over folders, for the command line and for scripts. Whatever is copied is checked on the way: frames, names,
and the records themselves; with a key, their signatures.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio

from ...errors import FingerprintMismatch, StorageError
from ..base import Listed, Tier
from ..disk.tier import DiskTier
from ..snapshot.backend import FolderBackend
from ..snapshot.files import resolved
from ..snapshot.format import MANIFEST
from ..snapshot.rewrite import erase_tenant
from ..snapshot.verify import VerifyReport, verify_snapshot
from ..snapshot.writer import SnapshotSettings
from .copying import ByBlock, ByTokens, Copying
from .inspection import Inspection, inspected
from .sources import UNBOUNDED, Found, codec_of, find, only, opened


class Copied(NamedTuple):
    """What a copy took along."""

    blocks: int
    bad: int
    """Blocks that were left out: their bytes were wrong, they had gone meanwhile, or they come after such a block."""
    unsigned: int
    """Blocks among ``blocks`` whose signature could not be checked, for want of the key."""


async def inspect(path: Path, settings: SnapshotSettings, *, prefixes: int = 5) -> list[Inspection]:
    """What is at ``path``, a snapshot or a disk tier; one entry for each model. Shows ``prefixes`` of each kind.

    :raises StorageError: when nothing is there or it cannot be read.
    """
    reports = []
    for found in await anyio.to_thread.run_sync(find, settings.fs, path):
        async with opened(found, settings) as tier:
            reports.append(await inspected(found, tier, prefixes))
    return reports


async def verify(path: Path, settings: SnapshotSettings, *, key: bytes | None = None) -> VerifyReport:
    """Look at every byte. ``key``: what the engine signs records with, if it does.

    :raises StorageError: when nothing is at ``path``. What is wrong with what is there is in the report.
    """
    if (resolved(path) / MANIFEST).exists():
        return await anyio.to_thread.run_sync(verify_snapshot, path, settings.fs, key)
    total = VerifyReport(0, 0, 0, 0, [])
    for found in await anyio.to_thread.run_sync(find, settings.fs, path):
        report = await _verify_disk(found, key)
        total = VerifyReport(
            files=total.files + report.files,
            blocks=total.blocks + report.blocks,
            bytes=total.bytes + report.bytes,
            unsigned=total.unsigned + report.unsigned,
            problems=total.problems + report.problems,
        )
    return total


async def compact(path: Path, settings: SnapshotSettings) -> int:
    """Give back what deleted blocks still take on the disk of a disk tier; returns how many bytes.

    :raises StorageError: when there is none at ``path`` or an engine writes to it.
    """
    freed = 0
    for found in await anyio.to_thread.run_sync(find, settings.fs, path):
        if found.kind != "disk":
            raise StorageError(f"{path} is a snapshot; it has nothing that could be compacted")
        async with _disk(found, {"bytes": UNBOUNDED}) as tier:
            before = tier.stats().bytes
            await tier.compact()
            freed += before - tier.stats().bytes
    return freed


async def create(
    source: Path, target: Path, settings: SnapshotSettings, *, model: str | None = None, key: bytes | None = None
) -> Copied:
    """A snapshot at ``target`` of all blocks at ``source``, which is only read. ``model``: first digits of its
    identity's digest, where there are several.

    :raises StorageError: when ``source`` cannot be read or ``target`` not be written; what was there is still there.
    """
    found = only(await anyio.to_thread.run_sync(find, settings.fs, source), model)
    async with opened(found, settings) as tier:
        items = [item async for item in tier.listing()]
        return await _to_snapshot(found, tier, items, target, settings, key)


async def export_prefix(
    source: Path,
    target: Path,
    settings: SnapshotSettings,
    *,
    prefix: ByTokens | ByBlock,
    model: str | None = None,
    key: bytes | None = None,
) -> Copied:
    """A snapshot at ``target`` of the blocks of one prefix alone.

    :raises StorageError: also when ``source`` does not have the prefix from its first block on.
    """
    found = only(await anyio.to_thread.run_sync(find, settings.fs, source), model)
    async with opened(found, settings) as tier:
        items = await prefix.find(tier, found.identity)
        return await _to_snapshot(found, tier, items, target, settings, key)


async def import_snapshot(
    source: Path,
    disk: Path,
    settings: SnapshotSettings,
    *,
    disk_bytes: int = UNBOUNDED,
    new_model: bool = False,
    key: bytes | None = None,
) -> Copied:
    """Put the blocks of the snapshot at ``source`` into the disk tier at ``disk``, which is made if need be.

    :param disk_bytes: the bound of the disk tier, in bytes; the default evicts nothing.
    :param new_model: whether blocks may go to a disk tier that has only those of other models.
    :raises FingerprintMismatch: when it has only those, and ``new_model`` is not set.
    :raises StorageError: when one cannot be read or the other not be written.
    """
    found = only(await anyio.to_thread.run_sync(find, settings.fs, source), None)
    if not new_model:
        await anyio.to_thread.run_sync(_check_home, settings, found, disk)
    place = found._replace(path=disk)
    async with opened(found, settings) as tier, _disk(place, {"bytes": disk_bytes}) as target:
        items = [item async for item in tier.listing()]
        blocks = 0
        copying = Copying(tier, codec_of(found.identity, key), has_key=key is not None)
        async for shelf, records in copying.records(items):
            blocks += sum(await target.put(shelf, records))
            if problem := target.stats().problem:
                raise StorageError(f"{blocks} blocks were imported, the others not: {problem}")
        await target.flush()
        return Copied(blocks, copying.bad, copying.unsigned)


async def erase(path: Path, tenant: bytes, settings: SnapshotSettings) -> int:
    """Remove a tenant's blocks (``Shelf.tenant``) from the snapshot or disk tier at ``path``; returns how many.

    :raises StorageError: when that cannot be done.
    """
    erased = 0
    for found in await anyio.to_thread.run_sync(find, settings.fs, path):
        if found.kind == "snapshot":
            erased += await anyio.to_thread.run_sync(erase_tenant, settings, found.path, tenant)
        else:
            async with _disk(found, {"bytes": UNBOUNDED}) as tier:
                erased += await tier.erase(tenant)
    return erased


async def _to_snapshot(
    found: Found, tier: Tier, items: Sequence[Listed], target: Path, settings: SnapshotSettings, key: bytes | None
) -> Copied:
    copying = Copying(tier, codec_of(found.identity, key), has_key=key is not None)
    sink = await FolderBackend(settings).begin(str(target), found.geometry)
    try:
        async for shelf, records in copying.records(items):
            await sink.add(shelf, records)
        return Copied(await sink.commit(), copying.bad, copying.unsigned)
    finally:
        await sink.abandon()


async def _verify_disk(found: Found, key: bytes | None) -> VerifyReport:
    async with _disk(found, {"bytes": UNBOUNDED, "read_only": True}) as tier:
        report = await tier.verify()
        copying = Copying(tier, codec_of(found.identity, key), has_key=key is not None)
        items = [item async for item in tier.listing()]
        async for _ in copying.records(items):
            pass
        problems = list(report.problems)
        if copying.bad:
            problems.append(f"{copying.bad} blocks hold other records than they should, or come after such blocks")
        return VerifyReport(report.segments, report.blocks, report.bytes, copying.unsigned, problems)


@asynccontextmanager
async def _disk(found: Found, options: Mapping[str, object]) -> AsyncIterator[DiskTier]:
    """The disk tier at ``found.path``, or an error: never one that only seems to work."""
    # blocks of other models are no business of a tool, however old they are
    own = {"path": str(found.path), "strict": True, "keep_foreign_seconds": sys.float_info.max}
    tier = DiskTier.create({**own, **options}, found.geometry)
    try:
        await tier.open()
        yield tier
    finally:
        await tier.close()


def _check_home(settings: SnapshotSettings, found: Found, disk: Path) -> None:
    try:
        there = find(settings.fs, disk)
    except StorageError:  # nothing is there yet
        return
    if all(each.identity != found.identity for each in there):
        differences = "; ".join(there[0].identity.differences(found.identity))
        raise FingerprintMismatch(
            f"the disk tier at {disk} has blocks of other models than the snapshot's only ({differences}, where "
            "here is the disk tier). Allow a new model, or name another folder."
        )
