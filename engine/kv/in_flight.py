"""InFlight: who is computing which prefix now, so that a second request for it waits instead of computing it again."""

from __future__ import annotations

from .node import Node
from .prefix_tree import Match
from .sequence import Sequence

TOKEN_BYTES = 4


class InFlight:
    """Index of admitted sequences by the next block that they will publish.

    A follower's match ends at the very edge on which its producer has its lease: an edge is never longer than what all
    holders of its end share, and it keeps its identity when it is split. So the edge and the tokens of the next block
    find the producer in O(1), and nothing else need be compared.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._producers: dict[tuple[Node, bytes], Sequence] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def watch(self, sequence: Sequence) -> None:
        """(Re)file ``sequence`` under the block it publishes next; not at all once that block is not known in full, or
        it has no place in the tree.
        """
        if sequence.in_flight_key is not None:
            self.forget(sequence)
        start, node = sequence.table.shared * self._block_size, sequence.node
        end = start + self._block_size
        if node is None or end > len(sequence.tokens):
            return
        key = (node, sequence.tokens[start:end].tobytes())
        if self._producers.setdefault(key, sequence) is sequence:
            sequence.in_flight_key = key

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` publishes nothing more: it was stopped, preempted, or has computed its prompt."""
        if sequence.in_flight_key is not None:
            del self._producers[sequence.in_flight_key]
            sequence.in_flight_key = None

    def producer(self, match: Match, key: bytes) -> Sequence | None:
        """The sequence that is computing the block after ``match`` of the prompt ``key`` (int32 tokens), if any."""
        node = match.node
        if node is None or match.used < len(node.ids):
            return None
        start, size = len(match.ids), self._block_size * TOKEN_BYTES
        return self._producers.get((node, key[start * size : (start + 1) * size]))
