"""Attention over the paged cache: the backends by name, and the device memory they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ....errors import ModelError
from .base import AttentionBackend, AttentionOptions, StepAttention
from .torch_backend import TorchBackend

__all__ = ["BACKENDS", "AttentionBackend", "AttentionOptions", "StepAttention", "make_backend"]

BACKENDS: Mapping[str, Callable[[torch.device], AttentionBackend]] = MappingProxyType({"torch": TorchBackend})
"""Every backend by name."""


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """Make the backend called ``name`` for ``device``.

    :raises ModelError: for an unknown name; the message lists the known ones.
    """
    try:
        factory = BACKENDS[name]
    except KeyError:
        known = ", ".join(sorted(BACKENDS))
        raise ModelError(f"no attention backend is called {name!r}; choose one of: {known}") from None
    return factory(device)
