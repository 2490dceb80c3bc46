"""Router: Ray's request router, with the books and the policies of this fleet.

Ray makes one for each handle and calls it in an event loop of its own. It tells when replicas come, go and report, and
asks for a ranking; which replica of the ranking gets the request is up to Ray, which passes over those that have
``max_ongoing_requests`` or are dead.

Ray carries this class to other processes by value, so what it shares with the rest of the package, such as tickets,
must lie in other modules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from ray.serve.request_router import RequestRouter

from .assigning import Desk
from .following import Watch
from .seams import Pending, RayReplica, RayReplicaId, Result

MOST: Final = 16
"""Of a ranking. Who is not in it gets a chance with the next one, after a short while."""


class Router(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends requests by a routing policy, see :mod:`octavo.policies.routing`.

    For ``RequestRouterConfig(request_router_class=Router, request_router_kwargs={...})``, with the keyword arguments of
    :meth:`initialize_state`.
    """

    def initialize_state(
        self,
        policy: str = "prefix",
        options: Mapping[str, object] | None = None,
        half_life: float = 30.0,
        drain_timeout: float = 20.0,
    ) -> None:
        """``policy``: a name in ``octavo.routing_policies`` or ``package.module:Class``, made with ``options``.
        ``half_life``: seconds after which work that was placed counts half. ``drain_timeout``: seconds that requests
        get to finish at a replica that is to end.

        :raises PluginError: when there is no such policy.
        """
        self._desk = Desk(policy, options or {}, half_life=half_life, clock=time.monotonic)
        self._watch = Watch(self._desk.view)
        self._drain_timeout = drain_timeout

    async def choose_replicas(
        self, candidate_replicas: Sequence[RayReplica], pending_request: Pending | None = None
    ) -> list[list[RayReplica]]:
        """A ranking, one replica in each rank."""
        if pending_request is None:
            return [[replica] for replica in candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again at once, and for ever
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = [known[each] for each in self._desk.rank(pending_request) if each in known][:MOST]
        for replica in ranked:
            if self.replica_queue_len_cache.get(replica.replica_id) is None:  # Ray would ask the replica, and wait
                self.on_new_queue_len_info(replica.replica_id, self._desk.in_flight(replica.replica_id.unique_id))
        return [[replica] for replica in ranked] or [list(candidate_replicas)]  # one that was refused is passed over

    def on_request_routed(self, pending_request: Pending, replica_id: RayReplicaId, result: Result) -> None:
        self._desk.taken(pending_request, replica_id.unique_id, result)

    def on_request_completed(self, replica_id: RayReplicaId, internal_request_id: str) -> None:
        self._desk.completed(internal_request_id, replica_id.unique_id)

    def update_replicas(self, replicas: Sequence[RayReplica]) -> None:
        """Who is there, with what they have reported."""
        super().update_replicas(list(replicas))
        self._desk.sweep()
        gone = self._watch.update({each.replica_id.unique_id: each.routing_stats for each in replicas})
        for replica in gone:  # it is to end: what it has in hand may finish, but not take for ever
            self._desk.retire(replica, self._drain_timeout, asyncio.get_running_loop().call_later)

    def on_replica_actor_died(self, replica_id: RayReplicaId) -> None:
        super().on_replica_actor_died(replica_id)
        self._watch.lost(replica_id.unique_id)
