"""Keep: how dear a run of blocks is to those who asked for it to be kept, and until when."""

from __future__ import annotations

from typing import NamedTuple

SAME_MOMENT = 1.0
"""Seconds. Ends that lie closer together count as one: clocks are read several times while one prompt is loaded."""


class Keep(NamedTuple):
    """Retention of a run. Lower priorities are evicted first; at ``expires`` (monotonic) it falls back to 0."""

    priority: int = 0
    expires: float | None = None
    """``None``: for good."""

    @classmethod
    def until(cls, priority: int, expires: float | None, now: float) -> Keep:
        """As asked for, or plain where that says nothing (any more)."""
        if not priority or (expires is not None and expires <= now):
            return PLAIN
        return cls(priority, expires)

    def agrees(self, other: Keep) -> bool:
        """Whether runs with these two may share an edge."""
        if self.expires is None or other.expires is None:
            return self == other
        return self.priority == other.priority and abs(self.expires - other.expires) < SAME_MOMENT

    def raised(self, other: Keep) -> Keep:
        """The dearer one: the higher priority, of equal ones the later end. ``self`` where ``other`` adds nothing."""
        if other.priority != self.priority:
            return other if other.priority > self.priority else self
        if self.expires is None or (other.expires is not None and other.expires <= self.expires):
            return self
        return other


PLAIN = Keep()
