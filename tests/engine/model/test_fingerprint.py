"""The identity in parts: each difference between two models shows in its own part, and in every process alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo.engine.model.checkpoint import load_checkpoint
from octavo.engine.model.fingerprint import Fingerprint, fingerprint
from octavo.engine.model.loader import load
from octavo.storage.identity import Identity

SaveLlama = Callable[..., Path]
TINY: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMMON = {"weights", "computed buffers", "configuration", "position encoding", "tokenizer"}
BY_RUNNER = {"dtype", "geometry"}


def identity(directory: Path, dtype: str = "float32") -> Mapping[str, str]:
    return load(str(directory), dtype=dtype).runner.info.identity


def different(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {part for part in one if one[part] != other[part]}


def of_family(family: str, **settings: object) -> Fingerprint:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **settings})
    model: object = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # as Transformers has it
    assert isinstance(model, PreTrainedModel)
    return fingerprint(model, None, lambda _share: None)


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def other_weights(directory: Path) -> None:
    """Same name, shapes, size of file and time of change."""
    file = directory / "model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def other_tokenizer(directory: Path) -> None:
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    file.write_text(json.dumps(content))


def configured(**changes: object) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "config.json", **changes)


POSITIONS = {"position encoding", "computed buffers"}
ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
CHANGES: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "nothing": (lambda _directory: None, set()),
    "a name": (configured(_name_or_path="x", transformers_version="1.0", use_cache=False), set()),
    "a weight": (other_weights, {"weights"}),
    "rope theta": (configured(rope_parameters={**ROPE, "rope_theta": 10001.0}), POSITIONS),
    "rope scaling": (configured(rope_parameters={**ROPE, "rope_type": "linear", "factor": 2.0}), POSITIONS),
    "a norm": (configured(rms_norm_eps=1e-5), {"configuration"}),
    "the tokenizer": (other_tokenizer, {"tokenizer"}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_to_a_directory_shows_in_its_part(save_llama: SaveLlama, case: str) -> None:
    directory = save_llama()
    before = identity(directory)
    assert before.keys() == COMMON | BY_RUNNER
    change, expected = CHANGES[case]
    change(directory)
    after = identity(directory)
    assert different(before, after) == expected
    one, other = (Identity.of(parts, block_size=16, payload_bytes=64) for parts in (before, after))
    assert (one.digest == other.digest) is (not expected)
    assert len(one.differences(other)) == len(expected)


def test_another_dtype_is_named(save_llama: SaveLlama) -> None:
    directory = save_llama()
    single, half, brain = (identity(directory, dtype) for dtype in ("float32", "float16", "bfloat16"))
    assert [parts["dtype"] for parts in (single, half, brain)] == ["float32", "float16", "bfloat16"]
    assert different(single, half) == different(half, brain) == {"dtype", "weights"}


def test_a_model_without_a_tokenizer_says_so(save_llama: SaveLlama) -> None:
    with_one, without = (identity(save_llama(str(there), tokenizer=there)) for there in (True, False))
    assert without["tokenizer"] == "none"
    assert different(with_one, without) == {"tokenizer"}


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("granite", {"attention_multiplier": 0.5}, {"configuration"}),
        ("gemma2", {"query_pre_attn_scalar": 12}, {"configuration"}),
        ("gemma2", {"attn_logit_softcapping": 30.0}, {"configuration"}),
        ("mistral", {"sliding_window": 6}, {"configuration"}),
        ("smollm3", {"no_rope_layers": [0, 1]}, {"position encoding"}),
        ("stablelm", {"partial_rotary_factor": 0.5}, POSITIONS),
        ("falcon", {"alibi": True}, {"position encoding"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the same in every process
)
def test_what_attention_is_scaled_by_and_where_tokens_are_shows(
    family: str, settings: dict[str, object], expected: set[str]
) -> None:
    one, other = of_family(family), of_family(family, **settings)
    assert different(one.identity, other.identity) == expected
    assert one.digest != other.digest


def test_the_position_encoding_is_text_that_can_be_read() -> None:
    assert json.loads(of_family("llama").identity["position encoding"]) == {"rope_parameters": ROPE}


def test_a_long_position_encoding_is_a_digest() -> None:
    texts = set()
    for factor in (1.0, 1.5):
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
        factors = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 31 + [factor]}
        settings: dict[str, object] = {"head_dim": 64, "rope_parameters": {**rope, **factors}}
        texts.add(of_family("llama", **settings).identity["position encoding"])
    assert len(texts) == 2
    assert all(text.startswith("sha256 ") and len(text) == 71 for text in texts)


def test_the_geometry_counts_all_layers(save_llama: SaveLlama) -> None:
    assert identity(save_llama())["geometry"] == "2 layers x 2 kv heads x (K 8 + V 8)"


def test_the_parts_cannot_be_changed(save_llama: SaveLlama) -> None:
    parts = identity(save_llama())
    with pytest.raises(TypeError):
        parts["weights"] = "others"  # type: ignore[index]  # that is the point


IN_A_PROCESS = """
import json, sys, torch
from pathlib import Path
from octavo.engine.model.checkpoint import load_checkpoint
from octavo.engine.model.fingerprint import fingerprint
found = load_checkpoint(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"), report=lambda *_: None)
found.model.config.update({"odd": set(sys.argv[2:])})
digest, identity = fingerprint(found.model, None, lambda _: None)
print(json.dumps([digest, dict(identity)]))
"""


def test_every_process_finds_the_same(save_llama: SaveLlama) -> None:
    directory = save_llama()
    odd = [f"part {number}" for number in range(16)]  # two hash seeds do not put so many into the same order
    found = load_checkpoint(directory, dtype=torch.float32, device=torch.device("cpu"), report=lambda *_: None)
    found.model.config.update({"odd": set(odd)})
    digest, parts = fingerprint(found.model, None, lambda _share: None)
    printed = subprocess.check_output(  # noqa: S603  # our own interpreter
        [sys.executable, "-c", IN_A_PROCESS, str(directory), *odd],
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        timeout=100,
    )
    assert json.loads(printed) == [digest, dict(parts)]
