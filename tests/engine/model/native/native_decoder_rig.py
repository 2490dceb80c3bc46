"""Tiny decoders in one call of the kernels, beside what they must equal, and steps for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from octavo.engine.model.attention import AttentionBackend, make_backend
from octavo.engine.model.attention.kv_tensors import KVTensors, LayerGeometry
from octavo.engine.model.attention.native_backend import NativeBackend
from octavo.engine.model.attention.torch_backend import TorchBackend
from octavo.engine.model.decoder import Decoder, ModuleDecoder, PackedTokens
from octavo.engine.model.lowering import lower
from octavo.engine.model.lowering.native_decoder import NativeDecoder
from octavo.engine.model.probe import probe
from octavo.engine.model.runner import Row
from octavo.engine.model.transformers_runner import TransformersRunner
from octavo.tests.engine.model.native.native_rig import WatchedKernels
from octavo.tests.engine.model.test_transformers_runner import (
    VOCAB,
    assert_equal,
    build,
)

CPU = torch.device("cpu")
WIDE: dict[str, object] = {"hidden_size": 64, "max_position_embeddings": 1024}
ODD: dict[str, object] = {**WIDE, "hidden_size": 44, "head_dim": 16, "intermediate_size": 54}
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", WIDE),
    "llama of odd sizes": ("llama", ODD),
    "llama with a tied head": ("llama", {**WIDE, "tie_word_embeddings": True}),
    "llama with a head for each query": ("llama", {**WIDE, "num_key_value_heads": 4}),
    "mistral with a long window": ("mistral", {**WIDE, "sliding_window": 900}),
    "qwen2": ("qwen2", WIDE),
    "qwen3": ("qwen3", {**ODD, "head_dim": 32}),
    "smollm3": ("smollm3", {**WIDE, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "phi3": ("phi3", WIDE),
    "phi3 that turns half of a head": ("phi3", {**WIDE, "partial_rotary_factor": 0.5}),
}
SHORT_WINDOW: tuple[str, Mapping[str, object]] = ("mistral", {**WIDE, "sliding_window": 6})


def model_of(family: str, extra: Mapping[str, object], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Norms and biases are random, too: as they are made, they would hardly show."""
    model = build(family, extra)
    random = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            middle = 1.0 if "norm" in name else 0.0
            parameter.data = middle + 0.3 * torch.randn(parameter.shape, generator=random)
        parameter.data = parameter.data.to(dtype)
    return model


class Watched:
    """A native decoder that counts the steps it takes itself: else one that leaves all to its program would pass."""

    def __init__(self, decoder: Decoder) -> None:
        assert isinstance(decoder, NativeDecoder)
        self.decoder = decoder
        self.program = decoder._program
        self.steps = 0
        self._run = decoder._run
        vars(decoder)["_run"] = self._counted

    def _counted(self, *arguments: object) -> None:
        self.steps += 1
        self._run(*arguments)


class Rig(NamedTuple):
    own: ModuleDecoder
    native: Watched
    layers: tuple[LayerGeometry, ...]
    dtype: torch.dtype
    attention: AttentionBackend


class Part(NamedTuple):
    """A row: full blocks of an earlier one, then its own past, then what is computed now."""

    parent: int
    """Which of the earlier ones, modulo their number."""
    kept: float
    """Share of the parent's full blocks."""
    past: int
    length: int


several_parts = st.lists(
    st.builds(
        Part,
        parent=st.integers(0, 7),
        kept=st.sampled_from([0.0, 0.5, 1.0]),
        past=st.integers(0, 40),
        length=st.just(1) | st.integers(2, 19),
    ),
    min_size=1,
    max_size=6,
)
MIXED = (Part(0, 0.0, 33, 1), Part(0, 1.0, 3, 9), Part(1, 0.5, 0, 1), Part(0, 0.0, 0, 12), Part(1, 1.0, 70, 2))


