"""Assembly: from a loaded model and a configuration to the parts of an engine, wired."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple

from ..errors import describe
from ..plugins import PluginGroup
from ..policies.eviction.base import EvictionPolicy
from ..policies.scheduling.base import SchedulingPolicy
from ..storage.base import TierGeometry
from ..storage.identity import Identity
from ..storage.manager.settings import ManagerSettings
from ..storage.manager.tier_manager import Mounted, TierManager
from ..storage.naming import Namespace
from ..storage.record import RecordCodec
from ..telemetry.logging import RateLimited
from .checkpoint import Checkpoint
from .choosing import EVICTION_POLICIES, chosen, made_with
from .config import EngineConfig
from .control import Control
from .counters import Counters
from .execution import StepExecutor
from .exports import Exports
from .insight.cache_view import CacheViews
from .insight.kv_events import KvEvents
from .insight.measures import Measures
from .insight.metrics import EngineMetrics
from .insight.readings import Observed
from .insight.shadows import Shadows
from .intake import Intake
from .kv import CacheManager
from .kv.quotas import Quotas
from .learned import Learned
from .loading import Loads
from .loop import StepLoop
from .model.runner import ModelRunner
from .model.text import TextCodec
from .model_thread import ModelThread
from .mounting import check_tiers, mount
from .pins import Pins
from .scheduler import Scheduler
from .snapshotting import Snapshots
from .surroundings import Surroundings
from .tiering import Tiering
from .warming import Warming

__all__ = ["EVICTION_POLICIES", "SCHEDULING_POLICIES", "Parts", "assemble", "check_plugins"]

SCHEDULING_POLICIES = PluginGroup("octavo.scheduling_policies", SchedulingPolicy)
REPEAT_SECONDS = 10.0
"""A breach of contract that repeats is logged once in so many seconds."""


class Parts(NamedTuple):
    """What an open engine is made of."""

    runner: ModelRunner
    codec: TextCodec | None
    intake: Intake
    loop: StepLoop
    tiering: Tiering
    control: Control
    counters: Counters
    kv_events: KvEvents
    measures: Measures
    shadows: Shadows
    views: CacheViews
    observe: Callable[[], Observed]
    """What metrics are made of; in the engine's event loop."""


def check_plugins(config: EngineConfig) -> None:
    """Tell a wrong name before a model is loaded.

    :raises PluginError: when a policy or tier is unknown, cannot be imported, or is none.
    """
    for spec in (config.eviction_policy, *config.shadow_policies):
        EVICTION_POLICIES.find(spec)
    SCHEDULING_POLICIES.find(config.scheduling_policy)
    check_tiers(config)


