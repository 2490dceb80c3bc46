"""The metrics of a gateway in front of several engines. A registry of their own, as those of HTTP have."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from .catalogue import CALL_SECONDS, Metric
from .exposition import Readings
from .histogram import Histogram

ROUTED: Final = Metric(
    "octavo_fleet_requests_total",
    "counter",
    "Requests that a replica answered, by why it was chosen.",
    ("replica", "reason"),
)
MATCHED_TOKENS: Final = Metric(
    "octavo_fleet_matched_tokens_total",
    "counter",
    "Tokens of prompts that the chosen replica was thought to have.",
    ("replica",),
)
PROMPT_TOKENS: Final = Metric(
    "octavo_fleet_prompt_tokens_total",
    "counter",
    "Tokens of the prompts that were sent to a replica: matched / prompt is the hit rate that the gateway expects.",
    ("replica",),
)
RETRIES: Final = Metric(
    "octavo_fleet_retries_total",
    "counter",
    "Requests that another replica was asked for; cause: lost, or busy (it had no room, or was about to end).",
    ("cause",),
)
LOST: Final = Metric(
    "octavo_fleet_lost_total", "counter", "Requests whose replica was lost before its answer was whole.", ("replica",)
)
ROUTING_SECONDS: Final = Metric(
    "octavo_fleet_routing_seconds",
    "histogram",
    "From a request's last byte until it is sent to a replica: its prompt is read and its blocks are named.",
    (),
    CALL_SECONDS,
)

FLEET_CATALOGUE: Final[tuple[Metric, ...]] = (ROUTED, MATCHED_TOKENS, PROMPT_TOKENS, RETRIES, LOST, ROUTING_SECONDS)

MOST_REPLICAS: Final = 1024
"""Replicas that have a label of their own: those come and go, each with a new name, and labels stay."""
OTHER: Final = "other"


class Sent(NamedTuple):
    """One request that a replica has begun to answer."""

    replica: str
    reason: str
    """Of the router's own list."""
    matched_tokens: int
    prompt_tokens: int


class FleetMeasures:
    """Counts what a gateway does. All calls from its event loop."""

    def __init__(self) -> None:
        self._replicas: set[str] = set()
        self._routed: Counter[tuple[str, str]] = Counter()
        self._matched: Counter[tuple[str]] = Counter()
        self._prompts: Counter[tuple[str]] = Counter()
        self._retries: Counter[tuple[str]] = Counter()
        self._lost: Counter[tuple[str]] = Counter()
        self._seconds = Histogram(ROUTING_SECONDS.bounds)

    def sent(self, sent: Sent) -> None:
        """A replica has begun to answer."""
        replica = self._label(sent.replica)
        self._routed[replica, sent.reason] += 1
        self._matched[replica,] += sent.matched_tokens
        self._prompts[replica,] += sent.prompt_tokens

    def read(self, seconds: float) -> None:
        """A prompt was read."""
        self._seconds.observe(seconds)

    def lost(self, replica: str | None) -> None:
        """A replica did not finish its answer; ``None``: nobody knows which."""
        self._lost[OTHER if replica is None else self._label(replica),] += 1

    def retried(self, cause: str) -> None:
        """Another replica is asked. ``cause``: ``lost`` or ``busy``."""
        self._retries[cause,] += 1

    def readings(self) -> Readings:
        """All of them, as they are now."""
        return Readings(
            {
                ROUTED: {labels: float(count) for labels, count in self._routed.items()},
                MATCHED_TOKENS: {labels: float(count) for labels, count in self._matched.items()},
                PROMPT_TOKENS: {labels: float(count) for labels, count in self._prompts.items()},
                RETRIES: {labels: float(count) for labels, count in self._retries.items()},
                LOST: {labels: float(count) for labels, count in self._lost.items()},
            },
            {ROUTING_SECONDS: {(): self._seconds.state()}},
        )

    def _label(self, replica: str) -> str:
        if replica not in self._replicas and len(self._replicas) >= MOST_REPLICAS:
            return OTHER
        self._replicas.add(replica)
        return replica
