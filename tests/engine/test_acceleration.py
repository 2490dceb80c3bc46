"""Every switch of what makes steps fast: another way to the same tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.acceleration import Acceleration
from octavo.engine.model.attention.native_backend import NativeBackend
from octavo.engine.model.attention.torch_backend import TorchBackend
from octavo.engine.model.decoder import ModuleDecoder
from octavo.engine.model.loader import load
from octavo.engine.model.transformers_runner import TransformersRunner
from octavo.errors import InvalidRequest, ModelError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SaveLlama = Callable[..., Path]
Ids = tuple[int, ...]
SWITCHES = [each.name for each in fields(Acceleration)]
OFF = Acceleration(**dict.fromkeys(SWITCHES, False))
SIZES = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
"""Heads of 16 dimensions, as the kernels need them."""
SYSTEM = tuple((i * 7 + 3) % 250 for i in range(37))
PROMPTS = [(*SYSTEM, *((i * k + 11) % 250 for i in range(3 + 5 * k))) for k in range(1, 6)]
PROMPTS += [PROMPTS[0][:20], PROMPTS[1], (5,), tuple((i * i) % 250 for i in range(90))]
TOKENS, END = 14, 257


def greedy(**others: object) -> SamplingParams:
    return SamplingParams.from_mapping({"max_tokens": TOKENS, "temperature": 0.0, **others})


BEAMS = SamplingParams(max_tokens=8, beam_width=4, n=3)


class Answers(NamedTuple):
    """What an engine made of the prompts."""

    greedy: list[Ids]
    samples: list[list[Ids]]
    beams: list[list[Ids]]


def tokens(outputs: list[RequestOutput]) -> list[Ids]:
    return [output.token_ids for output in outputs]


async def answers(engine: AsyncEngine) -> Answers:
    """Twice side by side, so that the second time most is found in the cache."""
    jobs = [engine.complete(prompt, greedy()) for prompt in PROMPTS]
    jobs += [engine.complete(prompt, greedy(n=3)) for prompt in PROMPTS[2:5]]
    jobs += [engine.complete(prompt, BEAMS) for prompt in PROMPTS[:3]]
    found = list(map(tokens, await asyncio.gather(*jobs)))
    again = list(map(tokens, await asyncio.gather(*(engine.complete(prompt, greedy()) for prompt in PROMPTS))))
    count = len(PROMPTS)
    assert again == found[:count]
    return Answers([first for (first,) in found[:count]], found[count : count + 3], found[count + 3 :])


class Reference:
    """Transformers' own ``generate``."""

    def __init__(self, directory: Path) -> None:
        model: object = AutoModelForCausalLM.from_pretrained(str(directory), attn_implementation="eager")
        assert isinstance(model, LlamaForCausalLM)
        self._model = model

    def generate(self, prompt: Ids, count: int, **how: object) -> list[Ids]:
        settings = GenerationConfig(  # type: ignore[no-untyped-call]  # as Transformers has it
            do_sample=False, max_new_tokens=count, pad_token_id=0, eos_token_id=END, **how
        )
        ids = torch.tensor([prompt])
        found = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return [_to_end(tuple(row[len(prompt) :])) for row in found.tolist()]


def expected(directory: Path) -> Answers:
    reference = Reference(directory)
    lines = [reference.generate(prompt, TOKENS)[0] for prompt in PROMPTS]
    beams = [reference.generate(prompt, 8, num_beams=4, num_return_sequences=3) for prompt in PROMPTS[:3]]
    return Answers(lines, [[line] * 3 for line in lines[2:5]], beams)


def _to_end(line: Ids) -> Ids:
    return line[: line.index(END) + 1] if END in line else line


