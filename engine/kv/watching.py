"""Watchers: who hears of blocks that enter and leave the cache. Naming blocks costs, and is done for those who ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ...policies.history import Told
from .runs import CachedRun, EvictedRun

_Told = TypeVar("_Told")


class EvictionHook(Protocol):
    """The seam for storage tiers and for events. Neither method may block; what they raise is counted and reported.

    Blocks that left the cache are free at once: whoever wants their contents copies them before the next step writes.
    """

    def evicted(self, run: EvictedRun) -> None:
        """``run`` is leaving the tree for want of room."""

    def dropped(self, run: EvictedRun) -> None:
        """``run`` is leaving the tree because its contents are bad or were to be forgotten: a copy that is still to be
        made of its blocks must not be made.
        """


class PublicationHook(Protocol):
    """Hears of blocks that enter the cache. May not block; what it raises is counted and reported."""

    def published(self, runs: Sequence[CachedRun]) -> None:
        """These have just entered the tree, parents first. Computed or loaded: their contents are there."""


class RequestHook(Protocol):
    """Hears of everything that decides what an eviction policy sees, in order, each thing after it has happened. May
    not block; what it raises is counted and reported.
    """

    def heard(self, event: Told) -> None:
        """See :mod:`octavo.policies.history`."""


class Watchers:
    """The hooks of one cache."""

    def __init__(self, report: Callable[[str, BaseException | str], None]) -> None:
        """``report(where, error)`` hears of what a hook raises."""
        self.faults = 0
        self.requests: tuple[RequestHook, ...] = ()
        """Who hears what requests do. Nothing is named or made for them while there are none."""
        self.alias: Callable[[bytes], bytes] | None = None
        """How policies are to know blocks, if not by the ends of their chained names."""
        self.of_leaving = self.of_names = self.of_entering = False
        """Whether anybody hears of what leaves, reads the names of what leaves, hears of what enters."""
        self._report = report
        self._leaving: list[tuple[EvictionHook, bool]] = []
        self._entering: list[PublicationHook] = []

    def add(self, hook: EvictionHook, *, names: bool) -> None:
        """``names``: whether it reads the names of runs; where nobody does, runs come without."""
        self._leaving = [*self._leaving, (hook, names)]
        self._look()

    def remove(self, hook: EvictionHook) -> None:
        """Idempotent."""
        self._leaving = [other for other in self._leaving if other[0] is not hook]
        self._look()

    def add_publication(self, hook: PublicationHook) -> None:
        """It needs the names of all runs."""
        self._entering = [*self._entering, hook]
        self._look()

    def remove_publication(self, hook: PublicationHook) -> None:
        """Idempotent."""
        self._entering = [other for other in self._entering if other is not hook]
        self._look()

    def add_request(self, hook: RequestHook) -> None:
        """It hears of what happens from now on."""
        self.requests = (*self.requests, hook)

    def remove_request(self, hook: RequestHook) -> None:
        """Idempotent."""
        self.requests = tuple(other for other in self.requests if other is not hook)

    def evicted(self, run: EvictedRun) -> None:
        """Tell all."""
        for hook, _ in self._leaving:
            self._tell("eviction hook", hook.evicted, run)

    def dropped(self, run: EvictedRun) -> None:
        """Tell all."""
        for hook, _ in self._leaving:
            self._tell("eviction hook", hook.dropped, run)

    def published(self, runs: Sequence[CachedRun]) -> None:
        """Tell all."""
        for hook in self._entering:
            self._tell("publication hook", hook.published, runs)

    def tell(self, event: Told) -> None:
        """Tell those who hear what requests do."""
        for hook in self.requests:
            self._tell("request hook", hook.heard, event)

    def _look(self) -> None:
        self.of_leaving, self.of_entering = bool(self._leaving), bool(self._entering)
        self.of_names = any(names for _, names in self._leaving)

    def _tell(self, where: str, event: Callable[[_Told], None], what: _Told) -> None:
        try:
            event(what)
        except Exception as error:  # noqa: BLE001  # a tier's fault is a miss later, never a failed allocation now
            self.faults += 1
            self._report(where, error)
