"""Shadows: eviction policies that decide nothing, beside the one that does, over the same requests.

Each has a cache of its own without contents (:class:`~octavo.policies.replica.Replica`) as large as the engine's, hears
of the same requests at the same moments, and counts what it would have found. With a sample below 1 only blocks are
looked at whose names fall into a part of all possible names, in a cache that is as much smaller: so hits stay right on
average while the work shrinks (Waldspurger, Park, Garthwaite, Ahmad, Efficient MRC construction with SHARDS, FAST
2015). Names are chained, so what is left of a prompt is a chain of prefixes again.

A shadow starts empty, knows no pins, no retention priorities and no tiers, and does not forget what the engine is told
to forget.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...errors import InvalidRequest, describe
from ...policies.eviction.base import NAME_BYTES, EvictionPolicy
from ...policies.history import Admitted, Extended, Forked, Left, Published, Told
from ...policies.replica import Lease, Replica
from ..kv import CacheManager
from ..surroundings import Surroundings

MakePolicy = Callable[[str, int], EvictionPolicy]
"""From a spec and a number of blocks to a policy.

:raises PluginError: when there is none, or it cannot be made.
"""


class ShadowReport(NamedTuple):
    """What a policy would have done since it runs as a shadow. Blocks are those of the sample."""

    policy: str
    """As it was asked for."""
    since: float
    """Seconds since the epoch."""
    sample: float
    requests: int
    uses: int
    """Blocks of prompts that a cache could have had."""
    hits: int
    """Those of them that it would have had."""
    live_hits: int
    """Those that the engine's own cache had. The shadow started empty, which that one perhaps did not."""
    evicted: int
    """Blocks."""
    refused: int
    """Requests that found no room in it, which the engine had; all they asked for counts as not found."""
    fault: str | None
    """Why it has stopped; ``None``: it runs."""

    @property
    def hit_ratio(self) -> float:
        """In [0, 1]; 0 before the first use."""
        return self.hits / self.uses if self.uses else 0.0

    @property
    def live_hit_ratio(self) -> float:
        """The same of the engine's own cache."""
        return self.live_hits / self.uses if self.uses else 0.0


class _Line:
    """One line of text, as far as its blocks are in the sample."""

    __slots__ = ("blocks", "names", "places")

    def __init__(self) -> None:
        self.blocks = 0
        """All blocks whose names were told."""
        self.names = b""
        """Of those in the sample."""
        self.places: array[int] | None = None
        """Numbers of these; ``None``: all blocks are."""

    def known(self, blocks: int) -> int:
        """How many of the first ``blocks`` blocks are in the sample."""
        return min(blocks, self.blocks) if self.places is None else bisect_left(self.places, blocks)


