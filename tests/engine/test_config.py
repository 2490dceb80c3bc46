"""EngineConfig is checked when it is made, and its limits reach the engine."""

from __future__ import annotations

import dataclasses

import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, UnknownPlugin

NAN, INF = float("nan"), float("inf")
COUNTS = ("num_blocks", "block_size", "max_batch_tokens", "max_running", "max_waiting", "tier_queue_bytes")
NAMES = ("eviction_policy", "scheduling_policy", "device", "attention_backend", "persistence_backend")
FLAGS = ("enable_prefix_caching", "check_every_step", "restore_from_disk", "strict_tiers")
TIMES = ("prefix_wait", "promotion_timeout", "checkpoint_interval", "close_budget", "warm_bytes")
CHOICES = {
    "demotion": ("write_back", "write_through", "selective"),
    "promotion": ("timeout", "wait", "best_effort"),
    "load_failure": ("recompute", "fail"),
}
BAD_OPTIONS: tuple[object, ...] = (None, 5, "x", [("a", {})], {"host": 5}, {"host": None})
BAD: list[tuple[str, object]] = [
    *[(name, value) for name in COUNTS for value in (0, -1, 1.5, NAN, INF, True, None, "5")],
    *[(name, value) for name in ("step_timeout", "tier_deadline") for value in (0, -1.0, NAN, True, None, "5")],
    *[("policy_timeout", value) for value in (0, -0.1, NAN, True, None, "1")],
    *[(name, value) for name in NAMES for value in (5, None, "")],
    *[(name, value) for name in FLAGS for value in ("no", 1, None)],
    *[(name, value) for name in CHOICES for value in ("no", 1, None, "")],
    *[(name, value) for name in ("host_bytes", "disk_bytes") for value in (0, -1, 1.5, NAN, True, "5")],
    *[("tier_options", value) for value in BAD_OPTIONS],
    *[("storage_key", value) for value in ("k" * 16, b"", b"k" * 15, b"k" * 65, 5, bytearray(16))],
    *[("seed", value) for value in (1.5, True, None, "5")],
    *[("tiers", value) for value in (None, "host", ("host", "host"), (5,), ("",))],
    *[
        (name, value)
        for name in ("evict_below", "evict_until", "admission_reserve")
        for value in (-0.1, 1.0, NAN, None, "0.1")
    ],
    *[(name, value) for name in TIMES for value in (-1.0, NAN, None, "5", True)],
    *[("prefill_chunk", value) for value in (0, -1, 1.5, True, "5")],
    ("dtype", "int8"),
    ("dtype", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        EngineConfig(**{name: value})  # type: ignore[arg-type]  # what is tested


def test_the_watermarks_must_be_in_order() -> None:
    with pytest.raises(InvalidRequest, match="evict_below"):
        EngineConfig(evict_below=0.5, evict_until=0.4)
    assert EngineConfig(evict_below=0.4, evict_until=0.4).evict_below == 0.4


def test_unknown_settings_are_refused_and_known_ones_frozen() -> None:
    with pytest.raises(TypeError):
        EngineConfig(block_sise=4)  # type: ignore[call-arg]  # what is tested
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 4  # type: ignore[misc]  # what is tested


def test_edges_are_taken() -> None:
    EngineConfig(num_blocks=1, block_size=1, max_batch_tokens=1, max_running=1, max_waiting=1, prefill_chunk=1)
    EngineConfig(prefix_wait=0, evict_below=0.0, evict_until=0.0, admission_reserve=0.0)


def test_every_choice_can_be_made() -> None:
    for name, choices in CHOICES.items():
        for choice in choices:
            assert getattr(EngineConfig(**{name: choice}), name) == choice  # type: ignore[arg-type]  # by name
    EngineConfig(warm_bytes=0, checkpoint_interval=0, close_budget=0, promotion_timeout=0.0, storage_key=b"k" * 64)


HOST: dict[str, object] = {"tiers": ("host",), "host_bytes": 1}
DISK: dict[str, object] = {"tiers": ("disk",), "disk_path": "x", "disk_bytes": 1}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tiers": ("host",)}, "host_bytes"),
        ({"tiers": ("disk",), "disk_path": "x"}, "disk_path and disk_bytes"),
        ({"tiers": ("disk",), "disk_bytes": 1}, "disk_path and disk_bytes"),
        ({"host_bytes": 1}, "'host' is not among"),
        ({**HOST, "disk_path": "x"}, "'disk' is not among"),
        ({**DISK, "host_bytes": 1}, "'host' is not among"),
        ({"tier_options": {"redis": {}}}, "redis"),
        ({**HOST, "enable_prefix_caching": False}, "enable_prefix_caching"),
    ],
)
def test_settings_of_tiers_go_with_the_tiers(config: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        EngineConfig(**config)  # type: ignore[arg-type]  # by name


def test_tiers_that_are_complete_are_taken() -> None:
    for config in (HOST, DISK, {**HOST, **DISK, "tiers": ("host", "disk"), "tier_options": {"disk": {"x": 1}}}):
        EngineConfig(**config)  # type: ignore[arg-type]  # by name


def test_the_key_is_never_shown() -> None:
    secret = b"a secret of some bytes"
    assert "secret" not in repr(EngineConfig(storage_key=secret))
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(storage_key=secret * 9)
    assert "secret of" not in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("setting", ["eviction_policy", "scheduling_policy"])
async def test_a_wrong_policy_name_is_told_with_the_right_ones(setting: str) -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=EngineConfig(**{setting: "lruu"}))  # type: ignore[arg-type]  # by name
    with pytest.raises(UnknownPlugin, match="lru" if setting == "eviction_policy" else "fcfs"):
        await engine.__aenter__()
