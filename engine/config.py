"""EngineConfig: every knob of the engine, frozen, checked once when it is made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import InvalidRequest
from ..telemetry.metrics.exposition import label_problem
from .acceleration import Acceleration


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Nothing is read from the environment.

    :raises InvalidRequest: when a value is out of range; the message names the field.
    """

    # the cache
    num_blocks: int = 1024
    """Blocks in the pool."""
    block_size: int = 16
    """Tokens per block."""
    enable_prefix_caching: bool = True
    """Share and keep the blocks of common prefixes. Off: every request computes all of its prompt."""
    eviction_policy: str = "adaptive"
    """Who goes when blocks are short. ``adaptive`` costs some tenths of a millisecond for each request; ``lru`` costs
    hardly anything. Entry-point name in ``octavo.eviction_policies`` or ``package.module:Class``."""
    policy_timeout: float = 0.1
    """Seconds that one call of the eviction policy may take. A longer one is a fault: what came out of it is not used,
    and a policy with too many faults is set aside. ``inf``: as long as it takes."""
    shadow_policies: tuple[str, ...] = ()
    """Eviction policies that decide nothing and count what they would have found, each in a cache of its own without
    contents: see ``AsyncEngine.shadows``. Named as above."""
    shadow_sample: float = 1.0
    """Share of the blocks that shadows look at, in (0, 1], in caches as much smaller. Less is less work and less exact:
    at least some hundred blocks should be left of the pool."""
    evict_below: float = 0.02
    """Background eviction, a look after every step, starts when less than this share of the pool is free ..."""
    evict_until: float = 0.05
    """... and goes on until this share is free. So an admission seldom has to evict first."""

    # the tiers below the device
    tiers: tuple[str, ...] = ()
    """Storage tiers, fastest first: names in ``octavo.storage_tiers`` (``host``, ``disk``, ``redis``, ``object_store``)
    or ``package.module:Class``."""
    host_bytes: int | None = None
    """Bound of the ``host`` tier; its memory is taken when the engine opens."""
    disk_path: str | os.PathLike[str] | None = None
    """Folder of the ``disk`` tier. What an engine with the same model left there is used again."""
    disk_bytes: int | None = None
    """Bound of the ``disk`` tier, with everything that it writes."""
    restore_from_disk: bool = True
    """False: forget what lies at ``disk_path`` and start cold."""
    tier_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """More settings by name of the tier, such as ``{"redis": {"url": "redis://..."}}``; each tier documents its own.
    ``{"host": {"eviction_policy": "s3_fifo"}}``: what goes from ``host`` or ``disk`` is chosen as on the device."""
    demotion: Literal["write_back", "write_through", "selective"] = "write_back"
    """When blocks go down: once they are evicted; once their request is done, to all tiers; or the same from their
    second use on. Evicted blocks that are not down yet go then (``selective``: if they were used twice)."""
    promotion: Literal["timeout", "wait", "best_effort"] = "timeout"
    """How long a request waits for blocks that lie lower: ``promotion_timeout`` at most, until they are there, or not
    at all for any tier but the first. What did not come in time is computed."""
    promotion_timeout: float = 5.0
    load_failure: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose blocks were promised by a tier and could not be loaded."""
    tier_deadline: float = 2.0
    """Seconds that a tier has for one batch of blocks before it counts as failed."""
    tier_queue_bytes: int = 256 * 2**20
    """Bound of the write queue of each tier. What does not fit is dropped, which is a miss later."""
    strict_tiers: bool = False
    """Refuse to open when a tier or a snapshot cannot be used, instead of going on without it and saying so."""
    storage_key: bytes | None = field(default=None, repr=False)
    """Secret of up to 64 bytes: stored blocks are signed, and those that are not signed with it are misses. For tiers
    that others can write to."""
    checkpoint_interval: float = 60.0
    """Seconds between two looks at what the persistent tiers still lack, most valuable first; 0: only on closing."""
    close_budget: float = 20.0
    """Seconds that closing may take to save what the persistent tiers lack, most valuable first."""
    warm_bytes: int = 0
    """After opening, bring up to so many bytes of stored blocks to the device in the background, hottest first, as far
    as blocks are free. The rest comes when it is asked for."""
    persistence_backend: str = "folder"
    """How snapshots are kept: a name in ``octavo.persistence_backends`` or ``package.module:Class``."""

    # the batch
    max_batch_tokens: int = 512
    """Tokens computed in one step, over all sequences."""
    max_running: int = 64
    """Sequences that hold blocks at the same time; each sample and each beam counts."""
    prefill_chunk: int | None = None
    """Most prompt tokens of one sequence in one step; ``None``: only ``max_batch_tokens`` bounds it."""
    scheduling_policy: str = "fcfs"
    """Entry-point name in ``octavo.scheduling_policies`` or ``package.module:Class``."""
    scheduling_options: Mapping[str, object] = field(default_factory=dict)
    """More settings for the scheduling policy, such as ``{"weights": {"tenant": 2.0}}`` for ``fair``; each policy
    documents its own."""
    tenant_quotas: Mapping[str, float] = field(default_factory=dict)
    """Shares of the pool by tenant, together at most 1: what a tenant holds within its share is never taken for
    another one. ``""`` stands for requests without a tenant, ``"*"`` for all tenants that are not named, together; what
    nobody has is theirs, if ``"*"`` is not given. A tenant may use more while nobody else needs it: then its cached
    blocks go first, and after them its requests are preempted."""
    quota_wait: float = 30.0
    """Longest time in seconds that the oldest request of a tenant, for which there is no room within its share, is
    overtaken by those of tenants within theirs. Then nobody is let in before it."""
    admission_reserve: float = 0.01
    """Share of the pool that an admission must leave free for the growth of what already runs."""
    prefix_wait: float = 5.0
    """Longest time in seconds that a request waits for another one that is computing the same prefix."""

    # the doors
    max_waiting: int = 1024
    """Requests in the waiting queue; one more is refused with ``QueueFull``."""
    step_timeout: float = 60.0
    """Seconds after which the watchdog reports a step that does not return."""
    seed: int = 0
    """Root of the random streams of requests that bring no seed of their own."""

    # the model
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attention_backend: str = "auto"
    """Name of the attention backend (see ``engine/model/attention``); ``auto``: the fastest that runs here."""
    acceleration: Acceleration = field(default_factory=Acceleration)
    """Switches of what makes steps fast."""
    tensor_parallel: int = 1
    """Ranks that the model is split over, each a process of one ``torchrun`` job with a device of its own. The engine
    is on rank 0, with this configuration; the others call :func:`octavo.follow` with the same."""

    # telemetry
    metric_labels: Mapping[str, str] = field(default_factory=dict)
    """On every metric of this engine, such as ``{"engine": "a"}``: several engines in one registry need different
    ones."""
    trace_text: bool = False
    """Put prompts and answers into spans. Whoever reads the traces reads them, too."""
    trace_decode_steps: int = 16
    """Of the steps that compute no prompt, one in so many gets a span; the others always do."""
    kv_events_buffer: int = 10_000
    """Batches of KV events, one or two for a step that changes the cache, that are kept while somebody subscribes; a
    reader that falls further behind begins anew."""

    # checking
    check_every_step: bool = False
    """Run the census after every step (slow; for tests and for hunting a bug)."""

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_batch_tokens",
            "max_running",
            "max_waiting",
            "tier_queue_bytes",
            "kv_events_buffer",
            "trace_decode_steps",
            "tensor_parallel",
        ):
            self._require(name, _is_count(getattr(self, name)), "must be a positive integer")
        for name in ("prefill_chunk", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            self._require(name, value is None or _is_count(value), "must be a positive integer or None")
        for name in ("eviction_policy", "scheduling_policy", "device", "attention_backend", "persistence_backend"):
            value = getattr(self, name)
            self._require(name, isinstance(value, str) and bool(value), "must be a name")
        for name in ("enable_prefix_caching", "check_every_step", "trace_text", "restore_from_disk", "strict_tiers"):
            self._require(name, isinstance(getattr(self, name), bool), "must be true or false")
        for name in ("step_timeout", "tier_deadline"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and 0 < value < math.inf, "must be a positive number")
        self._require(
            "policy_timeout", _is_number(self.policy_timeout) and self.policy_timeout > 0, "must be a positive number"
        )
        share = self.shadow_sample
        self._require("shadow_sample", _is_number(share) and 0.0 < share <= 1.0, "must be above 0 and at most 1")
        self._require("shadow_policies", _are_names(self.shadow_policies), "must be a tuple of different names")
        self._require("warm_bytes", self.warm_bytes != math.inf, "must be finite")
        for name in (
            "prefix_wait",
            "quota_wait",
            "promotion_timeout",
            "checkpoint_interval",
            "close_budget",
            "warm_bytes",
        ):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value >= 0, "must be 0 or a positive number")
        for name in ("evict_below", "evict_until", "admission_reserve"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and 0.0 <= value < 1.0, "must be in [0, 1)")
        self._require("acceleration", isinstance(self.acceleration, Acceleration), "must be an Acceleration")
        for name, known in _CHOICES.items():
            self._require(name, getattr(self, name) in known, f"must be one of {', '.join(known)}")
        self._require("seed", isinstance(self.seed, int) and not isinstance(self.seed, bool), "must be an integer")
        if self.evict_below > self.evict_until:
            raise InvalidRequest("EngineConfig: evict_below must not exceed evict_until")
        self._check_tiers()
        self._check_labels()
        self._check_tenants()

    def _check_tenants(self) -> None:
        options, quotas = self.scheduling_options, self.tenant_quotas
        named = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        self._require("scheduling_options", named, "must map names of settings to values")
        right = isinstance(quotas, Mapping) and all(
            isinstance(tenant, str) and _is_number(share) and 0 < share <= 1 for tenant, share in quotas.items()
        )
        if not right:  # names of tenants are secrets to some: not into the message
            raise InvalidRequest("EngineConfig: tenant_quotas must map names of tenants to shares in (0, 1]")
        if (total := math.fsum(quotas.values())) > 1 + 1e-9:
            raise InvalidRequest(f"EngineConfig: tenant_quotas must be at most 1 together, not {total:.4g}")

    def _check_labels(self) -> None:
        labels = self.metric_labels
        problem = label_problem(labels) if isinstance(labels, Mapping) else "must map names to strings"
        if problem is not None:
            raise InvalidRequest(f"EngineConfig: metric_labels {problem}")

    def _check_tiers(self) -> None:
        tiers, options, key = self.tiers, self.tier_options, self.storage_key
        self._require("tiers", _are_names(tiers), "must be a tuple of different names")
        mapped = isinstance(options, Mapping) and all(isinstance(each, Mapping) for each in options.values())
        self._require("tier_options", mapped, "must map names of tiers to their settings")
        if strangers := sorted(set(options) - set(tiers)):
            raise InvalidRequest(f"EngineConfig: tier_options for {', '.join(strangers)}, but tiers are {tiers!r}")
        right_key = key is None or (isinstance(key, bytes) and 16 <= len(key) <= 64)
        if not right_key:  # its value must not get into a log
            raise InvalidRequest("EngineConfig: storage_key must be 16 to 64 bytes")
        for tier, fields in (("host", ("host_bytes",)), ("disk", ("disk_path", "disk_bytes"))):
            given = [name for name in fields if getattr(self, name) is not None]
            if tier in tiers and len(given) < len(fields):
                raise InvalidRequest(f"EngineConfig: the {tier} tier needs {' and '.join(fields)}")
            if given and tier not in tiers:
                raise InvalidRequest(f"EngineConfig: {given[0]} is given, but {tier!r} is not among tiers={tiers!r}")
        if tiers and not self.enable_prefix_caching:
            raise InvalidRequest("EngineConfig: tiers need enable_prefix_caching")

    def _require(self, name: str, holds: bool, message: str) -> None:
        if not holds:
            raise InvalidRequest(f"EngineConfig: {name} {message}, not {getattr(self, name)!r:.80}")


_CHOICES = {
    "demotion": ("write_back", "write_through", "selective"),
    "promotion": ("timeout", "wait", "best_effort"),
    "load_failure": ("recompute", "fail"),
    "dtype": ("float32", "bfloat16", "float16"),
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_names(value: object) -> bool:
    named = isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)
    return named and isinstance(value, tuple) and len(set(value)) == len(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
