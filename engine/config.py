"""EngineConfig: every knob of the engine, frozen, checked once when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidRequest


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
    eviction_policy: str = "lru"
    """Entry-point name in ``octavo.eviction_policies`` or ``package.module:Class``."""
    evict_below: float = 0.02
    """Background eviction, a look after every step, starts when less than this share of the pool is free ..."""
    evict_until: float = 0.05
    """... and goes on until this share is free. So an admission seldom has to evict first."""
    tiers: tuple[str, ...] = ()
    """Storage tiers below the device, fastest first. There are none in this version: anything but ``()`` is refused."""

    # the batch
    max_batch_tokens: int = 512
    """Tokens computed in one step, over all sequences."""
    max_running: int = 64
    """Sequences that hold blocks at the same time; each sample and each beam counts."""
    prefill_chunk: int | None = None
    """Most prompt tokens of one sequence in one step; ``None``: only ``max_batch_tokens`` bounds it."""
    scheduling_policy: str = "fcfs"
    """Entry-point name in ``octavo.scheduling_policies`` or ``package.module:Class``."""
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
    attention_backend: str = "torch"
    """Name of the attention backend (see ``engine/model/attention``)."""

    # checking
    check_every_step: bool = False
    """Run the census after every step (slow; for tests and for hunting a bug)."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch_tokens", "max_running", "max_waiting"):
            _require(_is_count(getattr(self, name)), f"{name} must be a positive integer, not {getattr(self, name)!r}")
        for name in ("eviction_policy", "scheduling_policy", "device", "attention_backend"):
            value = getattr(self, name)
            _require(isinstance(value, str) and bool(value), f"{name} must be a name, not {value!r}")
        for name in ("enable_prefix_caching", "check_every_step"):
            _require(
                isinstance(getattr(self, name), bool), f"{name} must be true or false, not {getattr(self, name)!r}"
            )
        _require(_is_number(self.step_timeout) and self.step_timeout > 0, "step_timeout must be a positive number")
        for name in ("evict_below", "evict_until", "admission_reserve"):
            _require(_is_number(getattr(self, name)) and 0.0 <= getattr(self, name) < 1.0, f"{name} must be in [0, 1)")
        _require(self.evict_below <= self.evict_until, "evict_below must not exceed evict_until")
        _require(_is_number(self.prefix_wait) and self.prefix_wait >= 0, "prefix_wait must be 0 or a positive number")
        _require(
            self.prefill_chunk is None or _is_count(self.prefill_chunk),
            "prefill_chunk must be a positive integer or None",
        )
        _require(isinstance(self.seed, int) and not isinstance(self.seed, bool), "seed must be an integer")
        _require(self.tiers == (), "tiers must be empty: this version has no storage tiers")
        _require(self.dtype in ("float32", "bfloat16", "float16"), f"dtype {self.dtype!r} is not known")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(f"EngineConfig: {message}")
