"""The form in which cache-aware routers read KV events: msgpack, as vLLM writes it.

``[seconds, [event, ...], rank]``; an event is ``["BlockStored", block_hashes, parent_block_hash, token_ids, block_size,
lora_id, medium, lora_name, extra_keys]``, ``["BlockRemoved", block_hashes, medium]`` or ``["AllBlocksCleared"]``, or a
map of the same with the first under ``"type"``. Readers of vLLM's newest form accept either, older ones and those of
SGLang arrays alone.

A block hash is the last 8 bytes of the digest as an unsigned big-endian integer: what vLLM sends by default, and what
readers make of the whole digest if they get that. Some know integers only.

Routers that name blocks themselves need no tokens: the form ``names`` has none, so prompts do not travel. It is the
array form with whole digests, the tiers' own names as mediums, and one more value at the end of a message: when its
publisher began, by which its numbers are told from those of the publisher before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from ...errors import TelemetryError, describe
from .log import DEVICE, Cleared, EventBatch, KvEvent, Removed, Stored

Form: TypeAlias = Literal["array", "map", "names"]

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
_HASH_BYTES: Final = 8
_TENANT_DIGITS: Final = 32  # of its digest; readers take 64 for the digest of an image


class Told(NamedTuple):
    """What a message says."""

    time: float
    """Seconds since the epoch."""
    events: tuple[KvEvent, ...]
    """Without tokens and namespaces: whoever reads goes by names alone."""
    since: float
    """When the publisher began, seconds since the epoch; 0: it does not say."""


def payload(batch: EventBatch, *, rank: int, form: Form, since: float = 0.0) -> bytes:
    """``batch`` as a message. Its ``Cleared`` are read as of everything: see :func:`is_partial`. ``since``: time of the
    publisher's first batch.
    """
    if form == "names":
        return msgspec.msgpack.encode([batch.time, [*map(_by_name, batch.events)], rank, since])
    events = [_wire(event, form) for event in batch.events]
    return msgspec.msgpack.encode([batch.time, events, rank])


def told(message: bytes) -> Told:
    """Read a message in any of the forms. A hash that is an integer becomes the last 8 bytes of the name.

    :raises TelemetryError: when it is none.
    """
    try:
        read = _READ.decode(message)
        events = tuple(_event(event) for event in read.events)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise TelemetryError(f"a message with KV events cannot be read: {describe(error)}") from error
    return Told(read.time, events, read.since)


def is_partial(event: KvEvent) -> bool:
    """Whether it clears a part of what is stored, which the form cannot say."""
    return isinstance(event, Cleared) and event != Cleared()


def block_hash(name: bytes) -> int:
    """What stands for a digest."""
    return int.from_bytes(name[-_HASH_BYTES:], "big")


def _wire(event: KvEvent, form: Form) -> list[object] | dict[str, object]:
    names, values = _fields(event)
    return dict(zip(names, values, strict=False)) if form == "map" else list(values)


def _by_name(event: KvEvent) -> Sequence[object]:
    if isinstance(event, Stored):
        return ("BlockStored", event.names, event.parent, (), event.block_size, None, event.tier, event.adapter)
    if isinstance(event, Removed):
        return ("BlockRemoved", event.names, event.tier)
    return ("AllBlocksCleared",)


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


_Hash: TypeAlias = int | Annotated[bytes, msgspec.Meta(max_length=64)]
"""Longer ones than any digest are refused: readers keep many."""


class _Event(msgspec.Struct, frozen=True, tag_field="type"):
    """What all events have in common: unknown fields are passed over."""


class _BlockStored(_Event, frozen=True, tag="BlockStored"):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None


class _BlockRemoved(_Event, frozen=True, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None


class _AllBlocksCleared(_Event, frozen=True, tag="AllBlocksCleared"):
    pass


class _Message(msgspec.Struct, frozen=True, array_like=True):
    time: float
    events: list[list[object] | dict[str, object]]
    rank: object = 0
    since: float = 0.0


_READ: Final = msgspec.msgpack.Decoder(_Message)
_PLACES: Final[Mapping[str, str]] = MappingProxyType({medium: tier for tier, medium in MEDIA.items()})


def _event(values: Sequence[object] | Mapping[str, object]) -> KvEvent:
    """:raises msgspec.ValidationError: when it is none."""
    fields = values if isinstance(values, Mapping) else dict(zip(_STORED, values, strict=False))
    if not isinstance(values, Mapping) and fields.get("type") == "BlockRemoved":
        fields = dict(zip(_REMOVED, values, strict=False))
    event = msgspec.convert(fields, _BlockStored | _BlockRemoved | _AllBlocksCleared)
    if isinstance(event, _AllBlocksCleared):
        return Cleared()
    names, tier = tuple(map(_name, event.block_hashes)), _place(event.medium)
    if isinstance(event, _BlockRemoved):
        return Removed(names, tier, b"")
    parent = None if event.parent_block_hash is None else _name(event.parent_block_hash)
    return Stored(names, parent, b"", event.block_size, tier, b"", b"", is_private=False, adapter=event.lora_name)


def _name(block: int | bytes) -> bytes:
    """:raises OverflowError: when an integer is no unsigned one of 8 bytes."""
    return block if isinstance(block, bytes) else block.to_bytes(_HASH_BYTES, "big")


def _place(medium: str | None) -> str:
    return DEVICE if medium is None else _PLACES.get(medium, medium)
