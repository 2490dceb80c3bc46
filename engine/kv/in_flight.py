"""InFlight: who is computing which prefix now, so that a second request for it waits instead of computing it again."""

from __future__ import annotations

from ...storage.naming import Namespace
from .sequence import Sequence

TOKEN_BYTES = 4


class InFlight:
    """Index of admitted sequences by the next block that they will publish.

    A follower's match ends where its producer's published part ends, so namespace, depth and the tokens of the next
    block find the producer in O(1); its whole prefix is compared before it is believed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._producers: dict[tuple[Namespace, int, bytes], Sequence] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def watch(self, sequence: Sequence) -> None:
        """(Re)file ``sequence`` under the block it publishes next; not at all once that block is not known in full."""
        if sequence.in_flight_key is not None:
            self.forget(sequence)
        first, size = sequence.table.shared, self._block_size
        end = (first + 1) * size
        if end > len(sequence.tokens):
            return
        key = (sequence.namespace, first, sequence.tokens[end - size : end].tobytes())
        if key not in self._producers:
            self._producers[key] = sequence
            sequence.in_flight_key = key

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` publishes nothing more: it was stopped, preempted, or has computed its prompt."""
        if sequence.in_flight_key is not None:
            del self._producers[sequence.in_flight_key]
            sequence.in_flight_key = None

    def producer(self, namespace: Namespace, key: bytes, blocks: int) -> Sequence | None:
        """The sequence that is computing block number ``blocks`` of the prompt ``key`` (int32 tokens), if any."""
        if not self._producers:
            return None
        size = self._block_size * TOKEN_BYTES
        found = self._producers.get((namespace, blocks, key[blocks * size : (blocks + 1) * size]))
        if found is None or not key.startswith(found.tokens[: blocks * self._block_size].tobytes()):
            return None
        return found
