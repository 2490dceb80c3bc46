"""Leases: prefixes that somebody pinned. Their blocks cannot be evicted until the lease is given back."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import CacheMisuse, OutOfBlocks
from ...storage.naming import Namespace
from .narrator import Narrator
from .node import Node
from .prefix_tree import Match, PrefixTree


@dataclass(slots=True, eq=False)
class Lease:
    """A lock on the whole blocks of one prefix. Compared by identity."""

    namespace: Namespace = field(repr=False)
    number: int
    """Its own, below 0: those above are of sequences."""
    tokens: int
    """Tokens that it covers."""
    node: Node = field(repr=False)
    """The end of the locked path."""
    is_held: bool = True


class Leases:
    """All leases of one cache, and how many blocks they hold."""

    def __init__(self, tree: PrefixTree, narrator: Narrator, most_blocks: int) -> None:
        """``most_blocks``: bound on the blocks that leases may hold together, so that the rest can be used."""
        self.blocks = 0
        """Blocks that leases hold; one that several hold counts once."""
        self.held: dict[Lease, None] = {}
        self._tree = tree
        self._narrator = narrator
        self._most = most_blocks
        self._taken = 0

    def take(self, namespace: Namespace, match: Match) -> Lease:
        """Lock what ``match`` found.

        :raises OutOfBlocks: when leases would hold too many blocks; nothing has changed.
        """
        node = self._tree.lock_match(namespace, match)
        self._taken += 1
        lease = Lease(namespace, -self._taken, node.end, node)
        self.held[lease] = None
        if self._narrator.is_heard:
            self._narrator.locked(lease.number, node, len(match.ids))
        self.blocks, before = self._count(), self.blocks
        if self.blocks > self._most:
            more = self.blocks - before
            self.give_back(lease)
            raise OutOfBlocks(
                f"pinning this prefix takes {more} blocks more; pinned prefixes hold {before} of at most {self._most}. "
                "Unpin others or enlarge the cache"
            )
        return lease

    def give_back(self, lease: Lease) -> None:
        """Unlock; the blocks stay cached until they are evicted.

        :raises CacheMisuse: when it was given back before, or is another cache's.
        """
        if lease not in self.held:
            raise CacheMisuse("this lease on a prefix was given back before, or belongs to another cache")
        del self.held[lease]
        lease.is_held = False
        self._tree.unlock(lease.node)
        if self._narrator.is_heard:
            self._narrator.unlocked(lease.number)
        self.blocks = self._count()

    def _count(self) -> int:
        pinned = {part for lease in self.held for part in self._tree.path(lease.node)}
        return sum(len(part.ids) for part in pinned)
