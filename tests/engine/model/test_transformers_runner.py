"""Real families with tiny random weights: the paged runner against the same model's own eager attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo.engine.model import transformers_runner
from octavo.engine.model.attention.forward_context import ATTENTION_NAME
from octavo.engine.model.attention.kv_tensors import LayerGeometry
from octavo.engine.model.runner import (
    Int32Array,
    Int64Array,
    PromptScore,
    Row,
    RowOutput,
    RowSampling,
    SampledToken,
    StepInput,
)
from octavo.engine.model.transformers_runner import TransformersRunner
from octavo.engine.request import SamplingParams
from octavo.errors import DeviceOutOfMemory, ModelError, UnsupportedModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCAB = 97
CPU = torch.device("cpu")
NO_COPIES = np.zeros((0, 2), dtype=np.int32)
TINY: dict[str, object] = {
    "vocab_size": VOCAB,
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
}
GEMMA: dict[str, object] = {"sliding_window": 6, "head_dim": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 12}
MOE: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
ROPE_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "gpt_oss": {**MOE, "head_dim": 12, "rope_parameters": ROPE_GPT_OSS},
    "stablelm": {"num_key_value_heads": 4, "partial_rotary_factor": 1.0},
    "nemotron": {},
    "mixtral": MOE,
    "cohere2": {"sliding_window": 6, "head_dim": 12, "num_hidden_layers": 4, "logit_scale": 1.0},
    "glm4": {"head_dim": 12},
    "starcoder2": {"sliding_window": 6},
    "gpt2": {},
    "deepseek_v3": {
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
    },
}


class ShowingSampler:
    """Greedy, and shows all logits it was given."""

    def __init__(self, *, vocab_limit: int | None, ops: object = None) -> None:
        self.shown: list[Tensor] = []

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[RowOutput]:
        return [RowOutput(sampled=(SampledToken(int(row.argmax()), 0.0),)) for row in logits]

    def prompt_scores(self, logits: Tensor, targets: Int32Array, top: int) -> tuple[PromptScore, ...]:
        self.shown.append(logits.clone())
        return tuple(PromptScore(int(target), 0.0) for target in targets)


class Driver:
    """What the engine would do: keeps token lists and block tables of sequences, and packs them into steps."""

    def __init__(
        self, model: PreTrainedModel | TransformersRunner, *, num_blocks: int = 64, block_size: int = 4
    ) -> None:
        self.runner = model if isinstance(model, TransformersRunner) else make_runner(model)
        self.runner.allocate(num_blocks, block_size)
        self.block_size = block_size
        self.free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.tokens: list[list[int]] = []
        self.tables: list[list[int]] = []

    def add(self, tokens: Sequence[int]) -> int:
        self.tokens.append(list(tokens))
        self.tables.append([])
        return len(self.tokens) - 1

    def step(self, parts: Sequence[tuple[int, int, int]], copies: Int32Array = NO_COPIES) -> list[Tensor]:
        """Compute (sequence, first position, count) and give the logits of every position of each part."""
        packed = [self.row(sequence, first, count) for sequence, first, count in parts]
        rows = self.packed_rows([row for row, _, _, _ in packed])
        step = StepInput(
            tokens=np.concatenate([tokens for _, tokens, _, _ in packed]),
            positions=np.concatenate([positions for _, _, positions, _ in packed]),
            slots=np.concatenate([slots for _, _, _, slots in packed]),
            rows=rows,
            copies=copies,
        )
        sampler = self.runner._sampler
        assert isinstance(sampler, ShowingSampler)
        sampler.shown.clear()
        self.last = self.runner.execute(step)
        return list(sampler.shown)

    def row(self, sequence: int, first: int, count: int) -> tuple[Row, Int32Array, Int32Array, Int64Array]:
        context = first + count
        table = self.tables[sequence]
        while len(table) * self.block_size < context:
            table.append(self.free.pop())
        positions = np.arange(first, context, dtype=np.int32)
        tokens = np.array(self.tokens[sequence][first:context], dtype=np.int32)
        blocks = np.array(table, dtype=np.int32)
        slots = blocks[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        return (
            Row(0, count, context, blocks[: -(-context // self.block_size)], greedy(), tokens),
            tokens,
            positions,
            slots,
        )

    def packed_rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        starts = np.cumsum([0, *(row.length for row in rows)])
        return tuple(row._replace(start=int(start)) for row, start in zip(rows, starts, strict=False))


def greedy() -> RowSampling:
    return RowSampling(SamplingParams(temperature=0.0), (0,), np.zeros(0, dtype=np.int32), 0)


def make_runner(
    model: PreTrainedModel, *, dtype: torch.dtype = torch.float32, vocab_limit: int | None = None
) -> TransformersRunner:
    return TransformersRunner(
        model,
        name="tiny",
        fingerprint="f",
        identity={"weights": "w"},
        eos_token_ids=frozenset({2}),
        vocab_limit=vocab_limit,
        device=CPU,
        dtype=dtype,
        poison=True,
    )


def build(
    family: str, extra: Mapping[str, object] | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **(extra or {})})
    model: object = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.train(mode=False)
    return model


def eager_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """What the model says by itself; call it before a runner takes the model over."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    return logits


