"""The wish for large pages reaches the system, and only for what lies wholly within the tensor."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.engine.model.attention.kv_tensors import KVTensors, LayerGeometry
from octavo.engine.model.huge_pages import HUGE, prefer_huge_pages

SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", re.MULTILINE | re.DOTALL)
needs_smaps = pytest.mark.skipif(
    sys.platform != "linux" or not SMAPS.exists(), reason="needs the memory map of a Linux process"
)


def is_wished_for(address: int) -> bool:
    """Whether the mapping around ``address`` is marked for large pages."""
    for mapping in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", SMAPS.read_text(), re.MULTILINE | re.DOTALL
    ):
        if int(mapping[1], 16) <= address < int(mapping[2], 16):
            return "hg" in mapping[3].split()
    raise LookupError(hex(address))


def middle(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes // 2


@needs_smaps
def test_what_is_large_gets_them_and_nothing_beside_it() -> None:
    memory = torch.empty(16 * HUGE, dtype=torch.uint8)
    prefer_huge_pages(memory[: 6 * HUGE])
    assert is_wished_for(memory.data_ptr() + 3 * HUGE)
    assert not is_wished_for(memory.data_ptr() + 7 * HUGE)


@needs_smaps
def test_the_cache_asks_for_them() -> None:
    cache = KVTensors([LayerGeometry(2, 64, 64)] * 2, 4096, 16, dtype=torch.float32, device=torch.device("cpu"))
    assert all(is_wished_for(middle(part)) for layer in (0, 1) for part in (cache.keys(layer), cache.values(layer)))


@pytest.mark.parametrize("size", [0, 1, HUGE - 1, 3 * HUGE])
def test_nothing_that_is_written_changes(size: int) -> None:
    memory = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    before = memory.clone()
    prefer_huge_pages(memory)
    assert torch.equal(memory, before)


def test_other_devices_are_left_alone() -> None:
    prefer_huge_pages(torch.empty(8 * HUGE, dtype=torch.uint8, device="meta"))
