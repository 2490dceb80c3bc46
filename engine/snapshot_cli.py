"""The command line of stored blocks: ``octavo snapshot create``, ``inspect``, ``verify``, ``export`` and so on."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ..errors import InvalidRequest, StorageError, describe
from ..storage.maintenance import tools as maintenance
from ..storage.maintenance.copying import ByBlock, ByTokens
from ..storage.maintenance.inspection import Inspection, PrefixReport
from ..storage.maintenance.sources import UNBOUNDED
from ..storage.maintenance.tools import Copied
from ..storage.naming import tenant_digest
from ..storage.snapshot.verify import VerifyReport
from ..storage.snapshot.writer import SnapshotSettings
from .model.loader import load

snapshot_app = typer.Typer(no_args_is_help=True, help="Look at stored caches, check, copy and erase them.")

Store = Annotated[Path, typer.Argument(help="Folder of a snapshot or of a disk tier.")]
Target = Annotated[Path, typer.Argument(help="Folder of the new snapshot. One that is there is replaced.")]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="File with the key that the engine signs blocks with, to check them.")
]
Identity = Annotated[
    str | None,
    typer.Option("--identity", help="First digits of the model's digest (see inspect), where there are several."),
]


@snapshot_app.command()
def create(source: Store, target: Target, identity: Identity = None, key_file: KeyFile = None) -> None:
    """Make a snapshot of a disk tier (or another snapshot). The source is only read."""

    async def run() -> Copied:
        return await maintenance.create(source, target, SnapshotSettings(), model=identity, key=_key(key_file))

    _say_copied(anyio.run(run), target)


@snapshot_app.command()
def inspect(
    path: Store,
    prefixes: Annotated[int, typer.Option(min=0, help="How many of the longest and most used prefixes to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what is stored: for which model, how much, the longest and the most used prefixes."""

    async def run() -> list[Inspection]:
        return await maintenance.inspect(path, SnapshotSettings(), prefixes=prefixes)

    reports = anyio.run(run)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(reports), indent=2).decode())
        return
    for report in reports:
        _show(Console(), report)


@snapshot_app.command()
def verify(path: Store, key_file: KeyFile = None) -> None:
    """Look at every byte. Exit status 1 when something is wrong."""

    async def run() -> VerifyReport:
        return await maintenance.verify(path, SnapshotSettings(), key=_key(key_file))

    report = anyio.run(run)
    for problem in report.problems:
        typer.echo(problem)
    typer.echo(
        f"{_blocks(report.blocks)} in {report.files} files, {report.bytes} bytes: {len(report.problems)} problems"
    )
    _say_unsigned(report.unsigned)
    raise typer.Exit(1 if report.problems else 0)


@snapshot_app.command()
def compact(path: Annotated[Path, typer.Argument(help="Folder of a disk tier that no engine uses now.")]) -> None:
    """Give back what deleted blocks still take on the disk."""

    async def run() -> int:
        return await maintenance.compact(path, SnapshotSettings())

    typer.echo(f"{anyio.run(run)} bytes given back")