CONFIGS: dict[str, dict[str, object]] = {
    "roomy": {"num_blocks": 256},
    "in chunks": {"num_blocks": 256, "prefill_chunk": 8, "max_batch_tokens": 40},
    "too small a pool": {"num_blocks": 50, "admission_reserve": 0.0},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.asyncio
async def test_every_switch_off_alone_and_all_together_give_what_transformers_gives(
    save_llama: SaveLlama, config: str
) -> None:
    directory = save_llama(**SIZES)
    right = expected(directory)
    for acceleration in (Acceleration(), OFF, *(Acceleration(**{name: False}) for name in SWITCHES)):
        settings = EngineConfig(block_size=4, check_every_step=True, acceleration=acceleration, **CONFIGS[config])  # type: ignore[arg-type]  # checked by the constructor
        async with AsyncEngine.open(str(directory), settings) as engine:
            assert await answers(engine) == right, acceleration
            census, stats = engine.census(), engine.stats()
            assert (census.held, stats.failed_rows) == (0, 0)
            assert (stats.preemptions > 0) is (config == "too small a pool")


def loaded(directory: Path, acceleration: Acceleration, **how: str) -> TransformersRunner:
    runner = load(str(directory), acceleration=acceleration, **how).runner  # type: ignore[arg-type]  # names of settings
    assert isinstance(runner, TransformersRunner)
    return runner


def test_a_switch_that_is_off_is_off(save_llama: SaveLlama) -> None:
    directory = save_llama(**SIZES)
    plain = loaded(directory, OFF)
    assert isinstance(plain._backend, TorchBackend)
    assert isinstance(plain._decoder, ModuleDecoder)
    assert isinstance(loaded(directory, Acceleration(native=False))._backend, TorchBackend)
    assert isinstance(loaded(directory, Acceleration(fused=False))._decoder, ModuleDecoder)
    assert not isinstance(loaded(directory, Acceleration())._decoder, ModuleDecoder)


def test_with_a_compiler_the_kernels_are_used(save_llama: SaveLlama) -> None:
    directory = save_llama(**SIZES)
    runner = loaded(directory, Acceleration())
    if not isinstance(runner._backend, NativeBackend):
        pytest.skip("no kernels: no C++ compiler")
    assert runner._backend._shares
    apart = loaded(directory, Acceleration(shared_prefix=False))._backend
    assert isinstance(apart, NativeBackend)
    assert not apart._shares
    assert isinstance(loaded(directory, Acceleration(), attention_backend="native")._backend, NativeBackend)
    assert isinstance(loaded(directory, Acceleration(), attention_backend="torch")._backend, TorchBackend)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that was compiled before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_native_is_refused_and_auto_does_without(
    save_llama: SaveLlama, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.model")
    directory = save_llama(**SIZES)
    with pytest.raises(ModelError, match=r"'native' cannot be had here: no C\+\+ compiler is installed"):
        loaded(directory, Acceleration(), attention_backend="native")
    assert isinstance(loaded(directory, Acceleration())._backend, TorchBackend)
    assert isinstance(loaded(directory, Acceleration(), dtype="bfloat16")._backend, TorchBackend)
    assert len([line for line in caplog.messages if "no_native_kernels" in line]) == 1


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.asyncio
async def test_without_a_compiler_the_tokens_are_the_same(save_llama: SaveLlama) -> None:
    directory = save_llama(**SIZES)
    async with AsyncEngine.open(str(directory), EngineConfig(num_blocks=256, block_size=4)) as engine:
        assert await answers(engine) == expected(directory)


@pytest.mark.parametrize("how", [{"dtype": "float16"}, {"acceleration": OFF}], ids=["float16", "switched off"])
def test_native_is_refused_where_nothing_native_would_run(save_llama: SaveLlama, how: dict[str, object]) -> None:
    settings: dict[str, object] = {"attention_backend": "native", **how}
    with pytest.raises(ModelError, match=r"float32 or bfloat16, and Acceleration\.native"):
        load(str(save_llama(**SIZES)), **settings)  # type: ignore[arg-type]  # names and values of settings


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_switch_is_true_or_false(name: str, value: Literal["yes", 1] | None) -> None:
    with pytest.raises(InvalidRequest, match=name):
        Acceleration(**{name: value})  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidRequest, match=name):
        replace(Acceleration(), **{name: value})  # type: ignore[arg-type]  # on purpose


def test_everything_is_on_unless_somebody_says_so_and_nothing_else_is_taken() -> None:
    config = EngineConfig()
    assert all(getattr(config.acceleration, name) is True for name in SWITCHES)
    assert config.attention_backend == "auto"
    with pytest.raises(InvalidRequest, match="acceleration"):
        EngineConfig(acceleration=True)  # type: ignore[arg-type]  # on purpose
