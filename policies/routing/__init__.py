"""Which of several engines gets a request."""

from .base import Choice, Reason, ReplicaId, RoutedRequest, RoutingPolicy
from .digest import Digest, DigestBuilder
from .fleet_view import FleetView, Placement
from .prefix_index import IndexLimits
from .status import ReplicaStatus

__all__ = [
    "Choice",
    "Digest",
    "DigestBuilder",
    "FleetView",
    "IndexLimits",
    "Placement",
    "Reason",
    "ReplicaId",
    "ReplicaStatus",
    "RoutedRequest",
    "RoutingPolicy",
]
