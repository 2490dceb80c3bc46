"""What rank 0 tells the other ranks: plain data, in MessagePack."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ...request import SamplingParams
from ..runner import Int32Array, Row, RowSampling, StepInput


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make the memory of the cache."""

    num_blocks: int
    block_size: int


class RowShape(NamedTuple):
    """A row, without how its tokens are chosen: only rank 0 does that."""

    start: int
    length: int
    context: int
    blocks: bytes
    samples: bool
    """Whether logits are needed at its end."""
    scored: int
    """At how many of its positions logits are needed for the prompt's scores."""


class Execute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a step."""

    tokens: bytes
    positions: bytes
    slots: bytes
    copies: bytes
    rows: tuple[RowShape, ...]


class Export(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send what blocks hold to rank 0."""

    blocks: bytes


class Import(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fill blocks with what rank 0 sends."""

    blocks: bytes


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That was all."""


Order: TypeAlias = Allocate | Execute | Export | Import | Close
encode: Callable[[Order], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode


def execute_order(step: StepInput) -> Execute:
    """``step`` as others need it."""
    rows = tuple(
        RowShape(
            row.start,
            row.length,
            row.context,
            packed(row.blocks),
            row.sampling is not None,
            0 if row.prompt_targets is None else len(row.prompt_targets),
        )
        for row in step.rows
    )
    slots = step.slots.astype(np.int64, copy=False).tobytes()
    return Execute(packed(step.tokens), packed(step.positions), slots, packed(step.copies), rows)


def step_of(order: Execute) -> StepInput:
    """A step that computes the same logits at the same positions, and chooses nothing."""
    return StepInput(
        tokens=ids(order.tokens),
        positions=ids(order.positions),
        slots=np.frombuffer(order.slots, dtype=np.int64),
        rows=tuple(_row(shape) for shape in order.rows),
        copies=ids(order.copies).reshape(-1, 2),
    )


def packed(numbers: Int32Array) -> bytes:
    """Numbers in an order."""
    return numbers.astype(np.int32, copy=False).tobytes()


def ids(found: bytes) -> Int32Array:
    """Numbers that were ``packed``."""
    return np.frombuffer(found, dtype=np.int32)


def _row(shape: RowShape) -> Row:
    sampling = RowSampling(SamplingParams(temperature=0.0), (), ids(b""), 0) if shape.samples else None
    targets = np.zeros(shape.scored, dtype=np.int32) if shape.scored else None
    return Row(shape.start, shape.length, shape.context, ids(shape.blocks), sampling, targets)
