"""What ``octavo serve`` is told, from its options to the settings of engine, app and end."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...errors import InvalidRequest, describe
from ..config import EngineConfig
from .access import Keys
from .lifecycle import Ending
from .settings import ServerSettings

SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command, by their names. Sizes are as they were written."""

    model: str
    # where
    host: str
    port: int
    uds: str | None
    root_path: str
    # the engine
    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    dtype: str
    device: str
    tensor_parallel: int
    eviction_policy: str
    scheduling_policy: str
    tier: list[str]
    restore: str | None
    # the app
    served_model_name: list[str]
    api_keys: str | None
    admin_token: str | None
    chat_template: str | None
    tool_format: str | None
    snapshot_dir: str | None
    max_body: str
    max_connections: int
    # the end
    snapshot_on_exit: str | None
    drain_timeout: float
    # the log
    otlp_endpoint: str | None
    log_level: str

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def engine_config(self, more: Mapping[str, object], keys: Keys) -> EngineConfig:
        """``more``: fields of :class:`EngineConfig` for which there is no option. ``keys``: quotas and weights that
        they bring hold where ``more`` says nothing.

        :raises InvalidRequest: when something does not fit.
        """
        own = {name: getattr(self, name) for name in ENGINE_OPTIONS} | tiers_of(self.tier)._asdict()
        if doubled := sorted(own.keys() & more.keys()):
            raise InvalidRequest(f"[engine] sets {', '.join(doubled)}: write it outside of [engine], as the option")
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(more.keys() - known):
            raise InvalidRequest(f"[engine] sets {', '.join(unknown)}, which the engine does not have")
        own["tenant_quotas"] = keys.quotas
        if keys.weights and self.scheduling_policy == "fair":
            own["scheduling_options"] = {"weights": keys.weights}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in more.items()}
        return EngineConfig(**own | values)

    def server_settings(self, keys: Keys, admin_token: str | None) -> ServerSettings:
        """:raises InvalidRequest: when something does not fit."""
        return ServerSettings(
            model_names=tuple(self.served_model_name),
            keys=keys,
            admin_token=admin_token,
            snapshot_dir=self.snapshot_dir,
            tool_format=self.tool_format,
            max_body_bytes=parse_size(self.max_body),
            max_connections=self.max_connections,
        )

    def ending(self) -> Ending:
        """:raises InvalidRequest: when the time is none."""
        if not 0.0 <= self.drain_timeout < float("inf"):
            raise InvalidRequest(f"--drain-timeout is {self.drain_timeout}; it must be a number of seconds")
        return Ending(drain_timeout=self.drain_timeout, snapshot=self.snapshot_on_exit)

    def template_text(self) -> str | None:
        """The chat template, if one is given.

        :raises InvalidRequest: when its file cannot be read.
        """
        return None if self.chat_template is None else _text_of(self.chat_template, "the chat template")


ENGINE_OPTIONS: Final = (
    "num_blocks",
    "block_size",
    "max_batch_tokens",
    "max_running",
    "max_waiting",
    "dtype",
    "device",
    "tensor_parallel",
    "eviction_policy",
    "scheduling_policy",
)


class Tiers(NamedTuple):
    """The fields of :class:`EngineConfig` for tiers."""

    tiers: tuple[str, ...] = ()
    host_bytes: int | None = None
    disk_path: str | None = None
    disk_bytes: int | None = None


def tiers_of(specs: list[str]) -> Tiers:
    """``["host=1GiB", "disk=/var/cache/octavo:10GiB", "redis"]``, fastest first.

    :raises InvalidRequest: when one is not understood.
    """
    tiers = Tiers()
    for spec in specs:
        name, _, value = spec.partition("=")
        if name == "host" and value:
            tiers = tiers._replace(host_bytes=parse_size(value))
        elif name == "disk" and ":" in value:
            path, _, size = value.rpartition(":")
            tiers = tiers._replace(disk_path=path, disk_bytes=parse_size(size))
        elif value or name in {"host", "disk"}:
            raise InvalidRequest(
                f"--tier {spec!r:.80}: write host=SIZE, disk=PATH:SIZE, or only the name of another tier, whose "
                "settings are in [engine.tier_options.NAME] of --config"
            )
        tiers = tiers._replace(tiers=(*tiers.tiers, name))
    return tiers


def parse_size(text: str) -> int:
    """Bytes: ``8MiB``, ``1.5 GB``, ``4096``.

    :raises InvalidRequest: when it is no size.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r:.80} is no size: write it as 512MiB, 10GB or a number of bytes")
    number, unit, binary = match.groups()
    factor: int = (1024 if binary else 1000) ** POWERS[(unit or "").upper()]
    return round(float(number) * factor)


class ConfigFile(NamedTuple):
    """What a configuration file says."""

    options: dict[str, object]
    """By their names in Python."""
    engine: dict[str, object]
    """More fields of :class:`EngineConfig`."""


def read_config(path: str, known: frozenset[str]) -> ConfigFile:
    """A TOML file with the names of the options, and a table ``[engine]``.

    :raises InvalidRequest: when it cannot be read, or names what is not ``known``.
    """
    try:
        table = tomllib.loads(_text_of(path, "the configuration"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is no TOML: {error}") from error
    engine = table.pop("engine", {})
    options = {name.replace("-", "_"): value for name, value in table.items()}
    if unknown := sorted(options.keys() - known):
        raise InvalidRequest(f"{path} sets {', '.join(unknown)}, which octavo serve does not have")
    if not isinstance(engine, dict):
        raise InvalidRequest(f"{path}: engine must be a table, [engine]")
    return ConfigFile(options, engine)


def _text_of(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{what} cannot be read: {describe(error)}") from error
