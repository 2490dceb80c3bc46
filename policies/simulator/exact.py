"""Exact replay: what a live engine did to its cache, done again to a replica, and the same victims expected.

A recording says when requests held, published and gave back blocks, and how many blocks were asked of the policy. All
of that is done again as it was; only whom the policy names is its own. The first name that differs ends the replay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from ...errors import ContractBroken, TraceError
from ..eviction.base import NAME_BYTES, EvictionPolicy
from ..history import (
    Admitted,
    Dropped,
    Evicted,
    Extended,
    Forked,
    Gap,
    Kept,
    Left,
    Line,
    Locked,
    Part,
    Published,
    Switched,
    Unlocked,
)
from ..replica import Lease, Run
from ..returning import Return
from .obedient import ObedientReplica, Victim
from .recording import Chains, events, read_header


class Divergence(NamedTuple):
    """Where a policy chose otherwise than in the recording."""

    line: int
    """Of the file, from 1."""
    victim: int
    """Of this line, from 0."""
    recorded: tuple[bytes, int] | None
    """Name of its last block and number of blocks; ``None``: there was none any more."""
    chosen: tuple[bytes, int] | None


class Replayed(NamedTuple):
    """How far a replay came."""

    victims: int
    """Victims that were the same."""
    events: int
    divergence: Divergence | None


def replay_exactly(path: str | os.PathLike[str], policy: EvictionPolicy) -> Divergence | None:
    """Play a recording to ``policy``, a new object made as the engine makes its own, priorities included
    (:class:`~octavo.policies.eviction.priority_ttl.PriorityTtl`). ``None``: it chose the same victims throughout.

    Holds the cache of the recording without contents, :class:`~octavo.policies.simulator.recording.Chains`, and what
    the policy wanted remembered of evicted runs that were not wanted again.

    :raises TraceError: when the file is no recording, is wrong, has gaps, or changes its policy on the way.
    """
    return play(path, policy).divergence


def play(path: str | os.PathLike[str], policy: EvictionPolicy) -> Replayed:
    """The same, with how much was compared."""
    header = read_header(path)
    replay = _Replay(ObedientReplica(header.num_blocks, policy, header.block_tokens), header.block_tokens)
    count = 0
    for line, event in events(path):
        try:
            replay.take(event)
        except (KeyError, ContractBroken) as error:
            raise TraceError(f"{os.fspath(path)}, line {line}: this cannot be done again ({error})") from error
        count += 1
        if replay.differs is not None:
            victim, recorded, chosen = replay.differs
            return Replayed(replay.victims, count, Divergence(line, victim, recorded, chosen))
    return Replayed(replay.victims, count, None)


class _Replay:
    """From events to what is done to the replica."""

    def __init__(self, tree: ObedientReplica, block_tokens: int) -> None:
        self.victims = 0
        self.differs: tuple[int, Victim | None, Victim | None] | None = None
        self._tree = tree
        self._block_tokens = block_tokens
        self._chains = Chains()
        self._held: dict[int, tuple[Run, bytes]] = {}
        self._leases: dict[int, Lease] = {}
        self._tenants: dict[int, str] = {}
        self._told: set[int] = set()

    def take(self, event: Line) -> None:
        """What happened next.

        :raises KeyError: when it cannot have happened after what came before.
        :raises ContractBroken: when the policy names what cannot be evicted, or nothing.
        """
        match event:
            case Admitted():
                self._admitted(event)
            case Published():
                self._published(event)
            case Extended():
                self._leases[event.number].held += event.taken
            case Forked():
                self._forked(event)
            case Left():
                self._left(event)
            case _:
                self._take_other(event)

    def _take_other(self, event: Line) -> None:
        """What no single line of text does."""
        match event:
            case Locked():
                names = self._chains.path(event.names, event.blocks)
                self._held[event.number] = self._tree.hold(names, event.now), names
            case Unlocked():
                self._tree.release(self._held.pop(event.number)[0], event.now)
            case Evicted():
                self._evicted(event)
            case Kept():
                for end, blocks in _runs(event):
                    self._tree.keep(self._chains.path(end), blocks, event.priority, event.expires, event.now)
            case Dropped():
                for end, _ in _runs(event):
                    self._tree.take_out(self._chains.path(end), event.now)
                self._chains.cut(event)
            case Gap():
                raise KeyError(f"{event.lost} events are missing")
            case Switched():
                raise KeyError(f"{event.name} took over")
            case _:
                return

    def _evicted(self, event: Evicted) -> None:
        tree, recorded = self._tree, list(_runs(event))
        tree.log.clear()
        if event.faulty:
            for end, blocks in recorded:
                tree.evict_given(self._chains.path(end), blocks, event.now)
        elif sum(event.blocks) > event.asked:  # some were still being copied and did not come free at once
            tree.evict_in_parts(event.asked, event.blocks, event.now)
        else:
            tree.evict(event.asked, event.now)
        for index, (was, now) in enumerate(zip_longest(recorded, tree.log)):
            if was != now:
                self.differs = index, was, now
                return
            self.victims += not event.faulty
        self._chains.cut(event)

    def _admitted(self, event: Admitted) -> None:
        tree, policy = self._tree, self._tree.policy
        node, found = self._held.pop(event.number) if event.number in self._held else (tree.hold(b"", event.now), b"")
        lease = Lease(event.number, found + event.names, node, event.found, event.taken, 0)
        self._leases[event.number] = lease
        self._tenants[event.number] = str(event.tenant) if event.tenant else ""
        if event.used:
            self._told.add(event.number)
        if event.resumed:
            return
        if event.used and policy.wants_requests:
            policy.on_request(event.number, lease.names, event.now)
        if event.found:
            tree.use(node, event.now)
        lease.returns = self._returns(event)

    def _returns(self, event: Admitted) -> list[Return]:
        whole, first, returns = event.tokens // self._block_tokens, event.found, list[Return]()
        for ghost in event.ghosts:
            memory = self._tree.memories.pop(ghost.number, None)
            returns.append(Return(memory, first, min(ghost.blocks, whole - first), ghost.idle))
            first += ghost.blocks
        return returns

    def _published(self, event: Published) -> None:
        tree, lease, tenant = self._tree, self._leases[event.number], self._tenants[event.number]
        start = event.blocks * NAME_BYTES - len(event.names)
        before = lease.names[start - NAME_BYTES : start] if start else b""
        if event.blocks * NAME_BYTES > len(lease.names):
            lease.names = lease.names[:start] + event.names
        lease.published = start // NAME_BYTES
        if not tenant and _is_plain(event.parts, lease.node):
            lease.held = max(lease.held, event.blocks - lease.published)
            tree.publish(lease, event.blocks, event.now, event.parts[0].recompute_seconds)
        else:
            self._published_otherwise(event, lease, tenant)
        self._chains.add(before, event.names)

    def _published_otherwise(self, event: Published, lease: Lease, tenant: str) -> None:
        """Kept in some way, loaded, or of a tenant: what replicas are not asked for otherwise."""
        at, new_from = 0, lease.published + event.known
        for part in event.parts:
            end = at + part.blocks * NAME_BYTES
            self._tree.put(lease, event.names[at:end], part, tenant, event.now)
            at = end
        lease.published = event.blocks
        self._tree.greet(lease, new_from, event.now)

    def _forked(self, event: Forked) -> None:
        self._leases[event.number] = self._tree.fork(self._leases[event.parent], event.number, event.now)
        self._tenants[event.number] = self._tenants[event.parent]
        if event.parent in self._told:
            self._told.add(event.number)

    def _left(self, event: Left) -> None:
        names, policy = b"", self._tree.policy
        lease = self._leases.pop(event.number, None)
        if lease is not None:
            self._tree.release(lease.node, event.now)
            names = lease.names[: lease.published * NAME_BYTES]
        if event.kind == "preempted":
            return
        self._tenants.pop(event.number, None)
        if event.number in self._told and policy.wants_requests:
            policy.on_complete(event.number, names, event.now)
        self._told.discard(event.number)


def _runs(event: Evicted | Dropped | Kept) -> Iterator[Victim]:
    for index, blocks in enumerate(event.blocks):
        yield event.names[index * NAME_BYTES : (index + 1) * NAME_BYTES], blocks


def _is_plain(parts: Sequence[Part], node: Run) -> bool:
    """Computed, and kept like everything else, as is what it comes after."""
    first = parts[0]
    plain = len(parts) == 1 and not first.priority and first.last_use is None
    return plain and not node.priority and node.reload_tier is None
