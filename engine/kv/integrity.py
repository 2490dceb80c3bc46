"""What is wrong with a prefix tree, if anything: the part of the census that knows nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...storage.naming import NAME_BYTES, TOKEN_BYTES, names_after
from .node import Node
from .prefix_tree import PrefixTree


def contradictions(tree: PrefixTree, leases: Mapping[Node, int]) -> list[str]:
    """What does not add up, given how many leases end at each node. Empty when all does. O(tree)."""
    wrong: list[str] = []
    idle = total = ending = 0
    roots = [root for root in map(tree.root, tree.namespaces()) if root is not None]
    for node in [*roots, *tree.nodes()]:
        total += len(node.ids)
        idle += 0 if node.locks else len(node.ids)
        ending += node.keep.expires is not None
        wrong += _locks_and_children(node, leases.get(node, 0))
        wrong += _edge(tree, node)
        wrong += _names(tree, node)
    if (total, idle) != (tree.blocks, tree.idle_blocks):
        wrong.append(f"tree counts {tree.blocks} blocks, {tree.idle_blocks} idle; it has {total}, {idle} idle")
    if ending != len(tree.expiries):
        wrong.append(f"the retention of {ending} nodes ends some time and {len(tree.expiries)} are filed")
    return wrong


def _where(node: Node) -> str:
    return f"node that ends at token {node.end}"


def _locks_and_children(node: Node, leases: int) -> Iterator[str]:
    if node.locks != leases + sum(child.locks for child in node.children.values()):
        yield f"{_where(node)} has {node.locks} locks, its leases and children account for another number"
    if sorted(node.children) != node.keys or any(child.parent is not node for child in node.children.values()):
        yield f"{_where(node)} and its children disagree"
    if node.parent is None and not node.children and not node.locks:
        yield f"{_where(node)} is a root without a use"


def _edge(tree: PrefixTree, node: Node) -> Iterator[str]:
    if node.parent is None:
        return
    if not node.ids or len(node.tokens) != len(node.ids) * tree.block_size * TOKEN_BYTES:
        yield f"{_where(node)} has {len(node.ids)} ids and {len(node.tokens)} bytes of tokens"
    if node.end != node.parent.end + len(node.ids) * tree.block_size:
        yield f"{_where(node)} does not follow from its parent's end {node.parent.end}"
    is_candidate = node in tree.candidates
    if is_candidate != (not node.locks and not node.children):
        yield f"{_where(node)} is wrongly {'a' if is_candidate else 'no'} candidate"
    if (node.keep.expires is not None) != (node in tree.expiries):
        yield f"the end of retention of the {_where(node)} is wrongly filed or not"


def _names(tree: PrefixTree, node: Node) -> Iterator[str]:
    """Names that are there follow from the name before them and the tokens."""
    if not node.names:
        return
    if node.parent is None:
        right = node.namespace.shelf().namespace
    elif len(node.parent.names) < max(len(node.parent.ids), 1) * NAME_BYTES:
        yield f"{_where(node)} is named and its parent is not"
        return
    else:
        named = len(node.names) // NAME_BYTES * tree.block_size * TOKEN_BYTES
        before = bytes(node.parent.names[-NAME_BYTES:])
        right = b"".join(names_after(before, bytes(node.tokens[:named]), tree.block_size))
    if node.names != right:
        yield f"{_where(node)} has wrong names"
