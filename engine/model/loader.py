"""From a name to a model that is ready to run: directories, hub ids, GGUF files and the demo model.

Nothing that lies beside the weights is ever executed and no pickle is read.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from ...errors import ModelError
from ..acceleration import Acceleration
from .attention import require_backend
from .runner import ModelRunner
from .text import TextCodec, TextModel

if TYPE_CHECKING:
    from .sources import Setup

Progress: TypeAlias = Callable[[str, float], None]
"""Called with a phase (``download``, ``convert``, ``load``, ``fingerprint``, ``probe``) and its done share, 0 to 1."""

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})


class LoadedModel(NamedTuple):
    """A runner that has no cache yet, and the tokenizer."""

    runner: ModelRunner
    codec: TextCodec | None
    """``None`` when the model comes without a tokenizer."""


def load(  # noqa: PLR0913  # a model, then where and how to run it
    model: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: str = "auto",
    acceleration: Acceleration | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    chat_template: str | None = None,
    tensor_parallel: int = 1,
) -> LoadedModel:
    """Load a model.

    :param model: a directory with safetensors, a ``.gguf`` file, a hub id, or ``smollm2``.
    :param device: as torch names it, for example ``cpu`` or ``cuda:0``.
    :param dtype: ``float32``, ``bfloat16`` or ``float16``.
    :param acceleration: what may be done for speed; ``None``: everything.
    :param cache_dir: where converted GGUF files are kept; ``None``: :func:`default_cache_dir`.
    :param chat_template: a Jinja template, as text, in place of the model's own.
    :param tensor_parallel: over how many ranks of a ``torchrun`` job it is split; this is rank 0, the others call
        :func:`follow`.
    :raises UnsupportedModel: when the model cannot run on a paged cache, or cannot be split like this.
    :raises ModelError: for everything else that keeps it from being loaded; the message says what to do.
    """
    how = _setup(device, dtype, attention_backend, acceleration, cache_dir)
    from .sources import open_model  # noqa: PLC0415  # Transformers takes seconds, and embedders may do without it

    if tensor_parallel > 1:
        from .parallel.opening import lead  # noqa: PLC0415  # as above

        return LoadedModel(*lead(model, how, tensor_parallel, progress or _silent, chat_template))
    opened = open_model(model, how, progress or _silent, chat_template)
    return LoadedModel(opened.runner, opened.codec)


def follow(
    model: str,
    *,
    tensor_parallel: int,
    device: str = "cpu",
    dtype: str = "float32",
    attention_backend: str = "auto",
    acceleration: Acceleration | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Load a share of the model on a rank above 0 and compute with it until rank 0 closes its runner. Parameters as
    for :func:`load`, and the same as there.

    :raises ModelError: when it cannot be loaded, and when rank 0 is gone.
    """
    how = _setup(device, dtype, attention_backend, acceleration, cache_dir)
    from .parallel.opening import follow_along  # noqa: PLC0415  # as above

    follow_along(model, how, tensor_parallel)


def load_text(
    model: str, *, dtype: str = "float32", cache_dir: Path | None = None, chat_template: str | None = None
) -> TextModel:
    """The tokenizer of a model and the sizes that prompts must keep to, without the weights. Parameters and errors as
    for :func:`load`.
    """
    kind = _dtype(dtype)
    _require_transformers()
    from .sources import open_text  # noqa: PLC0415  # as above

    return open_text(model, kind, cache_dir or default_cache_dir(), _silent, chat_template)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/octavo/converted``, by default below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "octavo" / "converted"


def _setup(
    device: str, dtype: str, attention_backend: str, acceleration: Acceleration | None, cache_dir: Path | None
) -> Setup:
    place, kind = _device(device), _dtype(dtype)
    require_backend(attention_backend, place)  # a wrong name shall not cost the time of a load
    _require_transformers()
    from .sources import Setup  # noqa: PLC0415  # as above

    return Setup(place, kind, attention_backend, acceleration or Acceleration(), cache_dir or default_cache_dir())


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
