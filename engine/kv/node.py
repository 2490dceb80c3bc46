"""Node: one edge of the prefix tree, and Traits: what a run of blocks brings along when it becomes one."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from ...policies.eviction.base import Entry
from ...storage.naming import Namespace
from ...telemetry.record import Origin
from .keep import PLAIN, Keep


class Traits(NamedTuple):
    """Statistics of a run that enters the tree."""

    recompute_seconds: float
    """Measured, for one block; 0: not measured."""
    keep: Keep = PLAIN
    hits: int = 0
    last_use: float | None = None
    """``None``: it was computed just now."""
    reload_tier: str | None = None
    reload_seconds: float | None = None


class Node(Entry):
    """One edge of the tree and the branching at its end.

    What it inherits is shown to policies and never relied on: a policy that writes there spoils its own view only.
    What the cache itself goes by is in the slots beside it.
    """

    __slots__ = (
        "children",
        "end",
        "ids",
        "keep",
        "keys",
        "locks",
        "names",
        "namespace",
        "owner",
        "parent",
        "seconds",
        "tier",
        "tokens",
        "used",
        "uses",
    )

    def __init__(
        self, namespace: Namespace, parent: Node | None, tokens: bytearray, ids: array[int], end: int, now: float
    ) -> None:
        self.blocks, self.depth = len(ids), end  # as ``Entry`` does; spelled out: every request makes a node
        self.insert_time = self.last_use = now
        self.hits, self.recompute_seconds = 0, 0.0
        self.reload_seconds, self.reload_tier = None, None
        self.priority, self.expires = PLAIN
        self.tenant, self.candidate = "", False
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.ids = ids
        self.children: dict[bytes, Node] = {}  # first block's tokens -> child
        self.keys: list[bytes] = []  # the keys of ``children``, sorted: the nearest relative of any block in O(log n)
        self.locks = 0
        self.end = end  # tokens from the start of the prompt to the end of the edge
        self.used = now  # ``last_use``
        self.uses = 0  # ``hits``
        self.seconds = 0.0  # ``recompute_seconds``
        self.tier: str | None = None  # ``reload_tier``
        self.keep = PLAIN
        self.owner: Origin | None = None  # span of the request that used it last, if that was traced
        self.names = bytearray()  # of its first blocks, as far as anybody asked; of a root: what its children follow

    def show(self) -> None:
        """Bring what policies see up to date."""
        self.blocks, self.depth = len(self.ids), self.end

    def show_keep(self, keep: Keep) -> None:
        """Take ``keep`` and let policies see it."""
        self.keep = keep
        self.priority, self.expires = keep

    def show_use(self) -> None:
        """The same for what is known of its uses and its cost."""
        self.last_use, self.hits, self.recompute_seconds, self.reload_tier = (
            self.used,
            self.uses,
            self.seconds,
            self.tier,
        )

    def show_all(self) -> None:
        """Undo what a policy may have written: somebody who trusts what is shown is about to read it."""
        self.show()
        self.show_keep(self.keep)
        self.show_use()

    def take(self, traits: Traits, now: float) -> None:
        """A new edge starts with ``traits``; ``now`` is its last use where they name none."""
        seconds, _, hits, last_use, tier, self.reload_seconds = traits
        self.seconds = self.recompute_seconds = seconds
        self.uses = self.hits = hits
        self.tier = self.reload_tier = tier
        self.used = self.last_use = now if last_use is None else last_use

    def inherit(self, lower: Node) -> None:
        """A head that was cut off ``lower`` starts with the statistics of it."""
        self.used, self.uses, self.seconds, self.tier = lower.used, lower.uses, lower.seconds, lower.tier
        self.reload_seconds, self.tenant = lower.reload_seconds, lower.tenant
        self.show_use()

    def takes(self, traits: Traits) -> bool:
        """Whether a run with these traits may lengthen this edge: retention and tier are the same all along it."""
        same_keep = self.keep is traits.keep or self.keep.agrees(traits.keep)
        return same_keep and self.tier == traits.reload_tier

    def merge(self, traits: Traits) -> None:
        """Note the uses of blocks that were here already, or come to this edge, under ``traits``."""
        self.uses = max(self.uses, traits.hits)
        if traits.last_use is not None:
            self.used = max(self.used, traits.last_use)
            self.tier, self.reload_seconds = traits.reload_tier, traits.reload_seconds
        self.show_use()
