from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CorruptBlock, InvalidRequest
from octavo.storage.files import compression as module
from octavo.storage.files.compression import NoCompression, ShuffledZstd, compression, unpacker


@given(data=st.binary(max_size=3000), repeat=st.integers(1, 20), itemsize=st.integers(1, 9))
def test_what_was_packed_comes_back(data: bytes, repeat: int, itemsize: int) -> None:
    raw = data * repeat
    packed = ShuffledZstd(itemsize=itemsize).pack(memoryview(raw))
    if packed is not None:
        assert len(packed) < len(raw)
        assert ShuffledZstd(itemsize=itemsize).unpack(packed, len(raw), itemsize) == raw


def numbers() -> memoryview:
    values = np.random.default_rng(0).normal(size=200_000).astype(np.float16)
    return memoryview(values.tobytes())


def test_shuffling_is_what_makes_numbers_smaller() -> None:
    raw = numbers()
    shuffled, plain = ShuffledZstd(itemsize=2).pack(raw), ShuffledZstd(itemsize=1).pack(raw)
    assert shuffled is not None
    assert len(shuffled) < 0.96 * (len(raw) if plain is None else len(plain))


def test_noise_is_left_as_it_is() -> None:
    assert ShuffledZstd().pack(memoryview(np.random.default_rng(0).bytes(10_000))) is None
    assert NoCompression().pack(memoryview(bytes(10_000))) is None


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_it_stumble(noise: bytes) -> None:
    with pytest.raises(CorruptBlock):
        ShuffledZstd().unpack(memoryview(noise), 1 << 40, 2)


def test_no_memory_is_taken_beyond_the_length_that_is_expected() -> None:
    bomb = ShuffledZstd().pack(memoryview(bytes(1 << 24)))
    assert bomb is not None
    with pytest.raises(CorruptBlock, match="another length"):
        ShuffledZstd().unpack(bomb, 1000, 2)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_zstd", lambda: False)
    with pytest.raises(InvalidRequest, match=r"octavo\[zstd\]"):
        compression("zstd", 2)
    with pytest.raises(CorruptBlock, match=r"octavo\[zstd\]"):
        unpacker().unpack(memoryview(b"x"), 1, 2)
    with pytest.raises(InvalidRequest, match="lz4"):
        compression("lz4", 2)