def eager_greedy(model: PreTrainedModel, tokens: Sequence[int], count: int) -> list[int]:
    out = list(tokens)
    for _ in range(count):
        out.append(int(eager_logits(model, out)[-1].argmax()))
    return out[len(tokens) :]


def prompt(length: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, length)]


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the size of the logits, which these weights make large."""
    assert (got - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.fixture(autouse=True)
def showing_sampler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real_sampler" not in request.node.name:
        monkeypatch.setattr(transformers_runner, "Sampler", ShowingSampler)


MIXED_STEPS = (
    ((0, 0, 7),),  # a chunk of one prompt
    ((0, 7, 9), (1, 0, 5)),  # the next chunk over existing context, beside a second prompt
    ((1, 5, 6), (0, 16, 1)),  # a chunk beside a single token
    ((0, 17, 12), (1, 11, 1)),
    ((0, 29, 1), (1, 12, 1)),  # single tokens of different contexts
    ((1, 13, 9), (0, 30, 9)),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_steps_equal_the_model_itself_and_so_does_greedy_decoding(family: str) -> None:
    model = build(family, FAMILIES[family])
    prompts = [prompt(39), prompt(22, seed=2)]
    expected = [eager_logits(model, tokens) for tokens in prompts]
    continued = [eager_greedy(model, tokens, 4) for tokens in prompts]
    driver = Driver(model)
    for tokens in prompts:
        driver.add(tokens)
    for parts in MIXED_STEPS:
        for (sequence, first, count), logits in zip(parts, driver.step(parts), strict=True):
            assert_equal(logits, expected[sequence][first : first + count])
    for _ in range(4):
        order = (1, 0)
        heads = [(s, len(driver.tokens[s]) - 1, 1) for s in order]
        driver.step(heads)
        for sequence, output in zip(order, driver.last.rows, strict=True):
            driver.tokens[sequence].append(output.sampled[0].token_id)
    assert [driver.tokens[s][len(prompts[s]) :] for s in (0, 1)] == continued


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("falcon", {"alibi": True, "new_decoder_architecture": False}, "FalconForCausalLM.*attention interface"),
        ("bloom", {}, "BloomForCausalLM.*attention interface"),
        ("mamba", {}, "MambaForCausalLM"),
        ("recurrent_gemma", {}, "RecurrentGemmaForCausalLM.*linear_attention"),
        ("falcon_h1", {}, "FalconH1ForCausalLM.*hybrid"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM.*conv"),
        ("llama4_text", {}, "Llama4ForCausalLM.*chunked_attention"),
    ],
)
def test_families_that_cannot_live_on_a_paged_cache_are_refused_by_name(
    family: str, extra: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        make_runner(build(family, extra))


def test_a_layer_that_is_not_called_once_is_refused() -> None:
    model = build("llama")
    vars(model.get_submodule("model.layers.1.self_attn"))["layer_idx"] = 0
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*\[0, 0\] where \[0, 1\]"):
        make_runner(model)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = build("llama")
    vars(model.get_submodule("model.layers.1.self_attn"))["is_causal"] = False
    with pytest.raises(UnsupportedModel, match="not causal in layer 1"):
        make_runner(model)


def test_a_window_that_is_not_passed_on_is_refused() -> None:
    model = build("mistral", {"sliding_window": None})
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModel, match="layer 1 has a sliding window"):
        make_runner(model)


def test_a_model_that_mixes_tokens_beside_attention_is_refused() -> None:
    model = build("llama")
    mix = model.get_submodule("model.layers.0.mlp")
    mix.register_forward_hook(lambda _module, _args, output: output + output.cumsum(dim=1))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*state beyond K and V"):
        make_runner(model)


def test_a_model_that_needs_more_than_tokens_and_positions_is_refused() -> None:
    model = build("llama")

    def need(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> None:
        if kwargs["cache"] is None:
            raise KeyError("cache")

    model.get_submodule("model.layers.0").register_forward_pre_hook(need, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*does not run.*cache"):
        make_runner(model)


def test_a_model_whose_own_attention_says_something_else_is_refused() -> None:
    model = build("llama")

    def skew(module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        return output if model.config._attn_implementation == ATTENTION_NAME else output.flip(-1)

    model.get_submodule("model.layers.0.self_attn.v_proj").register_forward_hook(skew)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*differ"):
        make_runner(model)


@pytest.mark.parametrize("chunk", range(1, 24))
def test_a_sliding_window_holds_at_every_chunk_size(chunk: int) -> None:
    model = build("mistral", {"sliding_window": 5})
    tokens = prompt(23)
    expected = eager_logits(model, tokens)
    driver = Driver(model, block_size=3)
    driver.add(tokens)
    for first in range(0, 23, chunk):
        count = min(chunk, 23 - first)
        assert_equal(driver.step([(0, first, count)])[0], expected[first : first + count])


ROPES: dict[str, dict[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "old key": {"type": "linear", "factor": 2.0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [8, 16, 64])
@pytest.mark.parametrize("rope", ROPES)
def test_scaled_positions_hold_beyond_the_original_length(rope: str, length: int) -> None:
    model = build("llama", {"rope_parameters": {"rope_theta": 500.0, **ROPES[rope]}, "max_position_embeddings": 64})
    plain = eager_logits(
        build("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}), prompt(length)
    )
    expected = eager_logits(model, prompt(length))
    assert (plain - expected).abs().max() > 1e-3, "the scaling must matter for this to test anything"
    driver = Driver(model)
    driver.add(prompt(length))
    half = length // 2
    assert_equal(driver.step([(0, 0, half)])[0], expected[:half])
    assert_equal(driver.step([(0, half, length - half)])[0], expected[half:])


LENGTH_DEPENDENT: dict[str, tuple[str, dict[str, object]]] = {
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
            "max_position_embeddings": 16,
        },
    ),
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0] * 6,
                "long_factor": [4.0] * 6,
                "original_max_position_embeddings": 16,
            },
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_positions_that_depend_on_the_batch_end_the_context_where_they_begin_to(rope: str) -> None:
    model = build(*LENGTH_DEPENDENT[rope])
    expected = eager_logits(model, prompt(16))
    driver = Driver(model)
    driver.add(prompt(20))
    assert driver.runner.info.max_context == 16
    assert_equal(driver.step([(0, 0, 9)])[0], expected[:9])
    assert_equal(driver.step([(0, 9, 7)])[0], expected[9:])
    with pytest.raises(ModelError, match="position is out of range"):
        driver.step([(0, 16, 1)])


def test_a_fork_copies_the_shared_tail_before_either_side_writes() -> None:
    model = build("llama")
    shared = prompt(6)
    left, right = [*shared, 11, 12], [*shared, 21, 22]
    expected = [eager_logits(model, tokens) for tokens in (left, right)]
    driver = Driver(model)
    driver.add(left)
    driver.add(right)
    driver.step([(0, 0, 6)])
    tail = driver.free.pop()
    driver.tables[1] = [driver.tables[0][0], tail]
    copies = np.array([(driver.tables[0][1], tail)], dtype=np.int32)
    both = driver.step([(0, 6, 1), (1, 6, 1)], copies)
    both += driver.step([(1, 7, 1), (0, 7, 1)])
    for got, want in zip(both, (expected[0][6], expected[1][6], expected[1][7], expected[0][7]), strict=True):
        assert_equal(got[0], want)


def test_copies_in_a_cycle_move_whole_sequences() -> None:
    model = build("llama")
    prompts = [prompt(5, seed=s) for s in range(3)]
    expected = [eager_logits(model, tokens) for tokens in prompts]
    driver = Driver(model, num_blocks=6)
    for tokens in prompts:
        driver.add(tokens)
    driver.step([(s, 0, 4) for s in range(3)])
    a, b, c = (table[0] for table in driver.tables)
    driver.tables = [[b], [c], [a]]
    copies = np.array([(a, b), (b, c), (c, a)], dtype=np.int32)
    for logits, want in zip(driver.step([(s, 4, 1) for s in range(3)], copies), expected, strict=True):
        assert_equal(logits[0], want[4])


def test_a_step_of_copies_alone_moves_them() -> None:
    driver = Driver(build("llama"))
    driver.add(prompt(4))
    driver.step([(0, 0, 4)])
    source, target = driver.tables[0][0], driver.free[-1]
    empty = np.zeros(0, dtype=np.int32)
    copies = np.array([(source, target)], dtype=np.int32)
    assert driver.runner.execute(StepInput(empty, empty, empty.astype(np.int64), (), copies)).rows == ()
    kv = driver.runner._kv
    assert kv is not None
    assert torch.equal(kv.keys(1)[target], kv.keys(1)[source])
    assert kv.keys(1)[target].isfinite().all()


def head_inputs(model: PreTrainedModel) -> list[int]:
    """How many positions the lm_head saw in each call from now on."""
    seen: list[int] = []
    model.get_submodule("lm_head").register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape[1]))
    return seen


def test_the_head_runs_only_where_logits_are_wanted() -> None:
    model = build("llama")
    driver = Driver(model)
    seen = head_inputs(model)
    for text in (prompt(20), prompt(9)):
        driver.add(text)
    chunk, tokens, positions, slots = driver.row(0, 0, 20)
    step = StepInput(tokens, positions, slots, (chunk._replace(sampling=None, prompt_targets=None),), NO_COPIES)
    assert driver.runner.execute(step).rows == (RowOutput(),)
    assert (
        driver.runner.execute(StepInput(tokens, positions, slots, (chunk._replace(prompt_targets=None),), NO_COPIES))
        .rows[0]
        .sampled
    )
    driver.step([(1, 0, 9)])
    assert seen == [0, 1, 1 + 9]


def test_bfloat16_runs_close_to_the_model_itself() -> None:
    model = build("llama", dtype=torch.bfloat16)
    tokens = prompt(24)
    expected = eager_logits(model, tokens)
    runner = make_runner(model, dtype=torch.bfloat16)
    driver = Driver(runner)
    driver.add(tokens)
    got = torch.cat([driver.step([(0, 0, 15)])[0], driver.step([(0, 15, 9)])[0]])
    assert got.dtype == torch.float32
    assert (got.log_softmax(-1) - expected.log_softmax(-1)).abs().mean() < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: step.tokens.__setitem__(0, VOCAB), "token is out of range"),
        (lambda step: step.tokens.__setitem__(0, -1), "token is out of range"),
        (lambda step: step.positions.__setitem__(0, 256), "position is out of range"),
        (lambda step: step.slots.__setitem__(0, 64 * 4), "slot is out of range"),
        (lambda step: step.copies.__setitem__((0, 1), 64), "copied block is out of range"),
        (lambda step: step.rows[0].blocks.__setitem__(0, 64), "block is out of range"),
    ],
)
def test_a_step_out_of_range_is_refused_unchanged_and_the_runner_goes_on(
    change: Callable[[StepInput], None], message: str
) -> None:
    model = build("llama")
    expected = eager_logits(model, prompt(6))
    driver = Driver(model)
    driver.add(prompt(6))
    assert_equal(driver.step([(0, 0, 3)])[0], expected[:3])
    kv = driver.runner._kv
    assert kv is not None
    before = kv.keys(0).clone()
    row, tokens, positions, slots = driver.row(0, 3, 1)
    bad = StepInput(tokens, positions, slots, (row,), np.array([(0, 1)], dtype=np.int32))
    change(bad)
    with pytest.raises(ModelError, match=message):
        driver.runner.execute(bad)
    assert torch.equal(kv.keys(0).nan_to_num(), before.nan_to_num())
    assert_equal(driver.step([(0, 3, 3)])[0], expected[3:])


def test_info_and_the_life_of_the_cache() -> None:
    runner = make_runner(build("llama"))
    info = runner.info
    assert (info.name, info.fingerprint, info.vocab_size, info.max_context) == ("tiny", "f", VOCAB, 256)
    assert (info.eos_token_ids, info.bytes_per_block) == (frozenset({2}), 0)
    nothing = StepInput(*(np.zeros(0, dtype=np.int32),) * 2, np.zeros(0, dtype=np.int64), (), NO_COPIES)
    with pytest.raises(ModelError, match="allocate was not called"):
        runner.execute(nothing)
    runner.allocate(4, 8)
    assert runner.info.bytes_per_block == 2 * 2 * 8 * 2 * 12 * 4
    with pytest.raises(ModelError, match="already"):
        runner.allocate(4, 8)
    runner.close()
    runner.close()
    with pytest.raises(ModelError, match="closed"):
        runner.execute(nothing)


def test_a_cache_too_large_is_refused_and_a_smaller_one_still_works() -> None:
    runner = make_runner(build("llama"))
    with pytest.raises(ModelError, match="GiB"):
        runner.allocate(10**11, 16)
    runner.allocate(4, 16)


def test_the_model_cannot_be_called_past_its_runner() -> None:
    model = build("llama")
    make_runner(model)
    with pytest.raises(ModelError, match="runner"):
        eager_logits(model, [3, 4])


def test_timings_come_from_the_clock_that_was_given() -> None:
    ticks = iter([10.0, 13.0, 14.0])
    runner = TransformersRunner(
        build("llama"),
        name="tiny",
        fingerprint="f",
        identity={"weights": "w"},
        eos_token_ids=frozenset(),
        vocab_limit=None,
        device=CPU,
        dtype=torch.float32,
        clock=lambda: next(ticks),
    )
    driver = Driver(runner)
    driver.add(prompt(3))
    driver.step([(0, 0, 3)])
    assert driver.last.timings == {"forward": 3.0, "sample": 1.0}


def test_real_sampler_gives_logprobs_of_each_prompt_token_and_of_the_drawn_one() -> None:
    model = build("llama")
    tokens = prompt(8)
    expected = eager_logits(model, tokens).log_softmax(-1)
    runner = make_runner(model)
    runner.allocate(8, 4)
    order = np.arange(8, dtype=np.int32)
    ids = np.array(tokens, dtype=np.int32)
    other = Row(0, 3, 3, order[6:7], None)
    row = Row(3, 8, 8, order[:2], RowSampling(SamplingParams(temperature=0.0), (1,), ids, 8), ids[1:])
    step = StepInput(
        np.concatenate((ids[:3], ids)), np.concatenate((order[:3], order)), np.r_[24:27, 0:8], (other, row), NO_COPIES
    )
    first, second = runner.execute(step).rows
    assert first == RowOutput()
    scores = [score.logprob for score in second.prompt_scores]
    np.testing.assert_allclose(scores, [float(expected[i, tokens[i + 1]]) for i in range(7)], atol=1e-4)
    assert second.sampled[0].token_id == int(expected[-1].argmax())
    assert abs(second.sampled[0].logprob - float(expected[-1].max())) < 1e-4


def test_real_sampler_never_draws_an_id_beyond_the_tokenizer() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_parameter("lm_head.weight")[90] *= 100
    loud = eager_logits(model, [5])[-1]
    free, bound = (make_runner(model, vocab_limit=limit) for limit in (None, 80))
    drawn = []
    for runner in (free, bound):
        runner.allocate(2, 4)
        row = Row(0, 1, 1, np.zeros(1, dtype=np.int32), greedy())
        one = np.array([5], dtype=np.int32)
        drawn.append(runner.execute(StepInput(one, one * 0, np.zeros(1, dtype=np.int64), (row,), NO_COPIES)))
    ids = [out.rows[0].sampled[0].token_id for out in drawn]
    assert ids == [int(loud.argmax()), int(loud[:80].argmax())]
    assert ids[0] >= 80 or ids[0] == ids[1]


def payloads(driver: Driver, sequence: int, count: int) -> list[memoryview]:
    """The first ``count`` blocks of a sequence in host memory, as records have them: behind headers."""
    size = driver.runner.info.bytes_per_block
    rows = np.zeros((count, size + 64), dtype=np.uint8)[:, 64:]
    driver.runner.export_blocks(np.array(driver.tables[sequence][:count], dtype=np.int32), rows)
    return [memoryview(row) for row in rows]


def adopt(driver: Driver, tokens: Sequence[int], blocks: Sequence[memoryview]) -> int:
    """A sequence whose first blocks come from elsewhere."""
    sequence = driver.add(tokens)
    driver.tables[sequence] = [driver.free.pop() for _ in blocks]
    driver.runner.import_blocks(np.array(driver.tables[sequence], dtype=np.int32), blocks)
    return sequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt_oss"])
def test_attention_over_imported_blocks_gives_the_very_same_logits(family: str, dtype: torch.dtype) -> None:
    driver = Driver(make_runner(build(family, FAMILIES[family], dtype), dtype=dtype))
    tokens = prompt(30)
    driver.add(tokens)
    driver.step([(0, 0, 20)])
    blocks = payloads(driver, 0, 5)
    expected = driver.step([(0, 20, 10)])[0]
    assert torch.equal(driver.step([(adopt(driver, tokens, blocks), 20, 10)])[0], expected)
    assert torch.equal(driver.step([(0, 20, 10)])[0], expected), "the export has changed nothing"


def test_logits_follow_from_each_imported_block() -> None:
    driver = Driver(make_runner(build("llama")))
    tokens = prompt(24)
    driver.add(tokens)
    driver.step([(0, 0, 20)])
    blocks = payloads(driver, 0, 5)
    right = driver.step([(0, 20, 4)])[0]
    for wrong in range(5):
        swapped = [*blocks[:wrong], blocks[(wrong + 1) % 5], *blocks[wrong + 1 :]]
        assert not torch.equal(driver.step([(adopt(driver, tokens, swapped), 20, 4)])[0], right)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_greedy_decoding_goes_on_in_a_fresh_runner_as_if_nothing_had_happened(family: str) -> None:
    model = build(family, FAMILIES[family])
    tokens = prompt(21)
    expected = eager_greedy(model, tokens, 12)
    first = Driver(model)
    first.add(tokens)
    first.step([(0, 0, 21)])
    blocks = payloads(first, 0, 5)
    first.runner.close()
    second = Driver(make_runner(build(family, FAMILIES[family])))
    second.free.reverse()
    sequence = adopt(second, tokens, blocks)
    for _ in range(12):
        done = len(second.tokens[sequence])
        start = 20 if done == 21 else done - 1
        second.tokens[sequence].append(int(second.step([(sequence, start, done - start)])[0][-1].argmax()))
    assert second.tokens[sequence][21:] == expected
    assert set(first.tables[0][:5]) != set(second.tables[sequence][:5])


def test_blocks_move_only_while_there_is_a_cache() -> None:
    runner = make_runner(build("llama"))
    none, one = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
    for close in (False, True):
        if close:
            runner.allocate(2, 4)
            runner.close()
        for blocks in (none, one):
            with pytest.raises(ModelError, match="no cache"):
                runner.export_blocks(blocks, np.zeros((len(blocks), 0), dtype=np.uint8))
            with pytest.raises(ModelError, match="no cache"):
                runner.import_blocks(blocks, [memoryview(b"")] * len(blocks))


def test_a_transfer_without_memory_is_named_and_the_runner_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_runner(build("llama")))
    driver.add(prompt(9))
    before = driver.step([(0, 0, 8)])[0]
    blocks = payloads(driver, 0, 2)
    ids = np.array([5, 6], dtype=np.int32)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        for direction in ("read", "write"):
            patch.setattr(f"octavo.engine.model.attention.block_transfer.HostTransfer.{direction}", exhausted)
        with pytest.raises(DeviceOutOfMemory, match="exporting 2 blocks"):
            payloads(driver, 0, 2)
        with pytest.raises(DeviceOutOfMemory, match="importing 2 blocks"):
            driver.runner.import_blocks(ids, blocks)
    assert payloads(driver, 0, 2) == blocks
    assert torch.equal(driver.step([(0, 0, 8)])[0], before)


def test_the_identity_has_what_the_checkpoint_says_and_what_the_runner_knows() -> None:
    plain = {"weights": "w", "dtype": "float32", "geometry": "2 layers x 2 kv heads x (K 12 + V 12)"}
    assert make_runner(build("llama")).info.identity == plain
    assert make_runner(build("llama", dtype=torch.float16), dtype=torch.float16).info.identity["dtype"] == "float16"
    deep = make_runner(build("deepseek_v3", FAMILIES["deepseek_v3"]))
    assert deep.info.identity["geometry"] == "2 layers x 4 kv heads x (K 16 + V 12)"


def test_the_geometry_tells_layers_apart_that_only_differ_in_order() -> None:
    wide, narrow = LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 4)
    lists = ((wide, narrow, narrow), (narrow, wide, narrow), (narrow, narrow, wide), (wide, wide, narrow))
    assert len({transformers_runner.describe_geometry(layers) for layers in lists}) == 4
