"""Snapshots over HTTP, and the erasure of a tenant everywhere. Names only: where they lie is the server's business."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

import anyio.to_thread
from starlette.types import ASGIApp

from ....errors import StorageError
from ....storage.snapshot.format import MANIFEST
from .. import operations as ops
from ..call import Call
from ..endpoint import json_response
from ..errors import ApiError
from ..wire import operations

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


async def take(call: Call) -> ASGIApp:
    """Write the cache, or one prefix of it, to a snapshot in the server's folder, while requests go on."""
    form = call.read(operations.SnapshotForm)
    location = _location(call, form.name)
    prefix = ops.prompt_of(form) if ops.has_prompt(form) else None
    with _told():
        report = await call.service.engine.snapshot(
            location, prefix=prefix, tenant=form.tenant, tiers=form.tiers is not False
        )
    written = operations.SnapshotWritten(form.name, report.blocks, report.device_blocks, report.lost)
    return json_response(written)


async def listing(call: Call) -> ASGIApp:
    """The snapshots in the server's folder."""
    found = await anyio.to_thread.run_sync(_found, _folder(call))
    return json_response(operations.SnapshotList(found))


async def erase(call: Call) -> ASGIApp:
    """Abort all requests of a tenant and forget all its blocks, on the device, in all tiers and in snapshots, and its
    stored responses."""
    form = call.read(operations.EraseForm)
    snapshots = [_location(call, name) for name in form.snapshots or ()]
    with _told():
        call.service.responses.erase(form.tenant)
        blocks = await call.service.engine.erase(form.tenant, snapshots=snapshots)
    return json_response(operations.Erased(blocks))


@contextmanager
def _told() -> Iterator[None]:
    """What storage refuses is the operator's to mend, not a fault of the server."""
    try:
        yield
    except StorageError as error:
        raise ApiError(HTTPStatus.CONFLICT, str(error), code="storage_error") from error


def _folder(call: Call) -> Path:
    folder = call.service.settings.snapshot_dir
    if folder is None:
        message = "this server has no folder for snapshots; start it with one (snapshot_dir, --snapshot-dir)"
        raise ApiError(HTTPStatus.CONFLICT, message, code="no_snapshot_dir")
    return Path(os.fspath(folder))


def _location(call: Call, name: str) -> Path:
    """Of a snapshot in the folder; the form has seen to it that ``name`` is no path."""
    return _folder(call) / name


def _found(folder: Path) -> list[operations.SnapshotFound]:
    return sorted(_snapshots(folder), key=lambda each: each.name)


def _snapshots(folder: Path) -> Iterator[operations.SnapshotFound]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        try:
            written = (path / MANIFEST).stat().st_mtime
            size = sum(part.stat().st_size for part in path.rglob("*") if part.is_file())
        except OSError:  # none, or being replaced just now
            continue
        if NAME.fullmatch(path.name):
            yield operations.SnapshotFound(path.name, size, written)
