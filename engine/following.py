"""follow: what the other ranks of an engine's job call, where the model is split over several."""

from __future__ import annotations

import os

from .config import EngineConfig


def follows(config: EngineConfig) -> bool:
    """Whether this process is one of the ranks that :func:`follow`, and has no engine, as ``torchrun`` says it."""
    return config.tensor_parallel > 1 and os.environ.get("RANK", "0") != "0"


def follow(model: str, config: EngineConfig) -> None:
    """Load this rank's share of ``model`` and compute with it until the engine on rank 0 is closed.

    Model and configuration must be those of the engine; of the configuration only what concerns the model counts here.
    Blocks the thread, and other engines of this process cannot be split meanwhile. After an error the process should
    end: as long as it lives, other ranks may wait for it in the middle of a step.

    :raises UnsupportedModel: when the model cannot run on a paged cache, or cannot be split over so many ranks.
    :raises ModelError: when this is no rank above 0 of such a job, when the model cannot be loaded on every rank, and
        when rank 0 is gone.
    """
    from .model.loader import follow as follow_model  # noqa: PLC0415  # torch only when a model is wanted

    follow_model(
        model,
        tensor_parallel=config.tensor_parallel,
        device=config.device,
        dtype=config.dtype,
        attention_backend=config.attention_backend,
        acceleration=config.acceleration,
    )
