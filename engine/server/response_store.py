"""ResponseStore: responses that later ones may go on from, for a while."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakSet

from ..request import ChatMessage
from .wire.responses import Response


class StoredResponse(NamedTuple):
    """A response with what was said until then."""

    response: Response
    conversation: tuple[ChatMessage, ...]
    """Every message up to and with the answer, without the instructions."""
    size: int
    """Bytes that it stands for, roughly: those of the conversation and of the answer."""
    owner: Owner


class Owner:
    """As whose a response is made."""

    def __init__(self, tenant: str | None) -> None:
        """``tenant``: as whose its request runs in the engine, also where the client has named it."""
        self.tenant = tenant
        self.is_erased = False
        """Whether it has to be forgotten, also if it is not complete yet."""


class ResponseStore:
    """Kept by tenant, so that nobody finds another's. In memory only: they do not outlive the server.

    Each tenant has room for ``max_count`` responses and ``max_bytes`` of them; the oldest make way. One that later
    ones went on from can go before they do: they have the conversation, too.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._shelves: dict[str | None, _Shelf] = {}
        self._owners = WeakSet[Owner]()

    def owner(self, tenant: str | None) -> Owner:
        """Of a response that is begun, so that :meth:`erase` knows of it."""
        owner = Owner(tenant)
        self._owners.add(owner)
        return owner

    def put(self, tenant: str | None, stored: StoredResponse) -> None:
        """Keep it, if there is any room for it at all, and if it was not erased meanwhile."""
        if stored.size > self._max_bytes or self._max_count == 0 or stored.owner.is_erased:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.put(stored)
        while len(shelf.by_id) > self._max_count or shelf.size > self._max_bytes:
            shelf.drop(next(iter(shelf.by_id)))

    def get(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """``None``: there is none of this tenant, or none any more."""
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.by_id.get(response_id)

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Forget it; False when there is none. Responses that went on from it keep what was said."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.by_id:
            return False
        shelf.drop(response_id)
        if not shelf.by_id:
            del self._shelves[tenant]
        return True

    def erase(self, tenant: str | None) -> int:
        """Forget all that ran as ``tenant``, on whosever shelf, and what is under way; how many were stored."""
        before = len(self)
        for owner in self._owners:
            owner.is_erased = owner.is_erased or owner.tenant == tenant
        for name, shelf in list(self._shelves.items()):
            for response_id in [each for each, stored in shelf.by_id.items() if stored.owner.is_erased]:
                self.delete(name, response_id)
        return before - len(self)

    def __len__(self) -> int:
        """Responses of all tenants."""
        return sum(len(shelf.by_id) for shelf in self._shelves.values())


class _Shelf:
    """What is kept for one tenant."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0

    def put(self, stored: StoredResponse) -> None:
        self.by_id[stored.response.id] = stored
        self.size += stored.size

    def drop(self, response_id: str) -> None:
        self.size -= self.by_id.pop(response_id).size
