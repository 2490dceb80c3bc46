"""What one who has read a trace to its end knows: the tree of all its prompts, and when each part of it is used next.

In that tree an edge ends wherever a prompt ends or two part, so a request uses an edge as a whole or not at all, and
all blocks of an edge are used at the same times. One step per edge is enough, whatever the number of blocks.

Memory: eight bytes for each different block while the tree is built, and a few numbers for each edge and each request.
Next uses, which are more, are in a temporary file.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from ..eviction.base import NAME_BYTES
from ..replica import agreeing_blocks
from .results import Outcome
from .service import ATOMIC
from .timeline import Demand, demands, run
from .trace import Request, Trace

NEVER = 2**62
"""As the number of a request: later than all of them."""


class _Edge:
    """While the tree is built. ``number`` stays with the lower part when an edge is cut."""

    __slots__ = ("children", "names", "number", "parent")

    def __init__(self, number: int, parent: _Edge | None, names: bytes) -> None:
        self.number = number
        self.parent = parent
        self.names = names
        self.children: dict[bytes, _Edge] = {}


class Forest:
    """Grows by whole prompts."""

    def __init__(self) -> None:
        self._root = _Edge(0, None, b"")
        self._edges = [self._root]

    def insert(self, names: bytes) -> tuple[int, int]:
        """The number of the edge at whose end ``names`` ends, and how many of its blocks were there."""
        node, at = self._root, 0
        while at < len(names):
            child = node.children.get(names[at : at + NAME_BYTES])
            if child is None:
                return self._add(node, names[at:]).number, at // NAME_BYTES
            if not names.startswith(child.names, at):
                child = self._split(child, agreeing_blocks(child.names, names, at) * NAME_BYTES)
            node = child
            at += len(child.names)
        return node.number, at // NAME_BYTES

    def shape(self) -> tuple[array[int], array[int]]:
        """For each edge by its number: that of its parent, and its blocks. Number 0 is the root."""
        parents = array("q", [edge.parent.number if edge.parent else 0 for edge in self._edges])
        return parents, array("q", [len(edge.names) // NAME_BYTES for edge in self._edges])

    def _add(self, parent: _Edge, names: bytes) -> _Edge:
        edge = parent.children[names[:NAME_BYTES]] = _Edge(len(self._edges), parent, names)
        self._edges.append(edge)
        return edge

    def _split(self, edge: _Edge, cut: int) -> _Edge:
        """Cut an edge, which is no root, after ``cut`` bytes; returns the new upper part."""
        upper = self._add(edge.parent or self._root, edge.names[:cut])
        edge.parent, edge.names = upper, edge.names[cut:]
        upper.children[edge.names[:NAME_BYTES]] = edge
        return upper


class Future:
    """A trace that was read to its end."""

    def __init__(self, trace: Trace) -> None:
        """:raises TraceError: when the trace cannot be read."""
        reader = _Reader()
        self.block_tokens = trace.info.block_tokens
        self.limit: Outcome = run(demands(trace), reader, self.block_tokens, ATOMIC)
        """Of a cache that never evicts."""
        self.parents, self.blocks = reader.forest.shape()
        self.depths = _depths(self.parents, self.blocks)
        """In blocks, to the end of each edge."""
        self.prompts = reader.prompts
        """For each request the edge at whose end its prompt ends."""
        self.answers = reader.answers
        """The same for all that it leaves in the cache."""
        self.needs = reader.needs
        """For each request the blocks that it holds while it runs."""
        self.generates = self.prompts != self.answers
        """Whether the trace tells of any generated block."""
        self._facts = reader.facts

    @property
    def unique(self) -> int:
        """Different blocks."""
        return sum(self.blocks)

    def requests(self) -> Iterator[tuple[Request, Demand]]:
        """The requests of the trace once more, without names."""
        facts = iter(self._facts)
        for number, (arrival, tokens_in, tokens_out) in enumerate(zip(facts, facts, facts, strict=True)):
            blocks = self.depths[self.prompts[number]]
            demand = Demand(number, blocks, self.needs[number] - blocks)
            yield Request(arrival, int(tokens_in), int(tokens_out), b""), demand

    def path(self, edge: int, above: int = 0) -> list[int]:
        """The edges from ``edge`` up, and below ``above``, which is one of them or the root."""
        parents, path = self.parents, []
        while edge != above:
            path.append(edge)
            edge = parents[edge]
        return path


class NextUses:
    """For each request, when each edge on its path is used again. A context manager: its file goes with it."""

    def __init__(self, future: Future, capacity: int, *, renewed: bool) -> None:
        """``capacity``: requests that need more are refused, so they use nothing. ``renewed``: an edge that a request
        will leave in the cache anew before it is used is as good as never used: it need not be kept until then.
        """
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        self._places = array("q", [0]) * len(future.prompts)
        following = array("q", [NEVER]) * len(future.blocks)
        for number in reversed(range(len(future.prompts))):
            if future.needs[number] <= capacity:
                self._places[number] = self._file.tell()
                self._note(future, number, following, renewed=renewed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def of(self, number: int) -> array[int]:
        """Numbers of requests, from the deepest edge that a request leaves in the cache up to the root. Not of one that
        is refused.
        """
        self._file.seek(self._places[number])
        count = int.from_bytes(self._file.read(8), "little")
        uses = array("q")
        uses.frombytes(self._file.read(count * uses.itemsize))
        return uses

    def _note(self, future: Future, number: int, following: array[int], *, renewed: bool) -> None:
        prompt, answer = future.prompts[number], future.answers[number]
        generated, asked = future.path(answer, prompt), future.path(prompt)
        uses = array("q", [following[edge] for edge in (*generated, *asked)])
        self._file.write(len(uses).to_bytes(8, "little"))
        self._file.write(uses.tobytes())
        for edge in asked:
            following[edge] = number
        if renewed:
            for edge in generated:
                following[edge] = NEVER


class _Reader:
    """A pool without bounds that writes down what each request wants."""

    capacity = NEVER
    evicted = wanted_again = 0

    def __init__(self) -> None:
        self.forest = Forest()
        self.prompts, self.answers, self.needs = array("q"), array("q"), array("q")
        self.facts = array("d")  # arrival, tokens in, tokens out of each request

    def admit(self, request: Request, demand: Demand, now: float) -> tuple[None, int]:
        prompt, found = self.forest.insert(request.names)
        answer = self.forest.insert(request.names + request.published)[0] if request.published else prompt
        self.prompts.append(prompt)
        self.answers.append(answer)
        self.facts.extend((request.arrival, request.input_tokens, request.output_tokens))
        self.needs.append(demand.blocks + demand.private)
        return None, found

    def finish(self, held: None, now: float) -> None:
        """Nothing is ever evicted."""


def _depths(parents: array[int], blocks: array[int]) -> array[int]:
    depths = array("q", [0]) * len(blocks)
    for edge in range(1, len(blocks)):
        unknown = []
        while edge and not depths[edge]:  # an upper part has a higher number than its lower one
            unknown.append(edge)
            edge = parents[edge]  # noqa: PLW2901  # the climb
        for lower in reversed(unknown):
            depths[lower] = depths[parents[lower]] + blocks[lower]
    return depths
