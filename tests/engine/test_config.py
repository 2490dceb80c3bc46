"""EngineConfig is checked when it is made, and its limits reach the engine."""

from __future__ import annotations

import dataclasses

import pytest

from octavo import AsyncEngine, EngineConfig
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest, UnknownPlugin

NAN, INF = float("nan"), float("inf")
COUNTS = ("num_blocks", "block_size", "max_batch_tokens", "max_running", "max_waiting")
BAD: list[tuple[str, object]] = [
    *[(name, value) for name in COUNTS for value in (0, -1, 1.5, NAN, INF, True, None, "5")],
    *[("step_timeout", value) for value in (0, -1.0, NAN, True, None, "5")],
    *[(name, value) for name in ("eviction_policy", "scheduling_policy", "device") for value in (5, None, "")],
    *[(name, value) for name in ("enable_prefix_caching", "check_every_step") for value in ("no", 1, None)],
    *[("seed", value) for value in (1.5, True, None, "5")],
    *[("tiers", value) for value in (None, "host", ("host", "host"), (5,), ("",))],
    *[
        (name, value)
        for name in ("evict_below", "evict_until", "admission_reserve")
        for value in (-0.1, 1.0, NAN, None, "0.1")
    ],
    *[("prefix_wait", value) for value in (-1.0, NAN, None, "5")],
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


@pytest.mark.asyncio
@pytest.mark.parametrize("setting", ["eviction_policy", "scheduling_policy"])
async def test_a_wrong_policy_name_is_told_with_the_right_ones(setting: str) -> None:
    engine = AsyncEngine(runner=FakeRunner(), config=EngineConfig(**{setting: "lruu"}))  # type: ignore[arg-type]  # by name
    with pytest.raises(UnknownPlugin, match="lru" if setting == "eviction_policy" else "fcfs"):
        await engine.__aenter__()
