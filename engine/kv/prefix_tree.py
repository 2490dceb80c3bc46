"""PrefixTree: a compressed radix tree from token prefixes to the blocks that hold their K and V.

An edge (stored in the node it leads to) carries a run of whole blocks: their tokens as one byte string, their ids
beside it. Tokens are compared, never hashed, so there are no false hits; one edge costs one ``memcmp``. Nodes split at
block borders.

Locks. A lease on a node counts one lock there and on every node above, so a node without locks has none below it. A
leaf without locks is a *candidate*: its tail may be evicted. The tree tells its observer, the eviction policy, every
change.

Retention and the tier that holds a copy are the same all along an edge: where they differ, edges part.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from ...errors import CacheMisuse
from ...policies.eviction.base import EvictionPolicy
from ...storage.naming import NAME_BYTES, TOKEN_BYTES, Namespace
from .expiries import Expiries
from .keep import PLAIN, Keep
from .node import Node, Traits
from .residency import Residency


class Match(NamedTuple):
    """How far a prefix is in the tree. Valid until the tree changes."""

    node: Node | None
    """Deepest node on the path; ``None``: the namespace is unknown."""
    used: int
    """Blocks of that node which match."""
    ids: array[int]
    """Ids of all whole blocks that match, in order."""
    idle: int
    """How many of these nobody references now: locking them takes them from the evictable ones."""
    partial_block: int
    """A block that begins like the rest of the prefix, to copy from; meaningless while ``partial_tokens`` is 0."""
    partial_tokens: int
    """How many tokens of it agree, less than a block."""


class PrefixTree:
    """See the module. ``observer`` receives the events of :class:`EvictionPolicy`; ``clock`` gives seconds."""

    def __init__(self, block_size: int, observer: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.block_size = block_size
        self.idle_blocks = 0
        """Blocks in nodes without a lock: all that could be evicted, sooner or later."""
        self.blocks = 0
        """Blocks in the tree."""
        self.changes = 0
        """Grows with every block that comes or goes: while it stays, a match is what it was."""
        self.candidates: dict[Node, None] = {}
        """Leaves without a lock, in the order in which they became so."""
        self.observer = observer
        self.expiries = Expiries()
        self._clock = clock
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}

    # looking up

    def match(self, namespace: Namespace, key: bytes, limit: int) -> Match:
        """The longest prefix of ``key`` (int32 tokens) of at most ``limit`` tokens. Changes nothing, takes nothing."""
        node = self._roots.get(namespace)
        if node is None:
            return Match(None, 0, array("i"), 0, 0, 0)
        block_bytes = self._block_bytes
        end = limit // self.block_size * block_bytes
        at = used = idle = 0
        ids = array("i")
        while at < end and (child := node.children.get(key[at : at + block_bytes])) is not None:
            node, used = child, len(child.ids)
            if at + used * block_bytes > end or not key.startswith(child.tokens, at):
                used = self._agreeing_blocks(child.tokens, key, at, end)
            at += used * block_bytes
            idle += 0 if node.locks else used
            if used < len(node.ids):
                ids += node.ids[:used]
                break
            ids += node.ids
        rest = key[at : min(at + block_bytes, limit * TOKEN_BYTES)]
        partial_block, partial_tokens = self._nearest_block(node, used, rest)
        return Match(node, used, ids, idle, partial_block, partial_tokens)

    def path(self, node: Node) -> Iterator[Node]:
        """The nodes with blocks from ``node`` up to the root."""
        part = node
        while part.parent is not None:
            above = part.parent
            yield part
            part = above

    def path_ids(self, node: Node) -> array[int]:
        """Ids of all blocks from the root to the end of ``node``."""
        ids = array("i")
        for part in reversed(list(self.path(node))):
            ids += part.ids
        return ids

    def root(self, namespace: Namespace) -> Node | None:
        """Where the blocks of a namespace begin; ``None`` when it has none."""
        return self._roots.get(namespace)

    def namespaces(self) -> list[Namespace]:
        """All namespaces that have blocks or leases."""
        return list(self._roots)

    # holding

    def lock_match(self, namespace: Namespace, match: Match) -> Node:
        """Take a lease on exactly what ``match`` found, splitting its last edge if need be."""
        node = match.node or self._root(namespace)
        if match.used < len(node.ids):
            node = self.split(node, match.used)
        self.lock(node)
        return node

    def count_hit(self, node: Node, residency: Residency | None = None) -> None:
        """Note that an admission reused the path down to ``node``, also in ``residency``."""
        now = self._clock()
        part = node
        while part.parent is not None:
            self.observer.on_hit(part, now)
            if residency is not None:
                residency.reused(part.used, now)
            part.used = part.last_use = now
            part.uses += 1
            part.hits = part.uses
            part = part.parent

    def lock(self, node: Node) -> None:
        """One more lease on ``node``."""
        part: Node | None = node
        while part is not None:  # spelled out: this and ``unlock`` are on the path of every request
            if not part.locks:
                self.idle_blocks -= len(part.ids)
                if part in self.candidates:
                    self._withdraw(part)
            part.locks += 1
            part = part.parent

    def unlock(self, node: Node) -> None:
        """Give a lease back.

        :raises CacheMisuse: when there is none.
        """
        if node.locks < 1:
            raise CacheMisuse("a lease on a prefix was given back twice")
        part: Node | None = node
        while part is not None:
            part.locks -= 1
            if not part.locks:
                self.idle_blocks += len(part.ids)
                if not part.children:
                    self._offer(part)
            part = part.parent

    # growing

    def publish(self, node: Node, tokens: bytes, ids: array[int], traits: Traits) -> tuple[Node, array[int]]:
        """Put blocks that were computed or loaded below ``node``, on which the caller has a lease that ends at
        ``node``'s end.

        ``tokens``: int32 tokens of the blocks, ``len(ids) * block_size`` of them. The lease moves to the returned node.
        Returned with it: the tree's ids of the leading blocks that it had already, where the caller's are duplicates;
        they are kept at least as ``traits`` says. Of the rest, the caller's references pass to the tree.
        """
        at = 0
        known = array("i")
        while at < len(tokens):
            key = tokens[at : at + self._block_bytes]
            child = node.children.get(key)
            if child is None:
                node = self._grow(node, key, tokens[at:], ids[len(known) :], traits)
                break
            used = self._agreeing_blocks(child.tokens, tokens, at, len(tokens))
            node = self.split(child, used) if used < len(child.ids) else child
            self._step_down(node)
            if traits.last_use is not None or traits.keep is not PLAIN:
                self._recall(node, traits)
            known += node.ids
            at += used * self._block_bytes
        return node, known

    def split(self, node: Node, used: int) -> Node:
        """Cut the edge of ``node`` after ``used`` blocks; returns the new upper half. Locks and leases stay right."""
        cut, named = used * self._block_bytes, used * NAME_BYTES
        end = node.end - (len(node.ids) - used) * self.block_size
        upper = Node(node.namespace, node.parent, node.tokens[:cut], node.ids[:used], end, node.insert_time)
        upper.inherit(node)
        upper.locks, upper.names, upper.owner = node.locks, node.names[:named], node.owner
        if node.parent is not None:
            node.parent.children[bytes(upper.tokens[: self._block_bytes])] = upper
        del node.tokens[:cut]
        del node.ids[:used]
        del node.names[:named]
        node.parent = upper
        node.show()
        if node.keep is not PLAIN:
            upper.show_keep(node.keep)
            self.expiries.note(upper)
        key = bytes(node.tokens[: self._block_bytes])
        upper.children[key] = node
        upper.keys.append(key)
        self.observer.on_split(upper, node, self._clock())
        return upper

    # shrinking

    def cut_tail(self, node: Node, count: int) -> tuple[array[int], bytes, object]:
        """Take the last ``count`` blocks out of a candidate. The tree's references to them pass to the caller.

        Returns their ids, the tokens of the first one, and what the observer remembers of the run.

        :raises CacheMisuse: when ``node`` is no candidate or has not that many blocks.
        """
        if node not in self.candidates or not 0 < count <= len(node.ids):
            raise CacheMisuse("only the tail of an unreferenced leaf can be evicted")
        left = len(node.ids) - count
        cut = left * self._block_bytes
        ids, head = node.ids[left:], bytes(node.tokens[cut : cut + self._block_bytes])
        del node.tokens[cut:]
        del node.ids[left:]
        if node.names:
            del node.names[left * NAME_BYTES :]
        node.end -= count * self.block_size
        node.blocks, node.depth = left, node.end
        self.blocks -= count
        self.changes += 1
        self.idle_blocks -= count
        if left:
            return ids, head, self.observer.on_evict(node, count, self._clock())
        self._remove(node, head)
        memory = self.observer.on_evict(node, count, self._clock())
        parent = node.parent
        if parent is not None and not parent.locks and not parent.children:
            self._offer(parent)
        return ids, head, memory

    # keeping

    def set_keep(self, node: Node, keep: Keep) -> None:
        """From now on ``node`` is kept like this; a candidate is announced anew."""
        is_candidate = node in self.candidates
        if is_candidate:
            self._withdraw(node)
        node.show_keep(keep)
        self.expiries.note(node)
        if is_candidate:
            self._offer(node)

    def expire(self, now: float) -> list[Node]:
        """Let all retention end that has expired; returns whose, in this order. O(1) when there is none."""
        expired = list(self.expiries.due(now))
        for node in expired:
            self.set_keep(node, PLAIN)
        return expired

    # walking

    def nodes(self) -> Iterator[Node]:
        """Every node that carries blocks, parents first. O(nodes)."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def by_last_use(self) -> Iterator[Node]:
        """The same, of all whose parents have had their turn the one unused for longest first. O(n log n)."""
        numbers = count()
        waiting = [
            (child.used, next(numbers), child) for root in self._roots.values() for child in root.children.values()
        ]
        heapify(waiting)
        while waiting:
            _, _, node = heappop(waiting)
            for child in node.children.values():
                heappush(waiting, (child.used, next(numbers), child))
            yield node

    # inside

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, bytearray(), array("i"), 0, self._clock())
        return root

    def _agreeing_blocks(self, edge: bytearray, key: bytes, at: int, end: int) -> int:
        """Leading blocks of ``edge`` that equal ``key`` from byte ``at`` to ``end``; the first one is known to."""
        size = self._block_bytes
        low, high = 1, min(len(edge), end - at) // size
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(edge[low * size : middle * size], at + low * size):
                low = middle
            else:
                high = middle - 1
        return low

    def _nearest_block(self, node: Node, used: int, rest: bytes) -> tuple[int, int]:
        """The block after the first ``used`` of ``node`` that shares most leading tokens with ``rest``."""
        if used < len(node.ids):
            start = used * self._block_bytes
            return node.ids[used], agreeing_tokens(bytes(node.tokens[start : start + self._block_bytes]), rest)
        best_block, best_tokens = 0, 0
        first, keys = rest[:TOKEN_BYTES], node.keys
        near = bisect_left(keys, rest)
        for key in keys[near - 1 if near else 0 : near + 1]:  # of a sorted list, a neighbour shares the longest prefix
            if key.startswith(first) and (tokens := agreeing_tokens(key, rest)) > best_tokens:
                best_block, best_tokens = node.children[key].ids[0], tokens
        return best_block, best_tokens

    def _grow(self, node: Node, key: bytes, tokens: bytes, ids: array[int], traits: Traits) -> Node:
        """New blocks below ``node``, the first one with the tokens ``key``: a longer edge when the caller alone holds
        that leaf, a child otherwise.
        """
        now, blocks = self._clock(), len(ids)
        self.blocks += blocks
        self.changes += 1
        if node.parent is not None and not node.children and node.locks == 1 and node.takes(traits):
            node.tokens += tokens
            node.ids += ids
            node.end += blocks * self.block_size
            node.blocks, node.depth = len(node.ids), node.end
            node.seconds = node.recompute_seconds = traits.recompute_seconds
            if traits.last_use is None:
                node.used = node.last_use = now
            else:
                node.merge(traits)
            self.observer.on_extend(node, blocks, now)
            return node
        child = Node(node.namespace, node, bytearray(tokens), ids, node.end + blocks * self.block_size, now)
        child.locks, child.tenant = 1, node.namespace.salt or ""
        child.take(traits, now)
        if traits.keep is not PLAIN:
            child.show_keep(traits.keep)
            self.expiries.note(child)
        node.children[key] = child
        insort(node.keys, key)
        self.observer.on_insert(child, now)
        return child

    def _recall(self, node: Node, traits: Traits) -> None:
        """A run was brought that is in the tree already: what is known of it counts, if it says more."""
        if traits.last_use is not None:
            node.merge(traits)
        if traits.keep is not PLAIN and node.keep.raised(traits.keep) is not node.keep:
            self.set_keep(node, traits.keep)

    def _step_down(self, node: Node) -> None:
        """Move a lease from the parent of ``node`` to ``node``: only this one lock is new."""
        if not node.locks:
            self.idle_blocks -= len(node.ids)
            self._withdraw(node)
        node.locks += 1

    def _remove(self, node: Node, key: bytes) -> None:
        """Drop an empty leaf."""
        parent = node.parent
        if parent is None:
            raise CacheMisuse("a root has no blocks to evict")
        del self.candidates[node]
        node.candidate = False
        if node.keep is not PLAIN:
            self.expiries.forget(node)
        del parent.children[key]
        del parent.keys[bisect_left(parent.keys, key)]

    def _offer(self, node: Node) -> None:
        """``node``, which has neither locks nor children, is a candidate from now on; an empty root goes."""
        if node.parent is None:
            del self._roots[node.namespace]
            return
        node.candidate = True
        self.candidates[node] = None
        self.observer.on_candidate(node, self._clock())

    def _withdraw(self, node: Node) -> None:
        if node in self.candidates:  # not ``node.candidate``: a policy can write there
            node.candidate = False
            del self.candidates[node]
            self.observer.on_held(node)


def agreeing_tokens(block: bytes, rest: bytes) -> int:
    """Leading tokens that two byte strings share, as far as the shorter one goes."""
    if block.startswith(rest):
        return len(rest) // TOKEN_BYTES
    if block[:TOKEN_BYTES] != rest[:TOKEN_BYTES]:
        return 0
    length = min(len(block), len(rest))
    difference = int.from_bytes(block[:length], "little") ^ int.from_bytes(rest[:length], "little")
    same_bits = (difference & -difference).bit_length() - 1 if difference else length * 8
    return same_bits // (8 * TOKEN_BYTES)
