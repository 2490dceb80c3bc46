"""The compiled kernels as Python functions over tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....errors import ModelError
from ....telemetry.logging import get_logger
from ..runner import Int32Array, Row
from .build import CannotBuild, NoCompiler, built

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What the kernels compute in, with the ending of the functions' names."""
LANES = 16
"""Floats of the widest vectors: head sizes must be multiples of it."""
MAX_GROUP = 32
"""Most query heads for one KV head."""
_LONG = frozenset({"attend", "lay_out", "product", "decoder"})
_MAY_FAIL = ("attend", "decoder", "draw", "product")
"""They return 1 when there is no memory."""


class Kernels:
    """A loaded library.

    What takes long lets other Python threads run meanwhile; the small operations do not: giving the interpreter away
    and waiting for it again would cost more than they take.

    :param path: what :func:`~octavo.engine.model.native.build.built` returned.
    """

    def __init__(self, path: Path) -> None:
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self.plan = held.octavo_plan
        self.plan.restype = c_void_p
        self.plan.argtypes = [c_int, *[c_void_p] * 5, *[c_int] * 4]
        self.free = held.octavo_free
        self.free.argtypes = [c_void_p]
        self.free.restype = None
        signatures = {
            "attend": [c_void_p, c_void_p, c_int64, *[c_void_p] * 3, *[c_int] * 4, c_float, c_int],
            "rms_norm": [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float, c_int],
            "silu_mul": [c_void_p, c_void_p, c_int64, c_int64, c_int],
            "rotate_store": [c_void_p, c_int64, *[c_void_p] * 5, c_int64, *[c_int] * 5],
            "lay_out": [c_void_p, c_void_p, c_int64, c_int64, c_int],
            "product": [c_void_p, c_int64, c_int64, *[c_void_p] * 2, *[c_int64] * 3, c_void_p, c_void_p, c_int],
            "decoder": [c_void_p, c_void_p, c_void_p, c_int],
        }
        self._functions = {
            (name, dtype): _typed(free if name in _LONG else held, f"octavo_{name}_{ending}", kinds)
            for name, kinds in signatures.items()
            for dtype, ending in DTYPES.items()
        }
        of_scores = {
            "survey": [c_void_p, *[c_int64] * 3, *[c_void_p] * 4, c_int],
            "draw": [c_void_p, *[c_int64] * 2, c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 2, c_int],
        }
        for name, kinds in of_scores.items():
            self._functions[name, torch.float32] = _typed(free, f"octavo_{name}_float32", kinds)
        self.is_threaded = bool(held.octavo_is_threaded())
        """False where the compiler knew no OpenMP: one thread does everything."""
        self.has_products = bool(held.octavo_has_products())
        """Whether matrix products are worth their own kernel on this processor."""
        self.panel_width: int = held.octavo_panel_width()
        """Outputs of a panel of weights: the last one is filled up."""

    def function(self, name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
        """The C function of that name; see ``src/kernels.cpp``."""
        return self._functions[name, dtype]


class NativePlan:
    """Which tokens of a step read which keys together; one for all layers with as many query heads to a KV head.

    :param shares: whether rows with common blocks read and score them once.
    """

    def __init__(self, kernels: Kernels, rows: Sequence[Row], block_size: int, group: int, *, shares: bool) -> None:
        self._free = kernels.free
        table = np.concatenate([row.blocks for row in rows]).astype(np.int32, copy=False)
        _require_rows(rows, block_size)
        numbers: Int32Array = np.array(
            [[row.start, row.length, row.context, len(row.blocks)] for row in rows], dtype=np.int32
        ).T.copy()
        first, size = _address(numbers), numbers[0].nbytes
        starts, lengths, contexts, sizes = range(first, first + 4 * size, size)
        self.handle: int | None = kernels.plan(
            len(rows),
            starts,
            lengths,
            contexts,
            _address(table),
            sizes,
            block_size,
            group,
            shares,
            torch.get_num_threads(),
        )
        if self.handle is None:
            raise MemoryError(f"no memory to plan a step of {len(rows)} rows")

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle is not None:
            self._free(handle)


class NativeOps:
    """The small operations of a lowered decoder; see :class:`~octavo.engine.model.lowering.ops.Ops`."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        self._norm = kernels.function("rms_norm", dtype)
        self._silu = kernels.function("silu_mul", dtype)
        self._rotate = kernels.function("rotate_store", dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        out = x.new_empty(rows, size)
        self._norm(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            rows,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(rows, both // 2)
        self._silu(out.data_ptr(), gate_up.data_ptr(), rows, both // 2, torch.get_num_threads())
        return out

    def rotate_store(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        tokens, width = qkv.shape
        kv_heads, dim = keys.shape[2:]
        cos, sin = cos.contiguous(), sin.contiguous()
        self._rotate(
            qkv.data_ptr(),
            qkv.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            tokens,
            width // dim - 2 * kv_heads,
            kv_heads,
            dim,
            cos.shape[1],
            torch.get_num_threads(),
        )


def kernels(folder: Path, *, is_required: bool = False) -> Kernels | None:
    """The kernels built below ``folder``; ``None`` where they cannot be built.

    :raises ModelError: in place of ``None`` where they are required; the message says what is in the way.
    """
    found = _opened(folder)
    if isinstance(found, Kernels):
        return found
    if is_required:
        raise ModelError(f"the backend 'native' cannot be had here: {found}")
    return None


@cache
def _opened(folder: Path) -> Kernels | str:
    """The kernels, or why there are none. What is not as it should be is logged once."""
    logger = get_logger("octavo.model")
    try:
        path = built(folder)
        found = Kernels(path)
    except NoCompiler as error:  # many machines have none
        logger.info("no_native_kernels", reason=str(error))
        return str(error)
    except (CannotBuild, OSError) as error:  # the latter: not a library of this system
        logger.warning("no_native_kernels", reason=str(error))
        return str(error)
    if not found.is_threaded:
        logger.warning(
            "kernels_single_threaded",
            reason="the compiler knew no OpenMP; install it (libgomp, libomp), then delete the library",
            library=str(path),
        )
    return found


def _typed(library: ctypes.CDLL, name: str, kinds: Sequence[type]) -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = getattr(library, name)
    function.argtypes = kinds
    function.restype = c_int if any(may_fail in name for may_fail in _MAY_FAIL) else None
    return function


def _require_rows(rows: Sequence[Row], block_size: int) -> None:
    """The kernels take rows at their word.

    :raises ModelError: unless rows are packed one behind the other and their tables cover their contexts.
    """
    end = 0
    for row in sorted(rows, key=attrgetter("start")):
        if row.start != end or not 1 <= row.length <= row.context <= len(row.blocks) * block_size:
            raise ModelError("rows of a step overlap, or a block table is shorter than its row")
        end += row.length


def _address(array: npt.NDArray[np.int32]) -> int:
    return array.ctypes.data
