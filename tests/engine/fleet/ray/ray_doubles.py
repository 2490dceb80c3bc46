"""What Ray hands to a router, without Ray."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field

from octavo.engine.fleet.base import Wanted
from octavo.engine.fleet.ray.seams import Assignment
from octavo.engine.fleet.ray.ticket import Ticket
from octavo.policies.routing.base import RoutedRequest


@dataclass
class FakeFuture:
    """Of a request that is to be given to a replica."""

    callbacks: list[Callable[[Assignment], None]] = field(default_factory=list)
    is_cancelled: bool = False

    def cancel(self) -> bool:
        self.is_cancelled = True
        self.resolve()
        return True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def add_done_callback(self, callback: Callable[[Assignment], None], /) -> None:
        self.callbacks.append(callback)

    def resolve(self) -> None:
        for callback in self.callbacks:
            callback(self)


@dataclass
class FakeMetadata:
    internal_request_id: str


@dataclass
class FakeContext:
    should_backoff: bool = False


@dataclass
class FakePending:
    """A request, with what it asked for."""

    metadata: FakeMetadata
    args: MutableSequence[object]
    future: FakeFuture = field(default_factory=FakeFuture)
    routing_context: FakeContext = field(default_factory=FakeContext)

    @property
    def ticket(self) -> Ticket:
        [ticket] = [each for each in self.args if isinstance(each, Ticket)]
        return ticket


@dataclass
class FakeResult:
    """Of a request that a replica has."""

    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


def pending(request_id: str, names: tuple[bytes, ...] = (), *, only: str | None = None) -> FakePending:
    wanted = Wanted(RoutedRequest(names, 16 * len(names) + 1, 8, 16), only)
    return FakePending(FakeMetadata(request_id), ["a request", Ticket(wanted)])
