"""The seam between the gateway and what carries its requests: one request goes to one replica and an answer comes back.

Everything that crosses it is plain data and can be pickled.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from ...policies.routing.base import Reason, ReplicaId, RoutedRequest

RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]

LOOKING: Final = frozenset({"GET", "HEAD"})
"""Methods of requests that change nothing."""


class HttpRequest(NamedTuple):
    """A whole request, as a replica's own app is to see it."""

    method: str
    path: str
    query: bytes
    headers: RawHeaders
    body: bytes


class Routed(NamedTuple):
    """How a replica came to be chosen, for those who look: spans and metrics."""

    reason: Reason | None
    """``None``: nobody chose, only one was allowed."""
    matched: int
    """Blocks of the prompt that it was thought to have."""
    load: float
    """Of the replica at that moment, without this request; in what the fleet's books count."""


class AnswerHead(NamedTuple):
    """What comes first of every answer. Pieces of the body follow, as bytes."""

    status: int
    headers: RawHeaders
    replica: ReplicaId
    routed: Routed | None = None
    """``None``: it is not known here."""


class WholeAnswer(NamedTuple):
    """An answer with its whole body."""

    head: AnswerHead
    body: bytes


class Wanted(NamedTuple):
    """What is known of a request for choosing its replica."""

    request: RoutedRequest
    only: ReplicaId | None = None
    """No other one will do."""


class Scheme(NamedTuple):
    """How replicas name blocks. All of a fleet do it in the same way, or they could not share any."""

    model: str
    """Digest of the model's identity: the ``model`` of every :class:`~octavo.storage.naming.Namespace`."""
    block_tokens: int
    """Tokens of a block."""


class Fleet(Protocol):
    """Several engines behind their servers."""

    @property
    def scheme(self) -> Scheme | None:
        """How its replicas name blocks; ``None`` while no replica has said so: requests go by load then."""

    def send(self, request: HttpRequest, wanted: Wanted) -> AsyncGenerator[AnswerHead | bytes, None]:
        """Choose a replica and have it answer: first an ``AnswerHead``, then the body as it comes. Closing the iterator
        (``aclose``) aborts the request there.

        :raises ~octavo.errors.ReplicaLost: before the head when no replica took it, or later when the replica was lost.
            It names the replica, unless nobody knows which one it was, or there is none to be asked.
        """

    async def ask_all(self, request: HttpRequest) -> Mapping[ReplicaId, WholeAnswer]:
        """Have every replica answer; to what only looks, in a few seconds. One that did not has an answer all the same,
        a 503 that says so: who has all of them do something is to know where it was not done. A fleet that does not
        know it by name leaves it out of a look.
        """
