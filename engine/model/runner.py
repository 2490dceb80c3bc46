"""The seam between scheduling and the model: a plan goes in as plain arrays, tokens come out.

A ``ModelRunner`` is called from the one model thread and from nowhere else, so it needs no locks.
Everything that crosses the seam is immutable; nothing in it is shared with the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import ModelError
from ..request import SamplingParams
from .guides import AllowedTokens

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class ModelInfo(NamedTuple):
    """What the engine must know about a loaded model."""

    name: str
    fingerprint: str
    """Hex digest over weights, geometry, position encoding, dtype and tokenizer: the root of every cache key."""
    vocab_size: int
    """Ids below this may appear in a prompt (rows of the embedding)."""
    max_context: int
    """Most tokens (prompt plus output) that positions exist for."""
    eos_token_ids: frozenset[int]
    bytes_per_block: int
    """Device memory of one block over all layers; 0 until ``allocate`` was called."""
    identity: Mapping[str, str]
    """What ``fingerprint`` covers, in parts that can be named where two models differ: digests of ``weights``,
    ``computed buffers``, ``configuration`` and ``tokenizer``; ``position encoding``, ``dtype`` and ``geometry`` as
    text. The same in every process. Blocks that outlive it are shared between models whose parts are all equal."""


class RowSampling(NamedTuple):
    """How to choose the next token(s) of a row from the logits of its last position."""

    params: SamplingParams
    seeds: tuple[int, ...]
    """One independent draw per seed. Parallel samples ask for n draws of one row, before they fork."""
    history: Int32Array
    """Prompt and output ids so far, for the penalties. Shape [context]."""
    prompt_length: int
    """How many of ``history`` are prompt."""
    banned: frozenset[int] = frozenset()
    """Ids that may not be drawn now (end tokens before ``min_tokens``); where ``guide`` allows no others, they may."""
    beam_candidates: int = 0
    """When > 0: draw nothing, return this many best continuations instead."""
    guide: AllowedTokens | None = None
    """Which tokens keep to the output format; the same for all draws. Asked once in each execution of the step, and not
    changed by it."""


class Row(NamedTuple):
    """One sequence's part of a step."""

    start: int
    """Index of its first token in the packed arrays."""
    length: int
    """Tokens of it computed in this step, at least 1."""
    context: int
    """Tokens whose K and V exist once this step has written; the last one computed has position ``context - 1``."""
    blocks: Int32Array
    """Block ids that cover ``context`` tokens, in order. Shape [ceil(context / block_size)]."""
    sampling: RowSampling | None
    """``None`` for a prefill chunk that is not the last: no logits are needed."""
    prompt_targets: Int32Array | None = None
    """For prompt log-probabilities: the prompt token that follows each computed position, shape [<= length]
    (one less where the row ends the prompt). ``None``: not asked for."""
    prompt_top: int = 0
    """How many alternatives to report with each prompt log-probability."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step of the whole batch, packed: T tokens of R sequences.

    Order of effects that a runner must keep: first all ``copies`` at once (every source is read before any destination
    is written), then the K and V of the T tokens go to ``slots``, then attention reads.
    """

    tokens: Int32Array
    """Shape [T]."""
    positions: Int32Array
    """Position of each token in its sequence. Shape [T]."""
    slots: Int64Array
    """Where each token's K and V go: block id * block_size + offset. Shape [T]."""
    rows: tuple[Row, ...]
    copies: Int32Array
    """Block copies (source, destination). Shape [C, 2], C may be 0."""


class TokenScore(NamedTuple):
    """A token id with its log-probability (natural logarithm, under the model's raw distribution)."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """One draw."""

    token_id: int
    logprob: float
    """Log-probability under the model's raw distribution (before temperature, penalties and filters)."""
    top: tuple[TokenScore, ...] = ()
    """The ``params.logprobs`` most likely ids, best first; empty when not asked for."""


class PromptScore(NamedTuple):
    """Log-probability of one prompt token given all before it."""

    token_id: int
    logprob: float
    top: tuple[TokenScore, ...] = ()


class RowOutput(NamedTuple):
    """What came out for one row."""

    sampled: tuple[SampledToken, ...] = ()
    """One per seed; empty when the row asked for no logits."""
    beam: tuple[TokenScore, ...] = ()
    """Best continuations, best first, when the row asked for beam candidates. Log-probabilities come after the
    processors that apply to beams (penalties, bias, bans), as in Hugging Face's beam search."""
    prompt_scores: tuple[PromptScore, ...] = ()
    error: str | None = None
    """Why this row alone has no result (logits that are not finite, a broken guide); the other rows are good."""
    refusal: str | None = None
    """Why its request cannot go on, without a fault of the model: every token is banned, say. All rows are good."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One ``RowOutput`` per row of the input, in the same order."""

    rows: tuple[RowOutput, ...]
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, for telemetry; may be empty."""


class ModelRunner(Protocol):
    """A model with a paged K/V memory."""

    @property
    def info(self) -> ModelInfo: ...

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the K/V memory. Called once, before the first step.

        :raises ModelError: when the device has not enough memory; the message says how much was needed.
        """

    def execute(self, step: StepInput) -> StepOutput:
        """Run one step. Any exception fails the requests of this step and no others; the runner must stay usable.

        :raises ModelError: for failures it can name; other exceptions are wrapped by the engine.
        """

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        """Copy K and V of whole blocks to host memory, as all steps so far have left them; changes nothing on the
        device. ``out`` is complete on return.

        :param blocks: block ids, shape [n]; may be empty, may name a block twice.
        :param out: shape [n, bytes_per_block], laid out as ``octavo.storage.identity.BLOCK_FORMAT`` says: for each
            layer K, then V, each [block_size, kv_heads, head_dim]. Rows may lie apart; the bytes of a row may not.
        :raises ModelError: before ``allocate``, after ``close``, and for ids or shapes that do not fit; ``out`` was not
            touched then.
        """

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        """Make ``payloads[i]``, which ``export_blocks`` wrote once, the content of ``blocks[i]``; later steps see it.
        The payloads may be dropped or overwritten after the return. What is in them is not checked here.

        :param blocks: block ids, shape [n], none twice; may be empty.
        :param payloads: ``bytes_per_block`` contiguous bytes each, at any address.
        :raises ModelError: before ``allocate``, after ``close``, and for ids or lengths that do not fit; nothing was
            changed then.
        :raises DeviceOutOfMemory: when there is no memory for the transfer; what ``blocks`` hold is undefined then.
        """

    def close(self) -> None:
        """Free device memory. Idempotent."""


def require_range(what: str, values: npt.NDArray[np.integer], stop: int) -> None:
    """A check for runners: a bad index would read foreign memory or, on a GPU, take the device down.

    :raises ModelError: unless all ``values`` are in [0, ``stop``); ``what`` names one of them.
    """
    if values.size and not (values.min() >= 0 and values.max() < stop):
        raise ModelError(f"a {what} is out of range: {values.min()} to {values.max()}, but only 0 to {stop - 1} exist")
