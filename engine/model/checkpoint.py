"""Loads a directory of safetensors with a Transformers configuration. The directory is not trusted.

What is declared is checked against what the files hold before anything is allocated; weights that are missing are an
error and never random numbers; Python files in the directory are never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ModelError
from .fingerprint import configuration_digest, fingerprint
from .parallel.ranks import Alone, Ranks
from .text import HuggingFaceCodec, TextCodec, TextModel
from .weights import ELEMENTS_PER_BYTE, check_sizes, load_weights, reading

_MAX_JSON_BYTES = 64 * 2**20
_MAX_EXPERTS = 2**14
_SIZES = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Checkpoint(NamedTuple):
    """A model with all its weights, and what comes with it."""

    model: PreTrainedModel
    codec: TextCodec | None
    fingerprint: str
    identity: Mapping[str, str]
    """The fingerprint in parts, but for what the runner adds."""
    eos_token_ids: frozenset[int]
    vocab_limit: int | None
    """Number of ids the tokenizer knows, when the model's head is wider."""


class _Contents(NamedTuple):
    """What the weight files hold."""

    tensors: int
    bytes: int


def load_checkpoint(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str, float], None],
    chat_template: str | None = None,
    ranks: Ranks = Alone(),  # noqa: B008  # it has no state
) -> Checkpoint:
    """Load everything and move it to ``device``.

    :param report: called with a phase and its done share.
    :param chat_template: used in place of the model's own. It is no part of the fingerprint: it decides on tokens, not
        on what is computed of them.
    :param ranks: over which the weights are split; all of them load at the same time.
    :raises ModelError: for a directory that is incomplete, malformed or not safe to read; the message names the fault.
    """
    report("load", 0.0)
    config, model, tokenizer = ranks.together(lambda: _read(directory, dtype, ranks.size), unhurried=True)
    report("load", 1.0)
    ranks.require_same("configuration", f"{configuration_digest(config)} {dtype}")  # by which they share tensors out
    digest, identity = ranks.together(lambda: fingerprint(model, tokenizer, lambda share: report("fingerprint", share)))
    ranks.require_same("model", digest)
    return Checkpoint(
        model=_moved(model, device),
        codec=_codec(tokenizer, chat_template),
        fingerprint=digest,
        identity=identity,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        vocab_limit=_vocab_limit(config, tokenizer),
    )


def _read(
    directory: Path, dtype: torch.dtype, ranks: int
) -> tuple[PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase | None]:
    """What the directory holds, each part after it was checked."""
    contents = check_weight_files(directory)
    config = _read_config(directory)
    _check_config(config, contents)
    check_sizes(config, contents.bytes, dtype, ranks)
    return config, load_weights(directory, config, dtype, ranks), _load_tokenizer(directory)


def load_text(directory: Path, chat_template: str | None = None) -> TextModel:
    """What of a model it takes to know the tokens of a prompt. No weights are read; they need not be there.

    :raises ModelError: for a directory that is incomplete or malformed; the message names the fault.
    """
    config = _read_config(directory).get_text_config()
    codec = _codec(_load_tokenizer(directory), chat_template)
    return TextModel(codec, config.vocab_size, config.max_position_embeddings)


def _codec(tokenizer: PreTrainedTokenizerBase | None, chat_template: str | None) -> TextCodec | None:
    if tokenizer is not None:
        return HuggingFaceCodec(tokenizer, chat_template)
    if chat_template is not None:
        raise ModelError("a chat template needs a tokenizer, which this model came without; leave it out")
    return None


def check_weight_files(directory: Path) -> _Contents:
    """Check the headers of the weight files against their sizes. Reads no weights.

    :raises ModelError: when there are none, or only pickles, or one is truncated or malformed.
    """
    if (directory / "adapter_config.json").exists():
        raise ModelError(f"{directory} holds an adapter, not a model; merge it into its base model first")
    files = _weight_files(directory)
    tensors = 0
    for file in files:
        trouble = f"{file}: the safetensors header does not fit the file; fetch the file again"
        # safe_open checks header length, offsets, overlaps and shapes against the file's size
        with reading(trouble), safe_open(str(file), framework="pt") as opened:
            tensors += len(opened.keys())
    return _Contents(tensors, sum(file.stat().st_size for file in files))


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        return _indexed_files(directory, index)
    if any(file for pattern in _PICKLES for file in directory.glob(pattern)):
        raise ModelError(
            f"{directory} has its weights in pickle files only (.bin, .pt, ...), which can run code when read; "
            "convert them to safetensors first, or fetch the safetensors of this model"
        )
    raise ModelError(f"{directory} holds no model.safetensors and no model.safetensors.index.json")


def _indexed_files(directory: Path, index: Path) -> list[Path]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index}: weight_map is missing")
    files = []
    for name in sorted({str(value) for value in names.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is not the plain name of a safetensors file")
        if not (directory / name).is_file():
            raise ModelError(f"{directory}: the weight file {name} is missing; fetch it")
        files.append(directory / name)
    return files


def _read_json(file: Path) -> dict[str, object]:
    with reading(f"{file} is not readable JSON"):
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"it is larger than {_MAX_JSON_BYTES} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content


def _read_config(directory: Path) -> PreTrainedConfig:
    _read_json(directory / "config.json")
    with reading(f"{directory}: Transformers does not accept config.json"):
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(f"{directory}: config.json describes no model")
    return config


def _check_config(config: PreTrainedConfig, contents: _Contents) -> None:
    """Refuse numbers that the files cannot back, before modules are built by them."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in _SIZES}
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelError(f"config.json: {name} must be a positive number, not {value!r}")
    layers, embedding = sizes["num_hidden_layers"] or 0, (sizes["vocab_size"] or 0) * (sizes["hidden_size"] or 0)
    if layers > contents.tensors:
        raise ModelError(f"config.json declares {layers} layers, but the files hold only {contents.tensors} tensors")
    if embedding > contents.bytes * ELEMENTS_PER_BYTE:
        raise ModelError(f"config.json declares an embedding of {embedding} numbers, more than the files can hold")
    experts = {k: v for k, v in text.to_dict().items() if "expert" in k and isinstance(v, int) and v > _MAX_EXPERTS}
    if experts:
        raise ModelError(f"config.json: {experts} is out of range (at most {_MAX_EXPERTS})")


def _load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    with reading(f"{directory}: the tokenizer does not load"):
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"{directory}: Transformers returned no tokenizer")
    return tokenizer


def _moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    try:
        model.to(device)  # type: ignore[arg-type]  # the decorator around it loses its type
    except RuntimeError as error:
        raise ModelError(f"the weights do not fit on {device}: {error}") from error
    return model


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Everything that any part of the checkpoint calls an end of sequence."""
    named = (getattr(source, "eos_token_id", None) for source in (model.generation_config, model.config, tokenizer))
    flat = [ids if isinstance(ids, list | tuple) else [ids] for ids in named]
    return frozenset(token for ids in flat for token in ids if isinstance(token, int))


def _vocab_limit(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    if tokenizer is None:
        return None
    known = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    return known if known < config.get_text_config().vocab_size else None