@snapshot_app.command()
def export(
    source: Store,
    target: Target,
    tokens: Annotated[str | None, typer.Option(help="The prefix as token ids: 1,2,3.")] = None,
    text: Annotated[str | None, typer.Option(help="The prefix as text; needs --model.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Whose tokenizer reads --text.")] = None,
    block: Annotated[str | None, typer.Option(help="The prefix by the name of its last block (see inspect).")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose prefix it is, with --tokens and --text.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Which adapter it is for, with --tokens and --text.")] = None,
    identity: Identity = None,
    key_file: KeyFile = None,
) -> None:
    """Make a snapshot of one prefix alone: a system prompt, a document."""
    if sum(given is not None for given in (tokens, text, block)) != 1:
        raise InvalidRequest("say which prefix: exactly one of --tokens, --text and --block")
    if block is not None:
        prefix: ByTokens | ByBlock = ByBlock(block)
    else:
        ids = _ids(tokens) if tokens is not None else _encoded(text or "", model)
        prefix = ByTokens(ids, tenant, adapter)

    async def run() -> Copied:
        return await maintenance.export_prefix(
            source, target, SnapshotSettings(), prefix=prefix, model=identity, key=_key(key_file)
        )

    _say_copied(anyio.run(run), target)


@snapshot_app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="Folder of a snapshot.")],
    disk: Annotated[Path, typer.Argument(help="Folder of a disk tier that no engine uses now; made if need be.")],
    disk_bytes: Annotated[
        int, typer.Option("--bytes", min=1, help="Bound of the disk tier, as the engine will have it. Default: none.")
    ] = UNBOUNDED,
    new_model: Annotated[
        bool, typer.Option("--new-model", help="Also into a disk tier that has only blocks of other models.")
    ] = False,
    key_file: KeyFile = None,
) -> None:
    """Put the blocks of a snapshot into a disk tier, where an engine finds them."""

    async def run() -> Copied:
        return await maintenance.import_snapshot(
            source, disk, SnapshotSettings(), disk_bytes=disk_bytes, new_model=new_model, key=_key(key_file)
        )

    _say_copied(anyio.run(run), disk)


@snapshot_app.command()
def erase(
    path: Store, tenant: Annotated[str, typer.Option(help="Whose blocks; the tenant as requests name it.")]
) -> None:
    """Remove a tenant's blocks for good."""

    async def run() -> int:
        return await maintenance.erase(path, tenant_digest(tenant), SnapshotSettings())

    typer.echo(f"{_blocks(anyio.run(run))} erased")


def _key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = path.read_bytes()
    except OSError as error:
        raise StorageError(f"the key cannot be read: {describe(error)}") from error
    if not 16 <= len(key) <= 64:
        raise InvalidRequest(f"a key has 16 to 64 bytes; {path} has {len(key)} (a line break counts)")
    return key


def _ids(tokens: str) -> list[int]:
    try:
        return [int(token) for token in tokens.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequest("--tokens takes numbers, as in 1,2,3") from error


def _encoded(text: str, model: str | None) -> list[int]:
    if model is None:
        raise InvalidRequest("--text needs --model, whose tokenizer reads it")
    codec = load(model).codec
    if codec is None:
        raise InvalidRequest(f"{model} comes without a tokenizer; give --tokens")
    return codec.encode(text)


def _say_copied(copied: Copied, target: Path) -> None:
    typer.echo(f"{_blocks(copied.blocks)} to {target}")
    if copied.bad:
        typer.echo(f"{_blocks(copied.bad)} left out: the bytes were wrong, or those of a block before")
    _say_unsigned(copied.unsigned)


def _say_unsigned(count: int) -> None:
    if count:
        typer.echo(f"{_blocks(count)} signed, and no key was given to check that")


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _show(console: Console, report: Inspection) -> None:
    made = "" if report.created is None else f", made {_date(report.created)}"
    console.print(f"{report.kind} {report.path}, format {report.version}{made}", highlight=False, soft_wrap=True)
    console.print(
        f"{report.blocks} blocks of {report.block_size} tokens ({report.tokens} tokens), {report.bytes} bytes on the "
        f"disk, {len(report.shelves)} namespaces",
        highlight=False,
        soft_wrap=True,
    )
    identity = Table("part", "value", title=f"identity {report.model[:16]}")
    for part, value in report.identity:
        identity.add_row(part, value)
    shelves = Table("namespace", "tenant", "blocks", title="namespaces")
    for shelf in report.shelves:
        shelves.add_row(shelf.namespace, shelf.tenant, str(shelf.blocks))
    console.print(identity, shelves, _prefixes("longest prefixes", report.longest))
    console.print(_prefixes("most used prefixes", report.hottest))


def _prefixes(title: str, prefixes: list[PrefixReport]) -> Table:
    table = Table("block", "namespace", "tokens", "hits", "idle (s)", title=title)
    for prefix in prefixes:
        table.add_row(prefix.block[:16], prefix.namespace, str(prefix.tokens), str(prefix.hits), f"{prefix.idle:.0f}")
    return table


def _date(seconds: float) -> str:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return "at a time that cannot be"