class _Sampling:
    """Which blocks are looked at, and how many stand for a number of blocks that have no names."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._below = np.uint64(min(int(share * 2**64), 2**64 - 1))
        self._owed = 0.0

    def begin(self, names: bytes) -> _Line:
        """A line that begins with these blocks."""
        line = _Line()
        if self.share < 1:
            line.places = array("Q")
        self.add(line, names)
        return line

    def add(self, line: _Line, names: bytes) -> None:
        """More blocks of it."""
        count = len(names) // NAME_BYTES
        if line.places is not None:
            values = np.frombuffer(names, dtype="<u8")
            chosen = np.flatnonzero(values < self._below)
            line.places.extend((chosen + line.blocks).tolist())
            names = values[chosen].tobytes()
        line.names += names
        line.blocks += count

    def scaled(self, blocks: int) -> int:
        """So many stand for ``blocks``; what is rounded off counts next time."""
        if self.share >= 1:
            return blocks
        self._owed += blocks * self.share
        whole = int(self._owed)
        self._owed -= whole
        return whole


class _Shadow:
    """One policy with its cache."""

    def __init__(self, spec: str, policy: EvictionPolicy, block_tokens: int, since: float) -> None:
        self.spec = spec
        self.since = since
        self.requests = self.uses = self.hits = self.live_hits = self.refused = 0
        self.fault: str | None = None
        self._replica = Replica(policy.capacity, policy, block_tokens=block_tokens)
        self._leases: dict[int, Lease] = {}

    def admit(self, event: Admitted, line: _Line, usable: int, private: int) -> None:
        """``usable``: blocks of ``line`` that can be found; ``private``: that it takes beside those of ``line``."""
        beyond = len(line.names) // NAME_BYTES - usable
        used = event.used and not event.resumed
        wanted = line.names[: usable * NAME_BYTES]
        tenant = str(event.tenant) if event.tenant else ""
        lease = self._replica.admit(wanted, private + beyond, event.now, used=used, tenant=tenant)
        found = 0
        if lease is not None:
            self._leases[event.number], found = lease, lease.found
            lease.names = line.names
            self._publish(lease, line.known(event.found), 0.0, event.now)
        if used:
            self.requests += 1
            self.uses += usable
            self.hits += found
            self.live_hits += line.known(event.found)
            self.refused += lease is None

    def publish(self, event: Published, line: _Line) -> None:
        """Blocks are computed."""
        lease = self._leases.get(event.number)
        if lease is not None:
            lease.names = line.names
            self._publish(lease, line.known(event.blocks), event.parts[-1].recompute_seconds, event.now)

    def fork(self, event: Forked, line: _Line) -> None:
        """Another line on the same blocks."""
        parent = self._leases.get(event.parent)
        if parent is None:
            return
        names = line.names[: parent.published * NAME_BYTES]
        lease = self._replica.admit(names, 0, event.now, used=False, tenant=parent.tenant)
        if lease is not None:
            lease.names = line.names
            self._leases[event.number] = lease

    def extend(self, number: int, blocks: int, now: float) -> None:
        """It takes more blocks, if there are any."""
        lease = self._leases.get(number)
        if lease is not None:
            self._replica.extend(lease, blocks, now)

    def leave(self, event: Left) -> None:
        """It gives them all back."""
        lease = self._leases.pop(event.number, None)
        if lease is not None:
            self._replica.finish(lease, event.now, over=event.kind != "preempted")

    def stop(self, fault: str) -> None:
        """It has failed."""
        self.fault = fault
        self._leases.clear()

    def report(self, sample: float) -> ShadowReport:
        """As it stands."""
        return ShadowReport(
            self.spec,
            self.since,
            sample,
            self.requests,
            self.uses,
            self.hits,
            self.live_hits,
            self._replica.evicted,
            self.refused,
            self.fault,
        )

    def _publish(self, lease: Lease, blocks: int, seconds: float, now: float) -> None:
        short = blocks - lease.published - lease.held
        if short <= 0 or self._replica.extend(lease, short, now):
            self._replica.publish(lease, blocks, now, seconds)


class Shadows:
    """Those of one engine. All calls from its event loop; what happens to the cache is heard of as it happens."""

    def __init__(
        self,
        cache: CacheManager,
        make: MakePolicy,
        sample: float,
        *,
        outside: Surroundings,
        timeout: float,
        on_fault: Callable[[str, BaseException | str], None],
    ) -> None:
        """``sample``: share of the blocks that is looked at, in (0, 1]. ``timeout``: seconds that a shadow may take for
        one event; one that takes longer holds up the loop and is stopped.
        """
        self._cache = cache
        self._make = make
        self._sampling = _Sampling(sample)
        self._capacity = max(round(cache.pool.num_blocks * sample), 1)
        self._clock, self._wall, _, _ = outside
        self._timeout = timeout
        self._on_fault = on_fault
        self._shadows: list[_Shadow] = []
        self._lines: dict[int, _Line] = {}

    def add(self, spec: str) -> None:
        """Let a policy run as a shadow from now on.

        :raises InvalidRequest: when it does already.
        :raises PluginError: when it is unknown or cannot be made.
        """
        if any(shadow.spec == spec for shadow in self._shadows):
            raise InvalidRequest(f"{spec!r} runs as a shadow already; remove it first to begin anew")
        policy = self._make(spec, self._capacity)
        self._shadows.append(_Shadow(spec, policy, self._cache.block_size, self._wall()))
        if len(self._shadows) == 1:
            self._cache.watch_requests(self)

    def remove(self, spec: str) -> bool:
        """No longer. Whether it did."""
        left = [shadow for shadow in self._shadows if shadow.spec != spec]
        removed, self._shadows = len(left) < len(self._shadows), left
        if not left:
            self._cache.unwatch_requests(self)
            self._lines.clear()
        return removed

    def reports(self) -> tuple[ShadowReport, ...]:
        """How they stand, in the order in which they were added."""
        return tuple(shadow.report(self._sampling.share) for shadow in self._shadows)

    # from the cache

    def heard(self, event: Told) -> None:
        """Pass it on to those who run."""
        match event:
            case Admitted():
                self._admitted(event)
            case Published():
                self._published(event)
            case Extended():
                blocks = self._sampling.scaled(event.taken)
                if blocks:
                    self._each(lambda shadow: shadow.extend(event.number, blocks, event.now))
            case Forked():
                self._forked(event)
            case Left():
                self._lines.pop(event.number, None)
                self._each(lambda shadow: shadow.leave(event))
            case _:
                return

    def _admitted(self, event: Admitted) -> None:
        line = self._lines[event.number] = self._sampling.begin(event.names)
        usable = line.known((event.tokens - 1) // self._cache.block_size)
        private = self._sampling.scaled(event.found + event.taken - line.blocks)
        self._each(lambda shadow: shadow.admit(event, line, usable, private))

    def _published(self, event: Published) -> None:
        line = self._lines.get(event.number)
        if line is None:
            return
        new = event.blocks - line.blocks
        if new > 0:
            self._sampling.add(line, event.names[-new * NAME_BYTES :])
        self._each(lambda shadow: shadow.publish(event, line))

    def _forked(self, event: Forked) -> None:
        parent = self._lines.get(event.parent)
        if parent is None:
            return
        line = self._lines[event.number] = _Line()
        line.blocks, line.names = parent.blocks, parent.names
        line.places = None if parent.places is None else parent.places[:]
        self._each(lambda shadow: shadow.fork(event, line))

    def _each(self, tell: Callable[[_Shadow], None]) -> None:
        for shadow in self._shadows:
            if shadow.fault is not None:
                continue
            began = self._clock()
            try:
                tell(shadow)
            except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
                self._stop(shadow, describe(error))
            if (seconds := self._clock() - began) > self._timeout:
                self._stop(shadow, f"took {seconds:.3g} s for one event, more than {self._timeout:g}")

    def _stop(self, shadow: _Shadow, fault: str) -> None:
        shadow.stop(fault)
        self._on_fault(f"shadow policy {shadow.spec}", f"{fault}; it is stopped")
