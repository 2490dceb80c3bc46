"""Blocks on their way to host memory and back, on the path of the CPU and on that of other devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.engine.model.attention.block_transfer import DeviceTransfer, HostTransfer, make_transfer
from octavo.engine.model.attention.kv_tensors import KVTensors, LayerGeometry
from octavo.engine.model.runner import Int32Array, UInt8Array
from octavo.errors import ModelError

CPU = torch.device("cpu")
PATHS = ("host", "device")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FENCE = 0xA5


class Shape(NamedTuple):
    """A cache to be."""

    layers: tuple[LayerGeometry, ...]
    num_blocks: int
    block_size: int
    dtype: torch.dtype


SHAPES = st.builds(
    Shape,
    st.lists(st.builds(LayerGeometry, *[st.integers(1, 5)] * 3), min_size=1, max_size=4).map(tuple),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(DTYPES),
)
PLAIN = Shape((LayerGeometry(2, 4, 4), LayerGeometry(1, 3, 5)), 7, 3, torch.float32)


def tensors(kv: KVTensors) -> list[Tensor]:
    """In the order of a payload."""
    return [read(layer) for layer in range(len(kv._keys)) for read in (kv.keys, kv.values)]


def cache(shape: Shape, path: str, *, seed: int | None = None) -> KVTensors:
    """Full of random bytes, or of NaN without ``seed``. The device path goes through rounds of very few blocks."""
    kv = KVTensors(shape.layers, shape.num_blocks, shape.block_size, dtype=shape.dtype, device=CPU, poison=True)
    assert isinstance(kv._transfer, HostTransfer)
    if path == "device":
        kv._transfer = DeviceTransfer(tensors(kv), CPU, staging_bytes=2 * kv.bytes_per_block)
    if seed is not None:
        noise = np.random.default_rng(seed)
        for tensor in tensors(kv):
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.from_numpy(noise.integers(0, 256, flat.shape, dtype=np.uint8)))
    return kv


def payload(kv: KVTensors, block: int) -> bytes:
    """What ``export_blocks`` shall give, piece by piece."""
    return b"".join(tensor[block].view(torch.uint8).numpy().tobytes() for tensor in tensors(kv))


def contents(kv: KVTensors) -> list[bytes]:
    return [payload(kv, block) for block in range(kv.num_blocks)]


def ids(*blocks: int) -> Int32Array:
    return np.array(blocks, dtype=np.int32)


def room(count: int, size: int, *, before: int = 0, after: int = 0) -> tuple[UInt8Array, UInt8Array]:
    """(memory with a fence, its rows without the fence)."""
    whole = np.full((count, before + size + after), FENCE, dtype=np.uint8)
    return whole, whole[:, before : before + size]


@pytest.mark.parametrize("path", PATHS)
@given(shape=SHAPES, data=st.data())
def test_an_export_gives_every_byte_and_touches_nothing_else(path: str, shape: Shape, data: st.DataObject) -> None:
    kv = cache(shape, path, seed=1)
    expected = contents(kv)
    blocks = data.draw(st.lists(st.integers(0, shape.num_blocks - 1), max_size=7))
    before, after = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    whole, rows = room(len(blocks), kv.bytes_per_block, before=before, after=after)
    kv.export_blocks(ids(*blocks), rows)
    assert [row.tobytes() for row in rows] == [expected[block] for block in blocks]
    rows[:] = FENCE
    assert (whole == FENCE).all()
    assert contents(kv) == expected


LAYOUTS: dict[str, Callable[[Sequence[bytes]], list[memoryview]]] = {
    "apart": lambda payloads: [memoryview(bytes(p)) for p in payloads],
    "one after the other": lambda payloads: _views(payloads, 0, 0),
    "behind headers": lambda payloads: _views(payloads, 64, 0),
    "at odd addresses": lambda payloads: _views(payloads, 3, 2),
    "last one first": lambda payloads: _views(payloads[::-1], 5, 0)[::-1],
    "of another item size": lambda payloads: [np.frombuffer(p, dtype=np.int16).data for p in payloads],
    "of two axes": lambda payloads: [np.frombuffer(p, dtype=np.uint8).reshape(2, -1).data for p in payloads],
}


def _views(payloads: Sequence[bytes], before: int, after: int) -> list[memoryview]:
    """Payloads with gaps between them in one piece of memory."""
    memory = memoryview(bytearray(b"".join(bytes(before) + p + bytes(after) for p in payloads)))
    step = before + after + len(payloads[0]) if payloads else 0
    return [memory[i * step + before : (i + 1) * step - after] for i in range(len(payloads))]


@pytest.mark.parametrize("path", PATHS)
@given(shape=SHAPES, layout=st.sampled_from(sorted(LAYOUTS)), poisoned=st.booleans(), data=st.data())
def test_an_import_changes_its_blocks_to_the_payloads_and_no_other(
    path: str, shape: Shape, layout: str, poisoned: bool, data: st.DataObject
) -> None:
    source = contents(cache(shape, path, seed=1))
    kv = cache(shape, path, seed=None if poisoned else 2)
    expected = contents(kv)
    targets = data.draw(st.lists(st.integers(0, shape.num_blocks - 1), unique=True))
    origins = [data.draw(st.integers(0, shape.num_blocks - 1)) for _ in targets]
    kv.import_blocks(ids(*targets), LAYOUTS[layout]([source[origin] for origin in origins]))
    for target, origin in zip(targets, origins, strict=True):
        expected[target] = source[origin]
    assert contents(kv) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_what_went_out_and_in_again_are_the_same_numbers(path: str, dtype: torch.dtype) -> None:
    shape = PLAIN._replace(dtype=dtype)
    source, target = cache(shape, path), cache(shape, path)
    for tensor in tensors(source):
        tensor.copy_(torch.rand(tensor.shape))
    _, rows = room(3, source.bytes_per_block, before=64)
    source.export_blocks(ids(6, 0, 3), rows)
    target.import_blocks(ids(2, 5, 1), [memoryview(row) for row in rows])
    for old, new in zip(tensors(source), tensors(target), strict=True):
        assert torch.equal(new[[2, 5, 1]], old[[6, 0, 3]])
        assert new[[0, 3, 4, 6]].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_an_export_sees_the_copies_and_writes_before_it_and_they_do_not_reach_back(path: str) -> None:
    kv = cache(PLAIN, path, seed=1)
    first = payload(kv, 0)
    _, rows = room(1, kv.bytes_per_block)
    kv.copy(np.array([(0, 4)], dtype=np.int32))
    kv.export_blocks(ids(4), rows)
    kv.write(0, torch.arange(12, 15), torch.rand(3, 2, 4), torch.rand(3, 2, 4))
    assert rows[0].tobytes() == first
    kv.export_blocks(ids(4), rows)
    assert rows[0].tobytes() == payload(kv, 4) != first


@pytest.mark.parametrize("path", PATHS)
def test_a_payload_may_be_overwritten_after_its_import(path: str) -> None:
    kv = cache(PLAIN, path)
    memory = bytearray(range(256)) * 3
    data = memoryview(memory)[: kv.bytes_per_block]
    expected = bytes(data)
    kv.import_blocks(ids(1), [data])
    data[:] = bytes(len(data))
    assert payload(kv, 1) == expected


def test_the_layout_is_that_of_the_format() -> None:
    """Layer after layer, K then V, each [block_size, kv_heads, head_dim]: what is on disk must stay readable."""
    kv = cache(PLAIN, "host")
    for number, tensor in enumerate(tensors(kv)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 1000 * number)
    _, rows = room(1, kv.bytes_per_block)
    kv.export_blocks(ids(1), rows)
    sizes = [3 * 2 * 4, 3 * 2 * 4, 3 * 1 * 3, 3 * 1 * 5]
    expected = [size + place + 1000 * number for number, size in enumerate(sizes) for place in range(size)]
    assert rows.view(np.float32)[0].tolist() == expected


SIZE = cache(PLAIN, "host").bytes_per_block
BAD_ROOM: dict[str, tuple[Int32Array, UInt8Array, str]] = {
    "an id too large": (ids(0, 7), room(2, SIZE)[1], "only 0 to 6 exist"),
    "a negative id": (ids(-1), room(1, SIZE)[1], "out of range"),
    "a row too few": (ids(0, 1), room(1, SIZE)[1], "shape"),
    "a row too many": (ids(0, 1), room(3, SIZE)[1], "shape"),
    "rows too short": (ids(0), room(1, SIZE - 1)[1], "shape"),
    "rows too long": (ids(0), room(1, SIZE + 1)[1], "shape"),
    "another dtype": (ids(0), room(1, SIZE)[0].view(np.int8), "int8"),
    "bytes apart": (ids(0, 1), room(SIZE, 2)[0].T, "follow each other"),
    "bytes backwards": (ids(0), room(1, SIZE)[0][:, ::-1], "follow each other"),
    "read only": (ids(0), np.frombuffer(bytes([FENCE]) * SIZE, dtype=np.uint8)[None], "writable"),
}


@pytest.mark.parametrize("case", BAD_ROOM)
@pytest.mark.parametrize("path", PATHS)
def test_room_that_does_not_fit_is_refused_untouched(path: str, case: str) -> None:
    blocks, out, message = BAD_ROOM[case]
    with pytest.raises(ModelError, match=message):
        cache(PLAIN, path, seed=1).export_blocks(blocks, out)
    assert (out.view(np.uint8) == FENCE).all()


def _payloads(*sizes: int) -> list[memoryview]:
    return [memoryview(bytes(size)) for size in sizes]


BAD_PAYLOADS: dict[str, tuple[Int32Array, list[memoryview], str]] = {
    "an id too large": (ids(0, 7), _payloads(SIZE, SIZE), "only 0 to 6 exist"),
    "a negative id": (ids(0, -1), _payloads(SIZE, SIZE), "out of range"),
    "a payload too few": (ids(0, 1), _payloads(SIZE), "2 blocks cannot be imported from 1 payloads"),
    "a payload too many": (ids(0), _payloads(SIZE, SIZE), "1 blocks cannot be imported from 2 payloads"),
    "a block twice": (ids(3, 0, 3), _payloads(SIZE, SIZE, SIZE), "twice"),
    "the last too short": (ids(0, 1), _payloads(SIZE, SIZE - 1), f"{SIZE} contiguous bytes"),
    "the last too long": (ids(0, 1), _payloads(SIZE, SIZE + 1), f"{SIZE} contiguous bytes"),
    "the last empty": (ids(0, 1), _payloads(SIZE, 0), f"{SIZE} contiguous bytes"),
    "bytes apart": (ids(0, 1), [*_payloads(SIZE), memoryview(bytes(2 * SIZE))[::2]], "contiguous"),
}


@pytest.mark.parametrize("case", BAD_PAYLOADS)
@pytest.mark.parametrize("path", PATHS)
def test_payloads_that_do_not_fit_are_refused_unchanged(path: str, case: str) -> None:
    blocks, payloads, message = BAD_PAYLOADS[case]
    kv = cache(PLAIN, path, seed=1)
    before = contents(kv)
    with pytest.raises(ModelError, match=message):
        kv.import_blocks(blocks, payloads)
    assert contents(kv) == before


@pytest.mark.parametrize("path", PATHS)
def test_no_blocks_are_no_work(path: str) -> None:
    kv = cache(PLAIN, path, seed=1)
    before = contents(kv)
    kv.export_blocks(ids(), room(0, SIZE)[1])
    kv.import_blocks(ids(), [])
    assert contents(kv) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_a_transfer_waits_for_the_work_before_it_and_later_work_for_the_transfer() -> None:
    device = torch.device("cuda")
    memory = torch.zeros((8, 64, 1024), device=device)
    transfer = make_transfer([memory], device)
    slow = torch.rand((2048, 2048), device=device)
    _, rows = room(3, 64 * 1024 * 4)
    for round_ in range(200):
        for _ in range(8):
            slow = slow @ slow / slow.norm()
        memory[4:7] = round_ + slow[0, 0] * 0
        transfer.read(ids(4, 5, 6), rows)
        assert (rows.view(np.float32) == round_).all()
        transfer.write(ids(0, 2, 1), list((rows.view(np.float32) + 1).view(np.uint8)))
        assert bool((memory[:3] * 1 == round_ + 1).all())
