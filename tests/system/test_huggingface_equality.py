"""The demo model in the whole engine against ``generate`` of Transformers with the same weights, token for token.

In float32 the logits of one position differ by about 1e-5 between forward passes of different shapes. Where the
reference has two tokens about that close at the top, either is right; such a tie ends the comparison of that text, and
few are allowed.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from octavo import AsyncEngine, EngineConfig, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.model.checkpoint import Checkpoint, load_checkpoint
from octavo.engine.model.gguf_file import converted
from octavo.engine.model.loader import default_cache_dir
from octavo.engine.model.sources import demo_model_path
from octavo.engine.model.transformers_runner import TransformersRunner
from octavo.errors import ModelError

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(1800),
]

Ids: TypeAlias = tuple[int, ...]
EarlyStopping: TypeAlias = bool | Literal["never"]
Breadth: TypeAlias = Literal["few", "all"]
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
FEW = (0, 7, 13, 18, 20, 24, 28, 30)
"""Positions in the whole list: some of each kind, of 1 to 200 tokens."""
breadths = pytest.mark.parametrize("breadth", ["few", pytest.param("all", marks=pytest.mark.slow)])


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
        self._known: dict[Ids, Reference] = {}

    def greedy(self, prompt: Ids, count: int, *, most: int = LONGEST) -> Reference:
        """:param most: how many tokens anybody will ask for."""
        if prompt not in self._known:
            self._known[prompt] = self._greedy(prompt, most)
        return self._known[prompt].first(count)

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
    """The demo model, loaded once for all engines of this file, and its reference."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint: Checkpoint = load_checkpoint(
            directory, dtype=torch.float32, device=CPU, report=lambda _phase, _share: None
        )
        self.huggingface = HuggingFace(directory, self.checkpoint.eos_token_ids)
        self._prompts = _prompts(self.checkpoint)

    def engine(self, **settings: object) -> AsyncEngine:
        """An engine with a cache of its own, full of NaN at first, on the shared weights."""
        runner = TransformersRunner(
            self.checkpoint.model,
            name="smollm2",
            fingerprint=self.checkpoint.fingerprint,
            identity=self.checkpoint.identity,
            eos_token_ids=self.checkpoint.eos_token_ids,
            vocab_limit=self.checkpoint.vocab_limit,
            device=CPU,
            dtype=torch.float32,
            poison=True,
        )
        return AsyncEngine(runner=runner, codec=self.checkpoint.codec, config=config(**settings))

    def prompts(self, breadth: Breadth) -> list[Ids]:
        return self._prompts if breadth == "all" else [self._prompts[i] for i in FEW]

    def greedy(self, prompts: Sequence[Ids], count: int, *, most: int = LONGEST) -> list[Reference]:
        return [self.huggingface.greedy(prompt, count, most=most) for prompt in prompts]


AtRest: TypeAlias = Callable[[AsyncEngine], None]


@pytest.fixture(scope="module")
def demo() -> Demo:
    try:
        file = demo_model_path()
    except ModelError as missing:
        pytest.skip(str(missing))
    return Demo(converted(file, torch.float32, default_cache_dir(), lambda _phase, _share: None))


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


