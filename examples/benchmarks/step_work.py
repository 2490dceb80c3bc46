"""What a step of a decoder has to read and to compute, and what the machine can do: for ``roofline.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch

from octavo.engine.model.lowering.linear import can_pack
from octavo.engine.model.runner import StepInput

DTYPE = torch.bfloat16
STREAMED = 2**29
"""Bytes: larger than any cache of a processor."""
PRODUCTS = ((2_048, 2_048, 2_048), (2_048, 576, 1_536))
"""Rows, inner dimension and columns of the products whose best rate counts."""
ATTENTION = "attention"


# what has to be done


class Geometry(NamedTuple):
    """What of a decoder determines its work."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int

    @property
    def product_weights(self) -> int:
        """Of all layers."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def cached(self) -> int:
        """Numbers in the cache for each token."""
        return self.layers * 2 * self.kv_heads * self.head_dim


SMOLLM2 = Geometry(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1_536, vocabulary=49_152)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must be read, and operations: a multiplication with an addition is two."""

    bytes: int
    operations: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def bound(self, machine: Limits) -> float:
        """Seconds that it takes at least."""
        return max(self.bytes / machine.bandwidth, self.operations / machine.rate)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do."""

    bandwidth: float
    """Bytes a second."""
    rate: float
    """Operations a second."""


def work_of(step: StepInput, block_size: int, model: Geometry = SMOLLM2) -> dict[str, Work]:
    """By phase."""
    outputs = sum(row.sampling is not None for row in step.rows)
    head = model.vocabulary * model.hidden
    queries = sum(row.length * (2 * row.context - row.length + 1) // 2 for row in step.rows)
    """Pairs of a query and a key that it sees."""
    return {
        ATTENTION: Work(
            tokens_read(step, block_size) * model.cached * DTYPE.itemsize,
            4 * model.layers * model.heads * model.head_dim * queries,
        ),
        "products": Work(model.product_weights * DTYPE.itemsize, 2 * model.product_weights * len(step.tokens)),
        "head": Work(head * DTYPE.itemsize, 2 * head * outputs),
    }


def tokens_read(step: StepInput, block_size: int) -> int:
    """Tokens whose K and V the step reads, each once however many rows share its block."""
    filled: dict[int, int] = {}
    for row in step.rows:
        for at, block in enumerate(row.blocks.tolist()):
            filled[block] = max(filled.get(block, 0), min(block_size, row.context - at * block_size))
    return sum(filled.values())


# what the machine can do


def bandwidth_probe() -> Callable[[], float]:
    """A function that measures bytes a second."""
    memory = torch.ones(STREAMED // 4)
    readers: tuple[Callable[[], object], ...] = (memory.sum, memory.amax)
    return lambda: STREAMED / min(fastest(reader) for reader in readers)


def rate_probe() -> Callable[[], float]:
    """A function that measures operations a second."""
    candidates = [
        (2 * rows * inner * columns, tuple(_products(rows, inner, columns))) for rows, inner, columns in PRODUCTS
    ]
    return lambda: max(count / fastest(way) for count, ways in candidates for way in ways)


def _products(rows: int, inner: int, columns: int) -> Iterator[Callable[[], object]]:
    """In the model's dtype; in float32 where the processor does not multiply that."""
    cpu = torch.device("cpu")
    dtype = DTYPE if can_pack(cpu, DTYPE) else torch.float32
    left, weight = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    yield lambda: left @ weight.T
    if can_pack(cpu, dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # noqa: SLF001  # what torch has for it
        yield lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")  # noqa: SLF001


def fastest(work: Callable[[], object], times: int = 3) -> float:
    """Seconds of the fastest try."""
    with torch.inference_mode():
        return min(seconds(work) for _ in range(times))


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began = perf_counter()
    work()
    return perf_counter() - began
