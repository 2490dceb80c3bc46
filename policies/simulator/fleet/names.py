"""Names of blocks as routers get them, one by one, and as traces have them, in a row."""

from __future__ import annotations

from collections.abc import Iterable

from ...eviction.base import NAME_BYTES


def split(names: bytes) -> list[bytes]:
    """One by one: from the ``NAME_BYTES`` each of a trace."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def shortened(names: Iterable[bytes]) -> bytes:
    """In a row, as a trace has them: from the longer ones of a live engine, whose first bytes are as random as the
    rest."""
    return b"".join([name[:NAME_BYTES] for name in names])
