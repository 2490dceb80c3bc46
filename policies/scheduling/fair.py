"""Fair shares by tenant: a virtual token counter each.

Y. Sheng, S. Cao, D. Li et al., "Fairness in Serving Large Language Models", OSDI 2024: the tenant that was served least
goes first; one that comes back from a pause is lifted to the least of those that wait, so that nobody saves up for a
burst. The order inside a share, by cached prefix, is an addition of ours.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping

from ...errors import InvalidRequest
from .base import Job, SchedulingPolicy

REMEMBERED = 1024
"""Absent tenants whose counters are kept, at most."""


class Fair(SchedulingPolicy):
    """Equal service for all tenants that have something waiting, or service in proportion to ``weights``.

    Service is counted in tokens as they are computed: ``input_weight`` for one of a prompt, ``output_weight`` for a
    generated one (with both at 1, shares are shares of the computed tokens). What is found in the cache costs nothing.
    Inside a share the longest cached prefix goes first, then the order of arrival; a request that came more than
    ``max_delay`` seconds ago goes before those of its tenant that did not. Nothing is displaced for a newcomer.

    Nobody is starved: a tenant that waits is served once its counter is the lowest, and it stays while others are
    served. Requests without a tenant share as one. The counter of a tenant that has left is kept until the others have
    caught up, so leaving and coming back wins nothing; at most ``REMEMBERED`` of them, the highest.
    """

    wants_cached_prefix = True

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        max_delay: float = 5.0,
    ) -> None:
        """``weights``: by tenant, ``""`` for requests without one; 1 where nothing is said.

        :raises InvalidRequest: when a weight is not a positive number or ``max_delay`` is negative.
        """
        self._weights = dict(weights or {})
        numbers = [*self._weights.values(), input_weight, output_weight]
        if not all(0 < number < float("inf") for number in numbers):
            raise InvalidRequest(f"fair: weights must be positive numbers, not {numbers}")
        if not max_delay >= 0:
            raise InvalidRequest(f"fair: max_delay must be 0 or more seconds, not {max_delay}")
        self._input_weight, self._output_weight = input_weight, output_weight
        self._max_delay = max_delay
        self._present: dict[str, dict[Job, None]] = {}
        """Jobs by tenant."""
        self._counters: dict[str, float] = {}
        """Of those who are present, and of the absent in ``_absent``."""
        self._absent: list[tuple[float, str]] = []
        """Heap of those who left with what they had; items of tenants that came back are stale."""
        self._order: list[tuple[float, str]] | None = None
        """Who is present, the least served first; ``None``: that has changed."""
        self._floor = 0.0
        """Nobody starts below it: what the last one had when the engine was left idle."""

    @property
    def known_tenants(self) -> int:
        """Tenants that have a counter."""
        return len(self._counters)

    def rank(self, job: Job, now: float) -> tuple[float, ...]:
        served = self._counters[job.tenant or ""]
        if now - job.arrival > self._max_delay:
            return (served, 0, job.order)
        return (served, 1, job.repeats, -job.cached_tokens, job.order)

    def on_arrival(self, job: Job, now: float) -> None:
        tenant = job.tenant or ""
        if not self._waits(tenant):
            self._lift(tenant)
        self._present.setdefault(tenant, {})[job] = None

    def on_served(self, job: Job, prefill_tokens: int, decode_tokens: int, now: float) -> None:
        tenant = job.tenant or ""
        cost = self._input_weight * prefill_tokens + self._output_weight * decode_tokens
        self._counters[tenant] += cost / self._weights.get(tenant, 1.0)
        self._order = None

    def on_leave(self, job: Job, now: float) -> None:
        tenant = job.tenant or ""
        del self._present[tenant][job]
        if self._present[tenant]:
            return
        del self._present[tenant]
        self._order = None
        if not self._present:
            self._floor = max(self._floor, self._counters[tenant])
        heapq.heappush(self._absent, (self._counters[tenant], tenant))
        self._forgive()

    def _waits(self, tenant: str) -> bool:
        return any(job.is_waiting for job in self._present.get(tenant, ()))

    def _lift(self, tenant: str) -> None:
        """``tenant`` begins to wait: it starts no lower than the least served of those who wait already. Where nobody
        waits, everybody got what he wanted, and all start alike. A burst of newcomers sorts the others once.
        """
        if self._order is None:
            self._order = sorted((self._counters[other], other) for other in self._present)
        order, had = self._order, self._counters.get(tenant, 0.0)
        most = order[-1][0] if order else 0.0
        start = next((counter for counter, other in order if self._waits(other)), most)
        if tenant in self._present:
            del order[bisect_left(order, (had, tenant))]
        self._counters[tenant] = max(had, start, self._floor)
        insort(order, (self._counters[tenant], tenant))

    def _forgive(self) -> None:
        """Forget who left and would start no higher than a newcomer does, and the lowest of too many."""
        least = min((self._counters[tenant] for tenant in self._present), default=self._floor)
        if len(self._absent) > 2 * REMEMBERED:
            self._absent = sorted({item for item in self._absent if self._is_absent(*item)})
        while self._absent and (self._absent[0][0] <= least or len(self._counters) - len(self._present) > REMEMBERED):
            counter, tenant = heapq.heappop(self._absent)
            if self._is_absent(counter, tenant):
                del self._counters[tenant]

    def _is_absent(self, counter: float, tenant: str) -> bool:
        return tenant not in self._present and self._counters.get(tenant) == counter
