"""Outlook: what a sequence that waits would find if it were admitted now, and whom it has that in common with."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ...storage.naming import Namespace
from .in_flight import InFlight
from .node import Node
from .prefix_tree import PrefixTree
from .sequence import Sequence

Wanted: TypeAlias = tuple[Node | Namespace, int, bytes]
"""A block that is not cached: the edge that its prefix ends in (where a namespace has none, that), how many blocks of
that belong to it, its tokens."""


class Outlook(NamedTuple):
    """Valid until the tree changes."""

    cached_tokens: int
    """Tokens at the front that need not be computed; at least one token always does."""
    wanted: Wanted | None
    """The first block that has to be computed, equal for all that lack it; ``None``: it is not known in full yet."""
    is_computed: bool
    """Whether an admitted sequence is computing that block."""


def outlook(tree: PrefixTree, in_flight: InFlight, sequence: Sequence) -> Outlook:
    """Look ``sequence`` up. One walk down the tree."""
    tokens, size = sequence.tokens, tree.block_size
    key = tokens.tobytes()
    match = tree.match(sequence.namespace, key, len(tokens))
    blocks = len(match.ids)
    cached = min(blocks * size + match.partial_tokens, len(tokens) - 1)
    block = tokens[blocks * size : (blocks + 1) * size]
    if len(block) < size:
        return Outlook(cached, None, is_computed=False)
    wanted = (match.node or sequence.namespace, match.used, block.tobytes())
    return Outlook(cached, wanted, in_flight.producer(match, key) is not None)
