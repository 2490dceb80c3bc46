"""What is served: the forms of ``/v1/models``."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct):
    """One name under which the model is served."""

    id: str
    created: int
    """Seconds since the epoch: since when it is served."""
    max_model_len: int
    """Tokens of a prompt and its answer together, as vLLM tells it."""
    root: str
    """The model's own name, whatever it is served as."""
    object: Literal["model"] = "model"
    owned_by: str = "octavo"


class ModelList(msgspec.Struct):
    """All names."""

    data: list[Model]
    object: Literal["list"] = "list"
