"""ContainedRouter: a routing policy in a box. What goes wrong in it is counted and logged, and costs no request.

A policy that fails again and again is set aside, by the same measure as eviction policies are
(:mod:`octavo.engine.kv.containment`). One that never returns holds up its event loop: nothing can interrupt it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ...errors import ContractBroken
from ...policies.routing.base import Choice, Reason, RoutedRequest, RoutingPolicy
from ...policies.routing.fleet_view import FleetView
from ...policies.routing.least_loaded import LeastLoaded
from ...telemetry.logging import Logger, fault_fields, get_logger
from ..kv.containment import MOST_FAULTS, WINDOW

LOG_INTERVAL: Final = 60.0
"""Seconds between two lines about faults: there could be one for each request."""


class ContainedRouter(RoutingPolicy):
    """Passes on what ``policy`` chooses, if it keeps to the contract. Otherwise the least loaded replica is chosen, for
    the reason ``stand_in``.
    """

    def __init__(
        self, policy: RoutingPolicy, *, clock: Callable[[], float] = time.monotonic, logger: Logger | None = None
    ) -> None:
        """``clock``: seconds, monotonic. ``logger``: ``None`` is that of fleets."""
        self.faults = 0
        """So far."""
        self.is_set_aside = False
        """Whether it is asked nothing any more."""
        self._policy = policy
        self._stand_in = LeastLoaded()
        self._clock = clock
        self._logger = logger or get_logger("octavo.fleet")
        self._asked = 0
        self._recent: deque[int] = deque((-WINDOW,), maxlen=MOST_FAULTS)
        """The last faults, by number of the call."""
        self._log_at = clock()

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        """Raises nothing that the policy raises."""
        if not self.is_set_aside:
            self._asked += 1
            try:
                return _checked(self._policy.choose(request, fleet), request, fleet)
            except KeyboardInterrupt:  # the user's, who wants to stop everything
                raise
            except BaseException as error:  # noqa: BLE001  # a plug-in may raise anything
                self._failed(error)
        return self._stand_in.choose(request, fleet)._replace(reason=Reason.STAND_IN)

    def _failed(self, error: BaseException) -> None:
        self.faults += 1
        self._recent.append(self._asked)
        self.is_set_aside = len(self._recent) == MOST_FAULTS and self._asked - self._recent[0] < WINDOW
        now, name = self._clock(), type(self._policy).__name__
        if now >= self._log_at:
            self._log_at = now + LOG_INTERVAL
            self._logger.error("routing_policy_failed", policy=name, faults=self.faults, **fault_fields(error))
        if self.is_set_aside:
            self._logger.error("routing_policy_set_aside", policy=name, faults=self.faults)


def _checked(choice: Choice, request: RoutedRequest, fleet: FleetView) -> Choice:
    """``choice``, in types of our own: it goes into books, labels and other processes.

    :raises ContractBroken: when it is no ranking of the replicas that there are.
    """
    replicas, there = list(choice.replicas), set(fleet.replicas)
    if len(replicas) != len(there) or set(replicas) != there:
        raise ContractBroken("the ranking does not name every replica once")
    if replicas[0] in request.avoid and not there <= request.avoid:
        raise ContractBroken("the first one of the ranking has failed this request, and others have not")
    matched = int(choice.matched)
    if not 0 <= matched <= len(request.names):
        raise ContractBroken(f"the prompt has {len(request.names)} blocks, and {matched} are said to be found")
    return Choice(replicas, matched, Reason(choice.reason))
