"""Which part of the tree belongs to one prefix, and to nothing else."""

from __future__ import annotations

from ...storage.naming import Namespace
from .node import Node
from .prefix_tree import PrefixTree


def region(tree: PrefixTree, namespace: Namespace, key: bytes) -> list[Node]:
    """The nodes whose blocks exist for ``key`` (int32 tokens) alone, parents first: all that continue it, and of those
    that hold a part of it the ones that no other prompt in the tree shares.

    O(nodes found, and branches beside their path).
    """
    node = tree.root(namespace)
    own: list[Node] = []  # nodes of the path since the last place where another prompt parted
    at = 0
    while node is not None:
        rest = key[at:]
        beyond = [child for child in node.children.values() if child.tokens.startswith(rest)]
        within = [child for child in node.children.values() if rest.startswith(child.tokens)] if not beyond else []
        if len(beyond) + len(within) < len(node.children):
            own.clear()
        if not within:
            return own + _below(beyond)
        node = within[0]
        own.append(node)
        at += len(node.tokens)
    return own


def _below(tops: list[Node]) -> list[Node]:
    """``tops`` and everything under them, parents first."""
    found: list[Node] = []
    stack = list(tops)
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found
