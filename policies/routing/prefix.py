"""To where most of the prompt is cached already, as long as that saves more than the wait there costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import InvalidRequest
from .base import Choice, Reason, RoutedRequest, RoutingPolicy
from .fleet_view import FleetView
from .load_books import Bools, Floats, Ints
from .ranking import ranked, rendezvous, standing


class Prefix(RoutingPolicy):
    """The longest cached prefix, with bounded load.

    A replica is overloaded when its load is above ``overload`` times the mean (V. Mirrokni, M. Thorup,
    M. Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018). Tokens that it has cached speak for it,
    tokens that it is overloaded by against it, one for one; the best difference wins. So who is chosen never has more
    than ``overload`` times the mean and this one request, computed from nothing.

    What several have cached speaks for each of them by its share only: many will ask for it, so one more should have
    it, too. What all have, such as a system prompt, speaks for nobody. Tokens count in steps of ``min_match`` of those
    that are to be computed anywhere else, so a small difference does not either.

    Equals are ranked by a rendezvous hash over the ``first_blocks`` first blocks that they do not all have, after those
    above the mean stand back: several routers agree on where a new prompt goes before they hear of each other's
    choices. Where nothing is left to hash, the least loaded is chosen.
    """

    def __init__(self, overload: float = 1.15, min_match: float = 0.1, first_blocks: int = 4) -> None:
        """Settings as above.

        :raises InvalidRequest: when ``overload`` is below 1, ``min_match`` not between 0 and 1, or ``first_blocks``
            below 1.
        """
        if not 1 <= overload < float("inf"):
            raise InvalidRequest(f"prefix: overload must be 1 or more, not {overload}")
        if not 0 <= min_match <= 1:
            raise InvalidRequest(f"prefix: min_match must be from 0 to 1, not {min_match}")
        if first_blocks < 1:
            raise InvalidRequest(f"prefix: first_blocks must be 1 or more, not {first_blocks}")
        self._overload, self._min_match, self._first_blocks = overload, min_match, first_blocks

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        ranks, loads, matches = standing(request, fleet), fleet.loads, fleet.matches(request.names)
        allowed = ranks == ranks.min()
        mean = loads[allowed].mean()
        worth = self._worth(request, matches, allowed)
        cost = np.maximum(loads - self._overload * mean, 0.0) - worth
        equals = allowed & (cost == cost[allowed].min())
        name = self._telling(request.names, int(matches[equals].min()))
        order = ranked(ranks, cost, loads > mean, loads if name is None else rendezvous(name, fleet))
        first = int(order[0])
        return Choice(fleet.named(order), int(matches[first]), _reason(worth, allowed, first, name is not None))

    def _worth(self, request: RoutedRequest, matches: Ints, allowed: Bools) -> Floats:
        """Of what each has cached, in tokens."""
        common = int(matches[allowed].min())
        most = request.work(common) - request.output_tokens
        worth = _shared(np.maximum(matches - common, 0)) * request.block_tokens
        step = self._min_match * most
        return np.minimum(np.floor(worth / step) * step if step else worth, most - 1)

    def _telling(self, names: Sequence[bytes], common: int) -> bytes | None:
        """The name that stands for the first blocks after ``common`` ones; ``None``: there are none."""
        return names[min(common + self._first_blocks, len(names)) - 1] if common < len(names) else None


def _shared(blocks: Ints) -> Floats:
    """Of so many leading blocks those that somebody has alone, half of those that two have, and so on."""
    holders = np.bincount(blocks)[::-1].cumsum()[::-1]
    worth = np.concatenate(([0.0], (1 / holders[1:]).cumsum()))
    return worth[blocks]


def _reason(worth: Floats, allowed: Bools, first: int, is_hashed: bool) -> Reason:
    if worth[first] < worth[allowed].max():
        return Reason.OVERLOAD
    if worth[first] > 0:
        return Reason.PREFIX
    return Reason.UNSEEN if is_hashed else Reason.LOAD
