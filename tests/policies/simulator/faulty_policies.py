"""Policies that go wrong, for tests that run them in other processes, which import them by name."""

from __future__ import annotations

import os
from collections.abc import Iterator

from octavo.policies.eviction.base import Entry, EvictionPolicy
from octavo.policies.eviction.lru import Lru


class Raises(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        raise ZeroDivisionError("victims are hard")


class NamesNothing(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


class CannotBeMade(EvictionPolicy):
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("not today")

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        return iter(())


class EndsItsProcess(Lru):
    def victims(self, count: int, now: float) -> Iterator[Entry]:
        os._exit(9)
