"""Watch: keeps the books about who is there, from what Ray and the replicas themselves tell."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ....policies.routing.base import ReplicaId
from ....policies.routing.fleet_view import FleetView
from ....policies.routing.status import ReplicaStatus
from ....telemetry.logging import get_logger
from ..news import FleetNews


class Watch:
    """Of one router. All calls in its event loop."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._news = FleetNews(view)
        self._logger = get_logger("octavo.fleet")

    def update(self, reports: Mapping[ReplicaId, Mapping[str, object]]) -> AbstractSet[ReplicaId]:
        """Those that are there now, each with its last report, which is empty at first; returns who has left."""
        gone = set(self._view.replicas) - reports.keys()
        for replica in gone:
            self.lost(replica)
        for replica, report in reports.items():
            self._view.join(replica)
            if report:
                self._note(replica, report)
        return gone

    def lost(self, replica: ReplicaId) -> None:
        """It is gone."""
        self._news.left(replica)
        self._view.leave(replica)

    def _note(self, replica: ReplicaId, report: Mapping[str, object]) -> None:
        try:
            status = ReplicaStatus.from_dict(report)
        except ValueError as error:
            self._logger.warning("report_refused", replica=replica, error=str(error))
            return
        if status != self._view.status(replica):
            self._view.report(replica, status)
            self._news.reported(replica, status)