async def assemble(
    runner: ModelRunner,
    codec: TextCodec | None,
    thread: ModelThread,
    config: EngineConfig,
    restore: str | None,
    outside: Surroundings,
    metrics: EngineMetrics,
) -> Parts:
    """Build and wire the parts. The tiers are not open yet.

    :raises PluginError: as ``check_plugins``, and when a plug-in cannot be made.
    :raises InvalidRequest: when a tier or the scheduling policy refuses its settings.
    :raises StorageError: with ``strict_tiers``, when the snapshot to restore cannot be used.
    """
    counters, new_id = Counters(), itertools.count().__next__
    tracing = outside.tracing
    tracing.block_bytes = runner.info.bytes_per_block
    fault = _reporter(outside)
    measures = metrics.measures(runner.info.name, outside.wall, fault)
    geometry, records = _stored_form(runner, config)
    quotas = Quotas(config.tenant_quotas, config.num_blocks) if config.tenant_quotas else None
    first = chosen(config.eviction_policy, config.num_blocks, quotas)
    cache = _cache(first.policy, config, outside, fault, quotas)
    learned = Learned(cache, first, outside)
    shadows = _shadows(cache, config, outside, fault)
    scheduling = _scheduling(config)
    mounting = mount(config, geometry, restore, outside.logger, on_fault=fault, clock=outside.clock)
    mounts = await mounting  # opens files: nothing fails from here on
    manager = _manager(config, mounts.tiers, records, outside)
    exports = Exports(runner, thread, records, fault, outside.clock)
    loads = Loads(manager, cache, runner, thread, config, outside, on_fault=fault)
    identity = geometry.identity
    warming = Warming(
        manager,
        cache,
        loads,
        namespace=Namespace(identity.digest),
        budget_blocks=int(config.warm_bytes // max(identity.payload_bytes, 1)),
        new_id=new_id,
        refused=mounts.refused,
        outside=outside,
    )
    checkpoint = Checkpoint(cache, exports, manager, learned, outside)
    tiering = Tiering(manager, cache, exports, loads, checkpoint, warming, config, outside)
    cache.watch(tiering, names=bool(manager.names))
    pins = Pins(cache, new_id)
    loop = StepLoop(
        cache=cache,
        scheduler=Scheduler(cache, scheduling, config, tiering, on_fault=_counted(counters, fault)),
        tiering=tiering,
        pins=pins,
        executor=StepExecutor(runner, thread),
        config=config,
        counters=counters,
        measures=measures,
        outside=outside,
        new_id=new_id,
    )
    snapshots = Snapshots(cache, exports, manager, learned, records, outside, loop, counters)
    control = Control(cache, loop, tiering, snapshots, pins, mounts.backend, geometry, outside)
    intake = Intake(runner.info, identity.digest, codec, config, clock=outside.clock, new_id=new_id)
    kv_events = KvEvents(cache, manager, most=config.kv_events_buffer, wall=outside.wall)
    info = (version("octavo"), runner.info.name, config.dtype, str(config.block_size))
    observe = _observer(loop, measures, kv_events, shadows, outside, info)
    views = CacheViews(cache, loop.stats, codec, clock=outside.clock, wall=outside.wall)
    return Parts(runner, codec, intake, loop, tiering, control, counters, kv_events, measures, shadows, views, observe)


def _counted(
    counters: Counters, fault: Callable[[str, BaseException | str], None]
) -> Callable[[str, BaseException | str], None]:
    """For faults of the scheduling policy."""

    def scheduling_fault(where: str, error: BaseException | str) -> None:
        counters.policy_faults += 1
        fault(where, error)

    return scheduling_fault


def _observer(
    loop: StepLoop,
    measures: Measures,
    kv_events: KvEvents,
    shadows: Shadows,
    outside: Surroundings,
    info: tuple[str, str, str, str],
) -> Callable[[], Observed]:
    """``info``: what the engine's info metric shows beside its policy."""
    cache, tracing = loop.cache, outside.tracing

    def observe() -> Observed:
        shown, events = (*info, cache.policy.name), kv_events.log.counts
        shown_shadows = shadows.reports()
        return Observed(loop.stats(), measures.states(), cache.residency, tracing.dropped, events, shown_shadows, shown)

    return observe


def _scheduling(config: EngineConfig) -> SchedulingPolicy:
    name = config.scheduling_policy
    return made_with(SCHEDULING_POLICIES.resolve(name), name, config.scheduling_options, "scheduling_options")


def _shadows(
    cache: CacheManager,
    config: EngineConfig,
    outside: Surroundings,
    fault: Callable[[str, BaseException | str], None],
) -> Shadows:
    shadows = Shadows(
        cache,
        lambda spec, blocks: chosen(spec, blocks).policy,
        config.shadow_sample,
        outside=outside,
        timeout=config.policy_timeout,
        on_fault=fault,
    )
    for spec in config.shadow_policies:
        shadows.add(spec)
    return shadows


def _cache(
    policy: EvictionPolicy,
    config: EngineConfig,
    outside: Surroundings,
    fault: Callable[[str, BaseException | str], None],
    quotas: Quotas | None,
) -> CacheManager:
    return CacheManager(
        config.num_blocks,
        config.block_size,
        policy,
        clock=outside.clock,
        on_fault=fault,
        sharing=config.enable_prefix_caching,
        background=outside.tracing.background,
        policy_timeout=config.policy_timeout,
        quotas=quotas,
    )


def _manager(
    config: EngineConfig, tiers: Sequence[Mounted], records: RecordCodec, outside: Surroundings
) -> TierManager:
    settings = ManagerSettings(
        deadline=config.tier_deadline, queue_bytes=config.tier_queue_bytes, strict=config.strict_tiers
    )
    return TierManager(
        tiers,
        records,
        settings,
        clock=outside.clock,
        wall=outside.wall,
        logger=outside.logger,
        journal=outside.tracing.background,
    )


def _stored_form(runner: ModelRunner, config: EngineConfig) -> tuple[TierGeometry, RecordCodec]:
    """What blocks of this engine are, and how they look, outside of the device."""
    identity = Identity.of(
        {**runner.info.identity, **_signature(config.storage_key)},
        block_size=config.block_size,
        payload_bytes=runner.info.bytes_per_block,
    )
    records = RecordCodec(
        block_size=config.block_size, payload_bytes=identity.payload_bytes, run=os.urandom(8), key=config.storage_key
    )
    return TierGeometry(identity, records.record_bytes), records


def _signature(key: bytes | None) -> dict[str, str]:
    """Engines with different keys are different to tiers: they neither use nor disturb each other's blocks."""
    if key is None:
        return {}
    return {"signed with": hashlib.blake2b(b"octavo-key", digest_size=8, key=key).hexdigest()}


def _reporter(outside: Surroundings) -> Callable[[str, BaseException | str], None]:
    limited = RateLimited(REPEAT_SECONDS, outside.clock)

    def fault(where: str, error: BaseException | str) -> None:
        shown = error if isinstance(error, str) else describe(error)
        limited.log(outside.logger.warning, "a plug-in broke its contract", key=where, where=where, error=shown)

    return fault
