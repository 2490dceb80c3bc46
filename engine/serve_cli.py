"""The command ``octavo serve``: an engine behind an OpenAI-compatible HTTP server (extra ``server``)."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import Annotated, Final

import typer

from ..errors import InvalidRequest
from .config import EngineConfig

DEFAULTS: Final = EngineConfig()
REPEATABLE: Final = ("served_model_name", "tier")


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ServedDtype(StrEnum):
    """Of weights and cache."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """Let the file give what the command line does not say."""
    if path is not None:
        known = {parameter.name for parameter in context.command.params if parameter.name}
        read = _server("options").read_config(path, frozenset(known - {"config"}))
        context.default_map = read.options
        context.obj = read.engine
    return path


Model = Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2 (the demo model).")]
CONFIG_HELP = (
    "TOML with the names of these options, and a table `engine` for the other fields of EngineConfig. The command line "
    "wins."
)
Config = Annotated[
    str | None, typer.Option(callback=_read_config, is_eager=True, metavar="FILE", help=CONFIG_HELP, show_default=False)
]
# where
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Uds = Annotated[str | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead.")]
RootPath = Annotated[str, typer.Option(help="Path below which a proxy shows the server.")]
# who
Names = Annotated[list[str] | None, typer.Option(help="What clients call the model; repeatable, the first is shown.")]
Keys = Annotated[str | None, typer.Option(metavar="FILE", help="TOML of API keys and their tenants. Default: open.")]
TOKEN_HELP = "Opens the admin routes and the cache at /ui. Default: a random one on loopback, closed elsewhere."  # noqa: S105  # a sentence
AdminToken = Annotated[str | None, typer.Option(envvar="OCTAVO_ADMIN_TOKEN", help=TOKEN_HELP)]
MaxBody = Annotated[str, typer.Option(metavar="SIZE", help="Longest body of a request.")]
MaxConnections = Annotated[int, typer.Option(help="Connections at the same time.")]
# the engine
Blocks = Annotated[int, typer.Option(help="Blocks in the cache.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
BatchTokens = Annotated[int, typer.Option(help="Tokens in one step.")]
Running = Annotated[int, typer.Option(help="Sequences that run side by side.")]
Waiting = Annotated[int, typer.Option(help="Requests in the queue; one more is answered with 429.")]
Dtype = Annotated[ServedDtype, typer.Option(help="Of weights and cache.")]
Device = Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Processes of a torchrun job that the model is split over.")]
Policy = Annotated[str, typer.Option(help="A name of `octavo plugins`, or package.module:Class.")]
Tier = Annotated[
    list[str] | None,
    typer.Option(help="Where evicted blocks go; repeatable, fastest first: host=1GiB, disk=PATH:10GiB, another name."),
]
Template = Annotated[str | None, typer.Option(metavar="FILE", help="Jinja template instead of the model's own.")]
ToolFormat = Annotated[str | None, typer.Option(help="How the model writes tool calls. Default: by its chat template.")]
# the cache over restarts
Restore = Annotated[str | None, typer.Option(metavar="PATH", help="Snapshot to start from.")]
SnapshotOnExit = Annotated[str | None, typer.Option(metavar="PATH", help="Where the cache is saved at the end.")]
SnapshotDir = Annotated[str | None, typer.Option(metavar="PATH", help="Folder of snapshots asked for over HTTP.")]
DrainTimeout = Annotated[float, typer.Option(min=0.0, help="Seconds that running requests get after SIGTERM.")]
# what it tells
Otlp = Annotated[str | None, typer.Option(metavar="URL", help="OpenTelemetry collector that gets the traces.")]
Level = Annotated[LogLevel, typer.Option(help="The least that is logged.")]


def serve(  # each option is an argument
    context: typer.Context,
    model: Model,
    config: Config = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    uds: Uds = None,
    root_path: RootPath = "",
    served_model_name: Names = None,
    api_keys: Keys = None,
    admin_token: AdminToken = None,
    max_body: MaxBody = "8MiB",
    max_connections: MaxConnections = 900,
    num_blocks: Blocks = DEFAULTS.num_blocks,
    block_size: BlockSize = DEFAULTS.block_size,
    max_batch_tokens: BatchTokens = DEFAULTS.max_batch_tokens,
    max_running: Running = DEFAULTS.max_running,
    max_waiting: Waiting = DEFAULTS.max_waiting,
    dtype: Dtype = ServedDtype.FLOAT32,
    device: Device = DEFAULTS.device,
    tensor_parallel: TensorParallel = DEFAULTS.tensor_parallel,
    eviction_policy: Policy = DEFAULTS.eviction_policy,
    scheduling_policy: Policy = DEFAULTS.scheduling_policy,
    tier: Tier = None,
    chat_template: Template = None,
    tool_format: ToolFormat = None,
    restore: Restore = None,
    snapshot_on_exit: SnapshotOnExit = None,
    snapshot_dir: SnapshotDir = None,
    drain_timeout: DrainTimeout = 20.0,
    otlp_endpoint: Otlp = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Serve a model over HTTP, in the form of OpenAI's API, until SIGTERM or Ctrl-C.

    Then running requests may finish and the cache is saved, if that is asked for. A second signal ends it at once.
    """
    given = dict(context.params)
    given |= {name: given[name] or [] for name in REPEATABLE}
    went_well = _server("command").run(given, context.obj or {})
    raise typer.Exit(0 if went_well else 1)


def _server(module: str) -> ModuleType:
    """A module of the server: only when it is wanted, for it needs an extra, and time."""
    try:
        return import_module(f".server.{module}", __package__)
    except ImportError as error:
        raise InvalidRequest(f"octavo serve lacks {error.name}: pip install 'octavo[server]'") from error
