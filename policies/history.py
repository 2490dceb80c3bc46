"""What happens to a cache, told one after the other: the words of recordings, and of those who listen to a live cache.

The events of one cache, in order, are all that decides what its eviction policy sees. So a recording of them, a line
each, can be played back to another policy object, which must then choose the same victims (see
:mod:`~octavo.policies.simulator.exact`).

Blocks are called by names of ``NAME_BYTES`` bytes; a name stands for its block and everything before it. A run is told
by the name of its last block and how many blocks it has. Tokens, text and names of tenants are in no event.

On paper an event is a JSON array: its word, then its fields in order. New fields come last and have a default, so a
reader takes lines of later writers.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

FORMAT = "octavo-recording-1"


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a recording, a JSON object."""

    format: str
    block_tokens: int
    num_blocks: int
    eviction_policy: str
    """As it was configured."""
    octavo: str
    """Version of the writer."""
    started: float
    """Seconds since the epoch."""
    clock: float
    """The same moment on the monotonic clock that all times in the recording are of."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Neighbouring blocks that were published alike."""

    blocks: int
    recompute_seconds: float
    """Measured, for one block; 0: not measured."""
    priority: int = 0
    expires: float | None = None
    hits: int = 0
    last_use: float | None = None
    """``None``: they were computed, so that is now."""
    reload_tier: str | None = None
    reload_seconds: float | None = None


class Remembered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An evicted run that a request wants."""

    number: int
    blocks: int
    idle: float
    """Seconds since it was evicted."""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Anything that happens."""

    now: float
    """Seconds on the monotonic clock. It stands still during an operation of the cache."""


class Locked(Event, frozen=True, tag="lock"):
    """Somebody, ``number``, holds a cached prefix of ``blocks`` blocks from now on: a request that is about to be
    admitted, or a pin, which has a number below 0.
    """

    number: int
    names: bytes
    """Of the last block; empty when there is none."""
    blocks: int


class Unlocked(Event, frozen=True, tag="unlock"):
    """No longer: there was no room for the rest of the request, or a pin was given back."""

    number: int


class Evicted(Event, frozen=True, tag="evict"):
    """The policy was asked for ``asked`` blocks, and these runs went, in this order. They are counted from 0 over the
    whole recording.
    """

    asked: int
    reason: str
    names: bytes
    """Of the last block of each run."""
    blocks: tuple[int, ...]
    faulty: bool = False
    """The policy broke its contract, so these are not (all) its choice."""


class Admitted(Event, frozen=True, tag="admit"):
    """A request has all blocks that its tokens need."""

    number: int
    request: int
    """Of the request that it is a line of, as in ``Done``; 0: of none."""
    tokens: int
    found: int
    """Blocks that were cached and that it holds now; a ``Locked`` came before, if there can be any."""
    taken: int
    """Blocks that it took beside these."""
    names: bytes
    """Of all its whole blocks. In a recording, where the ones that were found are known, only of the others."""
    resumed: bool = False
    """It was here before and was preempted."""
    used: bool = True
    """It is a request; otherwise blocks that are brought back after a restart."""
    tenant: int = 0
    """Number of the tenant, by first appearance; 0: none."""
    ghosts: tuple[Remembered, ...] = ()
    """What is remembered of the blocks that it lacks, one run after the other from the first of them on."""


class Kept(Event, frozen=True, tag="keep"):
    """These runs, one after the other, have another retention priority now."""

    names: bytes
    blocks: tuple[int, ...]
    priority: int
    expires: float | None = None


class Published(Event, frozen=True, tag="publish"):
    """The first ``blocks`` blocks of a request are in the cache."""

    number: int
    blocks: int
    names: bytes
    """Of those of them that were not before."""
    known: int
    """How many of these, from the first on, somebody else had published meanwhile."""
    parts: tuple[Part, ...]


class Extended(Event, frozen=True, tag="extend"):
    """A request took ``taken`` blocks more."""

    number: int
    taken: int


class Forked(Event, frozen=True, tag="fork"):
    """A second line of text goes on from where ``parent`` stands, on the same blocks."""

    number: int
    request: int
    """As of one that is admitted."""
    parent: int
    tokens: int
    """So far."""


class Left(Event, frozen=True, tag="leave"):
    """A request gave back all its blocks; what it published stays."""

    number: int
    kind: str
    """``finished``; ``preempted``: it will come back; ``abandoned``: it was preempted and does not."""


class Dropped(Event, frozen=True, tag="drop"):
    """These runs left the cache, one after the other, because they were bad or to be forgotten."""

    reason: str
    names: bytes
    blocks: tuple[int, ...]


class Switched(Event, frozen=True, tag="policy"):
    """Another eviction policy goes on."""

    name: str


class Done(Event, frozen=True, tag="done"):
    """A request is over, with all its lines of text."""

    request: int
    arrival: float
    """On the same clock."""
    priority: int
    """In scheduling."""
    prompt_tokens: int
    generated_tokens: int
    """Over all its lines."""
    end: str
    """``stop``, ``length``, ``abort`` or ``error``."""


class Gap(Event, frozen=True, tag="gap"):
    """``lost`` events are missing here: the disk could not follow."""

    lost: int


class End(Event, frozen=True, tag="end"):
    """The recording is complete but for ``lost`` events. A file without this line was torn."""

    lost: int = 0


Told: TypeAlias = (
    Locked | Unlocked | Evicted | Admitted | Kept | Published | Extended | Forked | Left | Dropped | Switched
)
"""What a cache tells."""
Line: TypeAlias = Told | Done | Gap | End
"""What stands in a recording, after the header."""
