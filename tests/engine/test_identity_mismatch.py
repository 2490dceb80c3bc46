"""Blocks of another model are never used, however alike the two look from outside; those of the same one always are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import pytest

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine.kv.cost import CostModel
from octavo.errors import FingerprintMismatch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SaveLlama: TypeAlias = Callable[..., Path]
Texts: TypeAlias = list[tuple[int, ...]]
MIB = 2**20
BLOCK = 4
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * number + 3 * at * at) % 250 for at in range(30 + number)] for number in range(3)]
WHOLE = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS)
PATIENT: dict[str, object] = {"promotion": "wait", "tier_deadline": 60.0, "close_budget": 60.0}
SETTINGS: dict[str, object] = {
    "num_blocks": 128,
    "block_size": BLOCK,
    "eviction_policy": "octavo.policies.eviction.lru:Lru",  # by path: quicker than looking it up
    "scheduling_policy": "octavo.policies.scheduling.fcfs:Fcfs",
    "persistence_backend": "octavo.storage.snapshot.backend:FolderBackend",
}


class Seen(NamedTuple):
    """What came of asking an engine all prompts."""

    texts: Texts
    loaded: int
    """Tokens."""
    refused: str | None


class Change(NamedTuple):
    """How the second model differs from the first one."""

    part: str
    """What a refusal names."""
    saved: Mapping[str, object] = MappingProxyType({})
    """Other arguments of ``save_llama``."""
    config: Mapping[str, object] = MappingProxyType({})
    """Other settings of the engine."""
    tokenizer: bool = False
    """Two symbols of the vocabulary change places."""
    says_the_same: bool = False
    """Whether the text may be the same all the same, so that it cannot tell."""


CHANGES = {
    "weights": Change("weights", saved={"seed": 1}),
    "rope theta": Change("position encoding", saved={"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "rope scaling": Change(
        "position encoding",
        saved={"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "norm": Change("configuration", saved={"rms_norm_eps": 0.5}),
    "tokenizer": Change("tokenizer", tokenizer=True, says_the_same=True),
    "dtype": Change("dtype", config={"dtype": "bfloat16"}, says_the_same=True),
    "block size": Change("block size", config={"block_size": 2 * BLOCK}, says_the_same=True),
}


@pytest.fixture
def save(save_llama: SaveLlama) -> Callable[[Change | None], Path]:
    """Save one of the two models at the same place, with the same times; the files of weights keep their size."""

    def save(change: Change | None) -> Path:
        folder = save_llama("model", **(change.saved if change else {}))
        if change is not None and change.tokenizer:
            swap_two_symbols(folder / "tokenizer.json")
        for file in folder.iterdir():
            os.utime(file, (1e9, 1e9))
        return folder

    return save


def swap_two_symbols(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(autouse=True)
def _computing_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is loaded, however slow the machine is just now."""
    monkeypatch.setattr(CostModel, "seconds", lambda _self, _depth: 1e9)


async def seen(
    model: Path, config: Mapping[str, object], *, restore: Path | None = None, snapshot: Path | None = None
) -> Seen:
    """Ask all prompts, one after the other, and leave a snapshot behind if wanted."""
    settings = EngineConfig(**{**SETTINGS, **PATIENT, **config})  # type: ignore[arg-type]  # the constructor checks the values
    async with AsyncEngine.open(str(model), settings, restore=restore) as engine:
        texts = [(await engine.complete(prompt, GREEDY))[0].token_ids for prompt in PROMPTS]
        if snapshot is not None:
            await engine.snapshot(snapshot)
        engine.census()
        stats = engine.stats()
        return Seen(texts, sum(stats.transfers.loaded_tokens.values()), stats.restore.refused)


def disk(folder: Path) -> dict[str, object]:
    return {
        "tiers": ("disk",),
        "disk_path": folder,
        "disk_bytes": 16 * MIB,
        "tier_options": {"disk": {"free_floor": 0}},
    }


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.asyncio
async def test_what_another_model_left_is_not_used(
    save: Callable[[Change | None], Path], tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, folder, snapshot = CHANGES[what], disk(tmp_path / "disk"), tmp_path / "snapshot"
    before = await seen(save(None), folder, snapshot=snapshot)
    sizes = sizes_of_weights(tmp_path / "model")
    other = save(change)
    assert sizes_of_weights(other) == sizes

    expected = await seen(other, change.config)
    assert change.says_the_same or expected.texts != before.texts
    caplog.clear()
    assert await seen(other, {**folder, **change.config}) == (expected.texts, 0, None)
    assert f"{change.part} is " in told(caplog, "disk_tier_starts_cold")
    caplog.clear()
    restored = await seen(other, change.config, restore=snapshot)
    assert (restored.texts, restored.loaded) == (expected.texts, 0)
    assert restored.refused is not None
    assert f"{change.part} is " in restored.refused
    assert f"{change.part} is " in told(caplog, "the engine starts cold")
    with pytest.raises(FingerprintMismatch, match=change.part):
        await imported(other, {**change.config, "tiers": ("host",), "host_bytes": MIB}, snapshot)
    assert (await seen(other, {**folder, **change.config})).loaded > 0, "its own blocks are found beside the others"

    caplog.clear()
    for known in (await seen(save(None), folder), await seen(save(None), {}, restore=snapshot)):
        assert known == (before.texts, WHOLE, None)
    assert not told(caplog, "cold")


@pytest.mark.parametrize("source", ["disk", "snapshot"])
@pytest.mark.asyncio
async def test_what_the_same_model_left_is_used_wherever_it_lies_now(
    save: Callable[[Change | None], Path], tmp_path: Path, source: str
) -> None:
    """The name, the folder and the times of a model say nothing about it."""
    folder, snapshot = disk(tmp_path / "disk"), tmp_path / "snapshot"
    model = save(None)
    before = await seen(model, folder, snapshot=snapshot)
    moved = model.rename(tmp_path / "another name")
    for file in moved.iterdir():
        os.utime(file)
    again = seen(moved, folder) if source == "disk" else seen(moved, {}, restore=snapshot)
    assert await again == (before.texts, WHOLE, None)


@pytest.mark.asyncio
async def test_a_refused_snapshot_is_an_error_if_wanted(save: Callable[[Change | None], Path], tmp_path: Path) -> None:
    await seen(save(None), {}, snapshot=tmp_path / "snapshot")
    with pytest.raises(FingerprintMismatch, match="weights is"):
        await seen(save(CHANGES["weights"]), {"strict_tiers": True}, restore=tmp_path / "snapshot")


async def imported(model: Path, config: Mapping[str, object], snapshot: Path) -> int:
    settings = EngineConfig(**{**SETTINGS, **config})  # type: ignore[arg-type]  # the constructor checks the values
    async with AsyncEngine.open(str(model), settings) as engine:
        return await engine.import_snapshot(snapshot)


def sizes_of_weights(model: Path) -> list[tuple[str, int, float]]:
    """What a careless look at a model goes by."""
    found = ((file, file.stat()) for file in sorted(model.glob("*.safetensors")))
    return [(file.name, status.st_size, status.st_mtime) for file, status in found]


def told(caplog: pytest.LogCaptureFixture, event: str) -> str:
    return "\n".join(message for message in caplog.messages if event in message)
