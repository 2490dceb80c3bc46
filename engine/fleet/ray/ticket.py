"""Ticket: what a request brings to the router, and what the router says about it."""

from __future__ import annotations

from ..base import Routed, Scheme, Wanted


class Ticket:
    """Goes with a request through Ray's handle to the router, which runs in the same process, in a thread of its own,
    and writes down what it decided. The replica gets none of it: pickled, a ticket is ``None``.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.routed: Routed | None = None
        """``None``: no router of ours has seen it."""
        self.scheme: Scheme | None = None
        """How replicas name blocks, as far as the router knows."""
        self.problem: str | None = None
        """Why the router has given it up."""
        self.is_over = False
        """Whether who asked has the whole answer, or wants it no more."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
