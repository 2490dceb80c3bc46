"""Loads a directory of safetensors with a Transformers configuration. The directory is not trusted.

What is declared is checked against what the files hold before anything is allocated; weights that are missing are an
error and never random numbers; Python files in the directory are never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ...errors import ModelError
from ...telemetry.logging import get_logger
from .attention.kv_tensors import available_memory
from .fingerprint import fingerprint
from .text import HuggingFaceCodec, TextCodec

_MAX_JSON_BYTES = 64 * 2**20
_MAX_EXPERTS = 2**14
_MAX_BUFFER_BYTES = 2**30
_ELEMENTS_PER_BYTE = 4
"""Bound on parameters per byte of file: two-bit weights are the smallest there are."""
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
) -> Checkpoint:
    """Load everything and move it to ``device``.

    :param report: called with a phase and its done share.
    :param chat_template: used in place of the model's own. It is no part of the fingerprint: it decides on tokens, not
        on what is computed of them.
    :raises ModelError: for a directory that is incomplete, malformed or not safe to read; the message names the fault.
    """
    report("load", 0.0)
    contents = check_weight_files(directory)
    config = _read_config(directory)
    _check_config(config, contents)
    _check_sizes(config, contents, dtype)
    model = _load_weights(directory, config, dtype)
    tokenizer = _load_tokenizer(directory)
    report("load", 1.0)
    digest, identity = fingerprint(model, tokenizer, lambda share: report("fingerprint", share))
    return Checkpoint(
        model=_moved(model, device),
        codec=_codec(tokenizer, chat_template),
        fingerprint=digest,
        identity=identity,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        vocab_limit=_vocab_limit(config, tokenizer),
    )


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
    if embedding > contents.bytes * _ELEMENTS_PER_BYTE:
        raise ModelError(f"config.json declares an embedding of {embedding} numbers, more than the files can hold")
    experts = {k: v for k, v in text.to_dict().items() if "expert" in k and isinstance(v, int) and v > _MAX_EXPERTS}
    if experts:
        raise ModelError(f"config.json: {experts} is out of range (at most {_MAX_EXPERTS})")


def _check_sizes(config: PreTrainedConfig, contents: _Contents, dtype: torch.dtype) -> None:
    """Build the model without memory and compare its size with the files and with the memory there is."""
    with reading("Transformers cannot build a model from config.json"), torch.device("meta"):
        skeleton: object = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # as Transformers has it
            config, attn_implementation="eager", trust_remote_code=False
        )
    if not isinstance(skeleton, PreTrainedModel):
        raise ModelError("config.json describes no language model")
    numbers = sum(parameter.numel() for parameter in skeleton.parameters())
    buffers = sum(buffer.nbytes for buffer in skeleton.buffers())
    if numbers > contents.bytes * _ELEMENTS_PER_BYTE or buffers > _MAX_BUFFER_BYTES:
        raise ModelError(
            f"config.json declares {numbers} parameters and {buffers} bytes of buffers, "
            f"more than {contents.bytes} bytes of weight files can back"
        )
    free = available_memory(torch.device("cpu"))
    if free is not None and numbers * dtype.itemsize > free:
        raise ModelError(
            f"the weights need {numbers * dtype.itemsize / 2**30:.2f} GiB in {dtype}, but only {free / 2**30:.2f} GiB "
            "of memory are free; use a narrower dtype or a smaller model"
        )


def _load_weights(directory: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with reading(f"{directory}: the weights do not load"), quiet_transformers():
        loaded: object = AutoModelForCausalLM.from_pretrained(
            str(directory),
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, info = _loaded_pair(loaded)
    missing = sorted(str(key) for key in info["missing_keys"] | info["mismatched_keys"])
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ModelError(f"{directory}: the files lack weights that the model needs: {shown}")
    if info["unexpected_keys"]:
        get_logger("octavo.model").warning(
            "unused_weights", directory=str(directory), tensors=sorted(map(str, info["unexpected_keys"]))[:8]
        )
    return model


def _loaded_pair(loaded: object) -> tuple[PreTrainedModel, dict[str, set[object]]]:
    """The types of what ``from_pretrained`` returns when asked for the loading report."""
    if isinstance(loaded, tuple) and isinstance(loaded[0], PreTrainedModel):
        return loaded[0], loaded[1]
    raise ModelError("Transformers returned no model")


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


@contextmanager
def reading(trouble: str) -> Iterator[None]:
    """The border to libraries that parse untrusted files: whatever they raise becomes a ``ModelError``."""
    try:
        yield
    except Exception as error:  # malformed input surfaces as anything from KeyError to ZeroDivisionError
        detail = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"{trouble}: {detail}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars on the host's terminal; the report goes to ``progress`` instead."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as Transformers has it
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as Transformers has it
