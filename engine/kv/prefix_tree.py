"""PrefixTree: a compressed radix tree from token prefixes to the blocks that hold their K and V.

An edge (stored in the node it leads to) carries a run of whole blocks: their tokens as one byte string, their ids
beside it. Tokens are compared, never hashed, so there are no false hits; one edge costs one ``memcmp``. Nodes split at
block borders.

Locks. A lease on a node counts one lock there and on every node above, so a node without locks has none below it. A
leaf without locks is a *candidate*: its tail may be evicted. The tree tells its observer, the eviction policy, every
change.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...errors import CacheMisuse
from ...policies.eviction.base import Entry, EvictionPolicy
from .namespace import Namespace

TOKEN_BYTES = 4


class Node(Entry):
    """One edge of the tree and the branching at its end.

    What it inherits is shown to policies and never relied on: a policy that writes there spoils its own view only.
    """

    __slots__ = ("children", "end", "ids", "keys", "locks", "namespace", "parent", "tokens")

    def __init__(
        self, namespace: Namespace, parent: Node | None, tokens: bytearray, ids: array[int], now: float
    ) -> None:
        super().__init__(len(ids), 0, now, now)
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.ids = ids
        self.children: dict[bytes, Node] = {}  # first block's tokens -> child
        self.keys: list[bytes] = []  # the keys of ``children``, sorted: the nearest relative of any block in O(log n)
        self.locks = 0
        self.end = 0  # tokens from the start of the prompt to the end of the edge

    def show(self) -> None:
        """Bring what policies see up to date."""
        self.blocks, self.depth = len(self.ids), self.end


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
        self.candidates: dict[Node, None] = {}
        """Leaves without a lock, in the order in which they became so."""
        self.observer = observer
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
        while at < end:
            child = node.children.get(key[at : at + block_bytes])
            if child is None:
                break
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

    def path_ids(self, node: Node) -> array[int]:
        """Ids of all blocks from the root to the end of ``node``."""
        path = list(self._upwards(node))
        ids = array("i")
        for part in reversed(path):
            ids += part.ids
        return ids

    # holding

    def lock_match(self, namespace: Namespace, match: Match) -> Node:
        """Take a lease on exactly what ``match`` found, splitting its last edge if need be."""
        node = match.node or self._root(namespace)
        if match.used < len(node.ids):
            node = self._split(node, match.used, self._clock())
        self.lock(node)
        return node

    def count_hit(self, node: Node) -> None:
        """Note that an admission reused the path down to ``node``."""
        now = self._clock()
        part = node
        while part.parent is not None:
            self.observer.on_hit(part, now)
            part.last_use = now
            part.hits += 1
            part = part.parent

    def lock(self, node: Node) -> None:
        """One more lease on ``node``."""
        part: Node | None = node
        while part is not None:  # spelled out: this and ``unlock`` are on the path of every request
            if not part.locks:
                self.idle_blocks -= len(part.ids)
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
                self._offer(part)
            part = part.parent

    # growing

    def publish(
        self, node: Node, tokens: bytes, ids: array[int], seconds: float, priority: int
    ) -> tuple[Node, array[int]]:
        """Put computed blocks below ``node``, on which the caller has a lease that ends at ``node``'s end.

        ``tokens``: int32 tokens of the blocks, ``len(ids) * block_size`` of them. ``seconds``: measured time to compute
        one block there. The lease moves to the returned node. Returned with it: the tree's ids of the leading blocks
        that it had already, where the caller's are duplicates. Of the rest, the caller's references pass to the tree.
        """
        at = 0
        known = array("i")
        while at < len(tokens):
            child = node.children.get(tokens[at : at + self._block_bytes])
            if child is None:
                node = self._grow(node, tokens[at:], ids[len(known) :], seconds, priority)
                break
            used = self._agreeing_blocks(child.tokens, tokens, at, len(tokens))
            node = self._split(child, used, self._clock()) if used < len(child.ids) else child
            self._step_down(node)
            known += node.ids
            at += used * self._block_bytes
        return node, known

    # shrinking

    def cut_tail(self, node: Node, count: int) -> tuple[array[int], bytes]:
        """Take the last ``count`` blocks out of a candidate; returns their ids and tokens. The tree's references to
        them pass to the caller. ``prefix`` of the node then gives the tokens before them, even if the node is gone.

        :raises CacheMisuse: when ``node`` is no candidate or has not that many blocks.
        """
        if node not in self.candidates or not 0 < count <= len(node.ids):
            raise CacheMisuse("only the tail of an unreferenced leaf can be evicted")
        cut = len(node.tokens) - count * self._block_bytes
        ids, tokens = node.ids[-count:], bytes(node.tokens[cut:])
        del node.tokens[cut:]
        del node.ids[-count:]
        node.end -= count * self.block_size
        node.show()
        self.blocks -= count
        self.idle_blocks -= count
        if not node.ids:
            self._remove(node, tokens[: self._block_bytes])
        self.observer.on_evict(node, count, self._clock())
        return ids, tokens

    def prefix(self, node: Node) -> bytes:
        """int32 tokens from the start of the prompt to the end of ``node``."""
        return b"".join(reversed([bytes(part.tokens) for part in self._upwards(node)]))

    # checking

    def nodes(self) -> Iterator[Node]:
        """Every node that carries blocks, parents first. O(nodes)."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def contradictions(self, leases: dict[Node, int]) -> list[str]:
        """What is wrong with the tree, given how many leases end at each node. Empty when nothing is. O(tree)."""
        wrong: list[str] = []
        idle = total = 0
        for node in [*self._roots.values(), *self.nodes()]:
            total += len(node.ids)
            idle += 0 if node.locks else len(node.ids)
            wrong += self._node_contradictions(node, leases.get(node, 0))
        if (total, idle) != (self.blocks, self.idle_blocks):
            wrong.append(f"tree counts {self.blocks} blocks, {self.idle_blocks} idle; it has {total}, {idle} idle")
        return wrong

    # inside

    @staticmethod
    def _upwards(node: Node) -> Iterator[Node]:
        part: Node | None = node
        while part is not None:
            above = part.parent
            yield part
            part = above

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, bytearray(), array("i"), self._clock())
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
            return node.ids[used], _agreeing_tokens(bytes(node.tokens[start : start + self._block_bytes]), rest)
        best_block, best_tokens = 0, 0
        near = bisect_left(node.keys, rest)
        for key in node.keys[max(near - 1, 0) : near + 1]:  # of a sorted list, a neighbour shares the longest prefix
            if (tokens := _agreeing_tokens(key, rest)) > best_tokens:
                best_block, best_tokens = node.children[key].ids[0], tokens
        return best_block, best_tokens

    def _split(self, node: Node, used: int, now: float) -> Node:
        """Cut the edge of ``node`` after ``used`` blocks; returns the new upper half. Locks and leases stay right."""
        cut = used * self._block_bytes
        upper = Node(node.namespace, node.parent, node.tokens[:cut], node.ids[:used], now)
        upper.end = node.end - (len(node.ids) - used) * self.block_size
        upper.insert_time, upper.last_use, upper.hits = node.insert_time, node.last_use, node.hits
        upper.recompute_seconds, upper.priority, upper.locks = node.recompute_seconds, node.priority, node.locks
        upper.reload_seconds, upper.reload_tier = node.reload_seconds, node.reload_tier
        upper.expires, upper.tenant = node.expires, node.tenant
        if node.parent is not None:
            node.parent.children[bytes(node.tokens[: self._block_bytes])] = upper
        del node.tokens[:cut]
        del node.ids[:used]
        node.parent = upper
        node.show()
        upper.show()
        self._adopt(upper, node)
        self.observer.on_split(upper, node, now)
        return upper

    def _grow(self, node: Node, tokens: bytes, ids: array[int], seconds: float, priority: int) -> Node:
        """New blocks below ``node``: a longer edge when the caller alone holds that leaf, a child otherwise."""
        now = self._clock()
        self.blocks += len(ids)
        if node.parent is not None and not node.children and node.locks == 1:
            node.tokens += tokens
            node.ids += ids
            node.end += len(ids) * self.block_size
            node.show()
            node.last_use, node.recompute_seconds = now, seconds
            self.observer.on_extend(node, len(ids), now)
            return node
        child = Node(node.namespace, node, bytearray(tokens), ids, now)
        child.end = node.end + len(ids) * self.block_size
        child.show()
        child.recompute_seconds, child.priority, child.locks = seconds, priority, 1
        child.tenant = node.namespace.salt or ""
        self._adopt(node, child)
        self.observer.on_insert(child, now)
        return child

    def _adopt(self, parent: Node, child: Node) -> None:
        key = bytes(child.tokens[: self._block_bytes])
        parent.children[key] = child
        insort(parent.keys, key)

    def _step_down(self, node: Node) -> None:
        """Move a lease from the parent of ``node`` to ``node``: only this one lock is new."""
        if not node.locks:
            self.idle_blocks -= len(node.ids)
            self._withdraw(node)
        node.locks += 1

    def _remove(self, node: Node, key: bytes) -> None:
        """Drop an empty leaf; its parent may be the next candidate."""
        parent = node.parent
        if parent is None:
            raise CacheMisuse("a root has no blocks to evict")
        del self.candidates[node]
        node.candidate = False
        del parent.children[key]
        del parent.keys[bisect_left(parent.keys, key)]
        if not parent.locks:
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """``node`` lost its last lock or child: a candidate if it is a leaf; an empty root goes."""
        if node.children:
            return
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

    def _node_contradictions(self, node: Node, leases: int) -> Iterator[str]:
        where = f"node that ends at token {node.end}"
        if node.locks != leases + sum(child.locks for child in node.children.values()):
            yield f"{where} has {node.locks} locks, its leases and children account for another number"
        if sorted(node.children) != node.keys or any(child.parent is not node for child in node.children.values()):
            yield f"{where} and its children disagree"
        if node.parent is None:
            if not node.children and not node.locks:
                yield f"{where} is a root without a use"
            return
        if not node.ids or len(node.tokens) != len(node.ids) * self._block_bytes:
            yield f"{where} has {len(node.ids)} ids and {len(node.tokens)} bytes of tokens"
        if node.end != node.parent.end + len(node.ids) * self.block_size:
            yield f"{where} does not follow from its parent's end {node.parent.end}"
        is_candidate = node in self.candidates
        if is_candidate != (not node.locks and not node.children):
            yield f"{where} is wrongly {'a' if is_candidate else 'no'} candidate"


def _agreeing_tokens(block: bytes, rest: bytes) -> int:
    """Leading tokens that two byte strings share, as far as the shorter one goes."""
    if block.startswith(rest):
        return len(rest) // TOKEN_BYTES
    if block[:TOKEN_BYTES] != rest[:TOKEN_BYTES]:
        return 0
    length = min(len(block), len(rest))
    difference = int.from_bytes(block[:length], "little") ^ int.from_bytes(rest[:length], "little")
    same_bits = (difference & -difference).bit_length() - 1 if difference else length * 8
    return same_bits // (8 * TOKEN_BYTES)
