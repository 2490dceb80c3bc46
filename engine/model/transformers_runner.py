"""Runs Hugging Face decoders, unchanged, on the paged cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import DeviceOutOfMemory, ModelError
from .attention import AttentionBackend
from .attention.kv_tensors import KVTensors, LayerGeometry
from .attention.torch_backend import TorchBackend
from .decoder import Decoder, PackedTokens
from .lowering import lower
from .native.library import Kernels
from .native.scores import NativeScores
from .probe import probe, usable_context
from .runner import (
    Int32Array,
    Int64Array,
    ModelInfo,
    PromptScore,
    Row,
    RowOutput,
    StepInput,
    StepOutput,
    UInt8Array,
    require_range,
)
from .sampler import Sampler


class TransformersRunner:
    """A :class:`~octavo.engine.model.runner.ModelRunner` over a Transformers decoder.

    A step is one packed forward pass of shape [1, T] without Transformers' own cache; the lm_head runs only at the
    positions whose logits somebody asked for. The runner takes the model over: it cannot be called directly afterwards.

    :param model: in evaluation mode, weights loaded, on ``device`` in ``dtype``.
    :param fingerprint: hex digest of everything that determines K and V (see ``ModelInfo``).
    :param identity: the same in parts; the runner adds what it knows itself, the dtype and the geometry.
    :param vocab_limit: ids from here on are never drawn (a head padded beyond the tokenizer); ``None``: no limit.
    :param attention: who attends over the cache; ``None``: the reference, in plain torch.
    :param poison: fill the cache with NaN at first, so that reads of unwritten slots show (tests).
    :param clock: seconds, for the timings of a step.
    :param fused: run a decoder whose structure is recognised as a flat program of fused operations.
    :param packed: lay weights out for oneDNN on the CPU.
    :param kernels: what the program computes with; ``None``: plain torch.
    :raises UnsupportedModel: when the model cannot run on a paged cache.
    """

    def __init__(  # noqa: PLR0913  # what a checkpoint says about itself, then where and how to run it
        self,
        model: PreTrainedModel,
        *,
        name: str,
        fingerprint: str,
        identity: Mapping[str, str],
        eos_token_ids: frozenset[int],
        vocab_limit: int | None,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend | None = None,
        poison: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        fused: bool = False,
        packed: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self._backend = attention or TorchBackend(device)
        self._layers = probe(model)
        self._decoder: Decoder | None = lower(model, self._layers, fused=fused, packed=packed, kernels=kernels)
        self._device = device
        self._dtype = dtype
        self._poison = poison
        self._clock = clock
        self._sampler = Sampler(vocab_limit=vocab_limit, ops=None if kernels is None else NativeScores(kernels))
        self._kv: KVTensors | None = None
        self._info = ModelInfo(
            name=name,
            fingerprint=fingerprint,
            vocab_size=int(model.config.get_text_config().vocab_size),
            max_context=usable_context(model.config),
            eos_token_ids=eos_token_ids,
            bytes_per_block=0,
            identity=MappingProxyType(
                {**identity, "dtype": str(dtype).removeprefix("torch."), "geometry": describe_geometry(self._layers)}
            ),
        )

    @property
    def info(self) -> ModelInfo:
        """``max_context`` is shorter than the model's own where its position encoding depends on the batch."""
        return self._info

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """What each layer caches here: of a model that is split, this rank's part."""
        return self._layers

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the K/V memory.

        :raises ModelError: when there is not enough memory, or when called twice.
        """
        if self._kv is not None:
            raise ModelError("allocate was already called: a runner has one cache for life")
        self._kv = KVTensors(
            self._layers, num_blocks, block_size, dtype=self._dtype, device=self._device, poison=self._poison
        )
        self._info = self._info._replace(bytes_per_block=self._kv.bytes_per_block)

    def execute(self, step: StepInput) -> StepOutput:
        """Run one step: copies, writes, attention, sampling. Without rows only the copies are made.

        :raises ModelError: before ``allocate``, after ``close``, and for ids, positions or slots out of range (nothing
            was changed then).
        :raises DeviceOutOfMemory: when the step is too large; a smaller one may work.
        """
        with self._out_of_memory_named(f"a step of {len(step.tokens)} tokens"), torch.inference_mode():
            return self._execute(step)

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        """Copy whole blocks to host memory; see :meth:`~octavo.engine.model.runner.ModelRunner.export_blocks`.

        :raises ModelError: before ``allocate``, after ``close``, and for ids or shapes that do not fit.
        :raises DeviceOutOfMemory: when there is no memory for the transfer.
        """
        with self._out_of_memory_named(f"exporting {len(blocks)} blocks"), torch.inference_mode():
            self._open()[1].export_blocks(blocks, out)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        """Fill whole blocks from host memory; see :meth:`~octavo.engine.model.runner.ModelRunner.import_blocks`.

        :raises ModelError: before ``allocate``, after ``close``, and for ids or lengths that do not fit (nothing was
            changed then).
        :raises DeviceOutOfMemory: when there is no memory for the transfer.
        """
        with self._out_of_memory_named(f"importing {len(blocks)} blocks"), torch.inference_mode():
            self._open()[1].import_blocks(blocks, payloads)

    def _open(self) -> tuple[Decoder, KVTensors]:
        if self._kv is None or self._decoder is None:
            raise ModelError("the runner has no cache: it was closed, or allocate was not called")
        return self._decoder, self._kv

    def _execute(self, step: StepInput) -> StepOutput:
        decoder, kv = self._open()
        self._check(step, kv)
        began = self._clock()
        kv.copy(step.copies)
        if not step.rows:
            return StepOutput(())
        wanted = _Wanted.of(step.rows)
        logits = self._forward(decoder, kv, step, wanted.positions)
        computed = self._clock()
        outputs = self._choose(step.rows, logits, wanted)
        return StepOutput(outputs, {"forward": computed - began, "sample": self._clock() - computed})

    def close(self) -> None:
        """Free the weights and the cache. Idempotent."""
        self._decoder = None
        self._kv = None
        self._release_unused()

    @contextmanager
    def _out_of_memory_named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._release_unused()
            raise DeviceOutOfMemory(f"{what} needs more memory than there is") from error

    def _release_unused(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check(self, step: StepInput, kv: KVTensors) -> None:
        require_range("token", step.tokens, self._info.vocab_size)
        require_range("position", step.positions, self._info.max_context)
        require_range("slot", step.slots, kv.num_blocks * kv.block_size)
        require_range("copied block", step.copies.ravel(), kv.num_blocks)
        if step.rows:
            require_range("block", np.concatenate([row.blocks for row in step.rows]), kv.num_blocks)

    def _forward(self, decoder: Decoder, kv: KVTensors, step: StepInput, positions: Int64Array) -> Tensor:
        """:returns: float32 logits at ``positions`` of the packed tokens, shape [len(positions), V]."""
        tokens = PackedTokens(*(self._to_device(array) for array in (step.tokens, step.positions, step.slots)))
        attention = self._backend.plan(step.rows, kv.block_size)
        return decoder.logits(tokens, kv, attention, self._to_device(positions)).float()

    def _choose(self, rows: Sequence[Row], logits: Tensor, wanted: _Wanted) -> tuple[RowOutput, ...]:
        sampling = [row.sampling for row in rows if row.sampling is not None]
        drawn = iter(self._sampler.sample(logits[: wanted.samples], sampling))
        outputs = [RowOutput() if row.sampling is None else next(drawn) for row in rows]
        for i, span in wanted.prompts:
            outputs[i] = outputs[i]._replace(prompt_scores=self._prompt_scores(rows[i], logits[span]))
        return tuple(outputs)

    def _prompt_scores(self, row: Row, logits: Tensor) -> tuple[PromptScore, ...]:
        if row.prompt_targets is None:
            return ()
        return self._sampler.prompt_scores(logits, row.prompt_targets, row.prompt_top)

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


class _Wanted(NamedTuple):
    """At which packed tokens logits are needed, and who gets which of them."""

    positions: Int64Array
    """Indices into the packed tokens: first the last token of each sampling row, then what prompt scores need."""
    samples: int
    """How many of ``positions`` belong to sampling rows."""
    prompts: tuple[tuple[int, slice], ...]
    """(row, its span of ``positions``) of rows with prompt targets."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Wanted:
        ends = [row.start + row.length - 1 for row in rows if row.sampling is not None]
        parts = [np.array(ends, dtype=np.int64)]
        spans: list[tuple[int, slice]] = []
        size = len(ends)
        for i, row in enumerate(rows):
            count = 0 if row.prompt_targets is None else len(row.prompt_targets)
            if count:
                parts.append(np.arange(row.start, row.start + count))
                spans.append((i, slice(size, size + count)))
                size += count
        return cls(np.concatenate(parts), len(ends), tuple(spans))


def describe_geometry(layers: Sequence[LayerGeometry]) -> str:
    """What an identity says of a model's layers: those of one shape in a row as one phrase, so that two texts are equal
    exactly when all layers are."""
    return ", ".join(
        f"{len(list(run))} layers x {g.kv_heads} kv heads x (K {g.key_dim} + V {g.value_dim})"
        for g, run in groupby(layers)
    )


def _is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has an error class of its own; the CPU's allocator only a message."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
