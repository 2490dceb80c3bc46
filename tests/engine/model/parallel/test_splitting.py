"""What can be split, by models that are built without memory."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from octavo.engine.model.attention.kv_tensors import LayerGeometry
from octavo.engine.model.parallel.splitting import distribution, require_split, whole_layers, whole_tensor
from octavo.errors import UnsupportedModel

TINY: dict[str, object] = {
    "vocab_size": 17,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def skeleton(family: str, **changes: object) -> PreTrainedModel:
    with torch.device("meta"):
        model: object = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **changes}))  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    return model


def config(**changes: object) -> PreTrainedConfig:
    made: object = AutoConfig.for_model("llama", **{**TINY, **changes})
    assert isinstance(made, PreTrainedConfig)
    return made


@pytest.mark.parametrize("ranks", [1, 3])
def test_heads_that_are_shared_out_evenly_will_do(ranks: int) -> None:
    require_split(skeleton("llama"), ranks)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_heads_that_are_not_are_refused_with_the_numbers_that_would_do(ranks: int) -> None:
    with pytest.raises(UnsupportedModel, match=rf"6 attention heads and 3 K/V heads.* {ranks} ranks.*can be 1, 3$"):
        require_split(skeleton("llama"), ranks)


def test_where_each_rank_has_all_heads_their_number_does_not_matter() -> None:
    require_split(skeleton("phi3"), 4)


def test_heads_count_whatever_the_attention_is_called() -> None:
    with pytest.raises(UnsupportedModel, match=r"6 attention heads and 6 K/V heads.* 4 ranks"):
        require_split(skeleton("gpt_neox"), 4)


def test_a_number_of_kv_heads_that_the_model_does_not_know_means_nothing() -> None:
    stray: object = AutoConfig.for_model("gpt_neox", **{**TINY, "num_key_value_heads": 3})
    assert isinstance(stray, PreTrainedConfig)
    assert whole_layers([LayerGeometry(3, 8, 8)], stray, 2)[0].kv_heads == 6


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*tp_plan.*tensor_parallel=1"):
        require_split(skeleton("gpt2", num_attention_heads=6), 2)


def test_layers_of_the_whole_have_all_heads() -> None:
    local = [LayerGeometry(1, 8, 4), LayerGeometry(3, 8, 4)]
    assert whole_layers(local, config(), 3) == (LayerGeometry(3, 8, 4), LayerGeometry(3, 8, 4))


def test_heads_that_are_neither_a_part_nor_all_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"2 K/V heads in layer 1.*neither all of 3 nor one of 3"):
        whole_layers([LayerGeometry(1, 8, 4), LayerGeometry(2, 8, 4)], config(), 3)


def test_without_a_number_of_kv_heads_there_are_as_many_as_heads() -> None:
    assert whole_layers([LayerGeometry(2, 8, 8)], config(num_key_value_heads=None), 3)[0].kv_heads == 6


def test_one_rank_is_told_nothing() -> None:
    assert distribution(1) is None
    split = distribution(2)
    assert split is not None
    assert split.tp_size == 2


def test_a_tensor_that_is_not_cut_is_whole() -> None:
    tensor = torch.rand(3)
    assert whole_tensor(tensor) is tensor
