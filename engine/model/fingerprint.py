"""The identity of a loaded model: digests over everything that determines the K and V of a token list."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .parallel.splitting import whole_tensor

_FORMAT = b"octavo-model-1"
_VOLATILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Configuration that does not change K and V (the dtype is hashed with the weights)."""
_POSITION = frozenset(
    {
        "alibi",
        "no_rope_layer_interval",
        "no_rope_layers",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "position_embedding_type",
        "rotary_dim",
        "rotary_emb_base",
        "rotary_pct",
    }
)
"""Configuration of the position encoding, beside all that begins with ``rope_``."""
_MAX_TEXT = 240


class Fingerprint(NamedTuple):
    """What a loaded model is."""

    digest: str
    """SHA-256, in hex, over the weights and buffers (name, shape, dtype, bytes), the configuration, the tokenizer."""
    identity: Mapping[str, str]
    """The same in parts. Digests of ``weights``, ``computed buffers`` (those that no file holds, like the frequencies
    of positions), ``configuration`` and ``tokenizer``; ``position encoding`` as text, or its digest where that is long.
    """


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, report: Callable[[float], None]
) -> Fingerprint:
    """Read all that ``model`` holds. The result does not depend on the process, on the order of the tensors or on the
    directory.

    :param report: called with the done share in [0, 1].
    """
    stored = model.state_dict().keys()
    whole, weights, buffers = hashlib.sha256(_FORMAT), hashlib.sha256(), hashlib.sha256()
    for name, entry in _entries(model, report):
        whole.update(entry)
        (weights if name in stored else buffers).update(entry)
    config, text = model.config.to_dict(), _tokenizer_bytes(tokenizer)
    whole.update(_framed(_canonical(config)) + _framed(text))
    parts = {
        "weights": weights.hexdigest(),
        "computed buffers": buffers.hexdigest(),
        "configuration": hashlib.sha256(_canonical({k: v for k, v in config.items() if not _places(k)})).hexdigest(),
        "position encoding": _position_encoding(config),
        "tokenizer": hashlib.sha256(text).hexdigest() if tokenizer is not None else "none",
    }
    return Fingerprint(whole.hexdigest(), MappingProxyType(parts))


def configuration_digest(config: PreTrainedConfig) -> str:
    """SHA-256, in hex, over what of ``config`` determines K and V."""
    return hashlib.sha256(_canonical(config.to_dict())).hexdigest()


def _entries(model: PreTrainedModel, report: Callable[[float], None]) -> Iterator[tuple[str, bytes]]:
    """(name, what to hash for it) of all tensors, by name. Two threads hash straight from the tensors' memory."""
    tensors = sorted(_tensors(model))
    total = sum(tensor.nbytes for _, tensor in tensors) or 1
    done = 0
    for (name, tensor), digest in zip(tensors, _digests(tensors), strict=True):
        yield name, _framed(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()) + digest
        done += tensor.nbytes
        report(done / total)


def _digests(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[bytes]:
    """In order. A tensor that is split over ranks is whole for as long as it is read, so only a few are at a time."""
    with ThreadPoolExecutor(max_workers=2) as threads:
        under_way: deque[Future[bytes]] = deque()
        for _, tensor in tensors:
            if len(under_way) > 2:
                yield under_way.popleft().result()
            under_way.append(threads.submit(_digest, whole_tensor(tensor)))
        for digest in under_way:
            yield digest.result()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Each distinct tensor once, also the buffers that are computed rather than stored (position frequencies)."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()


def _framed(data: bytes) -> bytes:
    """With its length in front, so that two parts cannot be read as one."""
    return len(data).to_bytes(8, "little") + data


def _canonical(config: dict[str, object]) -> bytes:
    stable = {key: value for key, value in config.items() if key not in _VOLATILE}
    return json.dumps(stable, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    """What JSON has no form for. The order of a set differs from process to process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _places(key: str) -> bool:
    return key.startswith("rope_") or key in _POSITION


def _position_encoding(config: dict[str, object]) -> str:
    settings = {key: value for key, value in config.items() if _places(key) and value is not None}
    text = json.dumps(settings, sort_keys=True, default=_plain)
    return text if len(text) <= _MAX_TEXT else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _tokenizer_bytes(tokenizer: PreTrainedTokenizerBase | None) -> bytes:
    if tokenizer is None:
        return b""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str()).encode()
    return json.dumps(sorted(tokenizer.get_vocab().items())).encode()
