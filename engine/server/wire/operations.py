"""What operators let be done: the forms of the admin routes, and of ``/v1/cache/explain``."""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$(?!\n)")]
"""Of a snapshot: no path, wherever it is written."""
Spec = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,80}$(?!\n)")]
"""Of a policy that is installed. Not ``package.module:Class``: nobody makes a server import things over HTTP."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**9)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Prefix(msgspec.Struct):
    """A prompt, or the beginning of one: a text or token ids in ``prompt``, or a conversation in ``messages``."""

    prompt: str | list[TokenId] | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None
    """With messages: as in a request for chat completions."""


class TenantPrefix(Prefix):
    """The same, of a tenant; null: of requests without one."""

    tenant: str | None = None


# explain


class ExplainForm(TenantPrefix):
    """Ask what a request with this prompt would find."""

    others: bool | None = None
    """Tell also whether another tenant has more of it."""


class OwnExplainForm(Prefix):
    """The same, for a client: of its own tenant only."""

    model: str | None = None
    cache_salt: str | None = None
    """As in a request for completions."""


class TierTokens(msgspec.Struct):
    """Tokens in a row that one tier has."""

    tier: str
    tokens: int


class OwnExplained(msgspec.Struct):
    """What a request would find now."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens that need not be computed; at least one always is."""
    device_tokens: int
    """Of them on the device."""
    tier_tokens: list[TierTokens]
    """What follows them in the tiers, in the order of the prompt."""
    reason: str
    """Why it is not more, in words; empty when all of it is there but the rest of a block."""


class Nearest(msgspec.Struct):
    """The stored text of the same tenant that has most in common with the prompt and then goes on otherwise."""

    position: int
    """Number of the first token that differs."""
    start: int
    """Number of the first of ``stored``."""
    stored: list[int]
    """Its tokens around ``position``."""


class EvictedBefore(msgspec.Struct):
    """How the first missing block left."""

    seconds_ago: float
    reason: str
    policy: str


class Explained(OwnExplained, kw_only=True):
    """The same for an operator, with what others may not know."""

    missing_from: int | None
    """Number of the first token whose block the device lacks; null: it has all whole blocks."""
    evicted: EvictedBefore | None
    nearest: Nearest | None
    other_has_more: bool | None
    """Whether another tenant has more of it; null: not asked."""


# keeping and forgetting


class PinForm(TenantPrefix):
    """Keep a prefix on the device, computing it first if need be."""

    ttl: Seconds | None = None
    """For so long; null: until it is unpinned."""
    priority: int | None = None
    """Do not hold it, only let what has a lower retention priority go first."""


class PinState(msgspec.Struct):
    """A prefix that is kept."""

    id: int
    """-1: it has a priority and is not held; nothing is to be unpinned."""
    tokens: int
    """Its whole blocks."""
    seconds_left: float | None
    """null: until it is unpinned."""
    tenant: str | None


class PinList(msgspec.Struct):
    """All that are held."""

    pins: list[PinState]


class Unpinned(msgspec.Struct):
    """A pin was given back."""

    id: int
    unpinned: bool = True


class EvictForm(TenantPrefix):
    """Forget a prefix and all that goes on from it. What is in use or pinned stays."""

    tiers: bool | None = None
    """Whether tiers forget it, too; by default they do."""


class EvictedBlocks(msgspec.Struct):
    """What was given up."""

    device_blocks: int
    tier_blocks: int


class EraseForm(msgspec.Struct):
    """Abort all requests of a tenant and forget all its blocks, on the device and in all tiers."""

    tenant: str | None
    """Has to be given; null: of requests without a tenant."""
    snapshots: list[Name] | None = None
    """In these snapshots, too."""


class Erased(msgspec.Struct):
    """How many blocks there were."""

    blocks: int


# snapshots


class SnapshotForm(TenantPrefix, kw_only=True):
    """Write the cache, or one prefix of it, to a snapshot."""

    name: Name
    """Under which it is written in the server's folder for snapshots. One of the same name is replaced."""
    tiers: bool | None = None
    """Whether also what only tiers have; by default it is."""


class SnapshotWritten(msgspec.Struct):
    """A snapshot is complete."""

    name: str
    blocks: int
    device_blocks: int
    lost: int
    """Blocks that could not be copied; with them what comes after them in a prompt."""


class SnapshotFound(msgspec.Struct):
    """A snapshot in the server's folder."""

    name: str
    bytes: int
    modified: float
    """Seconds since the epoch."""


class SnapshotList(msgspec.Struct):
    """All of them, by name."""

    snapshots: list[SnapshotFound]


# the engine


class DrainForm(msgspec.Struct):
    """Take no new requests any more, and wait until those under way are done. There is no way back."""

    timeout: Seconds | None = None
    """After so long abort the rest; null: wait for as long as it takes."""


class Drained(msgspec.Struct):
    """No request is left."""

    in_time: bool
    """False: some were aborted."""


class PolicyForm(msgspec.Struct):
    """Let another eviction policy say what goes."""

    eviction_policy: Spec


class Policies(msgspec.Struct):
    """Who decides."""

    eviction_policy: str
    set_aside: str | None
    """The policy that was chosen, when it broke its contract so often that another one stands in for it."""
    scheduling_policy: str
    installed: list[str]
    """Names that ``PUT`` takes: eviction policies that are installed."""
    before: str | None = None
    """The eviction policy until now, after a switch."""


class ShadowForm(msgspec.Struct):
    """Let one more eviction policy run beside the one that decides, on a cache without contents."""

    policy: Spec


class Shadow(msgspec.Struct):
    """What a policy would have found, beside what the cache found for the same requests."""

    policy: str
    uses: int
    """Blocks of prompts that could have been found."""
    hits: int
    live_hits: int


class ShadowList(msgspec.Struct):
    """All that run."""

    shadows: list[Shadow]


class RequestState(msgspec.Struct):
    """A request under way."""

    id: str
    tenant: str | None
    priority: int
    state: str
    """``waiting``, ``loading`` or ``running``."""
    age: float
    """Seconds since it came."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Over all samples."""
    samples: int


class RequestList(msgspec.Struct):
    """All of them, the oldest first."""

    requests: list[RequestState]


class Aborted(msgspec.Struct):
    """A request was aborted."""

    id: str
    aborted: bool = True
