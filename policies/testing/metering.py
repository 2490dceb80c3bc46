"""Metering: how much a policy does, in numbers that are the same on every machine.

Counted is, while the policy runs: each call of a function, in Python or in C, and each time an entry is looked at, be
it an attribute, a comparison or its hash. A scan over all entries shows as either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import TypeVar

from ..eviction.base import Entry, EvictionPolicy, Json, Returned, Tail

_T = TypeVar("_T")


class Meter:
    """Counts while it is on."""

    def __init__(self) -> None:
        self.count = 0
        self._is_on = False

    def entry(self) -> type[Entry]:
        """A class of entries that tell this meter when they are looked at."""
        meter = self

        class Watched(Entry):
            """An entry that counts."""

            __slots__ = ()

            def __getattribute__(self, name: str) -> object:
                meter.note()
                return super().__getattribute__(name)

            def __eq__(self, other: object) -> bool:
                meter.note()
                return self is other

            def __hash__(self) -> int:
                meter.note()
                return id(self) >> 4

        return Watched

    def note(self) -> None:
        """Something was done."""
        self.count += self._is_on

    def run(self, call: Callable[..., _T], *args: object) -> _T:
        """Make a call that counts."""
        before = sys.getprofile()
        sys.setprofile(self._called)
        self._is_on = True
        try:
            return call(*args)
        finally:
            self._is_on = False
            sys.setprofile(before)

    def _called(self, _frame: FrameType, event: str, _what: object) -> None:
        self.count += event in {"call", "c_call"}


class Metered(EvictionPolicy):
    """Passes everything on to ``policy`` and counts what it does."""

    def __init__(self, policy: EvictionPolicy, meter: Meter) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self.wants_requests = policy.wants_requests
        self._run = meter.run

    def on_insert(self, entry: Entry, now: float) -> None:
        self._run(self.policy.on_insert, entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._run(self.policy.on_extend, entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._run(self.policy.on_split, upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._run(self.policy.on_hit, entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._run(self.policy.on_candidate, entry, now)

    def on_held(self, entry: Entry) -> None:
        self._run(self.policy.on_held, entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        return self._run(self.policy.on_evict, entry, blocks, now)

    def on_forget(self, entry: Entry) -> None:
        self._run(self.policy.on_forget, entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._run(self.policy.on_ghost_hit, entry, returned, now)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        self._run(self.policy.on_request, number, names, now)

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        self._run(self.policy.on_complete, number, names, now)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        return self.policy.dump(key)

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        self.policy.load(state, entry)

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        victims = iter(self._run(self.policy.victims, count, now))
        try:
            while named := self._run(lambda: list(islice(victims, 1))):
                yield named[0]
        finally:
            self._run(getattr(victims, "close", lambda: None))
