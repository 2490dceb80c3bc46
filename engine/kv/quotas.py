"""Quotas: who owns which block, beside how many blocks he may count on.

Tenants with a quota of their own are groups by themselves; all others are one group together. Every block that is not
free is owned by the group of the tenant it was allocated for, cached or held. So the books agree with the pool by
construction: they are kept where blocks are taken and where they become free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from .free_runs import FreeRuns
from .leases import Lease
from .node import Node
from .sequence import Sequence

OTHERS = "*"
"""The group of all tenants that have no quota of their own."""


class Quotas:
    """The books of one pool. A tenant is its salt, ``""`` for none."""

    def __init__(self, shares: Mapping[str, float], num_blocks: int) -> None:
        """``shares``: of the pool, in (0, 1], by tenant, together at most 1; ``"*"`` is for all others together, who
        have what is left if nothing is said.
        """
        left = max(1.0 - sum(shares.values()), 0.0)
        self.blocks = {name: int(share * num_blocks) for name, share in ({OTHERS: left} | dict(shares)).items()}
        """Quota by group."""
        self.used = dict.fromkeys(self.blocks, 0)
        """Blocks by group that are cached or held, those included that are being taken."""
        self._owners: list[str | None] = [None] * num_blocks

    def group(self, tenant: str | None) -> str:
        """Whose quota counts for ``tenant``."""
        return tenant or "" if (tenant or "") in self.blocks else OTHERS

    def group_of(self, node: Node) -> str:
        """Whose blocks those of ``node`` are."""
        return self.group(node.namespace.salt)

    def excess(self, group: str) -> int:
        """Blocks that a group has beyond its quota; negative: that it has left."""
        return self.used[group] - self.blocks[group]

    @property
    def borrowed(self) -> int:
        """Blocks that groups have beyond their quotas."""
        return sum(max(self.excess(group), 0) for group in self.blocks)

    def share_of(self, tenant: str | None, blocks: int) -> int:
        """How many of ``blocks`` that were named as the next to go are to go now: of who is beyond his quota no more
        than what he is beyond.
        """
        excess = self.excess(self.group(tenant))
        return min(blocks, excess) if excess > 0 else blocks

    @contextmanager
    def taking(self, tenant: str | None, count: int) -> Iterator[None]:
        """While room is made for ``count`` blocks they count already, so that whoever goes beyond his quota by them
        makes room himself."""
        group = self.group(tenant)
        self.used[group] += count
        try:
            yield
        finally:
            self.used[group] -= count

    def took(self, tenant: str | None, ids: Collection[int]) -> None:
        """Blocks were allocated for ``tenant``."""
        group = self.group(tenant)
        self.used[group] += len(ids)
        for block in ids:
            self._owners[block] = group

    def returned(self, start: int, length: int) -> None:
        """So many blocks from ``start`` on are free again."""
        for block in range(start, start + length):
            if (group := self._owners[block]) is not None:
                self.used[group] -= 1
                self._owners[block] = None

    def owns(self, tenant: str | None, block: int) -> bool:
        """Whether ``block`` was allocated for the group of ``tenant``."""
        return self._owners[block] == self.group(tenant)

    def owned(self) -> Counter[str]:
        """Blocks by group, counted afresh. O(pool)."""
        return Counter(group for group in self._owners if group is not None)

    def held(self, sequences: Iterable[Sequence], leases: Iterable[Lease]) -> Counter[str]:
        """Blocks by group that these sequences and leases hold, each once. O(what they hold)."""
        held: Counter[str] = Counter()
        seen: set[Node] = set()
        private: set[int] = set()
        nodes = [lease.node for lease in leases]
        for sequence in sequences:
            if sequence.node is not None:
                nodes.append(sequence.node)
            fresh = set(sequence.table.own) - private
            private |= fresh
            held[self.group(sequence.namespace.salt)] += len(fresh)
        for node in nodes:
            part: Node | None = node
            while part is not None and part not in seen:
                seen.add(part)
                held[self.group(part.namespace.salt)] += len(part.ids)
                part = part.parent
        return held


class OwnedRuns(FreeRuns):
    """The free blocks of a pool whose owners are noted."""

    def __init__(self, total: int, quotas: Quotas) -> None:
        self._quotas = quotas
        super().__init__(total)

    def give(self, start: int, length: int) -> None:
        self._quotas.returned(start, length)
        super().give(start, length)
