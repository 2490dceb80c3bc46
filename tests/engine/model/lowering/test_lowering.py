"""Whole decoders, lowered: equal to the model itself, or left alone with a reason."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.model import transformers_runner
from octavo.engine.model.attention import StepAttention
from octavo.engine.model.attention.kv_tensors import KVTensors
from octavo.engine.model.decoder import Decoder, ModuleDecoder, PackedTokens
from octavo.engine.model.lowering import Program, TorchOps, lower
from octavo.engine.model.lowering.linear import can_pack
from octavo.engine.model.lowering.modules import PackedLinear
from octavo.engine.model.probe import difference, probe, trial
from octavo.engine.model.runner import StepInput
from octavo.engine.model.transformers_runner import TransformersRunner
from octavo.tests.engine.model.test_transformers_runner import (
    FAMILIES,
    MIXED_STEPS,
    NO_COPIES,
    Driver,
    ShowingSampler,
    assert_equal,
    build,
    eager_greedy,
    eager_logits,
    prompt,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CPU = torch.device("cpu")
NEEDS_PACKING = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")
NO_ROPE = {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}
LOWERED: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "llama with scaled positions": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "mistral": ("mistral", FAMILIES["mistral"]),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", FAMILIES["qwen3"]),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", NO_ROPE),
    "granite without multipliers": ("granite", {}),
}
LEFT_ALONE: dict[str, tuple[str, Mapping[str, object]]] = {
    **{f: (f, FAMILIES[f]) for f in ("gemma2", "gpt2", "cohere2", "mixtral", "glm4", "gpt_oss", "olmo2")},
    **{
        f"granite with {name}": ("granite", {name: value})
        for name, value in {
            "residual_multiplier": 0.9,
            "embedding_multiplier": 1.1,
            "logits_scaling": 1.1,
        }.items()
    },
}


def growing(beta: float) -> dict[str, object]:
    """Settings of a family whose queries grow with their position, from one on that short texts never reach."""
    positions = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    return {"max_position_embeddings": 256, "rope_parameters": {**positions, "llama_4_scaling_beta": beta}}


SWITCHES = {"fused": (True, False), "packed": (False, True), "both": (True, True)}


@pytest.fixture(autouse=True)
def showing_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_runner, "Sampler", ShowingSampler)


def make_runner(model: PreTrainedModel, switch: str) -> TransformersRunner:
    fused, packed = SWITCHES[switch]
    return TransformersRunner(
        model,
        name="tiny",
        fingerprint="f",
        identity={},
        eos_token_ids=frozenset(),
        vocab_limit=None,
        device=CPU,
        dtype=torch.float32,
        poison=True,
        fused=fused,
        packed=packed,
    )


def made(model: PreTrainedModel, *, fused: bool = True, packed: bool = False) -> Decoder:
    return lower(model, probe(model), fused=fused, packed=packed)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("case", [*LOWERED, *LEFT_ALONE])
def test_mixed_steps_and_greedy_decoding_equal_the_model_itself(case: str, switch: str) -> None:
    model = build(*(LOWERED | LEFT_ALONE)[case])
    prompts = [prompt(39), prompt(22, seed=2)]
    expected = [eager_logits(model, tokens) for tokens in prompts]
    continued = [eager_greedy(model, tokens, 3) for tokens in prompts]
    driver = Driver(make_runner(model, switch))
    for tokens in prompts:
        driver.add(tokens)
    for parts in MIXED_STEPS:
        for (sequence, first, count), logits in zip(parts, driver.step(parts), strict=True):
            assert_equal(logits, expected[sequence][first : first + count])
    for _ in range(3):
        driver.step([(s, len(driver.tokens[s]) - 1, 1) for s in (1, 0)])
        for sequence, output in zip((1, 0), driver.last.rows, strict=True):
            driver.tokens[sequence].append(output.sampled[0].token_id)
    assert [driver.tokens[s][len(prompts[s]) :] for s in (0, 1)] == continued


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", LOWERED)
def test_families_that_are_recognised(case: str, dtype: torch.dtype) -> None:
    model = build(*LOWERED[case], dtype)
    layers = probe(model)
    with torch.inference_mode():
        expected = trial(ModuleDecoder(model), model, layers)
        program = lower(model, layers, fused=True, packed=can_pack(CPU, dtype))
        assert isinstance(program, Program)
        assert difference(trial(program, model, layers), expected) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_families_that_are_left_alone_and_why(case: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.model")
    model = build(*LEFT_ALONE[case], dtype)
    assert isinstance(made(model), ModuleDecoder)
    [line] = caplog.messages
    assert "model_not_fused" in line
    assert type(model).__name__ in line


def scaled_output(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(lambda _m, _args, out: out * 1.1)


def other_activation(model: PreTrainedModel) -> None:
    vars(model.get_submodule("model.layers.1.mlp"))["_modules"]["act_fn"] = nn.GELU()


def added_parameter(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0.mlp").register_parameter("extra", nn.Parameter(torch.ones(1)))


def adapted(model: PreTrainedModel) -> None:
    class Adapted(nn.Linear):
        """What an adapter or a quantised layer looks like."""

    layer = model.get_submodule("model.layers.0.self_attn.v_proj")
    layer.__class__ = Adapted


def wider_norm(model: PreTrainedModel) -> None:
    norm = model.get_submodule("model.layers.1.input_layernorm")
    norm.register_forward_hook(lambda _m, _args, out: out + 0.1)


def other_eps(model: PreTrainedModel) -> None:
    norm = model.get_submodule("model.norm")
    weight = norm.get_parameter("weight")
    norm.register_forward_hook(lambda _m, args, _out: TorchOps().rms_norm(args[0], weight, 2e-6))  # it says 1e-6


def unread_layer(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.1").register_forward_hook(lambda _m, args, _out: args[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled_output, "layer 1"),
        (other_activation, "layer 1"),
        (added_parameter, "mlp.extra"),
        (adapted, "Adapted"),
        (wider_norm, "root mean square norm"),
        (other_eps, "root mean square norm"),
        (unread_layer, "layer 1"),
    ],
)
def test_any_difference_leaves_the_model_alone(
    change: Callable[[PreTrainedModel], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.model")
    model = build("llama")
    change(model)
    own = trial(ModuleDecoder(model), model, layers := probe(model))
    decoder = lower(model, layers, fused=True, packed=True)
    with torch.inference_mode():
        assert difference(trial(decoder, model, layers), own) is None
    assert not isinstance(decoder, Program)
    assert reason in caplog.text


def test_with_both_switches_off_nothing_is_touched() -> None:
    model = build("llama")
    assert isinstance(made(model, fused=False), ModuleDecoder)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@NEEDS_PACKING
def test_without_a_program_the_modules_are_packed() -> None:
    model = build(*LEFT_ALONE["cohere2"])
    assert isinstance(made(model, packed=True), ModuleDecoder)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert any(isinstance(module, PackedLinear) for module in model.modules())


@NEEDS_PACKING
def test_a_family_that_reads_the_weights_of_its_linear_layers_gets_them_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "octavo.model")
    model = build("llama")
    model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(
        lambda mlp, _args: mlp.up_proj.weight.sum() and None
    )
    before = eager_logits(model, prompt(9))
    made(model, fused=False, packed=True)
    assert "model_not_packed" in caplog.text
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    model.set_attn_implementation("eager")
    assert torch.equal(eager_logits(model, prompt(9)), before)


@NEEDS_PACKING
@pytest.mark.parametrize("case", ["llama", "cohere2"])
def test_packed_weights_take_the_place_of_the_old_ones(case: str) -> None:
    model = build(*(LOWERED | LEFT_ALONE)[case])
    addresses = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    addresses -= {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    assert addresses
    decoder = made(model, packed=True)
    del model
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.layout == torch.strided]
    assert not addresses & {tensor.data_ptr() for tensor in tensors}
    assert decoder is not None


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_chunk_that_wants_no_logits_still_fills_the_cache(switch: str) -> None:
    model = build("llama")
    expected = eager_logits(model, prompt(12))
    driver = Driver(make_runner(model, switch))
    driver.add(prompt(12))
    row, tokens, positions, slots = driver.row(0, 0, 8)
    silent = row._replace(sampling=None, prompt_targets=None)
    outputs = driver.runner.execute(StepInput(tokens, positions, slots, (silent,), NO_COPIES)).rows
    assert outputs[0].sampled == ()
    assert_equal(driver.step([(0, 8, 4)])[0], expected[8:])


def test_logits_come_only_for_what_is_kept_in_its_order() -> None:
    model = build("llama")
    seen: list[int] = []

    class Noting(TorchOps):
        def silu_mul(self, gate_up: Tensor) -> Tensor:
            seen.append(len(gate_up))
            return super().silu_mul(gate_up)

    layers = probe(model)
    program = lower(model, layers, fused=True, packed=False, ops=Noting())
    with torch.inference_mode():
        everything = trial(program, model, layers)
        seen.clear()
        some = trial(Keeping(program), model, layers)
    assert_equal(some, torch.cat((everything[[1, 0]], everything[2:][[1, 0]])))
    assert seen[1::2] == [2, 2], "the last layer's MLP runs for what is kept only"


class Keeping:
    """A decoder that asks for the second token, then the first."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def logits(self, tokens: PackedTokens, kv: KVTensors, attention: StepAttention, keep: Tensor) -> Tensor:
        return self._decoder.logits(tokens, kv, attention, keep.new_tensor([1, 0]))


def test_a_factor_that_shows_late_is_seen() -> None:
    assert isinstance(made(build("ministral3", growing(0.1))), ModuleDecoder)
    assert isinstance(made(build("ministral3", growing(0.0))), Program)
