"""Mounting: from the names in a configuration to the tiers that a manager drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import ContractBroken, OctavoError, StorageError, describe
from ..plugins import PluginGroup
from ..storage.base import PersistenceBackend, Tier, TierGeometry
from ..storage.manager.tier_manager import Mounted
from ..telemetry.logging import Logger
from .choosing import EVICTION_POLICIES
from .config import EngineConfig
from .tier_policies import OnFault, TierPolicies

STORAGE_TIERS = PluginGroup("octavo.storage_tiers", Tier)
PERSISTENCE_BACKENDS = PluginGroup("octavo.persistence_backends", PersistenceBackend)
SNAPSHOT_TIER = "snapshot"
"""Under what name a restored snapshot shows among the tiers."""


class Mounts(NamedTuple):
    """The tiers of one engine, fastest first."""

    tiers: tuple[Mounted, ...]
    backend: PersistenceBackend
    refused: str | None
    """Why the snapshot that was asked for is not among them."""


def check_tiers(config: EngineConfig) -> None:
    """Tell a wrong name before a model is loaded.

    :raises PluginError: when a tier, its eviction policy or the backend is unknown, cannot be imported, or is none.
    """
    for name in config.tiers:
        STORAGE_TIERS.find(name)
        policy = config.tier_options.get(name, {}).get("eviction_policy")
        if isinstance(policy, str) and policy and STORAGE_TIERS.resolve(name).evicts_by_name:
            EVICTION_POLICIES.find(policy)
    PERSISTENCE_BACKENDS.find(config.persistence_backend)


async def mount(
    config: EngineConfig,
    geometry: TierGeometry,
    restore: str | None,
    logger: Logger,
    *,
    on_fault: OnFault,
    clock: Callable[[], float],
) -> Mounts:
    """Make the tiers of ``config``, which are not open yet, and open the snapshot ``restore`` below them.

    ``on_fault`` hears, in any thread, when the eviction policy of a tier breaks its contract; with ``clock`` its calls
    are timed.

    A snapshot that does not fit is left out, with its reason: a cold start, unless ``strict_tiers``.

    :raises InvalidRequest: when a tier refuses its settings.
    :raises PluginError: as ``check_tiers``, and when a plug-in raises something else.
    :raises StorageError: with ``strict_tiers``, when the snapshot cannot be used.
    """
    backend = _backend(config.persistence_backend)
    mounted = []
    for name in config.tiers:
        policies = TierPolicies(name, on_fault, clock, config.policy_timeout)
        mounted.append(Mounted(name, _tier(name, config, geometry._replace(rankings=policies))))
    if restore is None:
        return Mounts(tuple(mounted), backend, None)
    try:
        snapshot = await backend.open(restore, geometry)
    except StorageError as error:
        if config.strict_tiers:
            raise
        logger.warning("the snapshot cannot be used; the engine starts cold", snapshot=restore, reason=str(error))
        return Mounts(tuple(mounted), backend, str(error))
    return Mounts((*mounted, Mounted(SNAPSHOT_TIER, snapshot, is_open=True)), backend, None)


def _tier(name: str, config: EngineConfig, geometry: TierGeometry) -> Tier:
    cls = STORAGE_TIERS.resolve(name)
    try:
        return cls.create({**_named_options(name, config), **config.tier_options.get(name, {})}, geometry)
    except OctavoError as error:
        raise type(error)(f"tier {name!r}: {error}") from error
    except Exception as error:
        raise ContractBroken(f"tier {name!r} could not be made: {describe(error)}") from error


def _named_options(name: str, config: EngineConfig) -> Mapping[str, object]:
    """The settings that have a field of their own in ``EngineConfig``."""
    if name == "host":
        return {"bytes": config.host_bytes, "pin": config.device.startswith("cuda")}
    if name == "disk":
        return {
            "path": str(config.disk_path),
            "bytes": config.disk_bytes,
            "strict": config.strict_tiers,
            "itemsize": 4 if config.dtype == "float32" else 2,
        }
    return {}


def _backend(name: str) -> PersistenceBackend:
    cls = PERSISTENCE_BACKENDS.resolve(name)
    try:
        return cls.create({})
    except Exception as error:
        raise ContractBroken(f"persistence backend {name!r} could not be made: {describe(error)}") from error
