"""What looking for blocks and loading them comes to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ..base import Head, Meta
from .write_queue import Item

LoadReason: TypeAlias = Literal["complete", "missing", "corrupt", "failed", "deadline"]


class Coverage(NamedTuple):
    """Where a prefix lies."""

    tiers: tuple[int, ...]
    """For each leading name that some tier has, the index of the fastest one."""


class Loaded(NamedTuple):
    """A block that came back, checked."""

    head: Head
    payload: memoryview
    """K and V, in a row."""
    meta: Meta
    tier: str
    own: bool
    """Whether this very run of the engine stored it."""


class LoadOutcome(NamedTuple):
    """How a load ended."""

    blocks: int
    """Delivered."""
    reason: LoadReason
    """Why not more: ``complete`` (that is all), ``missing`` (no tier has the next one), ``corrupt`` (its bytes were
    wrong wherever it was), ``failed`` (a tier that should have it failed, or took too long for a batch), ``deadline``
    (that of the whole load)."""


Deliver: TypeAlias = Callable[[list[Loaded]], Awaitable[None]]


class Found(NamedTuple):
    """A block that was read."""

    loaded: Loaded
    item: Item
    """The same, as it can be put into the queue of another tier."""


@dataclass(slots=True)
class Fetched:
    """What came of one batch of names."""

    found: dict[int, Found] = field(default_factory=dict)
    why: dict[int, LoadReason] = field(default_factory=dict)
    """The worst that happened to those that were not found."""

    def leading(self, count: int) -> list[Found]:
        """The blocks before the first one that was not found."""
        blocks = []
        for at in range(count):
            if at not in self.found:
                break
            blocks.append(self.found[at])
        return blocks
