"""The simulator of fleets: request traces through several replicas behind a router, with a store that all share.

Routing policies get the books that a live router keeps, and eviction policies the events of a live cache.

The trace ``mooncake_conversation`` (12,031 requests) with the policy ``prefix`` and a shared tier, on one core: 2.5 s
and 97 MiB for 4 replicas, 20 s and 160 MiB for 10,000.
"""

from .chats import Chats, ChatTrace
from .course import simulate
from .names import shortened
from .outcome import FleetOutcome
from .setting import FleetSetting, Kill, TierSetting, TierWrites

__all__ = [
    "ChatTrace",
    "Chats",
    "FleetOutcome",
    "FleetSetting",
    "Kill",
    "TierSetting",
    "TierWrites",
    "shortened",
    "simulate",
]
