"""Bytes of whole blocks against tensors whose heads are shared out."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.model.attention.kv_tensors import KVTensors, LayerGeometry
from octavo.engine.model.parallel.heads import HeadLayout
from octavo.engine.model.runner import UInt8Array

CPU = torch.device("cpu")
BLOCKS = 5
SIZES = st.integers(1, 3)


class Split:
    """A cache with all heads, and one for each rank with its part of them, or with all where they are not split."""

    def __init__(self, ranks: int, layers: list[tuple[bool, int, int, int]], block_size: int) -> None:
        self.local = [LayerGeometry(heads, key, value) for _, heads, key, value in layers]
        self.whole = [LayerGeometry(heads * (ranks if cut else 1), k, v) for cut, heads, k, v in layers]
        self.layout = HeadLayout(self.whole, self.local, ranks=ranks, block_size=block_size, itemsize=4)
        self.one = self._cache(self.whole, block_size)
        self.parts = [self._cache(self.local, block_size) for _ in range(ranks)]
        for layer, (cut, heads, _, _) in enumerate(layers):
            for whole, *parts in zip(*((c.keys(layer), c.values(layer)) for c in (self.one, *self.parts)), strict=True):
                whole.copy_(torch.rand(whole.shape))
                for rank, part in enumerate(parts):
                    part.copy_(whole[:, :, rank * heads : (rank + 1) * heads] if cut else whole)

    @staticmethod
    def _cache(layers: list[LayerGeometry], block_size: int) -> KVTensors:
        return KVTensors(layers, BLOCKS, block_size, dtype=torch.float32, device=CPU)


def exported(cache: KVTensors) -> UInt8Array:
    rows = np.empty((BLOCKS, cache.bytes_per_block), dtype=np.uint8)
    cache.export_blocks(np.arange(BLOCKS, dtype=np.int32), rows)
    return rows


splits = st.builds(
    Split, SIZES, st.lists(st.tuples(st.booleans(), SIZES, SIZES, SIZES), min_size=1, max_size=3), st.integers(1, 4)
)


@given(splits)
def test_the_parts_of_all_ranks_are_the_blocks_of_one(split: Split) -> None:
    out = np.zeros((BLOCKS, split.layout.whole_bytes + 3), dtype=np.uint8)[:, 1:-2]  # rows that lie apart
    split.layout.join([exported(part) for part in split.parts], out)
    assert (out == exported(split.one)).all()


@given(splits)
def test_each_rank_gets_what_it_would_have(split: Split) -> None:
    whole = exported(split.one)
    for rank, part in enumerate(split.parts):
        assert (split.layout.part(whole, rank) == exported(part)).all()


@given(splits)
def test_sizes_are_those_of_the_caches(split: Split) -> None:
    assert split.layout.whole_bytes == split.one.bytes_per_block
    assert split.layout.local_bytes == split.parts[0].bytes_per_block
