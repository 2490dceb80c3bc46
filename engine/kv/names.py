"""Names of the blocks in the tree (see :mod:`octavo.storage.naming`), worked out when somebody asks and then kept.

Each block is named once in its life: a node keeps the names of its first blocks, and splits, growth and eviction leave
them right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final

from ...storage.naming import NAME_BYTES, TOKEN_BYTES, BlockName, names_after
from .node import Node

PART_BLOCKS: Final = 512
"""Named in one go by those who name a whole cache: half a millisecond."""
_NAME = Struct(f"{NAME_BYTES}s")


def end_name(node: Node) -> BlockName:
    """The name of the last block of ``node``; of a root: what its first blocks follow. Names the whole path."""
    unnamed = []
    part = node
    while len(part.names) < max(len(part.ids), 1) * NAME_BYTES:
        unnamed.append(part)
        if part.parent is None:
            break
        part = part.parent
    for part in reversed(unnamed):
        _complete(part)
    return bytes(node.names[-NAME_BYTES:])


def path_names(node: Node) -> bytes:
    """The names of all blocks from the root to the end of ``node``, one after the other."""
    end_name(node)
    parts = []
    part: Node | None = node
    while part is not None and part.parent is not None:
        parts.append(part.names)
        part = part.parent
    return b"".join(reversed(parts))


def give_names(node: Node, names: bytes | bytearray, block_size: int) -> None:
    """Let the nodes of the path that ends at ``node`` keep what they are called, where they do not know it yet.
    ``names``: of all blocks of the path.
    """
    part = node
    while len(part.names) < max(len(part.ids), 1) * NAME_BYTES:
        if part.parent is None:
            _complete(part)
            return
        end = part.end // block_size
        part.names[:] = names[(end - len(part.ids)) * NAME_BYTES : end * NAME_BYTES]
        part = part.parent


def names_of(node: Node, first: int = 0) -> list[BlockName]:
    """The names of the blocks of ``node`` from number ``first`` on, in order."""
    end_name(node)
    return [name for (name,) in _NAME.iter_unpack(node.names[first * NAME_BYTES :])]


def naming(nodes: Iterable[Node]) -> Iterator[None]:
    """Name all ``nodes``, about ``PART_BLOCKS`` blocks at each step; the tree may change between two steps. What has
    become of them then is named, or gone; what comes in between is not.
    """
    blocks = 0
    for node in [*nodes]:
        blocks += len(node.ids) - len(node.names) // NAME_BYTES
        if node.ids:  # else it is gone
            end_name(node)
        if blocks >= PART_BLOCKS:
            blocks = 0
            yield


def parent_name(node: Node) -> BlockName:
    """The name of the block before the first one of ``node``, which is no root."""
    return end_name(node if node.parent is None else node.parent)


def _complete(node: Node) -> None:
    """Name the rest of ``node``, whose parent is named."""
    if node.parent is None:
        node.names += node.namespace.shelf().namespace
        return
    named = len(node.names) // NAME_BYTES
    before = bytes((node.names or node.parent.names)[-NAME_BYTES:])
    block_bytes = len(node.tokens) // len(node.ids)
    rest = bytes(node.tokens[named * block_bytes :])
    node.names += b"".join(names_after(before, rest, block_bytes // TOKEN_BYTES))
