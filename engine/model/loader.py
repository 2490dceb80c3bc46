"""From a name to a model that is ready to run: directories, hub ids, GGUF files and the demo model.

Nothing that lies beside the weights is ever executed and no pickle is read.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from ...errors import ModelError
from ..acceleration import Acceleration
from .attention import require_backend
from .runner import ModelRunner
from .text import TextCodec

Progress: TypeAlias = Callable[[str, float], None]
"""Called with a phase (``download``, ``convert``, ``load``, ``fingerprint``, ``probe``) and its done share, 0 to 1."""

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})


class LoadedModel(NamedTuple):
    """A runner that has no cache yet, and the tokenizer."""

    runner: ModelRunner
    codec: TextCodec | None
    """``None`` when the model comes without a tokenizer."""


def load(
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: str = "auto",
    acceleration: Acceleration | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    chat_template: str | None = None,
) -> LoadedModel:
    """Load a model.

    :param model: a directory with safetensors, a ``.gguf`` file, a hub id, or ``smollm2``.
    :param device: as torch names it, for example ``cpu`` or ``cuda:0``.
    :param dtype: ``float32``, ``bfloat16`` or ``float16``.
    :param acceleration: what may be done for speed; ``None``: everything.
    :param cache_dir: where converted GGUF files are kept; ``None``: :func:`default_cache_dir`.
    :param chat_template: a Jinja template, as text, in place of the model's own.
    :raises UnsupportedModel: when the model cannot run on a paged cache.
    :raises ModelError: for everything else that keeps it from being loaded; the message says what to do.
    """
    place, kind = _device(device), _dtype(dtype)
    require_backend(attention_backend, place)  # a wrong name shall not cost the time of a load
    report = progress or _silent
    _require_transformers()
    from .sources import Setup, open_model  # noqa: PLC0415  # Transformers takes seconds, and embedders may do without it

    how = Setup(place, kind, attention_backend, acceleration or Acceleration(), cache_dir or default_cache_dir())
    return LoadedModel(*open_model(model, how, report, chat_template))


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/octavo/converted``, by default below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "octavo" / "converted"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"{name!r} is no torch device; try 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r} was asked for, but torch sees no CUDA device here; use 'cpu'")
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not known; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _require_transformers() -> None:
    missing = [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"loading models needs {' and '.join(missing)}: pip install 'octavo[hf]'")


def _silent(phase: str, share: float) -> None:
    """Progress that nobody watches."""
