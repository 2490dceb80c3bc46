"""GGUF files: checked, converted once to a directory of safetensors, and found again by their content."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ...errors import ModelError
from .checkpoint import check_weight_files
from .weights import quiet_transformers, reading

_LAYOUT = "1"
"""Part of the cache key: raise it when converted directories change."""
_MAGIC = int.from_bytes(b"GGUF", "little")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct codes of the GGUF value types of fixed size."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_LOST_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Position encoding that Transformers drops when it reads GGUF: long texts would go wrong silently."""


def converted(file: Path, dtype: torch.dtype, cache_dir: Path, report: Callable[[str, float], None]) -> Path:
    """The directory of safetensors made from ``file``, made now unless it exists.

    It is keyed by the content of the file and by ``dtype``, made in a staging folder and renamed when it is whole,
    under a lock: a crash leaves no half directory, and of several processes one converts and the others wait.

    :raises ModelError: for a file that is malformed or of a kind that cannot be converted faithfully.
    """
    if not file.is_file():
        raise ModelError(f"there is no file {file}")
    target = cache_dir / f"{_digest(file)}-{str(dtype).removeprefix('torch.')}-{_LAYOUT}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not _is_whole(target):
            report("convert", 0.0)
            _convert(file, target, dtype)
            report("convert", 1.0)
    return target


def check_gguf(file: Path) -> None:
    """Walk the header and compare it with the size of the file. Reads no weights.

    :raises ModelError: for counts, lengths or offsets that the file cannot back, and for tensors that would be lost.
    """
    with file.open("rb") as opened:
        if file.stat().st_size < 24:
            raise ModelError(f"{file} is too short to be a GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _check_header(_Cursor(data, 0), len(data))
            except (struct.error, ValueError, KeyError) as error:
                raise ModelError(f"{file} is not a sound GGUF file: {error}; fetch it again") from error


def _is_whole(target: Path) -> bool:
    if not target.is_dir():
        return False
    try:
        check_weight_files(target)
    except ModelError:  # damaged since; what can be made again is made again
        return False
    return True


def _convert(file: Path, target: Path, dtype: torch.dtype) -> None:
    check_gguf(file)
    staging = target.with_name(f"{target.name}.staging")
    for leftover in (staging, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    staging.mkdir()
    with reading(f"{file}: the conversion failed"), quiet_transformers():
        folder, name = str(file.parent), file.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            quantization_config=GgufConfig(gguf_file=name, dequantize=True),
            dtype=dtype,
            trust_remote_code=False,
        )
        model.hf_quantizer = None  # type: ignore[assignment]  # else saving is refused, though the weights are plain by now
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    _make_durable(staging)
    staging.rename(target)


def _make_durable(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


class _Cursor:
    """Reads little-endian values in turn and never beyond the data."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def unpack(self, codes: str) -> tuple[int, ...]:
        layout = struct.Struct(f"<{codes}")
        self.skip(layout.size)
        return layout.unpack_from(self._data, self.offset - layout.size)

    def string(self) -> bytes:
        (length,) = self.unpack("Q")
        self.skip(length)
        return self._data[self.offset - length : self.offset]

    def skip(self, count: int) -> None:
        if count > len(self._data) - self.offset:
            raise ValueError(f"it ends at byte {len(self._data)}, but {count} more are declared at {self.offset}")
        self.offset += count


class _TensorInfo(NamedTuple):
    name: str
    offset: int
    """From the start of the data section."""
    size: int


def _check_header(cursor: _Cursor, file_size: int) -> None:
    """Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3)."""
    magic, version = cursor.unpack("II")
    if magic != _MAGIC:
        raise ValueError("it does not start with 'GGUF'")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported")
    tensors, pairs = cursor.unpack("QQ")
    alignment = 32
    for _ in range(pairs):
        key = cursor.string()
        value = _value(cursor, *cursor.unpack("I"))
        alignment = value if key == b"general.alignment" and value else alignment
    infos = [_tensor_info(cursor) for _ in range(tensors)]
    start = math.ceil(cursor.offset / alignment) * alignment
    for info in infos:
        if info.name in _LOST_TENSORS:
            raise ModelError(
                f"its tensor {info.name} scales positions and would be lost; use the safetensors of this model"
            )
        if start + info.offset + info.size > file_size:
            raise ValueError(f"tensor {info.name!r} lies beyond its end")


def _value(cursor: _Cursor, kind: int) -> int:
    """Skip a metadata value; the value itself when it is a single number, else 0."""
    if kind == _STRING:
        cursor.string()
        return 0
    if kind == _ARRAY:
        item, count = cursor.unpack("IQ")
        if item == _STRING:
            for _ in range(count):  # each takes 8 bytes at least: a count beyond the file ends in an error soon
                cursor.string()
        else:
            cursor.skip(count * struct.calcsize(f"<{_SCALARS[item]}"))
        return 0
    (number,) = cursor.unpack(_SCALARS[kind])
    return int(number) if math.isfinite(number) else 0


def _tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string().decode("utf-8")
    (count,) = cursor.unpack("I")
    if not 0 < count <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {count} dimensions")
    shape = cursor.unpack(f"{count}Q")
    kind, offset = cursor.unpack("IQ")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return _TensorInfo(name, offset, math.prod(shape) // block * size)
