"""What an engine leaves behind is used by the next one: the demo model against ``generate`` of Transformers, and
processes of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from octavo import AsyncEngine
from octavo.tests.system.demo_reference import BLOCK, Demo, Ids, Reference, assert_equal, config, greedy, together
from octavo.tests.system.tier_steps import Progress, push_out

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(600),
]

AtRest: TypeAlias = Callable[[AsyncEngine], None]
MIB = 2**20
COUNT = 6
"""Tokens of each text."""
SOME = (0, 21, 34)
"""Of all prompts: a question, code of 48 tokens, random ids of 65."""
PATIENT: dict[str, object] = {"tier_deadline": 60.0, "promotion": "wait", "close_budget": 60.0}
"""The machine may be busy."""
CHILD = Path(__file__).with_name("restart_child.py")


@pytest.fixture(scope="module")
def prompts(demo: Demo) -> list[Ids]:
    every = demo.prompts("all")
    return [every[i] for i in SOME]


@pytest.fixture(scope="module")
def references(demo: Demo, prompts: list[Ids]) -> list[Reference]:
    return demo.greedy(prompts, COUNT, most=COUNT)


def on_disk(folder: Path, *tiers: str) -> dict[str, object]:
    settings: dict[str, object] = {"tiers": (*tiers, "disk"), "disk_path": folder, "disk_bytes": 512 * MIB, **PATIENT}
    return settings | ({"host_bytes": 64 * MIB} if "host" in tiers else {})


def whole_blocks(prompt: Ids) -> int:
    """Tokens in whole blocks before its last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


async def assert_warm(engine: AsyncEngine, prompts: Sequence[Ids], references: Sequence[Reference], tier: str) -> None:
    """A prompt that an earlier engine has seen, and then the same with three tokens more, is not computed again."""
    outputs = await together(engine, prompts, greedy(COUNT))
    assert_equal(outputs, references)
    first = Progress.of(engine)
    known = sum(map(whole_blocks, prompts))
    assert first.loaded == {tier: known}
    assert first.computed == sum(map(len, prompts)) - known
    assert [output.cached_tokens for output in outputs] == list(map(whole_blocks, prompts))
    longer = [prompt + reference.tokens[:3] for prompt, reference in zip(prompts, references, strict=True)]
    rest = [Reference(reference.tokens[3:], reference.near[3:]) for reference in references]
    assert_equal(await together(engine, longer, greedy(COUNT - 3)), rest)
    assert Progress.of(engine).since(first).computed <= len(prompts) * (BLOCK + 3)
    assert engine.stats().transfers.loads.keys() == {"complete"}


@pytest.mark.parametrize(
    ("tiers", "demotion"),
    [
        (("host",), "write_back"),
        pytest.param((), "write_through", marks=pytest.mark.slow),
        pytest.param(("host",), "selective", marks=pytest.mark.slow),
    ],
)
@pytest.mark.asyncio
async def test_a_clean_restart_finds_everything(
    demo: Demo,
    assert_at_rest: AtRest,
    tmp_path: Path,
    prompts: list[Ids],
    references: list[Reference],
    tiers: tuple[str, ...],
    demotion: str,
) -> None:
    settings = {**on_disk(tmp_path, *tiers), "demotion": demotion}
    async with demo.engine(**settings) as engine:
        for _ in range(2):  # ``selective`` keeps what was used twice
            assert_equal(await together(engine, prompts[:1], greedy(COUNT)), references[:1])
        await push_out(engine)  # one lies in the tiers, the others on the device
        assert_equal(await together(engine, prompts[1:], greedy(COUNT)), references[1:])
        assert engine.stats().restore.stored_blocks == 0
        assert_at_rest(engine)
    async with demo.engine(**settings) as engine:
        assert engine.stats().restore.stored_blocks >= sum(map(whole_blocks, prompts)) // BLOCK
        await assert_warm(engine, prompts, references, "disk")
        assert engine.stats().restore.saved_tokens == sum(map(whole_blocks, prompts))
        assert_at_rest(engine)


@pytest.mark.asyncio
async def test_told_not_to_restore_it_starts_cold(
    demo: Demo, assert_at_rest: AtRest, tmp_path: Path, prompts: list[Ids], references: list[Reference]
) -> None:
    async with demo.engine(**on_disk(tmp_path)) as engine:
        await together(engine, prompts[:1], greedy(COUNT))
    cold = {**on_disk(tmp_path), "restore_from_disk": False, "close_budget": 0}
    for settings in (cold, {**cold, "restore_from_disk": True}):  # what was there is gone for good
        async with demo.engine(**settings) as engine:
            assert engine.stats().restore.stored_blocks == 0
            assert_equal(await together(engine, prompts[:1], greedy(COUNT)), references[:1])
            assert Progress.of(engine).loaded == {}
            assert_at_rest(engine)


@pytest.mark.asyncio
async def test_a_snapshot_of_device_and_tiers_is_restored(
    demo: Demo, assert_at_rest: AtRest, tmp_path: Path, prompts: list[Ids], references: list[Reference]
) -> None:
    snapshot = tmp_path / "snapshot"
    async with demo.engine(tiers=("host",), host_bytes=64 * MIB, **PATIENT) as engine:
        await together(engine, prompts[:1], greedy(COUNT))
        await push_out(engine)
        await together(engine, prompts[1:], greedy(COUNT))
        report = await engine.snapshot(snapshot)
        assert (report.lost, report.blocks > report.device_blocks > 0) == (0, True)
        assert_at_rest(engine)
    async with demo.configured(config(**PATIENT), restore=snapshot) as engine:
        assert engine.stats().restore.stored_blocks == report.blocks
        assert engine.stats().restore.refused is None
        await assert_warm(engine, prompts, references, "snapshot")
        assert engine.stats().restore.saved_tokens == sum(map(whole_blocks, prompts))
        assert_at_rest(engine)


@pytest.mark.asyncio
async def test_one_prefix_is_handed_to_another_engine(
    demo: Demo, assert_at_rest: AtRest, tmp_path: Path, prompts: list[Ids], references: list[Reference]
) -> None:
    exported = tmp_path / "prefix"
    async with demo.engine(**PATIENT) as engine:
        await together(engine, prompts, greedy(COUNT))
        report = await engine.snapshot(exported, prefix=prompts[-1])
        assert report.blocks == len(prompts[-1]) // BLOCK
    async with demo.engine(tiers=("host",), host_bytes=64 * MIB, **PATIENT) as engine:
        assert await engine.import_snapshot(exported) == report.blocks
        await assert_warm(engine, prompts[-1:], references[-1:], "host")
        others = Progress.of(engine)
        assert_equal(await together(engine, prompts[:-1], greedy(COUNT)), references[:-1])
        assert Progress.of(engine).since(others).loaded == {}
        assert_at_rest(engine)


@pytest.mark.parametrize(
    "seeds",
    [("unset", "0", "random"), pytest.param(("random", "1", "0", "unset", "random"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_names_do_not_depend_on_the_hash_seed(tmp_path: Path, seeds: tuple[str, ...]) -> None:
    """Each process asks for the same ten prefixes; only the first has to compute them."""
    hits = [_asked_in_a_process(tmp_path, seed) for seed in seeds]
    assert hits == [0] + [10] * (len(seeds) - 1)


def _asked_in_a_process(folder: Path, seed: str) -> int:
    """How many of the ten prefixes were found whole."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    if seed != "unset":
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(  # noqa: S603  # our own script
        [sys.executable, str(CHILD), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
