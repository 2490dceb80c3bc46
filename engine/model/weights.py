"""Builds a Transformers model from its configuration and fills it from safetensors, whole or one rank's share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...errors import ModelError
from ...telemetry.logging import get_logger
from .attention.kv_tensors import available_memory
from .parallel.splitting import distribution, require_split

ELEMENTS_PER_BYTE = 4
"""Bound on parameters per byte of file: two-bit weights are the smallest there are."""
_MAX_BUFFER_BYTES = 2**30


def check_sizes(config: PreTrainedConfig, stored: int, dtype: torch.dtype, ranks: int) -> None:
    """Build the model without memory and compare its size with the files and with the memory there is.

    :param stored: bytes of the weight files.
    :param ranks: over how many the weights are split.
    :raises ModelError: when it is too large; ``UnsupportedModel``: when it cannot be split like this.
    """
    with reading("Transformers cannot build a model from config.json"), torch.device("meta"):
        skeleton: object = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # as Transformers has it
            config, attn_implementation="eager", trust_remote_code=False
        )
    if not isinstance(skeleton, PreTrainedModel):
        raise ModelError("config.json describes no language model")
    if ranks > 1:
        require_split(skeleton, ranks)
    numbers = sum(parameter.numel() for parameter in skeleton.parameters())
    buffers = sum(buffer.nbytes for buffer in skeleton.buffers())
    if numbers > stored * ELEMENTS_PER_BYTE or buffers > _MAX_BUFFER_BYTES:
        raise ModelError(
            f"config.json declares {numbers} parameters and {buffers} bytes of buffers, "
            f"more than {stored} bytes of weight files can back"
        )
    free, needed = available_memory(torch.device("cpu")), numbers * dtype.itemsize // ranks
    if free is not None and needed > free:
        raise ModelError(
            f"the weights need {needed / 2**30:.2f} GiB in {dtype}, but only {free / 2**30:.2f} GiB "
            "of memory are free; use a narrower dtype or a smaller model"
        )


def load_weights(directory: Path, config: PreTrainedConfig, dtype: torch.dtype, ranks: int) -> PreTrainedModel:
    """The model with all its weights; of ``ranks`` above 1, this one's share.

    :raises ModelError: when the files do not have them all.
    """
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
            distributed_config=distribution(ranks),
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
