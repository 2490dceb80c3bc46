"""The demo model whose blocks come from every kind of tier, against ``generate`` of Transformers, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from octavo import AsyncEngine
from octavo.tests.system.demo_reference import (
    BLOCK,
    LONGEST,
    Breadth,
    Demo,
    Ids,
    Reference,
    alone,
    assert_equal,
    crowd,
    greedy,
    together,
)
from octavo.tests.system.tier_steps import Progress, payloads, push_out, written

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(1800),
]

AtRest: TypeAlias = Callable[[AsyncEngine], None]
MIB = 2**20
COUNT = 6
"""Tokens of most texts."""
SOME = (0, 21, 34)
"""Of all prompts: a question, code of 48 tokens, random ids of 65."""
PATIENT = 60.0
"""Seconds for a tier and for a load: the machine may be busy."""


class Place(NamedTuple):
    """One way to keep blocks."""

    tiers: tuple[str, ...]
    settings: dict[str, object]
    overflows: bool
    """Whether the first tier does, so that blocks come from the next one, too."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """``tiers/demotion/promotion``; a tier called ``tiny`` is a host tier of a few blocks."""
    tiers, demotion, promotion = request.param.split("/")
    names = tuple(tiers.replace("tiny", "host").split("+"))
    settings: dict[str, object] = {
        "tiers": names,
        "demotion": demotion,
        "promotion": promotion,
        "promotion_timeout": PATIENT,
        "tier_deadline": PATIENT,
    }
    if "host" in names:
        settings["host_bytes"] = 4 * MIB if "tiny" in tiers else 256 * MIB
    if "disk" in names:
        settings |= {"disk_path": tmp_path / "disk", "disk_bytes": 512 * MIB}
    options: dict[str, object] = {}
    if "redis" in names:
        socket = request.getfixturevalue("redis_socket")
        options["redis"] = {"url": f"unix://{socket}", "prefix": tmp_path.name}
    if "object_store" in names:
        options["object_store"] = {"url": (tmp_path / "objects").as_uri()}
    settings["tier_options"] = options
    return Place(names, settings, overflows="tiny" in tiers)


PLACES = (
    "host/write_back/timeout",
    "disk/write_through/wait",
    "redis/selective/timeout",
    "object_store/write_back/best_effort",
    "tiny+disk/write_back/wait",
)
MORE_PLACES = (
    "host+disk/write_through/best_effort",
    "disk/write_back/timeout",
    "disk/selective/wait",
    "redis/write_back/wait",
    "redis/write_through/best_effort",
    "object_store/selective/wait",
    "object_store/write_through/timeout",
    "host+redis/selective/wait",
)
places = pytest.mark.parametrize(
    ("place", "breadth"),
    [
        *((place, "few") for place in PLACES[1:3]),
        *(pytest.param(place, "few", marks=pytest.mark.slow) for place in (PLACES[0], *PLACES[3:], *MORE_PLACES)),
        *(pytest.param(place, "all", marks=pytest.mark.slow) for place in PLACES[:3]),
    ],
    indirect=["place"],
)


def asked(demo: Demo, breadth: Breadth) -> list[Ids]:
    """Prompts of several blocks each."""
    every = demo.prompts("all")
    if breadth == "few":
        return [every[i] for i in SOME]
    return [prompt for prompt in every if BLOCK < len(prompt) < 320]


def rest_of(reference: Reference, count: int) -> Reference:
    """What follows the first ``count`` tokens."""
    return Reference(reference.tokens[count:], reference.near[count:])


def whole_blocks(prompts: list[Ids]) -> int:
    """Tokens in the whole blocks before the last token of each prompt; what several share counts once."""
    return BLOCK * len({prompt[:end] for prompt in prompts for end in range(BLOCK, len(prompt), BLOCK)})


@places
@pytest.mark.asyncio
async def test_blocks_of_a_tier_say_the_same(
    demo: Demo, assert_at_rest: AtRest, place: Place, breadth: Breadth
) -> None:
    prompts = asked(demo, breadth)
    references = demo.greedy(prompts, COUNT, most=COUNT)
    async with demo.engine(num_blocks=1024, **place.settings) as engine:
        assert_equal(await together(engine, prompts, greedy(COUNT)), references)
        before = Progress.of(engine)
        assert_equal(await together(engine, prompts, greedy(COUNT)), references)
        on_device = Progress.of(engine).since(before)
        assert on_device.loaded_tokens == 0
        assert on_device.computed <= len(prompts) * BLOCK

        await push_out(engine)
        before = Progress.of(engine)
        again = await together(engine, prompts, greedy(COUNT))
        assert_equal(again, references)
        came_up = Progress.of(engine).since(before)
        assert came_up.loaded_tokens == whole_blocks(prompts)
        assert set(came_up.loaded) <= set(place.tiers)
        assert [tier.loaded_blocks > 0 for tier in engine.stats().tiers] == [True, place.overflows][: len(place.tiers)]
        assert came_up.computed <= len(prompts) * BLOCK
        for prompt, output in zip(prompts, again, strict=True):
            assert output.cached_tokens >= (len(prompt) - 1) // BLOCK * BLOCK

        await push_out(engine)
        before = Progress.of(engine)
        longer = [prompt + reference.tokens[:3] for prompt, reference in zip(prompts, references, strict=True)]
        outputs = await together(engine, longer, greedy(COUNT - 3))
        assert_equal(outputs, [rest_of(reference, 3) for reference in references])
        came_up = Progress.of(engine).since(before)
        assert came_up.loaded_tokens >= whole_blocks(longer) - len(prompts) * BLOCK
        assert came_up.computed <= len(prompts) * (BLOCK + 3)
        assert engine.stats().transfers.loads.keys() == {"complete"}
        await written(engine)
        assert_at_rest(engine)


@pytest.mark.parametrize("breadth", ["few", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.asyncio
async def test_what_preemption_swaps_out_comes_back(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts, tight = crowd(demo, breadth)
    settings = {"tiers": ("host",), "host_bytes": 256 * MIB, "tier_deadline": PATIENT, "promotion": "wait"}
    async with demo.engine(**tight, **settings) as engine:
        assert_equal(await together(engine, prompts, greedy(LONGEST)), demo.greedy(prompts, LONGEST))
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.transfers.loaded_tokens["host"] > 0
        assert stats.transfers.failed_exports == 0
        assert_at_rest(engine)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.asyncio
async def test_bytes_come_back_as_they_went(demo: Demo, assert_at_rest: AtRest, tmp_path: Path, dtype: str) -> None:
    """With the same chunks even half precision says the same: the steps that are left have the same shapes."""
    prompts = asked(demo, "few")
    settings: dict[str, object] = {
        "tiers": ("disk",),
        "disk_path": tmp_path,
        "disk_bytes": 256 * MIB,
        "dtype": dtype,
        "prefill_chunk": BLOCK,
        "tier_deadline": PATIENT,
        "promotion": "wait",
    }
    async with demo.engine(**settings) as engine:
        cold = await alone(engine, prompts, greedy(COUNT, logprobs=1))
        before = await payloads(engine)
        await push_out(engine)
        assert await payloads(engine) == {}
        loaded = await alone(engine, prompts, greedy(COUNT, logprobs=1))
        after = await payloads(engine)
        assert engine.stats().transfers.loaded_tokens == {"disk": whole_blocks(prompts)}
        assert [output.token_ids for output in loaded] == [output.token_ids for output in cold]
        assert [output.logprobs for output in loaded] == [output.logprobs for output in cold]
        assert before.keys() == after.keys()
        assert before == after
        assert_at_rest(engine)
