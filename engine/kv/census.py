"""The self-check: every block is in exactly one set, and every reference has an owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from ...errors import CensusFailed
from .block_pool import BlockPool
from .integrity import contradictions
from .leases import Lease
from .prefix_tree import PrefixTree
from .quotas import Quotas
from .sequence import Sequence, State


class Census(NamedTuple):
    """Where the blocks are; the first four add up to ``total``."""

    free: int
    idle: int
    """In the tree, referenced by no sequence and not pinned."""
    held: int
    in_transfer: int
    """Out of use, but a copy still reads them."""
    total: int
    references: int
    """Table entries of own blocks, plus one for each block in the tree."""


def take_census(
    pool: BlockPool,
    tree: PrefixTree,
    sequences: Collection[Sequence],
    pinned: Collection[Lease] = (),
    quotas: Quotas | None = None,
) -> Census:
    """Count everything afresh and compare it with the books. O(pool + tree).

    :raises CensusFailed: when something does not add up; the message lists every contradiction.
    """
    owners: Counter[int] = Counter()
    leases = Counter(lease.node for lease in pinned)
    idle = 0
    for node in tree.nodes():
        owners.update(node.ids)
        idle += 0 if node.locks else len(node.ids)
    wrong = [f"block {block} is in the tree {count} times" for block, count in owners.items() if count > 1]
    for sequence in sequences:
        owners.update(sequence.table.own)
        wrong += _sequence_contradictions(sequence, tree)
        if sequence.node is not None:
            leases[sequence.node] += 1
    wrong += contradictions(tree, leases)
    wrong += [f"{lease} is in the books and was given back" for lease in pinned if not lease.is_held]
    wrong += _pool_contradictions(pool, owners)
    if quotas is not None:
        wrong += _quota_contradictions(pool, tree, sequences, quotas)
    census = Census(
        free=pool.free,
        idle=idle,
        held=len(owners) - idle,
        in_transfer=pool.in_transfer,
        total=pool.num_blocks,
        references=owners.total(),
    )
    if sum(census[:4]) != census.total:
        wrong.append(f"{census} does not add up")
    if wrong:
        raise CensusFailed("; ".join(wrong))
    return census


def _sequence_contradictions(sequence: Sequence, tree: PrefixTree) -> list[str]:
    table = sequence.table
    wrong = []
    if sequence.state is not State.ADMITTED:
        wrong.append(f"{sequence!r} is registered")
    leased = tree.path_ids(sequence.node) if sequence.node is not None else table.blocks[:0]
    if leased != table.blocks[: table.shared]:
        wrong.append(f"{sequence!r} has other shared blocks than its lease says")
    if not table.shared * table.block_size <= sequence.computed <= min(table.capacity, len(sequence.tokens)):
        wrong.append(f"{sequence!r} has {len(table)} blocks, {table.shared} of them shared")
    return wrong


def _quota_contradictions(
    pool: BlockPool, tree: PrefixTree, sequences: Collection[Sequence], quotas: Quotas
) -> list[str]:
    wrong = []
    owned = quotas.owned()
    if owned != +Counter(quotas.used) or owned.total() != pool.num_blocks - pool.free:
        wrong.append(f"tenants own {owned.total()} blocks, {pool.num_blocks - pool.free} are in use")
    used = [(node.namespace, node.ids) for node in tree.nodes()]
    used += [(sequence.namespace, sequence.table.own) for sequence in sequences]
    for namespace, ids in used:
        wrong += [
            f"block {block} is owned by another tenant" for block in ids if not quotas.owns(namespace.salt, block)
        ]
    return wrong


def _pool_contradictions(pool: BlockPool, owners: Counter[int]) -> list[str]:
    wrong = []
    free = pool.free_ids()
    if len(set(free)) != len(free) or len(free) != pool.free:
        wrong.append(f"the free list has {len(free)} entries, {len(set(free))} ids, and counts {pool.free}")
    for block_id in range(pool.num_blocks):
        block = pool.block(block_id)
        if block.references != owners[block_id]:
            wrong.append(f"block {block_id} has {block.references} references and {owners[block_id]} owners")
    if {block for block in range(pool.num_blocks) if pool.block(block).is_free} != set(free):
        wrong.append("the free list and the reference counts disagree")
    return wrong
