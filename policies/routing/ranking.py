"""What policies rank with. Arrays are in the order of ``fleet.replicas``."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from .base import Choice, Reason, RoutedRequest
from .fleet_view import FleetView
from .load_books import Ints

Scores: TypeAlias = npt.NDArray[np.uint64]


def standing(request: RoutedRequest, fleet: FleetView) -> Ints:
    """0: may be chosen; 1: is draining; 2, 3: the same of those that ``request`` avoids."""
    ranks = fleet.draining.astype(np.int64)
    if request.avoid:
        ranks += 2 * np.array([replica in request.avoid for replica in fleet.replicas], np.int64)
    return ranks


def ranked(*keys: npt.NDArray[np.generic]) -> Ints:
    """All replicas, the lowest first: by the first key, by the next where it is the same, and at last by age."""
    return np.lexsort(keys[::-1])


def choice(request: RoutedRequest, fleet: FleetView, reason: Reason, order: Ints) -> Choice:
    """Replicas in ``order``, and what the first of them has of the prompt."""
    return Choice(fleet.named(order), int(fleet.matches(request.names)[order[0]]), reason)


def rendezvous(name: bytes, fleet: FleetView) -> Scores:
    """A number for each replica from its hash and that of ``name``; the lowest goes first.

    D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates", 1998: when a replica joins or leaves,
    only the names that it gets or had go to another one. The numbers are mixed as in splitmix64 (S. Vigna).
    """
    mixed = fleet.seeds ^ np.uint64(xxh3_64_intdigest(name))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
