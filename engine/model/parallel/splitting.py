"""How a model is cut over ranks, by Transformers' own plan, and how the whole is told from the parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from ....errors import UnsupportedModel
from ..attention.kv_tensors import LayerGeometry

_ATTENTION = ("attn", "attention")
_KV_HEADS = "num_key_value_heads"
_BY_HEADS = "colwise"
"""The style of projections whose results stay apart, on the rank that has the head. Other styles put them together."""


def distribution(ranks: int) -> DistributedConfig | None:
    """What ``from_pretrained`` is told; ``None`` for one rank."""
    return DistributedConfig(tp_size=ranks) if ranks > 1 else None


def require_split(model: PreTrainedModel, ranks: int) -> None:
    """Check what can be known before weights are read.

    :param model: built without memory.
    :raises UnsupportedModel: when there is no plan for it, or its attention heads cannot be shared out evenly.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    name = type(model).__name__
    if not plan:
        raise UnsupportedModel(
            f"{name}: Transformers has no plan to split it (no tp_plan); run it with tensor_parallel=1"
        )
    if not any(style == _BY_HEADS and any(name in module for name in _ATTENTION) for module, style in plan.items()):
        return  # each rank has all heads
    heads, kv_heads = _heads(model.config)
    if heads % ranks or kv_heads % ranks:
        fitting = [str(n) for n in range(1, kv_heads + 1) if heads % n == kv_heads % n == 0]
        raise UnsupportedModel(
            f"{name}: its {heads} attention heads and {kv_heads} K/V heads cannot be shared out evenly over {ranks} "
            f"ranks; tensor_parallel can be {', '.join(fitting)}"
        )


def whole_layers(local: Sequence[LayerGeometry], config: PreTrainedConfig, ranks: int) -> tuple[LayerGeometry, ...]:
    """The layers of the whole model, by those of a rank: either it has its part of the heads, or all of them.

    :raises UnsupportedModel: when it is neither.
    """
    return tuple(_whole_layer(i, each, config, ranks) for i, each in enumerate(local))


def whole_tensor(tensor: Tensor) -> Tensor:
    """``tensor`` put together from all ranks, each of which must ask for it; itself, where it is not cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_layer(layer: int, local: LayerGeometry, config: PreTrainedConfig, ranks: int) -> LayerGeometry:
    declared = _heads(config)[1]
    if declared in {local.kv_heads, local.kv_heads * ranks}:
        return local._replace(kv_heads=declared)
    raise UnsupportedModel(
        f"{config.model_type}: a rank has {local.kv_heads} K/V heads in layer {layer}, which is neither all of "
        f"{declared} nor one of {ranks} equal parts; run it with tensor_parallel=1"
    )


def _heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Heads of queries, and of K and V."""
    text = config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 1))
    return heads, int((_KV_HEADS in _known(text) and getattr(text, _KV_HEADS)) or heads)


def _known(config: PreTrainedConfig) -> set[str]:
    """What the model reads of its configuration. A file may say more, which means nothing then."""
    return {*type(config).__dataclass_fields__, *type(config).attribute_map}
