"""From the name of a routing policy to one that can choose."""

from __future__ import annotations

from collections.abc import Mapping

from ...plugins import PluginGroup
from ...policies.routing.base import RoutingPolicy
from ..choosing import made_with

ROUTING_POLICIES = PluginGroup("octavo.routing_policies", RoutingPolicy)


def made_router(spec: str = "prefix", options: Mapping[str, object] | None = None) -> RoutingPolicy:
    """The policy that ``spec`` names, an entry point or ``package.module:Class``, with ``options`` as its settings.

    :raises PluginError: when it is unknown, cannot be imported, is no routing policy or cannot be made.
    :raises InvalidRequest: when it has no such settings, or refuses their values.
    """
    return made_with(ROUTING_POLICIES.resolve(spec), spec, options or {}, "routing_options")
