"""Random requests on a small cache, and what of it is evicted: how two policies are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from hypothesis import strategies as st

from octavo.policies.eviction import EvictionPolicy
from octavo.policies.eviction.base import NAME_BYTES
from octavo.policies.replica import Lease, Replica

Make: TypeAlias = Callable[[int], EvictionPolicy]

MOST_HELD = 3
COSTS = (0.0, 0.5, 1.0, 4.0)


class Act(NamedTuple):
    path: int
    """Which way to go in the tree of prompts, a digit of base 3 per block."""
    blocks: int
    generated: int
    is_overlapping: bool
    """Whether it stays while others come."""
    cost: int


ACTS = st.lists(
    st.builds(
        Act,
        st.integers(0, 80),
        st.integers(1, 6),
        st.integers(0, 2),
        st.sampled_from([False, False, True]),
        st.integers(0, 3),
    ),
    max_size=150,
)
CAPACITIES = st.integers(8, 30)


def prompt(path: int, blocks: int) -> bytes:
    """Names of the blocks on the way: equal ones for equal beginnings."""
    names, number = b"", 1
    for _ in range(blocks):
        number = number * 3 + path % 3
        path //= 3
        names += number.to_bytes(NAME_BYTES, "little")
    return names


def evictions(policy: EvictionPolicy, acts: list[Act]) -> Iterator[list[tuple[bytes, int]]]:
    """What each request drives out, in order."""
    gone: list[tuple[bytes, int]] = []
    replica = Replica(policy.capacity, policy, on_evicted=lambda names, depth: gone.append((names, depth)))
    held: deque[Lease] = deque()
    for now, act in enumerate(acts):
        lease = replica.admit(prompt(act.path, act.blocks + act.generated), 0, float(now))
        if lease is not None:
            replica.publish(lease, act.blocks, float(now), COSTS[act.cost])
            replica.publish(lease, act.blocks + act.generated, float(now), COSTS[act.cost])
            held.append(lease)
        while held and (len(held) > MOST_HELD or not act.is_overlapping):
            replica.finish(held.popleft(), float(now))
        yield gone
        gone.clear()


def assert_alike(policy: Make, reference: Make, capacity: int, acts: list[Act]) -> None:
    """The two drive out the same, request by request."""
    for mine, other in zip(evictions(policy(capacity), acts), evictions(reference(capacity), acts), strict=True):
        assert mine == other
