"""What a replica says of itself now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""As far as a float counts, which books are kept in."""


class ReplicaStatus(NamedTuple):
    """How full and how busy a replica is, and a summary of what it has cached."""

    free_blocks: Count = 0
    """That no request holds: empty ones, and cached ones that may go."""
    total_blocks: Count = 0
    """0: not known."""
    running: Count = 0
    """Requests, whoever sent them."""
    waiting: Count = 0
    """Requests, whoever sent them."""
    waiting_tokens: Count = 0
    """Tokens of prompts that are still to be computed, of those that run and those that wait."""
    digest: bytes | None = None
    """A :class:`~octavo.policies.routing.digest.Digest` of the names of its cached blocks; ``None``: it has none."""
    kv_events: str | None = None
    """Where it publishes exact news of its cache, such as ``tcp://10.0.0.7:5557``; ``None``: nowhere."""
    block_tokens: Count = 0
    namespace: str = ""
    """Of the model and everything else that its blocks depend on: replicas of different ones share nothing."""
    is_draining: bool = False
    """It finishes what it has and should get nothing new."""
    kv_replay: str | None = None
    """Where what was missed of ``kv_events`` can be asked for; ``None``: nowhere."""

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return self._asdict()

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ReplicaStatus:
        """Read what :meth:`to_dict` gave; what is missing has its default, and what later writers add is ignored.

        :raises ValueError: when a field has another type, is negative or beyond what can be counted.
        """
        try:
            return msgspec.convert([data.get(name, cls._field_defaults[name]) for name in cls._fields], cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"no status of a replica: {error}") from error
