"""Namespace: whose cache a sequence may share."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import InvalidRequest


class Namespace(NamedTuple):
    """Sequences share blocks only inside one namespace. Each part has its own field, so that no two can be confused.

    ``None`` and the empty string are different values.
    """

    weights: str
    """Fingerprint of the model."""
    adapter: str | None = None
    salt: str | None = None
    """Secret or name of the tenant."""

    def checked(self) -> Namespace:
        """Itself, when every part has its type.

        :raises InvalidRequest: otherwise; a malformed part must never be read as "no part".
        """
        for name, value in (("adapter", self.adapter), ("tenant", self.salt)):
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string or None, not {type(value).__name__}")
        if not isinstance(self.weights, str) or not self.weights:
            raise InvalidRequest("a namespace needs the fingerprint of its model")
        return self
