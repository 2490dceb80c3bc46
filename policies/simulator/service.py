"""How long the requests of a trace take: what decides which of them overlap."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...errors import InvalidRequest


class Service(NamedTuple):
    """Rates of one request, whatever else runs beside it."""

    prefill_tokens_per_second: float = 20_000.0
    decode_tokens_per_second: float = 50.0

    def checked(self) -> Service:
        """This one.

        :raises InvalidRequest: when a rate is not above zero.
        """
        for name, rate in zip(self._fields, self, strict=True):
            if not rate > 0:
                raise InvalidRequest(f"{name} is {rate}; it must be above 0, and may be infinite")
        return self

    def seconds(self, computed_tokens: int, output_tokens: int) -> float:
        """From admission to the end: prefill of the tokens that no cache had, then the answer."""
        return computed_tokens / self.prefill_tokens_per_second + output_tokens / self.decode_tokens_per_second


DEFAULT = Service()
"""Of one 8B-class model on one accelerator, roughly."""

ATOMIC = Service(math.inf, math.inf)
"""Each request is over at the moment it comes: no two overlap. What most papers on caching measure."""
