"""The demo model, its engines and what Transformers says about it: the reference of all tests on real text.

In float32 the logits of one position differ by about 1e-5 between forward passes of different shapes. Where the
reference has two tokens about that close at the top, either is right; such a tie ends the comparison of that text, and
few are allowed.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from octavo import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from octavo.engine.model.checkpoint import Checkpoint, load_checkpoint
from octavo.engine.model.gguf_file import converted
from octavo.engine.model.loader import default_cache_dir
from octavo.engine.model.sources import demo_model_path
from octavo.engine.model.transformers_runner import TransformersRunner
from octavo.engine.request import Chat

Ids: TypeAlias = tuple[int, ...]
Breadth: TypeAlias = Literal["few", "all"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")
BLOCK = 16
NEAR = 1e-3
"""Logits closer to the best than this are as good as it."""
LONGEST = 24
"""Tokens of most references; a shorter one is its beginning."""
CHATS = ("Why is the sky blue?", "Name three fruits.", "Write a haiku about rain.", "What is 12 times 12?", "Hello!")
PROSE = (1, 2, 15, 16, 17, 31, 32, 33, 100, 129, 400, 700)
CODE = (3, 8, 18, 47, 48, 49, 64, 200, 256, 333, 512)
RANDOM = (1, 4, 16, 17, 30, 63, 65, 80, 112, 128, 160, 250)
FEW = (0, 7, 13, 18, 24, 28, 30)
"""Positions in the whole list: some of each kind, of 1 to 200 tokens."""


class Reference(NamedTuple):
    """A greedy continuation."""

    tokens: Ids
    near: tuple[frozenset[int], ...]
    """The tokens that are as good as the one taken, itself included."""

    def first(self, count: int) -> Reference:
        return Reference(self.tokens[:count], self.near[:count])


class Beam(NamedTuple):
    tokens: Ids
    score: float


class HuggingFace:
    """What Transformers says. Greedy continuations are remembered: the scenarios ask for the same ones."""

    def __init__(self, directory: Path, eos: frozenset[int]) -> None:
        model: object = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        assert isinstance(model, LlamaForCausalLM)
        self._model = model
        self._eos = eos
        self._known: dict[tuple[Ids, int], Reference] = {}

    def greedy(self, prompt: Ids, count: int, *, most: int = LONGEST) -> Reference:
        """:param most: how many tokens anybody will ask for."""
        key = prompt, most
        if key not in self._known:
            self._known[key] = self._greedy(prompt, most)
        return self._known[key].first(count)

    def _greedy(self, prompt: Ids, count: int) -> Reference:
        found = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]  # as Transformers has it
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=sorted(self._eos),
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
        near = (torch.nonzero(logits[0] > logits[0].max() - NEAR).ravel().tolist() for logits in found.logits)
        return Reference(tuple(found.sequences[0].tolist()[len(prompt) :]), tuple(map(frozenset, near)))

    def beams(self, prompt: Ids, params: SamplingParams) -> list[Beam]:
        ends = self._eos.union(params.stop_token_ids)
        found = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]  # as Transformers has it
                do_sample=False,
                max_new_tokens=params.max_tokens,
                num_beams=params.beam_width,
                num_return_sequences=params.n,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                eos_token_id=sorted(ends),
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            ),
        )
        texts = (_to_end(row[len(prompt) :], ends) for row in found.sequences.tolist())
        return [Beam(*pair) for pair in zip(texts, found.sequences_scores.tolist(), strict=True)]


class Demo:
    """The demo model, loaded once for all engines, and its reference."""

    def __init__(self) -> None:
        """:raises ModelError: when it is not installed."""
        directory = converted(demo_model_path(), torch.float32, default_cache_dir(), lambda _phase, _share: None)
        self.checkpoint: Checkpoint = load_checkpoint(
            directory, dtype=torch.float32, device=CPU, report=lambda _phase, _share: None
        )
        self.huggingface = HuggingFace(directory, self.checkpoint.eos_token_ids)
        self._prompts = _prompts(self.checkpoint)

    def engine(self, **settings: object) -> AsyncEngine:
        """An engine with a cache of its own, full of NaN at first, on the shared weights."""
        return self.configured(config(**settings))

    def configured(self, settings: EngineConfig, *, restore: Path | None = None) -> AsyncEngine:
        """The same, also in half precision: then on a copy of the weights."""
        dtype = DTYPES[settings.dtype]
        model = self.checkpoint.model
        if dtype != torch.float32:
            model = copy.deepcopy(model)
            torch.nn.Module.to(model, dtype)
        runner = TransformersRunner(
            model,
            name="smollm2",
            fingerprint=self.checkpoint.fingerprint,
            identity=self.checkpoint.identity,
            eos_token_ids=self.checkpoint.eos_token_ids,
            vocab_limit=self.checkpoint.vocab_limit,
            device=CPU,
            dtype=dtype,
            poison=True,
        )
        return AsyncEngine(runner=runner, codec=self.checkpoint.codec, config=settings, restore=restore)

    def prompts(self, breadth: Breadth) -> list[Ids]:
        return self._prompts if breadth == "all" else [self._prompts[i] for i in FEW]

    def greedy(self, prompts: Sequence[Ids], count: int, *, most: int = LONGEST) -> list[Reference]:
        return [self.huggingface.greedy(prompt, count, most=most) for prompt in prompts]


def config(**settings: object) -> EngineConfig:
    usual: dict[str, object] = {"num_blocks": 512, "block_size": BLOCK, "check_every_step": True}
    return EngineConfig(**{**usual, **settings})  # type: ignore[arg-type]  # the constructor checks the values


def greedy(count: int, **others: object) -> SamplingParams:
    return SamplingParams.from_mapping({"max_tokens": count, "temperature": 0.0, **others})


def crowd(demo: Demo, breadth: Breadth) -> tuple[list[Ids], dict[str, object]]:
    """Short prompts, and a pool that admits more of them than have room for ``LONGEST`` more tokens each."""
    longest, blocks = (16, 7) if breadth == "few" else (119, 22)
    prompts = [prompt for prompt in demo.prompts(breadth) if len(prompt) <= longest]
    return prompts, {"num_blocks": blocks, "admission_reserve": 0.0}


def count_ties(found: Sequence[Sequence[int]], references: Sequence[Reference]) -> int:
    """How many texts part from their reference at a tie. Any other difference fails."""
    ties = 0
    for tokens, (expected, near) in zip(found, references, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
        if at is None:
            assert tuple(tokens) == expected
        else:
            assert tokens[at] in near[at], f"token {at}: {tokens} where {expected} is right"
            ties += 1
    return ties


def assert_equal(outputs: Sequence[RequestOutput], references: Sequence[Reference]) -> None:
    ties = count_ties([output.token_ids for output in outputs], references)
    assert ties <= max(1, len(references) // 20), f"{ties} ties in {len(references)} texts are too many"


async def together(
    engine: AsyncEngine, prompts: Sequence[Ids], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    found = await asyncio.gather(*(engine.complete(*request) for request in zip(prompts, each, strict=True)))
    return [output for (output,) in found]


async def alone(
    engine: AsyncEngine, prompts: Sequence[Ids], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    found = [await engine.complete(*request) for request in zip(prompts, each, strict=True)]
    return [output for (output,) in found]


def _to_end(tokens: Sequence[int], ends: frozenset[int]) -> Ids:
    at = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:at])


def _prompts(checkpoint: Checkpoint) -> list[Ids]:
    """40 of them: questions in the chat template, prose, code, random ids."""
    codec = checkpoint.codec
    assert codec is not None
    vocab = checkpoint.model.config.get_text_config().vocab_size
    licence = codec.encode((Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8"))
    code = codec.encode(inspect.getsource(heapq))
    rng = np.random.default_rng(0)
    chats = [codec.encode_chat(Chat([{"role": "user", "content": question}])) for question in CHATS]
    prose = [licence[i * 37 : i * 37 + length] for i, length in enumerate(PROSE)]
    sources = [code[i * 53 : i * 53 + length] for i, length in enumerate(CODE)]
    noise = [rng.integers(17, vocab, length).tolist() for length in RANDOM]
    return [tuple(prompt) for prompt in (*chats, *prose, *sources, *noise)]
