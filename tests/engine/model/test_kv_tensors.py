from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.model.attention.kv_tensors import KVTensors, LayerGeometry, available_memory
from octavo.errors import ModelError

CPU = torch.device("cpu")
LAYERS = (LayerGeometry(2, 4, 4), LayerGeometry(1, 3, 5))


def make(num_blocks: int = 6, block_size: int = 3, *, poison: bool = False) -> KVTensors:
    return KVTensors(LAYERS, num_blocks, block_size, dtype=torch.float32, device=CPU, poison=poison)


def tensors(kv: KVTensors) -> list[torch.Tensor]:
    return [read(layer) for layer in range(len(LAYERS)) for read in (kv.keys, kv.values)]


def fill(kv: KVTensors) -> None:
    for tensor in tensors(kv):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view_as(tensor))


def test_the_layout_is_blocks_then_slots_then_heads() -> None:
    kv = make()
    assert [tuple(t.shape) for t in tensors(kv)] == [(6, 3, 2, 4), (6, 3, 2, 4), (6, 3, 1, 3), (6, 3, 1, 5)]


def test_bytes_per_block_is_what_was_allocated() -> None:
    kv = make()
    assert kv.bytes_per_block * kv.num_blocks == sum(t.nbytes for t in tensors(kv))


def test_a_write_reaches_its_slots_of_its_layer_and_nothing_else() -> None:
    kv = make(poison=True)
    key, value = torch.rand(3, 1, 3), torch.rand(3, 1, 5)
    kv.write(1, torch.tensor([16, 0, 4]), key, value)
    assert torch.equal(kv.keys(1)[5, 1], key[0])
    assert torch.equal(kv.keys(1)[0, 0], key[1])
    assert torch.equal(kv.values(1)[1, 1], value[2])
    assert kv.keys(1).isnan().sum() == kv.keys(1).numel() - key.numel()
    assert kv.values(1).isnan().sum() == kv.values(1).numel() - value.numel()
    assert kv.keys(0).isnan().all()
    assert kv.values(0).isnan().all()


def test_without_poison_memory_starts_at_zero() -> None:
    assert all((t == 0).all() for t in tensors(make()))


@given(st.lists(st.integers(0, 5), max_size=6), st.permutations(range(6)))
def test_copies_read_every_source_before_they_write_any_destination(sources: list[int], targets: list[int]) -> None:
    kv = make()
    fill(kv)
    before = [t.clone() for t in tensors(kv)]
    pairs = np.array(list(zip(sources, targets, strict=False)), dtype=np.int32).reshape(-1, 2)
    kv.copy(pairs)
    for old, new in zip(before, tensors(kv), strict=True):
        expected = old.clone()
        for source, target in pairs:
            expected[target] = old[source]
        assert torch.equal(new, expected)


def test_a_cycle_of_copies_rotates_the_blocks() -> None:
    kv = make()
    fill(kv)
    old = kv.keys(0).clone()
    kv.copy(np.array([(0, 1), (1, 2), (2, 0)], dtype=np.int32))
    assert torch.equal(kv.keys(0)[:3], old[[2, 0, 1]])


def test_a_cache_that_cannot_fit_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ModelError, match=r"needs .* GiB .*10000000000 blocks.*at most \d+ would fit"):
        make(num_blocks=10**10)


def test_the_limit_is_exact() -> None:
    need = make(num_blocks=2).bytes_per_block * 2
    KVTensors(LAYERS, 2, 3, dtype=torch.float32, device=CPU, available=need)
    with pytest.raises(ModelError, match="at most 1 would fit"):
        KVTensors(LAYERS, 2, 3, dtype=torch.float32, device=CPU, available=need - 1)


def test_host_memory_is_bounded_by_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
    assert available_memory(CPU, meminfo=meminfo, cgroup=tmp_path) == 5 * 1024
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 500\n")
    assert available_memory(CPU, meminfo=meminfo, cgroup=tmp_path) == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(CPU, meminfo=meminfo, cgroup=tmp_path) == 5 * 1024


def test_unknown_memory_is_no_limit(tmp_path: Path) -> None:
    assert available_memory(CPU, meminfo=tmp_path / "none", cgroup=tmp_path) is None
    assert available_memory(torch.device("meta")) is None
