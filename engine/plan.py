"""StepPlan: what the next step computes, and its packing into the arrays that a runner takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .kv.block_table import BlockTable
from .kv.cache_manager import Copies
from .model.runner import Row, RowSampling, StepInput
from .sequence import Sample

NOTHING_BANNED: frozenset[int] = frozenset()


@dataclass(slots=True)
class PlannedRow:
    """One sample's part of a step."""

    sample: Sample
    count: int
    """Tokens to compute."""
    copies: Copies
    """Block copies that must precede the writes of this row."""

    def take_copies(self) -> Copies:
        """The copies, which the caller now has to account for; none are left."""
        copies, self.copies = self.copies, ()
        return copies

    @property
    def is_last(self) -> bool:
        """Whether it computes the last known token, so that the next one can be chosen."""
        return self.count == self.sample.sequence.uncomputed

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a prompt, or again what was computed before a preemption."""
        return not (self.sample.is_decoding and self.sample.token_ids)


class StepPlan:
    """The rows of one step, in the order in which they were planned; at most one for each sample."""

    def __init__(self, token_limit: int) -> None:
        self.tokens = 0
        self._limit = token_limit
        self._rows: dict[Sample, PlannedRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[PlannedRow]:
        return list(self._rows.values())

    @property
    def left(self) -> int:
        """Tokens that still fit into the step."""
        return self._limit - self.tokens

    def row(self, sample: Sample) -> PlannedRow | None:
        return self._rows.get(sample)

    def add(self, row: PlannedRow) -> None:
        self._rows[row.sample] = row
        self.tokens += row.count

    def widen(self, row: PlannedRow, count: int) -> None:
        """Let ``row`` compute ``count`` tokens more."""
        row.count += count
        self.tokens += count

    def drop(self, sample: Sample) -> Copies:
        """Take a sample's row out, if it has one; returns the copies that will not be made."""
        row = self._rows.pop(sample, None)
        if row is None:
            return ()
        self.tokens -= row.count
        return row.copies


def pack(rows: Sequence[PlannedRow]) -> StepInput:
    """The arrays of one execution. Reads the cache's tables; nothing in the result changes afterwards."""
    tokens = bytearray()
    positions: list[int] = []
    slots: list[int] = []
    packed: list[Row] = []
    for row in rows:
        sequence = row.sample.sequence
        begin, end = sequence.computed, sequence.computed + row.count
        packed.append(_row(row, len(positions), begin, end))
        tokens += memoryview(sequence.tokens)[begin:end]
        positions += range(begin, end)
        for run in _slots(sequence.table, begin, end):
            slots += run
    return StepInput(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
        rows=tuple(packed),
        copies=np.array([pair for row in rows for pair in row.copies], dtype=np.int32).reshape(-1, 2),
    )


def _slots(table: BlockTable, begin: int, end: int) -> Iterator[range]:
    """Where the positions from ``begin`` on go, block by block."""
    size = table.block_size
    for at in range(begin // size, -(-end // size)):
        shift = (table.blocks[at] - at) * size
        yield range(shift + max(begin, at * size), shift + min(end, (at + 1) * size))


def _row(row: PlannedRow, start: int, begin: int, end: int) -> Row:
    sample, group = row.sample, row.sample.group
    targets = None
    if group.wants_prompt_scores:
        targets = np.array(group.prompt_ids[begin + 1 : end + 1], dtype=np.int32)
    return Row(
        start=start,
        length=row.count,
        context=end,
        blocks=sample.sequence.table.covering(end),
        sampling=_sampling(sample) if row.is_last and group.max_tokens > 0 else None,
        prompt_targets=targets,
        prompt_top=group.params.prompt_logprobs or 0,
    )


def _sampling(sample: Sample) -> RowSampling:
    group = sample.group
    is_beam = group.beam is not None
    return RowSampling(
        params=group.params,
        seeds=() if is_beam else _seeds(sample),
        history=sample.log.upto_now(sample.sequence.tokens),
        prompt_length=len(group.prompt_ids),
        banned=_banned(sample),
        beam_candidates=group.beam.candidates_per_beam if group.beam is not None else 0,
        guide=sample.guide,
    )


def _banned(sample: Sample) -> frozenset[int]:
    """End tokens that must not come yet; where they are to be ignored, those of an output format never should."""
    ends, params = sample.group.ends, sample.group.params
    early = ends.ids if len(sample.token_ids) < params.min_tokens else NOTHING_BANNED
    return early | ends.of_format if params.ignore_eos and ends.of_format else early


def _seeds(sample: Sample) -> tuple[int, ...]:
    """One draw per sample: the one row of a prompt draws the first token of every parallel sample."""
    return (sample.seed,) if sample.group.is_started else tuple(sample.group.sample_seeds())
