"""Slots: how many sequences run side by side, counted by what their requests will need."""

from __future__ import annotations

from collections.abc import Iterable

from .sequence import Sample, SequenceGroup


def used_slots(admitted: Iterable[Sample]) -> int:
    """Slots of all that is admitted."""
    return sum(width(group) for group in dict.fromkeys(sample.group for sample in admitted))


def width(group: SequenceGroup) -> int:
    """Slots of a group that runs: all that it will need, or after its fork, what it has."""
    if group.beam is not None or not group.is_started:
        return group.params.samples
    return sum(1 for sample in group.samples if sample.is_admitted)


def slots_for(sample: Sample) -> int:
    """Slots that the admission of ``sample`` takes; those of its group are taken with the first of it."""
    group = sample.group
    if group.beam is None and group.is_started:
        return 1
    counted = any(sibling.is_admitted for sibling in group.samples)
    return 0 if counted else group.params.samples
