"""The contract of routing policies: which of several engines gets a request.

A policy only chooses. The :class:`~octavo.policies.routing.fleet_view.FleetView` keeps the books: who is there, what
each holds, how much each has been given. Routers of a live fleet and the simulator keep the same books and ask the
same policies, so what is found in one holds in the other.

All calls come from one thread and must not block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .fleet_view import FleetView

ReplicaId: TypeAlias = str


class RoutedRequest(NamedTuple):
    """What a router knows of a request."""

    names: Sequence[bytes]
    """Of the whole blocks of its prompt, in order; each stands for everything before it as well, for the model and for
    the tenant. Empty: unknown."""
    prompt_tokens: int
    output_tokens: int
    """How many are expected, a guess."""
    block_tokens: int
    """Tokens of a block."""
    avoid: frozenset[ReplicaId] = frozenset()
    """Replicas that have failed it already: only if there are no others."""

    def work(self, matched: int) -> int:
        """Tokens to compute on a replica that has the first ``matched`` blocks; at least one of the prompt."""
        return max(self.prompt_tokens - matched * self.block_tokens, 1) + self.output_tokens


class Reason(StrEnum):
    """Why a replica was chosen."""

    PREFIX = "prefix"
    """It has more of the prompt than any other that may be chosen."""
    UNSEEN = "unseen"
    """Nobody has more of it than others: the first blocks that are not everywhere say who."""
    OVERLOAD = "overload"
    """Who has more of it has too much to do."""
    LOAD = "load"
    """It has the least to do of those that were looked at."""
    TURN = "turn"
    """It was its turn."""
    STAND_IN = "stand_in"
    """It has the least to do; the policy has failed. Given by routers, not by policies."""


class Choice(NamedTuple):
    """Where a request goes."""

    replicas: Sequence[ReplicaId]
    """All there are, best first. The others are for when those before cannot take it."""
    matched: int
    """Blocks of the prompt that the first one has, as far as is known."""
    reason: Reason


class RoutingPolicy(ABC):
    """Chooses replicas. Made with the settings of its name as keyword arguments."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    """Another major version than the router's is refused; minor ones only add methods with defaults."""

    @abstractmethod
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        """Rank all replicas for ``request``: each once, those that drain after those that do not, and those that
        ``request`` avoids last. Only called while ``fleet`` has any. Changes nothing in ``fleet``.
        """
