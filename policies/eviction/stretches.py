"""Stretches: the parts of a run that have one history each. A run is what requests share; its blocks need not be of one
age: a conversation grows at its end with each turn."""

from __future__ import annotations

from .hazard import Use


class Stretch:
    """Neighbouring blocks that were used together ever since."""

    __slots__ = ("blocks", "use", "weight")

    def __init__(self, blocks: int, weight: float, use: Use) -> None:
        self.blocks = blocks
        self.weight = weight
        """How often they were used, decayed to the time of the last use."""
        self.use = use
        """The last one; shared with blocks from which these were cut."""

    def take(self, other: Stretch) -> None:
        """``other``, the next one, is part of this one now."""
        blocks = self.blocks + other.blocks
        self.weight += (other.weight - self.weight) * other.blocks / blocks
        self.blocks = blocks


class Stretches:
    """The stretches of one run, from its head to its tail."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Stretch]) -> None:
        self.parts = parts

    @property
    def blocks(self) -> int:
        """Of all together."""
        return sum(part.blocks for part in self.parts)

    @property
    def last(self) -> Stretch:
        """The one at the tail. There is none in an empty run."""
        return self.parts[-1]

    def cut_head(self, blocks: int) -> Stretches:
        """Take the first ``blocks`` blocks out."""
        taken, self.parts = _cut(self.parts, blocks)
        return Stretches(taken)

    def cut_tail(self, blocks: int) -> Stretches:
        """Take the last ``blocks`` blocks out."""
        last = self.parts[-1]
        if last.blocks > blocks:  # what mostly happens
            last.blocks -= blocks
            return Stretches([Stretch(blocks, last.weight, last.use)])
        self.parts, taken = _cut(self.parts, self.blocks - blocks)
        return Stretches(taken)

    def replace(self, first: int, others: Stretches) -> list[Stretch]:
        """Put ``others`` in the place of as many blocks from number ``first`` on; returns what was there."""
        head, rest = _cut(self.parts, first)
        replaced, tail = _cut(rest, others.blocks)
        self.parts = [*head, *others.parts, *tail]
        return replaced


def _cut(parts: list[Stretch], blocks: int) -> tuple[list[Stretch], list[Stretch]]:
    """The first ``blocks`` blocks, and the others."""
    head: list[Stretch] = []
    for number, part in enumerate(parts):
        if not blocks:
            return head, parts[number:]
        if part.blocks > blocks:
            head.append(Stretch(blocks, part.weight, part.use))
            part.blocks -= blocks
            return head, parts[number:]
        head.append(part)
        blocks -= part.blocks
    return head, []
