"""What ranks do with real models, tiny and random, in jobs of ``ranks_rig.py``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel

import octavo
from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.model.parallel.runner import ParallelRunner
from octavo.engine.model.runner import RowOutput, RowSampling
from octavo.engine.model.sampler import Sampler
from octavo.errors import OctavoError

RANKS = 2
VOCAB = 97
BLOCK = 4
NEW = 10
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
TINY = MappingProxyType(
    {
        "vocab_size": VOCAB,  # does not divide: one rank has more of the head than the other
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # at the usual 0.02 attention hardly shows in the logits
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,  # with few layers tied ones repeat the last token whatever came before
    }
)
GEMMA: dict[str, object] = {"sliding_window": 6, "head_dim": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 12}
MOE: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
MLA: dict[str, object] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: MappingProxyType[str, dict[str, object]] = MappingProxyType(
    {
        "llama": {},
        "qwen2": {},  # biases
        "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
        "gemma2": GEMMA,
        "phi3": {},  # its plan leaves all heads on each rank
        "mixtral": MOE,
        "gpt_oss": {**MOE, "head_dim": 12, "rope_parameters": YARN},  # sinks
        "deepseek_v3": MLA,
    }
)
FEW = ("llama", "qwen3", "phi3")
REFUSED: MappingProxyType[str, tuple[str, dict[str, object]]] = MappingProxyType(
    {"odd": ("llama", {"num_key_value_heads": 1}), "planless": ("gpt2", {}), "wide": ("llama", {"hidden_size": 96})}
)
SETTINGS = EngineConfig(
    num_blocks=96, block_size=BLOCK, check_every_step=True, max_batch_tokens=32, admission_reserve=0.0
)
Ids: TypeAlias = list[int]
Found: TypeAlias = dict[str, object]


class ShowingSampler(Sampler):
    """Keeps the logits that tokens are chosen from."""

    def __init__(self) -> None:
        super().__init__(vocab_limit=None)
        self.shown: list[Tensor] = []

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[RowOutput]:
        self.shown.append(logits.clone())
        return super().sample(logits, rows)


def chosen(folder: Path) -> list[str]:
    names: list[str] = json.loads((folder / "families.json").read_text())
    return names


def build(family: str, extra: dict[str, object]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **extra})
    model: object = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.train(mode=False)
    return model


def prompts() -> list[Ids]:
    """Four that share 25 tokens, one of them to the end, and two strangers."""
    rng = np.random.default_rng(1)
    shared = rng.integers(3, VOCAB, 25).tolist()
    tails = [rng.integers(3, VOCAB, length).tolist() for length in (0, 1, 9, 14)]
    return [*(shared + tail for tail in tails), rng.integers(3, VOCAB, 1).tolist(), rng.integers(3, VOCAB, 30).tolist()]


def generated(model: PreTrainedModel, prompt: Ids) -> Ids:
    assert isinstance(model, GenerationMixin)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # else it rules where the call says nothing
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0),  # type: ignore[no-untyped-call]
    )
    ids: Ids = found[0].tolist()[len(prompt) :]
    return ids


async def together(engine: AsyncEngine, asked: Sequence[Ids]) -> list[RequestOutput]:
    return [output for (output,) in await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in asked))]


def texts(outputs: Sequence[RequestOutput]) -> list[Ids]:
    return [list(output.token_ids) for output in outputs]


async def one_by_one(engine: AsyncEngine) -> Tensor:
    """Logits of every token chosen, in an order that does not depend on time."""
    sampler = ShowingSampler()
    runner = engine._life.parts.runner
    vars(runner._shard if isinstance(runner, ParallelRunner) else runner)["_sampler"] = sampler
    for prompt in prompts()[1::2]:
        await engine.complete(prompt, GREEDY)
    return torch.cat(sampler.shown)


def alone(folder: Path, _rank: int) -> Found:
    """One process: makes the models, and says what they say. Leaves a snapshot."""
    found: Found = {}
    for name, (family, extra) in REFUSED.items():
        build(family, extra).save_pretrained(folder / name)
    trained = build("llama", FAMILIES["llama"])
    trained.model.norm.weight.data *= 2
    trained.save_pretrained(folder / "trained")
    for family in chosen(folder):
        model = build(family, FAMILIES[family])
        found[family] = [generated(model, prompt) for prompt in prompts()]
        model.save_pretrained(folder / family)

        async def ask(path: Path) -> None:
            async with AsyncEngine.open(str(path), SETTINGS) as engine:
                np.save(path / "one.npy", (await one_by_one(engine)).numpy())
                await together(engine, prompts())
                await engine.snapshot(str(path / "by-one"))
                found[f"{path.name} fingerprint"] = fingerprint_of(engine)

        asyncio.run(ask(folder / family))
    return found


def fingerprint_of(engine: AsyncEngine) -> Found:
    info = engine._life.parts.runner.info
    return {"fingerprint": info.fingerprint, "bytes": info.bytes_per_block, **info.identity}


def families(folder: Path, rank: int) -> Found:
    """Each family over two ranks, in one job: logits, texts, and a snapshot of one rank."""
    found: Found = {}
    settings = split(SETTINGS)
    for family in chosen(folder):
        path = folder / family
        if rank:
            octavo.follow(str(path), settings)
            continue

        async def ask(path: Path) -> None:
            async with AsyncEngine.open(str(path), settings) as engine:
                np.save(path / "two.npy", (await one_by_one(engine)).numpy())
                found[path.name] = texts(await together(engine, prompts()))
                await engine.snapshot(str(path / "by-two"))
                found[f"{path.name} fingerprint"] = fingerprint_of(engine)
                found[f"{path.name} at rest"] = is_at_rest(engine)

        asyncio.run(ask(path))
    return found


def reread(folder: Path, _rank: int) -> Found:
    """One process again: the snapshots of two ranks."""
    found: Found = {}

    async def ask(path: Path) -> None:
        async with AsyncEngine.open(str(path), SETTINGS, restore=str(path / "by-two")) as engine:
            outputs = await together(engine, prompts())
            found[path.name] = {"texts": texts(outputs), "cached": [output.cached_tokens for output in outputs]}

    for family in chosen(folder):
        asyncio.run(ask(folder / family))
    return found


def pressed(folder: Path, rank: int) -> Found:
    """Two ranks with few blocks: preemption, swaps to the host tier and back, and the snapshot of one rank."""
    found: Found = {}
    path = folder / "llama"
    small = split(SETTINGS, num_blocks=18)
    tiered = split(SETTINGS, num_blocks=18, tiers=("host",), host_bytes=2**20, promotion="wait")

    async def ask(name: str, config: EngineConfig, restore: str | None = None) -> None:
        async with AsyncEngine.open(str(path), config, restore=restore) as engine:
            outputs = [await together(engine, prompts()) for _ in range(2)]
            stats = engine.stats()
            found[name] = {
                "texts": [texts(each) for each in outputs],
                "cached": [[output.cached_tokens for output in each] for each in outputs],
                "preemptions": stats.preemptions,
                "loaded": sum(stats.transfers.loaded_tokens.values()),
                "at rest": is_at_rest(engine),
            }

    for name, config, restore in (
        ("small", small, None),
        ("tiered", tiered, None),
        ("restored", split(SETTINGS), str(path / "by-one")),
    ):
        if rank:
            octavo.follow(str(path), config)
        else:
            asyncio.run(ask(name, config, restore))
    return found


def refused(folder: Path, rank: int) -> Found:
    """Models that cannot be split, and ones that cannot be loaded on one of the ranks."""
    (folder / f"only-{rank}").symlink_to(folder / "llama")
    here, there = folder / f"only-{rank}", folder / f"lost-{rank}"
    odd, planless, llama, wide, trained = (folder / name for name in ("odd", "planless", "llama", "wide", "trained"))
    return {
        "odd": refusal(lambda: begin(odd, split(SETTINGS), rank)),
        "planless": refusal(lambda: begin(planless, split(SETTINGS), rank)),
        "lost there": refusal(lambda: begin(there if rank else here, split(SETTINGS), rank)),
        "another shape": refusal(lambda: begin(wide if rank else llama, split(SETTINGS), rank)),
        "other weights": refusal(lambda: begin(trained if rank else llama, split(SETTINGS), rank)),
        "another dtype": refusal(lambda: begin(llama, split(SETTINGS, dtype=("float32", "bfloat16")[rank]), rank)),
        "too many": refusal(lambda: begin(llama, split(SETTINGS, tensor_parallel=RANKS + 1), rank)),
    }


def split(config: EngineConfig, **changes: object) -> EngineConfig:
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return EngineConfig(**{**values, "tensor_parallel": RANKS, **changes})


def is_at_rest(engine: AsyncEngine) -> bool:
    census, stats = engine.census(), engine.stats()
    return (census.held, census.in_transfer, stats.running, stats.waiting, stats.failed_rows) == (0, 0, 0, 0, 0)


def begin(path: Path, config: EngineConfig, rank: int) -> None:
    async def lead() -> None:
        async with AsyncEngine.open(str(path), config):
            pass

    if rank:
        octavo.follow(str(path), config)
    else:
        asyncio.run(lead())


def refusal(act: Callable[[], None]) -> str:
    try:
        act()
    except OctavoError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
