"""The identity of a loaded model: a digest over everything that determines the K and V of a token list."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, report: Callable[[float], None]
) -> str:
    """SHA-256, in hex, over the weights and buffers (name, shape, dtype, bytes), the configuration and the tokenizer.

    It does not depend on the process, on the order of the tensors or on the directory. Two threads hash straight
    from the tensors' memory.

    :param report: called with the done share in [0, 1].
    """
    tensors = sorted(_tensors(model))
    total = sum(tensor.nbytes for _, tensor in tensors) or 1
    whole = hashlib.sha256(_FORMAT)
    done = 0
    with ThreadPoolExecutor(max_workers=2) as threads:
        for (name, tensor), digest in zip(tensors, threads.map(_digest, (t for _, t in tensors)), strict=True):
            whole.update(_framed(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()) + digest)
            done += tensor.nbytes
            report(done / total)
    whole.update(_framed(_canonical(model.config.to_dict())))
    whole.update(_framed(_tokenizer_bytes(tokenizer)))
    return whole.hexdigest()


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
    return json.dumps(stable, sort_keys=True, default=str).encode()


def _tokenizer_bytes(tokenizer: PreTrainedTokenizerBase | None) -> bytes:
    if tokenizer is None:
        return b""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str()).encode()
    return json.dumps(sorted(tokenizer.get_vocab().items())).encode()
