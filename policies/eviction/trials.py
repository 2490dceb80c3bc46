"""Trials: what ``adaptive`` is made of. Policies on ghost caches, the sample they see, and the race between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..replica import Lease, Replica
from .base import NAME_BYTES, EvictionPolicy, Json

_MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Names may be consecutive numbers: Fibonacci hashing spreads them (D. E. Knuth, "The Art of Computer Programming",
volume 3, section 6.4)."""
_MOST = 1e30
"""What no sum of a state exceeds."""


class Sample:
    """The blocks whose names hash below a threshold: for ``room`` blocks the same share of names as ``room`` is of
    ``capacity``. A name stands for everything before it, so what is left of a prompt is a prompt again.
    """

    def __init__(self, room: int, capacity: int) -> None:
        self._takes_all = room >= capacity
        self._threshold = np.uint64(0 if self._takes_all else room * 2**64 // capacity)

    def of(self, names: bytes) -> bytes:
        """Those of ``names`` that are in the sample, ``NAME_BYTES`` each."""
        if self._takes_all:
            return names
        numbers = np.frombuffer(names, dtype="<u8")
        return numbers[numbers * _MIXER < self._threshold].tobytes()


class Trial:
    """A policy on its ghost cache: a whole cache in small, without contents."""

    def __init__(self, policy: EvictionPolicy, room: int) -> None:
        """``room``: blocks of the ghost cache."""
        self._replica = Replica(room, policy)
        self._leases: dict[int, Lease] = {}

    def ask(self, number: int, names: bytes, now: float) -> int:
        """A request for ``names``; returns how many blocks were there."""
        lease = self._replica.admit(names, 0, now)
        if lease is None:  # those that run fill the ghost cache
            return 0
        self._replica.publish(lease, len(names) // NAME_BYTES, now)
        self._leases[number] = lease
        return lease.found

    def complete(self, number: int, names: bytes, now: float) -> None:
        """The request leaves ``names`` in the cache: all that it asked for and what it generated, or the beginning of
        it when it was broken off.
        """
        replica, lease = self._replica, self._leases.pop(number, None)
        if lease is None:  # a fork, or one for which there was no room; what it computed is cached all the same
            lease = replica.admit(names, 0, now, used=False)
        if lease is None:
            return
        blocks = len(names) // NAME_BYTES
        missing = blocks - lease.published - lease.held
        if blocks > lease.published and names.startswith(lease.names) and replica.extend(lease, missing, now):
            lease.names = names
            replica.publish(lease, blocks, now)
        replica.finish(lease, now)


class Race:
    """Which of several contestants is followed: the first one, until another one leads it clearly, and so on.

    Clearly is by more than chance, and by more than a change is worth. The lead of a contestant is a sum over requests,
    so by chance it is as large as the root of the sum of squares, its spread. Nobody is further behind than he would
    have to be ahead, so when the traffic changes it does not take long, however long it was as it was before.
    """

    def __init__(self, contestants: int, *, half_life: float, margin: float, chance: float) -> None:
        """``half_life``: seconds after which a request counts half. ``margin``: share of the blocks asked for that a
        lead must exceed. ``chance``: that many times its spread too.
        """
        self.followed = 0
        """Number of the contestant."""
        self._half_life = half_life
        self._margin = margin
        self._chance = chance
        self._asked = 0.0
        self._leads = [0.0] * contestants
        self._spreads = [0.0] * contestants
        self._last: float | None = None  # clocks begin anywhere, and what is loaded is as old as the first request

    def tell(self, asked: int, found: Sequence[int], now: float) -> None:
        """Of ``asked`` blocks, each contestant has ``found`` so many."""
        self._age(now)
        self._asked += asked
        usual = found[self.followed]
        for number, blocks in enumerate(found):
            if blocks != usual:
                self._spreads[number] += (blocks - usual) ** 2
                self._leads[number] = max(self._leads[number] + blocks - usual, -self._clear(number))
        best = max(self._leads)
        number = self._leads.index(best)
        if best > 0 and best > self._clear(number):
            self.followed = number
            self._leads = [0.0] * len(self._leads)  # from now on, against this one
            self._spreads = [0.0] * len(self._spreads)

    def dump(self) -> Mapping[str, Json]:
        """Who is followed and how it stands."""
        return {
            "followed": self.followed,
            "asked": self._asked,
            "leads": list(self._leads),
            "spreads": list(self._spreads),
        }

    def load(self, state: Mapping[str, Json]) -> None:
        """Take over what :meth:`dump` gave.

        :raises ValueError: when it is of another number of contestants, or damaged. Nothing has changed then.
        :raises TypeError: when there is no list where one belongs; nothing has changed either.
        """
        contestants, followed = len(self._leads), state["followed"]
        if not isinstance(followed, int) or not 0 <= followed < contestants:
            raise ValueError(f"{followed!r} is none of the {contestants} contestants")
        asked = _numbers([state["asked"]], 1, least=0.0)[0]
        leads, spreads = _numbers(state["leads"], contestants), _numbers(state["spreads"], contestants, least=0.0)
        self.followed, self._asked, self._leads, self._spreads = followed, asked, leads, spreads

    def _age(self, now: float) -> None:
        factor = 1.0 if self._last is None else 0.5 ** ((now - self._last) / self._half_life)
        self._last = now
        self._asked *= factor
        self._leads = [lead * factor for lead in self._leads]
        self._spreads = [spread * factor * factor for spread in self._spreads]

    def _clear(self, number: int) -> float:
        """A lead above this is clear."""
        return self._margin * self._asked + self._chance * math.sqrt(self._spreads[number])


def _numbers(values: Json, count: int, least: float = -_MOST) -> list[float]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{values!r} is no list of {count} numbers")
    numbers = [float(value) for value in values if isinstance(value, int | float) and least <= value <= _MOST]
    if len(numbers) != len(values) or len(numbers) != count:
        raise ValueError(f"{values!r} are not {count} numbers from {least} to {_MOST}")
    return numbers
