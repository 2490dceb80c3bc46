"""Owners: which replica has a stored response."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

from ...policies.routing.base import ReplicaId

RESPONSE_ID: Final = "resp_[0-9A-Za-z]{1,64}"
ID: Final = re.compile(f'"id": ?"({RESPONSE_ID})"'.encode())
"""As the first field of a response. In a client's own text the quotes would have strokes before them."""


def is_response_id(text: str) -> bool:
    """Whether a replica could have given this id. Others may be as long as a body, and are nowhere."""
    return re.fullmatch(RESPONSE_ID, text) is not None


class Owners:
    """Responses by id, the latest ``most`` of them; of others every replica has to be asked."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._replicas: OrderedDict[str, ReplicaId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def note(self, response_id: str, replica: ReplicaId) -> None:
        """``replica`` has it."""
        self._replicas[response_id] = replica
        self._replicas.move_to_end(response_id)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def find(self, response_id: str) -> ReplicaId | None:
        """Who has it; ``None``: not known."""
        return self._replicas.get(response_id)

    def forget(self, response_id: str) -> None:
        """It is nowhere any more, or not where it was thought to be."""
        self._replicas.pop(response_id, None)


class Birth:
    """Finds the id of the response that an answer brings, whole or as a stream."""

    def __init__(self, owners: Owners, replica: ReplicaId) -> None:
        self._owners = owners
        self._replica = replica
        self._is_known = False

    def note(self, piece: bytes) -> None:
        """A piece of the answer; the first one that has an id tells."""
        if not self._is_known and (found := ID.search(piece)) is not None:
            self._is_known = True
            self._owners.note(found[1].decode(), self._replica)
