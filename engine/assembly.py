"""Assembly: from a loaded model and a configuration to the parts of an engine, wired."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from ..errors import ContractBroken, describe
from ..plugins import PluginGroup
from ..policies.eviction.base import EvictionPolicy
from ..policies.scheduling.base import SchedulingPolicy
from ..telemetry.logging import Logger, RateLimited
from .config import EngineConfig
from .counters import Counters
from .execution import StepExecutor
from .intake import Intake
from .kv import CacheManager
from .loop import StepLoop
from .model.runner import ModelRunner
from .model.text import TextCodec
from .model_thread import ModelThread
from .scheduler import Scheduler

EVICTION_POLICIES = PluginGroup("octavo.eviction_policies", EvictionPolicy)
SCHEDULING_POLICIES = PluginGroup("octavo.scheduling_policies", SchedulingPolicy)
REPEAT_SECONDS = 10.0
"""A breach of contract that repeats is logged once in so many seconds."""

T = TypeVar("T")


class Parts(NamedTuple):
    """What an open engine is made of."""

    runner: ModelRunner
    codec: TextCodec | None
    intake: Intake
    loop: StepLoop
    counters: Counters


def check_policies(config: EngineConfig) -> None:
    """Tell a wrong name before a model is loaded.

    :raises PluginError: when a policy is unknown, cannot be imported, or is no policy.
    """
    EVICTION_POLICIES.find(config.eviction_policy)
    SCHEDULING_POLICIES.find(config.scheduling_policy)


def assemble(
    runner: ModelRunner,
    codec: TextCodec | None,
    thread: ModelThread,
    config: EngineConfig,
    *,
    clock: Callable[[], float],
    logger: Logger,
) -> Parts:
    """Build and wire the parts.

    :raises PluginError: as ``check_policies``, and when a policy cannot be made.
    """
    counters = Counters()
    limited = RateLimited(REPEAT_SECONDS, clock)

    def fault(where: str, error: BaseException | str) -> None:
        shown = error if isinstance(error, str) else describe(error)
        limited.log(logger.warning, "a policy broke its contract", key=where, where=where, error=shown)

    def scheduling_fault(where: str, error: BaseException | str) -> None:
        counters.policy_faults += 1
        fault(where, error)

    eviction = EVICTION_POLICIES.resolve(config.eviction_policy)
    cache = CacheManager(
        config.num_blocks,
        config.block_size,
        _made(partial(eviction, config.num_blocks), config.eviction_policy),
        clock=clock,
        on_fault=fault,
        sharing=config.enable_prefix_caching,
    )
    scheduling = _made(SCHEDULING_POLICIES.resolve(config.scheduling_policy), config.scheduling_policy)
    new_id = itertools.count().__next__
    loop = StepLoop(
        cache=cache,
        scheduler=Scheduler(cache, scheduling, config, on_fault=scheduling_fault),
        executor=StepExecutor(runner, thread),
        config=config,
        counters=counters,
        clock=clock,
        new_id=new_id,
        logger=logger,
    )
    intake = Intake(runner.info, codec, config, clock=clock, new_id=new_id)
    return Parts(runner, codec, intake, loop, counters)


def _made(make: Callable[[], T], name: str) -> T:
    try:
        return make()
    except Exception as error:
        raise ContractBroken(f"plug-in {name!r} could not be made: {describe(error)}") from error
