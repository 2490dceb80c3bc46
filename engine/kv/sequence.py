"""Sequence: the tokens of one line of text and where their K and V are."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as SequenceOf
from enum import Enum

from ...errors import CacheMisuse, InvalidRequest
from ...policies.returning import Return
from ...storage.naming import Namespace
from ...telemetry.record import NO_TRACK
from .block_table import BlockTable
from .node import Node
from .retention import Retention

NEVER = 2**62


class State(Enum):
    """Where a sequence stands with the cache."""

    OUTSIDE = "outside"  # holds nothing: new, or preempted
    ADMITTED = "admitted"
    FINISHED = "finished"


OUTSIDE, ADMITTED, FINISHED = State
"""The same by names of the module: looking a member up in its class takes ten times as long."""


class Sequence:
    """One sequence. Owned by the cache manager between ``admit`` and ``finish``; others read it only.

    ``computed`` counts the tokens whose K and V are in the blocks. A step computes tokens ``computed ... `` and the
    manager's ``commit`` moves it on.
    """

    __slots__ = (
        "computed",
        "in_flight_key",
        "is_told",
        "names",
        "namespace",
        "node",
        "prefill_seconds",
        "publish_at",
        "request",
        "resumed",
        "retained_since",
        "retention",
        "returns",
        "seq_id",
        "state",
        "table",
        "tokens",
        "track",
        "writable",
    )

    def __init__(
        self,
        seq_id: int,
        tokens: array[int],
        namespace: Namespace,
        *,
        block_size: int,
        retention: tuple[Retention, ...] = (),
        request: int = 0,
    ) -> None:
        """``tokens``: prompt ids (``encode_tokens``), at least one. ``retention``: what of it is to be kept longer or
        shorter than the rest. ``request``: number of the request that it is a line of; 0: of none.

        :raises InvalidRequest: for an empty prompt.
        """
        if not tokens:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        self.seq_id = seq_id
        self.tokens = tokens
        self.namespace = namespace
        self.retention = retention
        self.request = request
        self.state = OUTSIDE
        self.computed = 0
        self.table = BlockTable(block_size)
        # kept by the manager
        self.node: Node | None = None  # deepest tree node this sequence has a lock on
        self.writable = 0  # positions below have a slot that nobody else reads or writes
        self.publish_at = -1  # once ``computed`` reaches it, another full block can go into the tree
        self.in_flight_key: tuple[Node, bytes] | None = None
        self.resumed = False  # at its last admission
        self.is_told = False  # a request that was admitted and is not over: who listens has heard of it
        self.names = bytearray()  # of its first whole blocks, as far as anybody asked; they never change
        self.returns: SequenceOf[Return] = ()  # evicted runs that it is going to bring back
        self.retained_since = 0.0  # when it was admitted: what ``retention`` counts from
        self.track = NO_TRACK  # where what is done for it is noted
        self.prefill_seconds = 0.0  # measured time of its blocks that are computed and not yet published

    def __repr__(self) -> str:
        return f"<Sequence {self.seq_id}: {self.computed}/{len(self.tokens)} tokens, {self.state.value}>"

    @property
    def uncomputed(self) -> int:
        """Tokens that still have to go through the model; at least 1 while the sequence runs."""
        return len(self.tokens) - self.computed

    @property
    def is_outside(self) -> bool:
        """Whether it holds nothing and may be admitted."""
        return self.state is OUTSIDE

    def require(self, state: State) -> None:
        """Check the state.

        :raises CacheMisuse: when the sequence is in another one.
        """
        if self.state is not state:
            raise CacheMisuse(f"sequence {self.seq_id} is {self.state.value}; this call needs it {state.value}")


def encode_tokens(ids: SequenceOf[int]) -> array[int]:
    """Token ids as an int32 array, the form in which sequences keep and the tree compares them.

    :raises InvalidRequest: when something is not an integer of 32 bits.
    """
    try:
        # twice as fast as array("i", ids); struct.pack(format, *ids) would copy the list once more, to put one in front
        packed = struct.Struct(f"{len(ids)}i").pack(*ids)
    except struct.error as error:
        raise InvalidRequest(f"token ids must be integers of 32 bits: {error}") from error
    return array("i", packed)
