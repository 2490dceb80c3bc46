"""Attention over the paged cache: the backends by name, and the device memory they read."""

from __future__ import annotations

import torch

from ....errors import ModelError
from ..native.library import Kernels
from .base import AttentionBackend, AttentionOptions, StepAttention
from .native_backend import NativeBackend
from .torch_backend import TorchBackend

__all__ = ["BACKENDS", "AttentionBackend", "AttentionOptions", "StepAttention", "make_backend", "require_backend"]

BACKENDS = ("auto", "native", "torch")
"""Every backend by name. ``auto``: the kernels where they are there, else torch."""


def require_backend(name: str, device: torch.device) -> None:
    """:raises ModelError: for an unknown name, with the known ones, and for one that does not run on ``device``."""
    if name not in BACKENDS:
        raise ModelError(f"no attention backend is called {name!r}; choose one of: {', '.join(BACKENDS)}")
    if name == "native" and device.type != "cpu":
        raise ModelError(f"the attention backend 'native' runs on the CPU only, not on {device}; use 'auto'")


def make_backend(name: str, device: torch.device, kernels: Kernels | None, *, shares: bool = True) -> AttentionBackend:
    """Make the backend called ``name`` for ``device``.

    :param kernels: the compiled ones, where they are there.
    :param shares: whether rows with common blocks read them once.
    :raises ModelError: as :func:`require_backend`, and for ``native`` without kernels.
    """
    require_backend(name, device)
    if name == "torch" or (name == "auto" and (kernels is None or device.type != "cpu")):
        return TorchBackend(device)
    if kernels is None:
        raise ModelError("the backend 'native' needs float32 or bfloat16, and Acceleration.native on")
    return NativeBackend(kernels, shares=shares)
