"""What this package uses of what Ray hands it, which has no types of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableSequence, Sequence
from typing import Protocol

from ....policies.routing.base import ReplicaId
from ..base import AnswerHead, HttpRequest, Scheme
from .ticket import Ticket


class RayReplicaId(Protocol):
    """``ray.serve._private.common.ReplicaID``."""

    @property
    def unique_id(self) -> str:
        """Its name in our books."""


class RayReplica(Protocol):
    """``ray.serve.request_router.RunningReplica``."""

    @property
    def replica_id(self) -> RayReplicaId: ...

    @property
    def routing_stats(self) -> Mapping[str, object]: ...


class Assignment(Protocol):
    """The future of a request that is to be given to a replica."""

    def cancel(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Assignment], None], /) -> None: ...


class Backing(Protocol):
    """Of ``PendingRequest.routing_context``."""

    should_backoff: bool


class RequestMetadata(Protocol):
    """Of ``PendingRequest.metadata``."""

    @property
    def internal_request_id(self) -> str: ...


class Pending(Protocol):
    """``ray.serve.request_router.PendingRequest``."""

    @property
    def args(self) -> MutableSequence[object]: ...

    @property
    def metadata(self) -> RequestMetadata: ...

    @property
    def future(self) -> Assignment: ...

    @property
    def routing_context(self) -> Backing: ...


class Result(Protocol):
    """``ReplicaResult``: a request that a replica has taken."""

    def cancel(self) -> None: ...


class Stream(Protocol):
    """``DeploymentResponseGenerator``."""

    def __aiter__(self) -> AsyncIterator[ReplicaId | AnswerHead | bytes]: ...

    def cancel(self) -> None: ...


class AnswerMethod(Protocol):
    """``handle.answer``, when the handle streams."""

    def remote(self, request: HttpRequest, ticket: Ticket, /) -> Stream: ...


class SchemeMethod(Protocol):
    """``handle.scheme``."""

    def remote(self) -> Awaitable[Scheme]: ...


class OneAnswer(Protocol):
    """``ReplicaResult`` of a call that does not stream."""

    async def get_async(self) -> object: ...


class Broadcast(Protocol):
    """``DeploymentBroadcastResponse``."""

    async def _fetch_replica_results_async(self) -> Sequence[OneAnswer]:
        """Of all replicas. What is public waits for all: one that hangs would cost the answers of the others."""


class Handle(Protocol):
    """``ray.serve.handle.DeploymentHandle`` of a deployment of :class:`~octavo.engine.fleet.ray.replica.Replica`."""

    @property
    def answer(self) -> AnswerMethod: ...

    @property
    def scheme(self) -> SchemeMethod: ...

    def options(self, *, stream: bool) -> Handle: ...

    def broadcast(self, method: str, request: HttpRequest, seconds: float, /) -> Broadcast: ...
