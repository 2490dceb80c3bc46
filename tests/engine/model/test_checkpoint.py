"""What may lie in a model directory: sound, incomplete, malformed and hostile."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.engine.model.checkpoint import Checkpoint, load_checkpoint
from octavo.engine.model.text import HuggingFaceCodec
from octavo.errors import ModelError

SaveLlama = Callable[..., Path]
WEIGHTS = "model.safetensors"


def silent(_phase: str, _share: float) -> None: ...


def load(
    directory: Path, dtype: torch.dtype = torch.float32, report: Callable[[str, float], None] = silent
) -> Checkpoint:
    return load_checkpoint(directory, dtype=dtype, device=torch.device("cpu"), report=report)


def logits(model: object) -> Tensor:
    assert isinstance(model, PreTrainedModel)
    with torch.inference_mode():
        out: Tensor = model(torch.arange(7)[None]).logits
    return out


def reference_logits(directory: Path) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def test_a_sound_directory_gives_the_model_and_what_belongs_to_it(save_llama: SaveLlama) -> None:
    directory = save_llama()
    edit_json(directory / "generation_config.json", eos_token_id=[7, 8])
    found = load(directory)
    assert torch.equal(logits(found.model), reference_logits(directory))
    assert found.eos_token_ids == {7, 8, 257}, "generation_config, config and tokenizer together"
    assert found.vocab_limit == 258, "256 bytes and two special tokens of a head of 300"
    assert isinstance(found.codec, HuggingFaceCodec)
    assert found.codec.decode(found.codec.encode("Grüße")) == "Grüße"


def test_without_a_tokenizer_there_is_no_codec_and_no_limit(save_llama: SaveLlama) -> None:
    found = load(save_llama(tokenizer=False))
    assert (found.codec, found.vocab_limit) == (None, None)


def test_a_tied_head_is_not_missing(save_llama: SaveLlama) -> None:
    directory = save_llama()
    assert "lm_head.weight" not in load_file(directory / WEIGHTS)
    model = load(directory).model
    assert torch.equal(model.get_parameter("lm_head.weight"), model.get_parameter("model.embed_tokens.weight"))


def test_a_tied_head_may_also_be_in_the_file(save_llama: SaveLlama) -> None:
    directory = save_llama()
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(directory).model), reference_logits(directory))


@pytest.mark.parametrize(
    "gone", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_named_and_never_made_up(save_llama: SaveLlama, gone: str) -> None:
    directory = save_llama(tie_word_embeddings=False)
    edit_weights(directory, lambda tensors: tensors.pop(gone))
    with pytest.raises(ModelError, match=f"lack weights.*{gone}"):
        load(directory)


def test_a_tensor_of_another_shape_is_refused(save_llama: SaveLlama) -> None:
    directory = save_llama()
    edit_weights(directory, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelError, match=r"weights do not load|lack weights"):
        load(directory)


def test_an_extra_tensor_changes_nothing(save_llama: SaveLlama) -> None:
    directory = save_llama()
    before = logits(load(directory).model)
    edit_weights(directory, lambda t: t.update({"model.layers.7.strange": torch.ones(3)}))
    assert torch.equal(logits(load(directory).model), before)


class TestPickles:
    def test_a_directory_of_pickles_alone_is_refused_unread(self, save_llama: SaveLlama, tmp_path: Path) -> None:
        directory = save_llama()
        (directory / WEIGHTS).unlink()
        marker = tmp_path / "ran"
        payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
        (directory / "pytorch_model.bin").write_bytes(payload)
        with pytest.raises(ModelError, match="pickle"):
            load(directory)
        assert not marker.exists()

    def test_beside_safetensors_they_are_not_read(self, save_llama: SaveLlama) -> None:
        directory = save_llama()
        (directory / "pytorch_model.bin").write_bytes(b"never read")
        load(directory)


class TestForeignCode:
    """``trust_remote_code`` is off on every path."""

    @pytest.fixture
    def marker(self, tmp_path: Path) -> Path:
        return tmp_path / "ran"

    def plant(self, directory: Path, marker: Path, **auto_map: object) -> None:
        (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass A: pass\n")
        edit_json(directory / "config.json", auto_map=auto_map)

    def test_code_beside_a_known_architecture_is_ignored(self, save_llama: SaveLlama, marker: Path) -> None:
        directory = save_llama()
        self.plant(
            directory, marker, AutoConfig="evil.A", AutoModelForCausalLM="evil.A", AutoTokenizer=["evil.A", None]
        )
        edit_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.A", "evil.A"]})
        load(directory)
        assert not marker.exists()

    def test_an_architecture_that_needs_code_is_refused(self, save_llama: SaveLlama, marker: Path) -> None:
        directory = save_llama()
        self.plant(directory, marker, AutoConfig="evil.A", AutoModelForCausalLM="evil.A")
        edit_json(directory / "config.json", model_type="evil")
        with pytest.raises(ModelError, match=r"config\.json"):
            load(directory)
        assert not marker.exists()

    def test_an_attention_kernel_in_the_configuration_is_not_fetched(self, save_llama: SaveLlama) -> None:
        directory = save_llama()
        edit_json(directory / "config.json", _attn_implementation="evil/kernel", attn_implementation="evil/kernel")
        assert load(directory).model.config._attn_implementation == "eager"


def header(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


MALFORMED = {
    "empty": b"",
    "header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "header beyond the end": struct.pack("<Q", 100) + b"{}",
    "not JSON": struct.pack("<Q", 2) + b"{{",
    "data beyond the end": header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}) + b"1234",
    "shape that does not fit": header(a={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}) + b"1234",
    "negative shape": header(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}) + b"1234",
    "overlap": header(
        a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        b={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    )
    + bytes(12),
    "unknown dtype": header(a={"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}) + b"1234",
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_weight_file_is_refused(save_llama: SaveLlama, fault: str) -> None:
    directory = save_llama()
    (directory / WEIGHTS).write_bytes(MALFORMED[fault])
    with pytest.raises(ModelError, match=WEIGHTS):
        load(directory)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_weight_file_is_refused(save_llama: SaveLlama, share: float) -> None:
    directory = save_llama()
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match="fetch the file again"):
        load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 0},
        {"vocab_size": 10**12},
        {"hidden_size": 2**40},
        {"hidden_size": "32"},
        {"intermediate_size": 10**12},
        {"head_dim": 10**9},
        {"max_position_embeddings": 0},
        {"model_type": "no_such_family"},
        {"model_type": "mixtral", "num_local_experts": 10**9},
        {"rope_parameters": {"rope_type": "no_such_type", "rope_theta": 1.0}},
    ],
    ids=str,
)
def test_numbers_that_the_files_cannot_back_are_refused_before_anything_is_allocated(
    save_llama: SaveLlama, changes: dict[str, object]
) -> None:
    directory = save_llama()
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelError):
        load(directory)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"model_type": 3}', "\x00"])
def test_a_malformed_configuration_is_refused(save_llama: SaveLlama, text: str) -> None:
    directory = save_llama()
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(directory)


def test_a_malformed_tokenizer_is_refused(save_llama: SaveLlama) -> None:
    directory = save_llama()
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer does not load"):
        load(directory)


def test_a_directory_without_weights_or_configuration_says_what_is_missing(
    save_llama: SaveLlama, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load(tmp_path)
    directory = save_llama()
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load(directory)


def test_an_adapter_is_refused(save_llama: SaveLlama) -> None:
    directory = save_llama()
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(ModelError, match="adapter"):
        load(directory)


class TestShards:
    @pytest.fixture
    def sharded(self, save_llama: SaveLlama) -> Path:
        directory = save_llama()
        tensors = load_file(directory / WEIGHTS)
        names = sorted(tensors)
        where = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
        for part in set(where.values()):
            save_file({n: tensors[n] for n in names if where[n] == part}, directory / part, {"format": "pt"})
        (directory / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
        (directory / WEIGHTS).rename(directory / "whole")
        return directory

    def test_all_parts_are_read(self, sharded: Path, save_llama: SaveLlama) -> None:
        whole = load(save_llama("whole"))
        parts = load(sharded)
        assert torch.equal(logits(parts.model), logits(whole.model))
        assert parts.fingerprint == whole.fingerprint

    def test_a_missing_part_is_named(self, sharded: Path) -> None:
        (sharded / "part-1.safetensors").unlink()
        with pytest.raises(ModelError, match=r"part-1\.safetensors is missing"):
            load(sharded)

    @pytest.mark.parametrize("name", ["../model/part-0.safetensors", "/etc/passwd", "part-0.bin", ".."])
    def test_a_part_outside_the_directory_is_refused(self, sharded: Path, name: str) -> None:
        edit_json(sharded / f"{WEIGHTS}.index.json", weight_map={"model.norm.weight": name})
        with pytest.raises(ModelError, match="plain name"):
            load(sharded)

    @pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
    def test_a_malformed_index_is_refused(self, sharded: Path, weight_map: object) -> None:
        edit_json(sharded / f"{WEIGHTS}.index.json", weight_map=weight_map)
        with pytest.raises(ModelError, match="weight_map"):
            load(sharded)


def test_weights_beyond_the_free_memory_are_refused(save_llama: SaveLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.model.weights.available_memory", lambda _device: 1000)
    with pytest.raises(ModelError, match="memory are free"):
        load(save_llama())


class TestFingerprint:
    """Equal exactly where the same tokens give the same K and V."""

    def test_it_does_not_depend_on_name_or_place(self, save_llama: SaveLlama) -> None:
        first, second = load(save_llama("a")), load(save_llama("b"))
        assert first.fingerprint == second.fingerprint
        assert len(bytes.fromhex(first.fingerprint)) == 32

    def test_one_weight_changes_it(self, save_llama: SaveLlama) -> None:
        before = load(save_llama()).fingerprint
        directory = save_llama()
        edit_weights(directory, lambda t: t["model.layers.1.mlp.up_proj.weight"][0, 0].add_(1e-3))
        assert load(directory).fingerprint != before

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9999.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
            {"rms_norm_eps": 1e-5},
            {"hidden_act": "gelu"},
        ],
        ids=str,
    )
    def test_a_setting_that_changes_the_computation_changes_it(
        self, save_llama: SaveLlama, changes: dict[str, object]
    ) -> None:
        directory = save_llama()
        before = load(directory).fingerprint
        edit_json(directory / "config.json", **changes)
        assert load(directory).fingerprint != before

    def test_a_setting_that_does_not_change_it_leaves_it(self, save_llama: SaveLlama) -> None:
        directory = save_llama()
        before = load(directory).fingerprint
        edit_json(directory / "config.json", transformers_version="1.0", use_cache=False, _name_or_path="x")
        assert load(directory).fingerprint == before

    def test_the_dtype_changes_it(self, save_llama: SaveLlama) -> None:
        directory = save_llama()
        half = load(directory, torch.bfloat16)
        assert half.model.dtype == torch.bfloat16
        assert half.fingerprint != load(directory).fingerprint

    def test_the_tokenizer_changes_it(self, save_llama: SaveLlama) -> None:
        with_one, without = save_llama("a"), save_llama("b", tokenizer=False)
        before = load(with_one).fingerprint
        assert before != load(without).fingerprint
        content = json.loads((with_one / "tokenizer.json").read_text())
        vocab = content["model"]["vocab"]
        vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
        (with_one / "tokenizer.json").write_text(json.dumps(content))
        assert load(with_one).fingerprint != before

    def test_progress_ends_at_one(self, save_llama: SaveLlama) -> None:
        seen: list[tuple[str, float]] = []
        load(save_llama(), report=lambda phase, share: seen.append((phase, share)))
        shares = [share for phase, share in seen if phase == "fingerprint"]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert [share for phase, share in seen if phase == "load"] == [0.0, 1.0]
