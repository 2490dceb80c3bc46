"""GGUF files: converted once, faithfully, crash-safe; malformed ones refused without being believed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from octavo.engine.model import gguf_file
from octavo.engine.model.checkpoint import load_checkpoint
from octavo.engine.model.gguf_file import check_gguf, converted
from octavo.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Write = Callable[..., Path]
CPU = torch.device("cpu")
LAYERS, HIDDEN, FEED, HEADS, KV_HEADS = 2, 32, 48, 4, 2
BYTES = sorted(
    {chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))} | {chr(256 + i) for i in range(68)}
)
TOKENS = [*BYTES, "ab", "<s>", "</s>"]


def silent(_phase: str, _share: float) -> None: ...


@pytest.fixture
def write_gguf(tmp_path: Path) -> Write:
    """Write a tiny Llama as GGUF in float32, with a byte tokenizer."""

    def write(name: str = "tiny.gguf", seed: int = 0, extra: dict[str, int] | None = None) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(FEED)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(len(TOKENS))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(len(TOKENS) - 2)
        writer.add_eos_token_id(len(TOKENS) - 1)
        random = np.random.default_rng(seed)
        for tensor, shape in {**shapes(), **{name: (size,) for name, size in (extra or {}).items()}}.items():
            writer.add_tensor(tensor, (random.standard_normal(shape) * 0.2).astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        found |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"blk.{i}.attn_v.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": (FEED, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FEED, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FEED),
        }
    return found


def convert(file: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    return converted(file, dtype, file.parent / "cache", silent)


def test_a_converted_file_says_the_same_as_transformers_reading_it(write_gguf: Write) -> None:
    file = write_gguf()
    found = load_checkpoint(convert(file), dtype=torch.float32, device=CPU, report=silent)
    config = GgufConfig(gguf_file=file.name, dequantize=True)
    own: object = AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        quantization_config=config,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert isinstance(own, PreTrainedModel)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(found.model(ids).logits, own(ids).logits)
    assert found.eos_token_ids == {len(TOKENS) - 1}
    assert found.codec is not None
    assert found.codec.decode(found.codec.encode("ab cd")) == "ab cd"


def test_the_second_time_nothing_is_converted(write_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf()
    first = convert(file)
    renamed = file.rename(file.with_name("other-name.gguf"))
    monkeypatch.setattr(gguf_file, "_convert", lambda *_: pytest.fail("converted again"))
    phases: list[str] = []
    assert converted(renamed, torch.float32, file.parent / "cache", lambda phase, _: phases.append(phase)) == first
    assert phases == []


def test_other_content_and_other_dtypes_live_apart(write_gguf: Write) -> None:
    first = convert(write_gguf())
    half = convert(write_gguf(), dtype=torch.bfloat16)
    other = convert(write_gguf(seed=1))
    assert len({first, half, other}) == 3
    assert load_checkpoint(half, dtype=torch.bfloat16, device=CPU, report=silent).model.dtype == torch.bfloat16


def test_what_a_crash_left_behind_is_swept_and_never_taken_for_a_model(
    write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf()

    def crash(folder: Path) -> None:
        assert (folder / "model.safetensors").exists(), "all is written by now, only the rename is to come"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_file, "_make_durable", crash)
        with pytest.raises(KeyboardInterrupt):
            convert(file)
    cache = file.parent / "cache"
    assert [path.name for path in cache.iterdir() if path.is_dir() and path.suffix != ".staging"] == []
    target = convert(file)
    assert [path for path in cache.iterdir() if path.is_dir()] == [target]


def test_of_several_at_once_one_converts_and_the_others_wait(
    write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, original, made = write_gguf(), gguf_file._convert, []

    def counted(source: Path, target: Path, dtype: torch.dtype) -> None:
        made.append(target)
        original(source, target, dtype)

    monkeypatch.setattr(gguf_file, "_convert", counted)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(convert, [file] * 4))
    assert found == made * 4


def test_a_damaged_conversion_is_made_again(write_gguf: Write) -> None:
    file = write_gguf()
    weights = convert(file) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert (convert(file) / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight"])
def test_position_factors_that_would_be_lost_are_refused(write_gguf: Write, name: str) -> None:
    with pytest.raises(ModelError, match=f"{name}.*safetensors"):
        convert(write_gguf(extra={name: 4}))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file .*nowhere\.gguf"):
        convert(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(write_gguf: Write, share: float) -> None:
    file = write_gguf()
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        convert(file)
    assert not any(path.is_dir() for path in (file.parent / "cache").iterdir())


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def tensor(*shape: int, kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(b"t") + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


HOSTILE = {
    "another format": b"PK\x03\x04" + bytes(40),
    "version": head(version=9) + bytes(8),
    "tensor count": head(tensors=2**60) + bytes(64),
    "pair count": head(pairs=2**60) + bytes(64),
    "key length": head(pairs=1) + struct.pack("<Q", 2**63) + bytes(64),
    "array of numbers": head(pairs=1) + text(b"a") + struct.pack("<IIQ", 9, 6, 2**61) + bytes(64),
    "array of strings": head(pairs=1) + text(b"a") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64),
    "array of arrays": head(pairs=1) + text(b"a") + struct.pack("<IIQ", 9, 9, 2**61) + bytes(64),
    "value type": head(pairs=1) + text(b"a") + struct.pack("<I", 77) + bytes(64),
    "dimensions": head(tensors=1) + tensor(2, dimensions=2**31) + bytes(64),
    "tensor size": head(tensors=1) + tensor(2**60, 2**60) + bytes(64),
    "tensor offset": head(tensors=1) + tensor(2, offset=2**60) + bytes(64),
    "tensor type": head(tensors=1) + tensor(2, kind=999) + bytes(64),
    "tensor name": head(tensors=1) + text(b"\xff\xfe") + bytes(64),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_header_is_refused_at_once(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(HOSTILE[fault])
    with pytest.raises(ModelError, match=r"hostile\.gguf"):
        check_gguf(file)


def test_the_smallest_sound_header_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "sound.gguf"
    pairs = text(b"general.alignment") + struct.pack("<II", 4, 64)
    body = head(tensors=1, pairs=1) + pairs + tensor(2, 3)
    file.write_bytes(body.ljust(-(-len(body) // 64) * 64, b"\0") + bytes(24))
    check_gguf(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="beyond its end"):
        check_gguf(file)
