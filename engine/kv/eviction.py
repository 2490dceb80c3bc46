"""Eviction: asks the policy whom, takes the blocks out of the tree, shows them to those who watch, frees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ...policies.eviction.base import Tail
from ...storage.naming import BlockName
from ...telemetry import names
from ...telemetry.record import MOST_LINKS, Link, Origin, Track, Value
from .block_pool import BlockPool
from .containment import VICTIMS, ContainedPolicy
from .ghosts import Ghost, Ghosts
from .names import names_of
from .narrator import Narrator, Runs, run_of
from .node import Node
from .prefix_tree import PrefixTree
from .quotas import Quotas
from .residency import Residency
from .runs import EvictedRun, tail_run


class EvictionNote:
    """What one eviction took from whom, for a trace."""

    def __init__(self, began: float, faults: int) -> None:
        """``faults``: of policies until then."""
        self.began = began
        self.faults = faults
        self.blocks = self.victims = 0
        self._owners: dict[tuple[int, int], Origin] = {}  # by what identifies a span: an origin itself has no hash

    def add(self, node: Node, blocks: int) -> None:
        self.blocks += blocks
        self.victims += 1
        if node.owner is not None and len(self._owners) < MOST_LINKS:
            self._owners[node.owner.trace_id, node.owner.span_id] = node.owner

    def links(self) -> list[Link]:
        """To the requests that used the victims last."""
        return [Link(owner, "victim_owner") for owner in self._owners.values()]


class Evictor:
    """Frees cached blocks on demand."""

    def __init__(  # the parts that it works on
        self,
        pool: BlockPool,
        tree: PrefixTree,
        policy: ContainedPolicy,
        *,
        narrator: Narrator,
        ghosts: Ghosts,
        residency: Residency,
        background: Track,
        quotas: Quotas | None = None,
    ) -> None:
        """``background``: where evictions are noted that no request caused."""
        self.policy = policy
        self.evicted: Counter[tuple[str, str]] = Counter()
        """Blocks evicted, by reason and policy."""
        self._pool = pool
        self._tree = tree
        self._narrator, self._watchers, self._moment = narrator, narrator.watchers, narrator.moment
        self._clock = narrator.moment.clock
        self._victims_so_far = 0
        self._ghosts = ghosts
        self._residency = residency
        self._background = background
        self._quotas = quotas

    def evict(self, count: int, reason: str, cause: Track | None = None) -> int:
        """Evict until ``count`` blocks have come free or no candidate is left; returns how many came free.

        Blocks from which a copy is still read leave the cache but come free later; more are evicted in their place. A
        ``count`` of zero or less evicts nothing. ``cause``: of the request that wants the room, if one does.
        """
        if count <= 0:
            return 0
        track = cause or self._background
        free, faults = self._pool.free_runs, self.policy.all_faults
        note = EvictionNote(self._clock(), faults) if track.is_on else None
        runs: Runs = []
        goal = free.count + count

        def goes(node: Node, most: int) -> bool:
            """Evict of ``node`` what is wanted still, at most so many blocks; whether more is wanted then."""
            part = min(goal - free.count, most)
            if self._quotas is not None:
                part = self._quotas.share_of(node.namespace.salt, part)
            if note is not None:
                note.add(node, part)
            if self._watchers.requests:
                runs.append(run_of(node, part))
            self._evict_tail(node, part, reason, track)
            return free.count < goal

        self._ask(count, goes)
        if runs:
            faulty = self.policy.set_aside or self.policy.all_faults > faults
            self._narrator.evicted(count, reason, runs, faulty=faulty)
        if note is not None:
            self._write(note, track, reason)
        return free.count - goal + count

    def drop(self, nodes: Iterable[Node], reason: str, cause: Track | None = None) -> list[BlockName]:
        """Take whole nodes out of the cache whose contents are bad or to be forgotten: those of ``nodes`` that are
        candidates when their turn comes, so children come first. Returns their names, if anybody reads names.
        """
        track = cause or self._background
        gone: list[BlockName] = []
        note = EvictionNote(self._clock(), self.policy.all_faults) if track.is_on else None
        runs: Runs = []
        for node in nodes:
            if node not in self._tree.candidates:
                continue
            if self._watchers.requests:
                runs.append(run_of(node))
            if self._watchers.of_names:
                gone += names_of(node)
            if note is not None:
                note.add(node, len(node.ids))
            self._drop(node, reason, track)
        if runs:
            self._narrator.dropped(reason, runs)
        if note is not None:
            self._write(note, track, reason)
        return gone

    def _drop(self, node: Node, reason: str, track: Track) -> None:
        run = self._run(node, len(node.ids), reason, track) if self._watchers.of_leaving else None
        ids, _, _ = self._tree.cut_tail(node, len(node.ids))
        self.evicted[reason, self.policy.name] += len(ids)
        if run is not None:
            self._watchers.dropped(run)
        self._pool.release(ids)

    def _ask(self, count: int, goes: Callable[[Node, int], bool]) -> None:
        """Whom to evict, and at most how many blocks of it, until ``goes`` wants no more: the policy's choice while it
        keeps its contract; then the lowest priority, the least recently used first.
        """
        candidates, policy = self._tree.candidates, self.policy
        faults = policy.all_faults
        named_some = True
        while candidates and named_some and policy.all_faults == faults and not policy.set_aside:
            named_some = False
            for named in policy.victims(count, self._moment.now):
                choice = (named, len(named.ids)) if type(named) is Node else _understood(named)
                if choice is None or choice[0] not in candidates:
                    policy.fault(VICTIMS, _wrong_with(named))
                    break
                named_some = True
                if not goes(*choice):
                    return
        if candidates and not named_some and policy.all_faults == faults and not policy.set_aside:
            policy.fault(VICTIMS, "named nothing")
        while (node := policy.least_recently_used(candidates)) is not None and goes(node, len(node.ids)):
            pass

    def _write(self, note: EvictionNote, track: Track, reason: str) -> None:
        if not note.blocks:
            return
        why: dict[str, Value] = {names.REASON: reason, names.POLICY: self.policy.name, names.TIER: "device"}
        shown = {**why, names.BLOCKS: note.blocks, names.VICTIMS: note.victims}
        if self.policy.all_faults > note.faults:
            shown[names.POLICY_FAULT] = self.policy.last_fault
        track.act(names.EVICT, note.began, self._clock(), shown, note.links())

    def _evict_tail(self, node: Node, count: int, reason: str, cause: Track) -> None:
        run = self._run(node, count, reason, cause) if self._watchers.of_leaving else None
        now, policy = self._moment.now, self.policy.name
        self._residency.evicted(count, node.insert_time, node.used, now)
        ids, head, memory = self._tree.cut_tail(node, count)
        self.evicted[reason, policy] += count
        ghost = Ghost(now, reason, policy, memory, self._victims_so_far, count)
        self._victims_so_far += 1
        prefix: list[bytes | bytearray] = [head]
        part = node
        while (above := part.parent) is not None:  # as ``path``, spelled out
            prefix.append(part.tokens)
            part = above
        prefix.reverse()
        self._ghosts.remember(node.namespace, prefix, ghost)
        if run is not None:
            node.show_all()
            self._watchers.evicted(run)
        self._pool.release(ids)

    def _run(self, node: Node, count: int, reason: str, cause: Track) -> EvictedRun:
        """What is going to be told of the last ``count`` blocks of ``node``."""
        return tail_run(node, count, reason, cause, named=self._watchers.of_names)


def _understood(named: object) -> tuple[Node, int] | None:
    """What a policy named, and at most how many blocks of it are to go; ``None`` when it is neither an entry nor a tail
    of one.
    """
    if type(named) is Node:
        return named, len(named.ids)
    if type(named) is not Tail:
        return None
    entry, most = named
    if type(entry) is not Node or type(most) is not int or most < 1:
        return None
    return entry, min(most, len(entry.ids))


def _wrong_with(named: object) -> str:
    entry = named.entry if type(named) is Tail else named
    if type(entry) is not Node:
        return f"named {type(entry).__name__}, which is none of its entries"
    if _understood(named) is None:
        return "named a tail of no blocks"
    if not entry.ids:
        return "named what was evicted before"
    if entry.locks:
        return "named what somebody uses"
    return "named what has something after it" if entry.children else "named what is not in this cache"
