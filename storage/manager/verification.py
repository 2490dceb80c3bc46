"""What tiers return is checked here before anybody relies on it. A tier may be a plug-in, or read what others wrote."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from ...errors import StorageError, describe
from ..base import MOST_NOTES, Head, Listed, Meta, Record, Stored, TierStats
from ..naming import NAME_BYTES, BlockName, Shelf
from ..record import Opened, RecordCodec


def as_stored(answer: object, count: int) -> list[Stored | None]:
    """What ``get`` returned for ``count`` names.

    :raises StorageError: when it is not one result for each.
    """
    items = _as_list(answer, count)
    for item in items:
        if item is not None and not isinstance(item, Stored):
            raise StorageError(f"a tier returned {type(item).__name__} instead of a Stored")
    return [item if isinstance(item, Stored) else None for item in items]


def as_flags(answer: object, count: int) -> list[bool]:
    """What ``put`` or ``contains`` returned for ``count`` blocks.

    :raises StorageError: when it is not one truth value for each.
    """
    items = _as_list(answer, count)
    for item in items:
        if not isinstance(item, bool):
            raise StorageError(f"a tier returned {type(item).__name__} instead of a truth value")
    return [item is True for item in items]


def as_count(answer: object) -> int:
    """What ``delete``, ``erase`` or ``peek`` returned.

    :raises StorageError: when it is no number of blocks.
    """
    if not isinstance(answer, int) or answer < 0:
        raise StorageError(f"a tier returned {answer!r:.60} instead of a number of blocks")
    return int(answer)


def as_notes(answer: object) -> bytes | None:
    """What ``notes`` returned.

    :raises StorageError: when it is neither bytes nor nothing, or too long.
    """
    if answer is not None and (not isinstance(answer, bytes) or len(answer) > MOST_NOTES):
        raise StorageError(f"a tier returned {type(answer).__name__} for notes, or too many bytes")
    return bytes(answer) if isinstance(answer, bytes) else None


def as_nothing(_answer: object) -> None:
    """What ``flush``, ``touch``, ``open`` and ``close`` returned; nobody looks at it."""
    return


def as_iterator(answer: object) -> AsyncIterator[Listed]:
    """What ``listing`` returned.

    :raises StorageError: when it cannot be iterated.
    """
    if not isinstance(answer, AsyncIterator):
        raise StorageError(f"a tier returned {type(answer).__name__} instead of an asynchronous iterator")
    return answer


def as_listed(answer: object) -> list[Listed]:
    """The usable entries of what ``children`` or a listing returned.

    :raises StorageError: when it is no list.
    """
    items = _as_list(answer, None)
    return [
        item._replace(meta=clean_meta(item.meta))
        for item in items
        if isinstance(item, Listed) and _sound(item.shelf, item.head)
    ]


def as_spilled(answer: object, record_bytes: int) -> list[tuple[Shelf, Record]]:
    """The usable records of what ``spill`` returned. Their bytes are checked when they are read again.

    :raises StorageError: when it is no list.
    """
    spilled = []
    for item in _as_list(answer, None):
        if isinstance(item, tuple) and len(item) == 2:
            shelf, record = item
            if isinstance(record, Record) and is_plain(record.data) and _sound(shelf, record.head):
                spilled.append((shelf, record._replace(meta=clean_meta(record.meta))))
    return [(shelf, record) for shelf, record in spilled if len(record.data) == record_bytes]


def clean_meta(meta: object) -> Meta:
    """``meta`` with everything that is no sensible value put to its default; a broken time to live is over."""
    if not isinstance(meta, Meta):
        return Meta()
    return Meta(
        written=_seconds(meta.written) or 0.0,
        idle=_seconds(meta.idle) or 0.0,
        hits=meta.hits if _is_int(meta.hits) and meta.hits >= 0 else 0,
        priority=meta.priority if _is_int(meta.priority) else 0,
        ttl=None if meta.ttl is None else _seconds(meta.ttl) or 0.0,
        recompute_seconds=_seconds(meta.recompute_seconds) or 0.0,
    )


def is_plain(data: object) -> bool:
    """Whether ``data`` is a view of contiguous bytes."""
    return isinstance(data, memoryview) and data.ndim == 1 and data.format == "B" and data.c_contiguous


class Checked(NamedTuple):
    """What became of a batch of records."""

    opened: list[Opened | str]
    """The block, or what is wrong with its bytes."""
    seconds: float


def open_records(
    codec: RecordCodec,
    shelf: Shelf,
    names: Sequence[BlockName],
    data: Sequence[memoryview],
    clock: Callable[[], float],
) -> Checked:
    """Check ``data[i]`` to be the block ``names[i]``. Takes a while (every byte is read); meant for a thread."""
    started = clock()
    opened = [_open(codec, shelf, name, record) for name, record in zip(names, data, strict=True)]
    return Checked(opened, clock() - started)


def _open(codec: RecordCodec, shelf: Shelf, name: BlockName, data: memoryview) -> Opened | str:
    try:
        if not is_plain(data):
            return "a tier returned something that is no view of contiguous bytes"
        return codec.open(shelf, name, data)
    except Exception as error:  # noqa: BLE001  # bytes from anywhere, memory of a foreign tier
        return describe(error)


def _as_list(answer: object, count: int | None) -> Sequence[object]:
    if not isinstance(answer, list | tuple):
        raise StorageError(f"a tier returned {type(answer).__name__} instead of a list")
    if count is not None and len(answer) != count:
        raise StorageError(f"a tier returned {len(answer)} results for {count} blocks")
    return answer


def _sound(shelf: object, head: object) -> bool:
    if not isinstance(shelf, Shelf) or not isinstance(head, Head):
        return False
    digests = (*shelf, head.name, head.parent)
    return (
        all(isinstance(digest, bytes) and len(digest) == NAME_BYTES for digest in digests)
        and _is_int(head.start)
        and head.start >= 0
        and isinstance(head.tokens, bytes)
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seconds(value: object) -> float | None:
    """``value`` if it is a number of seconds that can be."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    return None


def as_stats(answer: object, before: TierStats) -> TierStats:
    """Statistics with numbers where numbers belong, and counters that are at least those ``before``."""
    if not isinstance(answer, TierStats):
        return before._replace(healthy=False, problem="it has no statistics")
    return TierStats(
        blocks=_number(answer.blocks),
        bytes=_number(answer.bytes),
        capacity=None if answer.capacity is None else _number(answer.capacity),
        evicted=max(_number(answer.evicted), before.evicted),
        declined=max(_number(answer.declined), before.declined),
        corrupt=max(_number(answer.corrupt), before.corrupt),
        healthy=bool(answer.healthy),
        problem=str(answer.problem),
        policy=str(answer.policy),
        policy_faults=max(_number(answer.policy_faults), before.policy_faults),
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