class Case(NamedTuple):
    """A step over a past of noise."""

    rows: tuple[Row, ...]
    tokens: PackedTokens
    past: Tensor
    """Slots that are filled."""
    block_size: int
    blocks: int
    seed: int

    @classmethod
    def of(cls, parts: Sequence[Part], *, block_size: int = 4, seed: int = 0) -> Case:
        """In random blocks."""
        order = np.random.default_rng(seed)
        tables: list[list[int]] = []
        sizes: list[tuple[int, int]] = []
        fresh = 0
        for part in parts:
            at = part.parent % max(1, len(tables))
            full = (sizes[at][1] - sizes[at][0]) // block_size if tables else 0
            shared = tables[at][: round(part.kept * full)] if tables else []
            context = len(shared) * block_size + part.past + part.length
            own = -(-context // block_size) - len(shared)
            tables.append([*shared, *range(fresh, fresh + own)])
            sizes.append((part.length, context))
            fresh += own
        places = order.permutation(fresh + 2)
        starts = np.cumsum([0, *(length for length, _ in sizes)])
        rows = tuple(
            Row(int(start), *size, places[table].astype(np.int32), None)
            for start, size, table in zip(starts, sizes, tables, strict=False)
        )
        positions = [np.arange(row.context - row.length, row.context) for row in rows]
        tokens = PackedTokens(
            torch.from_numpy(order.integers(0, VOCAB, int(starts[-1]))),
            torch.from_numpy(np.concatenate(positions)),
            torch.cat([slots(row, block_size)[-row.length :] for row in rows]),
        )
        past = torch.cat([slots(row, block_size)[: -row.length] for row in rows])
        return cls(rows, tokens, past, block_size, len(places), seed)

    def cache(self, rig: Rig) -> KVTensors:
        """NaN where no row looks."""
        kv = KVTensors(rig.layers, self.blocks, self.block_size, dtype=rig.dtype, device=CPU, poison=True)
        random = torch.Generator().manual_seed(self.seed)
        for pool in pools(kv):
            noise = torch.randn(pool.flatten(0, 1).shape, generator=random).to(rig.dtype)
            pool.flatten(0, 1)[self.past] = noise[self.past]
        return kv

    def run(self, decoder: Decoder, attention: AttentionBackend, kv: KVTensors, keep: Sequence[int]) -> Tensor:
        wanted = torch.tensor(keep, dtype=torch.int64)
        with torch.inference_mode():
            return decoder.logits(self.tokens, kv, attention.plan(self.rows, self.block_size), wanted)

    def everything(self) -> range:
        return range(len(self.tokens.ids))


def slots(row: Row, block_size: int) -> Tensor:
    """Of all tokens of a row."""
    positions = np.arange(row.context)
    return torch.from_numpy(row.blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size)


def pools(kv: KVTensors) -> list[Tensor]:
    return [pool for i in range(len(kv._keys)) for pool in (kv.keys(i), kv.values(i))]


def assert_same_cache(got: KVTensors, expected: KVTensors) -> None:
    for mine, other in zip(pools(got), pools(expected), strict=True):
        size = float(other.nan_to_num().abs().max())
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * size, equal_nan=True)


def assert_agrees(rig: Rig, case: Case, keep: Sequence[int]) -> None:
    """Logits, and what was written, of all three; one native step was taken."""
    before = rig.native.steps
    caches = [case.cache(rig) for _ in range(3)]
    got = case.run(rig.native.decoder, rig.attention, caches[0], keep)
    assert rig.native.steps == before + 1
    others: list[tuple[Decoder, AttentionBackend]] = [
        (rig.native.program, rig.attention),
        (rig.own, TorchBackend(CPU)),
    ]
    for (decoder, attention), kv in zip(others, caches[1:], strict=True):
        expected = case.run(decoder, attention, kv, keep)
        assert got.dtype == torch.float32
        assert got.shape == expected.shape == (len(keep), VOCAB)
        if len(keep):
            assert_equal(got, expected)
        assert_same_cache(caches[0], kv)
    assert rig.native.steps == before + 1


def rig_of(kernels: WatchedKernels, model: PreTrainedModel) -> Rig:
    layers = probe(model)
    native = Watched(lower(model, layers, fused=True, packed=True, kernels=kernels))
    return Rig(ModuleDecoder(model), native, layers, model.dtype, NativeBackend(kernels, shares=True))


@cache
def rig(kernels: WatchedKernels, case: str) -> Rig:
    return rig_of(kernels, model_of(*CASES[case]))


def case_logits(rig: Rig, step: Case) -> Tensor:
    before = rig.native.steps
    found = step.run(rig.native.decoder, rig.attention, step.cache(rig), step.everything())
    assert rig.native.steps == before + 1
    return found


def runner_of(model: PreTrainedModel, kernels: WatchedKernels) -> tuple[TransformersRunner, Watched]:
    runner = TransformersRunner(
        model,
        name="tiny",
        fingerprint="f",
        identity={},
        eos_token_ids=frozenset(),
        vocab_limit=None,
        device=CPU,
        dtype=torch.float32,
        attention=make_backend("auto", CPU, kernels),
        poison=True,
        fused=True,
        packed=True,
        kernels=kernels,
    )
    assert runner._decoder is not None
    return runner, Watched(runner._decoder)