@breadths
@pytest.mark.asyncio
async def test_cold_hit_longer_and_diverging(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts = demo.prompts(breadth)
    expected = demo.greedy(prompts, 16)
    some = [(p, e) for p, e in zip(prompts, expected, strict=True) if BLOCK < len(p) < 320][
        :: 1 if breadth == "all" else 3
    ]
    longer = [(*prompt, *reference.tokens, 11, 22, 33, 44, 55) for prompt, reference in some]
    parting = [(*prompt[: len(prompt) - BLOCK // 2 - 1], 66, 77, 88) for prompt, _ in some]
    async with AsyncEngine.open("smollm2", config(num_blocks=1024)) as engine:
        assert_equal(await together(engine, prompts, greedy(16)), expected)
        computed = engine.stats().prefill_tokens
        again = await together(engine, prompts, greedy(16))
        assert_equal(again, expected)
        assert engine.stats().prefill_tokens - computed <= sum(p - c for p, c in _prompt_and_cached(again))
        for prompt, output in zip(prompts, again, strict=True):
            kept = (len(prompt) + len(output.token_ids) - 1) // BLOCK * BLOCK
            assert output.cached_tokens == min(len(prompt) - 1, kept), f"a prompt of {len(prompt)} tokens"
        extended = await together(engine, longer, greedy(8))
        assert_equal(extended, demo.greedy(longer, 8, most=8))
        assert all(cached >= prompt - 5 - BLOCK for prompt, cached in _prompt_and_cached(extended))
        diverged = await together(engine, parting, greedy(8))
        assert_equal(diverged, demo.greedy(parting, 8, most=8))
        assert all(cached == prompt - 3 for prompt, cached in _prompt_and_cached(diverged))
        assert_at_rest(engine)


@breadths
@pytest.mark.parametrize(
    "chunk", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.asyncio
async def test_alone_without_sharing_in_chunks(
    demo: Demo, assert_at_rest: AtRest, breadth: Breadth, chunk: int | None
) -> None:
    prompts = demo.prompts(breadth)[:: 1 if breadth == "all" else 2]
    async with demo.engine(prefill_chunk=chunk, enable_prefix_caching=False) as engine:
        outputs = await alone(engine, prompts, greedy(16))
        assert_equal(outputs, demo.greedy(prompts, 16))
        assert engine.stats().cache.prefix_hits == 0
        assert_at_rest(engine)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"prefill_chunk": 64}, {"max_batch_tokens": 40}, {"max_running": 3}])
@pytest.mark.asyncio
async def test_in_batches_of_other_shapes(demo: Demo, assert_at_rest: AtRest, settings: dict[str, object]) -> None:
    prompts = demo.prompts("all")
    async with demo.engine(num_blocks=1024, **settings) as engine:
        assert_equal(await together(engine, prompts, greedy(16)), demo.greedy(prompts, 16))
        assert_at_rest(engine)


@breadths
@pytest.mark.parametrize("sharing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.asyncio
async def test_preempted_in_a_small_pool(demo: Demo, assert_at_rest: AtRest, breadth: Breadth, sharing: bool) -> None:
    prompts, tight = crowd(demo, breadth)
    async with demo.engine(**tight, enable_prefix_caching=sharing) as engine:
        assert_equal(await together(engine, prompts, greedy(LONGEST)), demo.greedy(prompts, LONGEST))
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


@breadths
@pytest.mark.asyncio
async def test_forks_and_parallel_samples(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts = [prompt for prompt in demo.prompts(breadth) if len(prompt) < 120][:: 1 if breadth == "all" else 3]
    parted = 0
    async with demo.engine() as engine:
        for prompt, reference in zip(prompts, demo.greedy(prompts, 16), strict=True):
            forked = await _forked(engine, prompt, greedy(16))
            samples = await engine.complete(prompt, greedy(16, n=3))
            assert [sample.index for sample in samples] == [0, 1, 2]
            lines = [output.token_ids for output in (*forked, *samples)]
            parted += count_ties(lines, [reference] * 7) > 0
        assert parted <= max(1, len(prompts) // 20)
        assert_at_rest(engine)


@pytest.mark.asyncio
async def test_a_chat_as_text(demo: Demo, assert_at_rest: AtRest) -> None:
    codec = demo.checkpoint.codec
    assert codec is not None
    messages = [{"role": "user", "content": "Name three fruits."}]
    prompt = tuple(codec.encode_chat(messages))
    expected = demo.huggingface.greedy(prompt, LONGEST)
    async with demo.engine() as engine:
        outputs = [output async for output in engine.generate(messages, greedy(LONGEST))]
        assert_at_rest(engine)
    last = outputs[-1]
    assert count_ties([last.token_ids], [expected]) == 0
    assert last.prompt_tokens == len(prompt)
    assert "".join(output.text_delta for output in outputs) == last.text == codec.decode(expected.tokens)
    ended = expected.tokens[-1] in demo.checkpoint.eos_token_ids
    assert last.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


BEAMS = [
    ("few", 2, False, 1.0),
    ("few", 4, True, 0.5),
    *(
        pytest.param("all", *values, marks=pytest.mark.slow)
        for values in itertools.product((2, 4), (False, True), (1.0, 0.5))
    ),
]


@pytest.mark.parametrize(("breadth", "width", "early", "penalty"), BEAMS)
@pytest.mark.asyncio
async def test_beams(
    demo: Demo, assert_at_rest: AtRest, breadth: Breadth, width: int, early: EarlyStopping, penalty: float
) -> None:
    """Commas and full stops end a beam, too: else none would end within so few tokens. The second round hits the cache,
    and the third has to be preempted."""
    codec = demo.checkpoint.codec
    assert codec is not None
    ends = sorted({codec.encode(text)[-1] for text in (",", ".")})
    chosen = (0, 1, 7, 13, 18, 20, 28, 36) if breadth == "all" else (0, 13)
    prompts = [demo.prompts("all")[i] for i in chosen]
    params = SamplingParams(
        max_tokens=8,
        beam_width=width,
        n=width,
        early_stopping=early,
        length_penalty=penalty,
        stop_token_ids=ends,
    )
    expected = [demo.huggingface.beams(prompt, params) for prompt in prompts]
    async with demo.engine() as engine:
        for _ in range(2):
            found = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
            for outputs, beams in zip(found, expected, strict=True):
                _assert_beams(outputs, beams, penalty)
        assert_at_rest(engine)
    needed = max(len(prompt) // BLOCK + width * 2 for prompt in prompts)
    spare = 2 if breadth == "all" else 1  # so that another one is admitted and both grow
    async with demo.engine(num_blocks=needed + spare, admission_reserve=0.0) as engine:
        found = await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts * 2))
        for outputs, beams in zip(found, expected * 2, strict=True):
            _assert_beams(outputs, beams, penalty)
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


@breadths
@pytest.mark.asyncio
async def test_seeded_draws_do_not_depend_on_company(demo: Demo, assert_at_rest: AtRest, breadth: Breadth) -> None:
    prompts, tight = crowd(demo, breadth)
    params = [_drawn(seed) for seed in range(len(prompts))]
    every = 1 if breadth == "all" else 2
    async with demo.engine(enable_prefix_caching=False) as engine:
        lonely = await alone(engine, prompts[::every], params[::every])
    async with demo.engine() as engine:
        for _ in range(1 if breadth == "few" else 2):
            social = await together(engine, prompts, params)
            assert_same_draws(social[::every], lonely)
        assert_at_rest(engine)
    async with demo.engine(**tight) as engine:
        assert_same_draws(await together(engine, prompts, params), social)
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


def assert_same_draws(outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    """Some hundred draws may hold one that fell between the sums of two almost equal distributions."""
    different = sum(a.token_ids != b.token_ids for a, b in zip(outputs, others, strict=True))
    assert different <= len(outputs) // 20


def _drawn(seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=LONGEST,
        ignore_eos=True,
        temperature=0.7 + 0.1 * (seed % 4),
        top_p=0.95,
        top_k=50 * (seed % 3),
        seed=seed,
    )


async def _forked(engine: AsyncEngine, prompt: Ids, params: SamplingParams) -> list[RequestOutput]:
    """A request, a fork of it before anything was computed, and two from the middle of its output."""
    source = await engine.generate(prompt, params).start()
    assert source.request_id is not None
    forks = [asyncio.ensure_future(_last(await engine.fork(source.request_id)))]
    last: RequestOutput | None = None
    async for output in source:
        last = output
        if len(forks) == 1 and len(output.token_ids) >= 5:
            forks += [asyncio.ensure_future(_last(await engine.fork(source.request_id))) for _ in range(2)]
    assert last is not None
    assert len(forks) == 3
    return [last, *await asyncio.gather(*forks)]


async def _last(outputs: Generation) -> RequestOutput:
    return [output async for output in outputs][-1]


def _assert_beams(outputs: Sequence[RequestOutput], expected: Sequence[Beam], penalty: float) -> None:
    scores = [output.cumulative_logprob / len(output.token_ids) ** penalty for output in outputs]
    assert [output.token_ids for output in outputs] == [beam.tokens for beam in expected]
    assert scores == pytest.approx([beam.score for beam in expected], abs=2e-4)


def _prompt_and_cached(outputs: Sequence[RequestOutput]) -> list[tuple[int, int]]:
    return [(output.prompt_tokens, output.cached_tokens) for output in outputs]


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
    chats = [codec.encode_chat([{"role": "user", "content": question}]) for question in CHATS]
    prose = [licence[i * 37 : i * 37 + length] for i, length in enumerate(PROSE)]
    sources = [code[i * 53 : i * 53 + length] for i, length in enumerate(CODE)]
    noise = [rng.integers(17, vocab, length).tolist() for length in RANDOM]
    return [tuple(prompt) for prompt in (*chats, *prose, *sources, *noise)]
