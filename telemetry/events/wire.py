"""The form in which cache-aware routers read KV events: msgpack, as vLLM writes it.

``[seconds, [event, ...], rank]``; an event is ``["BlockStored", block_hashes, parent_block_hash, token_ids, block_size,
lora_id, medium, lora_name, extra_keys]``, ``["BlockRemoved", block_hashes, medium]`` or ``["AllBlocksCleared"]``, or a
map of the same with the first under ``"type"``. Readers of vLLM's newest form accept either, older ones and those of
SGLang arrays alone.

A block hash is the last 8 bytes of the digest as an unsigned big-endian integer: what vLLM sends by default, and what
readers make of the whole digest if they get that. Some know integers only.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import msgspec

from .log import DEVICE, Cleared, EventBatch, KvEvent, Removed, Stored

Form: TypeAlias = Literal["array", "map"]

MEDIA: Final[Mapping[str, str]] = MappingProxyType({DEVICE: "GPU", "host": "CPU"})
"""How routers call the places. The device is ``GPU`` whatever it is: they take that for the fastest one."""
OTHER_MEDIUM: Final = "STORAGE"

_STORED: Final = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED: Final = ("type", "block_hashes", "medium")
_CLEARED: Final = ("type",)
_TENANT_DIGITS: Final = 32  # of its digest; readers take 64 for the digest of an image


def payload(batch: EventBatch, *, rank: int, form: Form) -> bytes:
    """``batch`` as a message. Its ``Cleared`` are read as of everything: see :func:`is_partial`."""
    events = [_wire(event, form) for event in batch.events]
    return msgspec.msgpack.encode([batch.time, events, rank])


def is_partial(event: KvEvent) -> bool:
    """Whether it clears a part of what is stored, which the form cannot say."""
    return isinstance(event, Cleared) and event != Cleared()


def block_hash(name: bytes) -> int:
    """What stands for a digest."""
    return int.from_bytes(name[-8:], "big")


def _wire(event: KvEvent, form: Form) -> list[object] | dict[str, object]:
    names, values = _fields(event)
    return dict(zip(names, values, strict=False)) if form == "map" else list(values)


def _fields(event: KvEvent) -> tuple[Sequence[str], Sequence[object]]:
    if isinstance(event, Stored):
        return _STORED, _stored(event)
    if isinstance(event, Removed):
        return _REMOVED, ("BlockRemoved", [*map(block_hash, event.names)], _medium(event.tier))
    return _CLEARED, ("AllBlocksCleared",)


def _stored(event: Stored) -> list[object]:
    fields: list[object] = [
        "BlockStored",
        [*map(block_hash, event.names)],
        None if event.parent is None else block_hash(event.parent),
        array("i", event.tokens).tolist(),
        event.block_size,
        None,
        _medium(event.tier),
        event.adapter,
    ]
    if event.is_private and event.parent is None:  # as vLLM does with a salt: what follows the first block inherits it
        fields.append([[event.tenant.hex()[:_TENANT_DIGITS]], *[None] * (len(event.names) - 1)])
    return fields


def _medium(tier: str) -> str:
    return MEDIA.get(tier, OTHER_MEDIUM)
