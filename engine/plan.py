"""StepPlan: what the next step computes, and its packing into the arrays that a runner takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .kv.cache_manager import Copies
from .model.runner import Int32Array, Row, RowSampling, StepInput
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
    """The arrays of one execution. Reads the cache's tables; the result shares nothing with them."""
    tokens: list[Int32Array] = []
    positions: list[Int32Array] = []
    slots = []
    packed: list[Row] = []
    start = 0
    for row in rows:
        sequence = row.sample.sequence
        begin, end = sequence.computed, sequence.computed + row.count
        tokens.append(np.array(sequence.tokens[begin:end], dtype=np.int32))
        positions.append(np.arange(begin, end, dtype=np.int32))
        slots.append(sequence.table.slots(begin, end))
        packed.append(_row(row, start, begin, end))
        start += row.count
    copies = [pair for row in rows for pair in row.copies]
    return StepInput(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        rows=tuple(packed),
        copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
    )


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
        seeds=() if is_beam else tuple(_seeds(sample)),
        history=np.array(sample.sequence.tokens, dtype=np.int32),
        prompt_length=len(group.prompt_ids),
        banned=_banned(sample),
        beam_candidates=group.beam.candidates_per_beam if group.beam is not None else 0,
        guide=sample.guide,
    )


def _banned(sample: Sample) -> frozenset[int]:
    """End tokens that must not come yet; where they are to be ignored, those of an output format never should."""
    ends, params = sample.group.ends, sample.group.params
    early = ends.ids if len(sample.token_ids) < params.min_tokens else NOTHING_BANNED
    return early | ends.of_format if params.ignore_eos else early


def _seeds(sample: Sample) -> Iterator[int]:
    """One draw per sample: the one row of a prompt draws the first token of every parallel sample."""
    if sample.group.is_started:
        yield sample.seed
    else:
        yield from sample.group.sample_seeds()
