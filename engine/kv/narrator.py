"""Narrator: tells what requests do to the cache, to those who listen and to policies that want to know.

Its methods are called while somebody does (:attr:`Narrator.is_heard`), but for those that say otherwise. Blocks go by
the last bytes of their chained names, worked out when they are told for the first time and then kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from ...policies import history
from ...policies.eviction.base import NAME_BYTES as SHORT
from ...storage.naming import NAME_BYTES, Namespace, names_after
from .containment import ContainedPolicy
from .ghosts import Ghost
from .keep import Keep
from .loads import Run
from .moment import Moment
from .names import end_name, path_names
from .node import Node
from .sequence import Sequence
from .watching import Watchers

Runs = list[tuple[bytes, int]]
"""Name of the last block and number of blocks of each."""
_WORDS = NAME_BYTES // SHORT
MOST_TENANTS = 4096
"""Tenants whose numbers are remembered: those seen last. One that comes back after that many others gets a new one."""


class Narrator:
    """Of one cache."""

    def __init__(self, watchers: Watchers, policy: ContainedPolicy, moment: Moment) -> None:
        self.watchers = watchers
        self._policy = policy
        self.moment = moment
        self._tenants: dict[str, int] = {}
        self._tenants_seen = 0

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self.watchers.requests)

    # requests

    def locked(self, number: int, node: Node, blocks: int) -> None:
        """``number`` holds a lock on ``node``, the end of a prefix of ``blocks`` blocks."""
        self.watchers.tell(history.Locked(self.moment.now, number, _end(node) if blocks else b"", blocks))

    def unlocked(self, number: int) -> None:
        """The lock was given back."""
        self.watchers.tell(history.Unlocked(self.moment.now, number))

    def admitted(self, sequence: Sequence, ghosts: SequenceOf[tuple[int, Ghost]], *, used: bool) -> None:
        """``sequence`` was admitted; nothing of what it found has been counted yet. ``ghosts``: what it is going to
        bring back; read only if anybody listens. Tells the policy, too.
        """
        names = short_names(sequence, len(sequence.tokens) // sequence.table.block_size)
        if used and not sequence.resumed and self._policy.wants_requests:
            self._policy.on_request(sequence.seq_id, self._alias(names), self.moment.now)
        if not self.watchers.requests:
            return
        table = sequence.table
        event = history.Admitted(
            self.moment.now,
            sequence.seq_id,
            sequence.request,
            len(sequence.tokens),
            table.shared,
            len(table) - table.shared,
            names,
            sequence.resumed,
            used,
            self._tenant(sequence.namespace),
            tuple(history.Remembered(ghost.number, ghost.blocks, self.moment.now - ghost.when) for _, ghost in ghosts),
        )
        self.watchers.tell(event)

    def extended(self, sequence: Sequence, taken: int) -> None:
        """It took more blocks."""
        self.watchers.tell(history.Extended(self.moment.now, sequence.seq_id, taken))

    def published(self, sequence: Sequence, full: int, known: int, parts: SequenceOf[Run]) -> None:
        """Its first ``full`` blocks are in the tree; before, the shared ones of its table were."""
        shared = sequence.table.shared
        names = short_names(sequence, full, first=shared)
        shown = tuple(_part(run) for run in parts)
        self.watchers.tell(history.Published(self.moment.now, sequence.seq_id, full, names, known, shown))

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """``child`` goes on where ``parent`` stands."""
        tokens = len(child.tokens)
        self.watchers.tell(history.Forked(self.moment.now, child.seq_id, child.request, parent.seq_id, tokens))

    def left(self, sequence: Sequence, kind: str) -> None:
        """It gave its blocks back."""
        self.watchers.tell(history.Left(self.moment.now, sequence.seq_id, kind))

    def over(self, sequence: Sequence, published: int) -> None:
        """A request is over, whose first ``published`` blocks are in the tree. For the policy alone, if it cares."""
        if self._policy.wants_requests:
            names = self._alias(short_names(sequence, published))
            self._policy.on_complete(sequence.seq_id, names, self.moment.now)

    # the tree

    def evicted(self, asked: int, reason: str, runs: Runs, *, faulty: bool) -> None:
        """``runs`` went, in this order."""
        names, blocks = _columns(runs)
        self.watchers.tell(history.Evicted(self.moment.now, asked, reason, names, blocks, faulty))

    def dropped(self, reason: str, runs: Runs) -> None:
        """The same where contents were bad or to be forgotten."""
        names, blocks = _columns(runs)
        self.watchers.tell(history.Dropped(self.moment.now, reason, names, blocks))

    def kept(self, nodes: Iterable[Node], keep: Keep) -> None:
        """``nodes`` are kept like this from now on; they have been changed in this order."""
        names, blocks = _columns([run_of(node) for node in nodes])
        if blocks:
            self.watchers.tell(history.Kept(self.moment.now, names, blocks, keep.priority, keep.expires))

    def switched(self, name: str) -> None:
        """Another policy goes on."""
        self.watchers.tell(history.Switched(self.moment.now, name))

    # tenants

    def forget_tenant(self, salt: str | None) -> None:
        """If it comes again it is somebody else."""
        if salt is not None:
            self._tenants.pop(salt, None)

    def _tenant(self, namespace: Namespace) -> int:
        if namespace.salt is None:
            return 0
        known = self._tenants.pop(namespace.salt, None)
        if known is None:
            self._tenants_seen = known = self._tenants_seen + 1
        self._tenants[namespace.salt] = known  # the last one now
        if len(self._tenants) > MOST_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return known

    @property
    def _alias(self) -> Callable[[bytes], bytes]:
        return self.watchers.alias or bytes


def run_of(node: Node, blocks: int | None = None) -> tuple[bytes, int]:
    """How the last ``blocks`` blocks of ``node``, or all, are told."""
    return _end(node), len(node.ids) if blocks is None else blocks


def short_names(sequence: Sequence, blocks: int, *, first: int = 0) -> bytes:
    """The names of its blocks number ``first`` to ``blocks - 1``, in the form for policies. Each is hashed once."""
    size = sequence.table.block_size
    named = len(sequence.names) // NAME_BYTES
    if not named and sequence.node is not None:
        sequence.names += path_names(sequence.node)
        named = len(sequence.names) // NAME_BYTES
    if named < blocks:
        before = bytes(sequence.names[-NAME_BYTES:]) or sequence.namespace.shelf().namespace
        rest = sequence.tokens[named * size : blocks * size].tobytes()
        sequence.names += b"".join(names_after(before, rest, size))
    words = memoryview(sequence.names).cast("Q")[first * _WORDS : blocks * _WORDS]
    return words[_WORDS - 1 :: _WORDS].tobytes()


def _end(node: Node) -> bytes:
    return end_name(node)[-SHORT:]


def _columns(runs: Runs) -> tuple[bytes, tuple[int, ...]]:
    return b"".join(name for name, _ in runs), tuple(blocks for _, blocks in runs)


def _part(run: Run) -> history.Part:
    traits = run.traits
    return history.Part(
        run.blocks,
        traits.recompute_seconds,
        traits.keep.priority,
        traits.keep.expires,
        traits.hits,
        traits.last_use,
        traits.reload_tier,
        traits.reload_seconds,
    )
