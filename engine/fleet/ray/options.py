"""build_app: an application from the arguments of ``serve run``, or of a Serve config file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ....errors import InvalidRequest
from ....telemetry.logging import get_logger
from ...config import EngineConfig
from ...server.access import Keys
from ...server.keys_file import load_keys
from ...server.options import parse_size
from ...server.settings import ServerSettings
from .build import Application, application
from .layout import Layout
from .spec import ReplicaSpec


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments by their names."""

    model: str = "smollm2"
    replicas: str = "2"
    """A number, or ``2-8``: as many as the tokens that wait ask for."""
    waiting_tokens: float = 8192.0
    """As of :class:`~octavo.engine.fleet.ray.layout.Layout`."""
    routing: str = "prefix"
    cpus: float = 1.0
    gpus: float = 0.0
    # the engine
    num_blocks: int = 1024
    block_size: int = 16
    device: str = "cpu"
    dtype: str = "float32"
    host: str | None = None
    """Size of a host tier, such as ``4GiB``."""
    redis: str | None = None
    """URL of a Redis or Valkey server: what one replica computes is there for all of them."""
    snapshots: str | None = None
    """As of :class:`~octavo.engine.fleet.ray.spec.ReplicaSpec`."""
    # the app
    served_model_name: str | None = None
    api_keys: str | None = None
    """A TOML file, as for ``octavo serve``."""
    admin_token: str | None = None
    otlp: str | None = None
    """Where spans go, such as ``http://localhost:4318``."""

    def spec(self) -> ReplicaSpec:
        """:raises InvalidRequest: when something does not fit, or a file cannot be read."""
        keys = Keys() if self.api_keys is None else load_keys(self.api_keys, get_logger("octavo.fleet"))
        return ReplicaSpec(
            model=self.model,
            engine=self._engine(keys),
            server=ServerSettings(
                model_names=() if self.served_model_name is None else (self.served_model_name,),
                keys=keys,
                admin_token=self.admin_token,
            ),
            otlp_endpoint=self.otlp,
            snapshots=self.snapshots,
        )

    def _engine(self, keys: Keys) -> EngineConfig:
        host = None if self.host is None else parse_size(self.host)
        return EngineConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            device=self.device,
            dtype=self.dtype,  # type: ignore[arg-type]  # it checks that itself
            tiers=(*(("host",) if host is not None else ()), *(("redis",) if self.redis is not None else ())),
            host_bytes=host,
            tier_options={} if self.redis is None else {"redis": {"url": self.redis}},
            # at once, not when it is evicted: others want it now, and a replica that is killed saves nothing
            demotion="write_back" if self.redis is None else "write_through",
            tenant_quotas=keys.quotas,
        )

    def layout(self) -> Layout:
        """:raises InvalidRequest: when something does not fit."""
        least, dash, most = self.replicas.partition("-")
        try:
            numbers = int(least), int(most) if dash else None
        except ValueError:
            raise InvalidRequest(f"replicas must be a number or a range like 2-8, not {self.replicas!r:.80}") from None
        return Layout(
            replicas=numbers[0],
            most=numbers[1],
            waiting_tokens=self.waiting_tokens,
            routing=self.routing,
            cpus=self.cpus,
            gpus=self.gpus,
        )


def build_app(arguments: Mapping[str, object]) -> Application:
    """For ``serve run octavo.engine.fleet.ray:build_app model=smollm2 replicas=2``; arguments as of :class:`Options`.

    What has no argument here is set by an application of your own, see
    :func:`~octavo.engine.fleet.ray.build.application`.

    :raises InvalidRequest: when an argument is unknown or does not fit.
    """
    try:
        options = msgspec.convert(arguments, Options, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"build_app: {error}") from error
    return application(options.spec(), options.layout())
