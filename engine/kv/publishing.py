"""Publisher: hands full blocks of sequences to the prefix tree, with what is known of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from ...errors import CacheMisuse
from ...policies.returning import tell_returns
from ...storage.base import Meta
from ...telemetry.record import Origin
from .block_pool import BlockPool
from .cost import CostModel
from .in_flight import InFlight
from .keep import PLAIN
from .loads import Run, TierCost, arrivals, runs
from .moment import Moment
from .names import give_names
from .narrator import Narrator
from .node import Node, Traits
from .prefix_tree import PrefixTree
from .retention import Span, raise_path, spans
from .runs import last_runs
from .sequence import Sequence
from .stats import CacheCounts
from .watching import Watchers


class Publisher:
    """Used by the cache manager alone."""

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        in_flight: InFlight,
        cost: CostModel,
        counts: CacheCounts,
        watchers: Watchers,
        narrator: Narrator,
        moment: Moment,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._in_flight = in_flight
        self._cost = cost
        self._counts = counts
        self._watchers = watchers
        self._narrator = narrator
        self._moment = moment
        self._plain = Traits(0.0)  # of what was computed and nobody wants to be kept otherwise

    def publish(self, sequence: Sequence) -> None:
        """Hand over what ``sequence`` has computed since the last time; where the tree has it already, use the tree's.

        :raises CacheMisuse: when the sequence has no place in the tree.
        """
        table = sequence.table
        shared, full = table.shared, sequence.computed // table.block_size
        depth = full * table.block_size
        if sequence.prefill_seconds > 0:
            self._cost.observe(depth, full - shared, sequence.prefill_seconds)
            sequence.prefill_seconds = 0.0
        seconds = self._cost.seconds(depth)
        if seconds != self._plain.recompute_seconds:  # which changes with measurements only
            self._plain = Traits(seconds)
        if not sequence.retention:
            self._hand_over(sequence, full, self._plain)
            return
        wishes = self._spans(sequence, shared, full)
        parts = [Run(s.stop - s.start, self._plain._replace(keep=s.keep)) for s in wishes]
        self._hand_over(sequence, full, parts[0].traits, parts)

    def publish_loaded(
        self, sequence: Sequence, metas: SequenceOf[Meta], source: TierCost, *, wall_now: float, used: bool
    ) -> None:
        """The same for blocks that came from a tier with ``metas``."""
        shared, full = sequence.table.shared, sequence.computed // sequence.table.block_size
        arrived = arrivals(metas, now=self._moment.now, wall_now=wall_now, used=used)
        parts = list(runs(arrived, source, self._cost.seconds(sequence.computed)))
        self._hand_over(sequence, full, parts[0].traits, parts)
        self.retain(sequence, shared)

    def retain(self, sequence: Sequence, first: int) -> None:
        """Keep the shared blocks of ``sequence`` from number ``first`` on at least as it wants."""
        if not sequence.retention or sequence.node is None:
            return
        for span in self._spans(sequence, first, sequence.table.shared):
            if span.keep is not PLAIN:
                raised = raise_path(self._tree, sequence.node, span)
                if self._watchers.requests:
                    self._narrator.kept(raised, span.keep)

    def _hand_over(self, sequence: Sequence, full: int, traits: Traits, parts: SequenceOf[Run] = ()) -> None:
        """Publish the blocks up to number ``full``, with ``traits``, or in ``parts`` when there are several."""
        table, node, size = sequence.table, sequence.node, sequence.table.block_size
        if node is None:
            raise CacheMisuse(f"sequence {sequence.seq_id} has no place in the tree")
        shared = table.shared
        own = table.blocks[shared:full]
        tokens = memoryview(sequence.tokens)[shared * size : full * size].tobytes()
        if len(parts) <= 1:
            sequence.node, known = self._tree.publish(node, tokens, own, traits)
        else:
            sequence.node, known = self._publish_parts(node, tokens, own, parts)
        if known:
            self._pool.release(own[: len(known)])
            table.blocks[shared : shared + len(known)] = known
            self._counts.duplicates_freed += len(known)
        if sequence.returns:
            self._greet(sequence, shared + len(known), full)
        if self._watchers.requests:
            self._narrator.published(sequence, full, len(known), parts or [Run(full - shared, traits)])
            give_names(sequence.node, sequence.names, size)
        if (origin := sequence.track.origin) is not sequence.node.owner:
            self._own(sequence.node, shared * size, origin)
        if self._watchers.of_entering and len(known) < len(own):
            self._watchers.published(last_runs(self._tree, sequence.node, len(own) - len(known)))
        table.shared = full
        sequence.publish_at = (full + 1) * size
        if sequence.in_flight_key is not None:
            self._in_flight.watch(sequence)

    def _greet(self, sequence: Sequence, new_from: int, full: int) -> None:
        """Blocks ``new_from`` to ``full`` are there: tell the policy which evicted runs are back with them."""
        last = sequence.returns[-1]
        if last.first + last.blocks <= full and not self._tree.observer.wants_returns:
            sequence.returns = ()  # all of them are, and nobody wants to hear of it
            return

        def entry_at(block: int) -> tuple[Node, int]:
            node = sequence.node
            while node is not None and (begins := node.end // self._tree.block_size - len(node.ids)) > block:
                node = node.parent
            if node is None:
                raise CacheMisuse(f"sequence {sequence.seq_id} has no block {block} in the tree")
            return node, begins

        sequence.returns = tell_returns(
            self._tree.observer,
            sequence.returns,
            new_from=new_from,
            stop=full,
            block_tokens=self._tree.block_size,
            entry_at=entry_at,
            now=self._moment.now,
        )

    def _own(self, node: Node, above: int, origin: Origin | None) -> None:
        """The path that ends at ``node``, down from ``above`` tokens, was last used by ``origin``, or by a request that
        is not traced.
        """
        for part in self._tree.path(node):
            if part.end <= above:
                break
            part.owner = origin

    def _publish_parts(
        self, node: Node, tokens: bytes, ids: array[int], parts: SequenceOf[Run]
    ) -> tuple[Node, array[int]]:
        """As ``PrefixTree.publish``, part by part. What the tree has already comes before what it has not."""
        known = array("i")
        size, at = len(tokens) // len(ids), 0
        for part in parts:
            end = at + part.blocks
            node, found = self._tree.publish(node, tokens[at * size : end * size], ids[at:end], part.traits)
            known += found
            at = end
        return node, known

    def _spans(self, sequence: Sequence, first: int, stop: int) -> list[Span]:
        return spans(sequence.retention, first, stop, sequence.table.block_size, sequence.retained_since)
