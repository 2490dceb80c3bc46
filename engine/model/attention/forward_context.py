"""How attention calls inside a Transformers model reach the paged cache.

Transformers calls a registered function by name from deep inside the model. Some families drop the extra keyword
arguments on the way down, so what the function needs travels in a context variable instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from ....errors import ModelError
from .base import AttentionOptions

ATTENTION_NAME = "octavo_paged"
"""The name under which the function is registered. No mask function carries it, so models build no mask."""

_EXPECTED_TENSORS = frozenset({"s_aux", "position_ids"})


class AttentionCall(NamedTuple):
    """One layer's call, as the model made it."""

    layer: int
    query: Tensor
    """Shape [1, H, T, Dk]."""
    key: Tensor
    """Shape [1, Hkv, T, Dk], after position encoding, not repeated for grouped queries."""
    value: Tensor
    """Shape [1, Hkv, T, Dv]."""
    options: AttentionOptions
    causal: bool
    surprises: tuple[str, ...]
    """Tensors in the call that a backend would ignore (a mask, a bias, ...), by name."""


class ForwardContext(Protocol):
    """Answers the attention calls of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """:returns: shape [1, T, H, Dv]."""


_current: ContextVar[ForwardContext] = ContextVar("octavo_forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Let ``context`` answer all attention calls made inside."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """The registered function, in the signature of Transformers' attention interface.

    :raises ModelError: when the model is called by anyone but a runner.
    """
    context = _current.get(None)
    if context is None:
        raise ModelError("this model belongs to an Octavo runner: it can only be called through it")
    sinks = rest.get("s_aux")
    tensors = {"attention_mask": attention_mask, **rest}
    layer = getattr(module, "layer_idx", None)
    call = AttentionCall(
        layer=layer if isinstance(layer, int) else -1,
        query=query,
        key=key,
        value=value,
        options=AttentionOptions(
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=sliding_window,
            softcap=softcap,
            sinks=sinks if isinstance(sinks, Tensor) else None,
        ),
        causal=bool(getattr(module, "is_causal", True)),
        surprises=tuple(n for n, v in tensors.items() if isinstance(v, Tensor) and n not in _EXPECTED_TENSORS),
    )
    return context.attend(call), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
