"""Row: what became of one request, and the metrics of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

OK = "ok"
REFUSED = "refused"
"""429: the server had no room, and said so."""
TRUNCATED = "truncated"
"""The stream ended without a finish_reason or without [DONE]."""
MALFORMED = "malformed"
"""What came was no stream of the API's chunks."""
ERROR_EVENT = "error event"
"""The stream told of an error."""
TIMEOUT = "timeout"
CONNECTION = "connection"
"""No connection, or it broke before an answer began."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are in seconds; moments count from the beginning of the run."""

    conversation: int
    turn: int
    due: float
    """When it was to be sent."""
    sent: float
    """When it was: later if it had to wait for a slot, or was refused before."""
    ended: float
    outcome: str
    status: int | None = None
    """Of HTTP; ``None``: there was no answer."""
    ttft: float | None = None
    """Until the first content; ``None``: there was none."""
    gaps: tuple[float, ...] = ()
    """Between events with content."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """``None``: the server does not tell."""
    output_tokens: int | None = None
    counted: bool = False
    """Whether the output tokens are counted events with content, for want of a usage."""
    finish_reason: str | None = None
    refusals: int = 0
    """How often it was answered with 429."""
    message: str | None = None
    """What went wrong."""

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def queue(self) -> float:
        """Spent here, before it was sent."""
        return self.sent - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; ``None`` for fewer than two."""
        if self.ttft is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def longest_gap(self) -> float | None:
        return max(self.gaps, default=None)


class Metric(NamedTuple):
    """A latency."""

    title: str
    of: Callable[[Row], float | None]
    """Of one request; for the gaps, its longest one."""


METRICS: Mapping[str, Metric] = {
    "ttft": Metric("first token", lambda row: row.ttft),
    "tpot": Metric("per token", lambda row: row.tpot),
    "itl": Metric("between", lambda row: row.longest_gap),
    "e2e": Metric("whole", lambda row: row.e2e),
    "queue": Metric("held here", lambda row: row.queue),
}
