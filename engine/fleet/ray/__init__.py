"""Replicas on Ray Serve (extra ``ray``): one engine each, a router that knows their caches, a gateway in front.

``serve run octavo.engine.fleet.ray:build_app model=smollm2 replicas=2`` starts it all; :func:`application` is the same
for a program of your own.
"""

from .build import application
from .fleet import RayFleet
from .layout import Layout
from .options import Options, build_app
from .replica import Replica
from .router import Router
from .spec import ReplicaSpec

__all__ = ["Layout", "Options", "RayFleet", "Replica", "ReplicaSpec", "Router", "application", "build_app"]
