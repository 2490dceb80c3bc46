"""Recorder: the rows as they come, and what can be said before the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .rows import CONNECTION, OK, REFUSED, Row


class Recorder:
    """Of one run."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.outcomes: Counter[str] = Counter()
        self.in_flight = 0
        self.unfinished = 0
        """Requests whose way was cut short from here."""
        self.content_events = 0
        """Of all answers, those under way as well: nearly tokens."""
        self.without_connection = 0
        """Requests that found none, since the last one that did."""

    @property
    def failed(self) -> int:
        return len(self.rows) - self.outcomes[OK] - self.outcomes[REFUSED]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.outcomes[row.outcome] += 1
        self.without_connection = self.without_connection + 1 if row.outcome == CONNECTION else 0

    def note_content(self) -> None:
        self.content_events += 1

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around a request on the wire."""
        self.in_flight += 1
        try:
            yield
        except BaseException:
            self.unfinished += 1
            raise
        finally:
            self.in_flight -= 1
