"""The offline optimum: what one who knows all requests to come gets out of a pool.

**Leaves are enough.** A request that uses a block uses all blocks before it, so the next use of a block is never later
than that of the blocks behind it: of all cached blocks, the one that is used furthest in the future is the end of a
leaf, or as far away as one. To evict only leaves costs nothing, when of equal next uses the deepest goes first.

**The bound.** Take the requests in their order, whatever the times. A hit on a block means that it stayed in the pool
since it came in last, with an earlier request, through the admission of each request in between; each of these needs
its own blocks at that moment, and the pool has no more than its capacity. So the hits of any policy, under any service
times, are a set of intervals of which no more than ``capacity - needed`` overlap at any admission. The largest such
set is found by going through the admissions in order and dropping, whenever there are too many, those that end last
(U. Faigle, W. M. Nawijn, "Note on scheduling intervals on-line", Discrete Applied Mathematics 58, 1995; M. C. Carlisle,
E. L. Lloyd, "On the k-coloring of intervals", Discrete Applied Mathematics 59, 1995): an exchange of the one that ends
last for any other leaves less to fit in later, also where the room differs from one moment to the next. For pages it is
the rule of L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
1966.

**The optimum** evicts that way, leaves only, in the timeline of a replay: what requests in flight hold stays, and how
long they take depends on the hits. With ``ATOMIC`` service nothing else is in flight, dropping an interval is evicting
a leaf, and the optimum *is* the bound: exact. Where requests overlap, it is what the rule gives, and the bound says how
far from perfect it can be. The same holds for a trace that tells of generated blocks: these come in without being
asked for, so an interval that ends where its block comes in anew is worth nothing, though blocks behind it may be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import NamedTuple

from ...errors import InvalidRequest
from .clairvoyant import ClairvoyantPool, UnboundPool
from .future import Future, NextUses
from .results import Outcome
from .service import ATOMIC, DEFAULT, Service
from .timeline import run
from .trace import Trace


class Survey(NamedTuple):
    """What a trace holds, whatever the cache."""

    requests: int
    unique: int
    """Different blocks, generated ones included: capacities are given as shares of these."""
    limit: Outcome
    """Of a cache that never evicts: no policy can do better. Its times say nothing: all requests are atomic."""


class Optimum(NamedTuple):
    """What could be had at one capacity by one who knows the future."""

    capacity: int
    outcome: Outcome
    """Of furthest next use among leaves, in the same timeline as a replay. With ``ATOMIC`` no policy has more hits, if
    the trace tells of no generated blocks."""
    bound: Outcome
    """No policy has more ``hits``, whatever the service times. What else it says is of these hits taken as prefixes of
    atomic requests; it evicts nothing."""


def survey(trace: Trace) -> Survey:
    """Read the trace once. Memory: eight bytes for each different block, and some for each request.

    :raises TraceError: when it cannot be read.
    """
    future = Future(trace)
    return Survey(future.limit.requests, future.unique, future.limit)


def optimum_at(
    trace: Trace,
    capacities: Sequence[int],
    service: Service = DEFAULT,
    *,
    on_progress: Callable[[int], None] | None = None,
) -> list[Optimum]:
    """One for each capacity, in their order. The trace is read once; memory as for ``survey``.

    ``on_progress`` is called now and then with the requests done so far, of all capacities together.

    :raises InvalidRequest: when a capacity is below 1, or a rate not above 0.
    :raises TraceError: when the trace cannot be read.
    """
    if min(capacities, default=1) < 1:
        raise InvalidRequest(f"a capacity of {min(capacities)} blocks: a pool has a block at least")
    service.checked()
    future = Future(trace)
    found: dict[int, Optimum] = {}
    for group in _alike(future, capacities):
        with _next_uses(future, group[0]) as (uses, worth):
            for capacity in group:
                done = len(found) * future.limit.requests
                found[capacity] = _optimum(future, uses, worth, capacity, service, _from(done, on_progress))
    return [found[capacity] for capacity in capacities]


def _optimum(
    future: Future,
    uses: NextUses,
    worth: NextUses,
    capacity: int,
    service: Service,
    on_progress: Callable[[int], None] | None,
) -> Optimum:
    pool, unbound = ClairvoyantPool(future, uses, capacity), UnboundPool(future, worth, capacity)
    outcome = run(future.requests(), pool, future.block_tokens, service, on_progress)
    bound = run(future.requests(), unbound, future.block_tokens, ATOMIC)
    return Optimum(capacity, outcome, bound)


def _alike(future: Future, capacities: Iterable[int]) -> Iterator[list[int]]:
    """The capacities in groups: with those of one group the same requests are refused, so next uses are the same."""
    needs = sorted(future.needs)
    for _, group in groupby(sorted(set(capacities)), key=lambda capacity: bisect_right(needs, capacity)):
        yield list(group)


@contextmanager
def _next_uses(future: Future, capacity: int) -> Iterator[tuple[NextUses, NextUses]]:
    """Of the optimum and of the bound: two only where it makes a difference."""
    with ExitStack() as files:
        uses = files.enter_context(NextUses(future, capacity, renewed=False))
        renewed = files.enter_context(NextUses(future, capacity, renewed=True)) if future.generates else uses
        yield uses, renewed


def _from(done: int, on_progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    return None if on_progress is None else lambda now: on_progress(done + now)
