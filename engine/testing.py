"""FakeRunner and FakeCodec: a model for tests whose next token is a pure function of the tokens and the K/V that it
reads.

Each slot of its "K/V memory" holds one number that follows from the token, its position and the number in the slot
before it. The logits follow from all numbers of the sequence. So a wrong block, a stale one, a missing copy or a
wrong order of effects changes the output at once, and reading a slot that was never written raises. Another identity
gives other numbers, so that blocks of another model show, too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from ..errors import InvalidRequest, ModelError
from .model.attention.block_transfer import checked_payloads, require_room
from .model.runner import (
    Int32Array,
    ModelInfo,
    Row,
    RowOutput,
    RowSampling,
    StepInput,
    StepOutput,
    UInt8Array,
)
from .model.sampler import Sampler
from .request import Chat, ChatMessage

UNWRITTEN = np.uint64(0)
MULTIPLIER = 6364136223846793005  # Knuth's MMIX generator
INCREMENT = 1442695040888963407
MASK = 2**64 - 1
SLOT_BYTES = 8


class FakeRunner:
    """A ModelRunner without a model.

    ``before_step`` is called with each step before anything happens: tests raise from it, sleep in it or record.
    ``step_seconds`` blocks the model thread that long. ``identity`` replaces parts of the model's identity, or adds
    some: with any change it is another model, which says something else. ``fingerprint`` is the part ``weights`` too.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        max_context: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
        fingerprint: str = "fake",
        identity: Mapping[str, str] | None = None,
        step_seconds: float = 0.0,
        before_step: Callable[[StepInput], None] | None = None,
    ) -> None:
        self.steps = 0
        self.tokens_computed = 0
        self.blocks_exported = 0
        self.blocks_imported = 0
        self.step_seconds = step_seconds
        self.before_step = before_step
        self.is_closed = False
        parts = {**_identity(fingerprint), **(identity or {})}
        self._info = ModelInfo(
            "fake",
            fingerprint,
            vocab_size,
            max_context,
            eos_token_ids,
            bytes_per_block=0,
            identity=MappingProxyType(parts),
        )
        self._root = _root(parts)
        self._sampler = Sampler(vocab_limit=None)
        self._block_size = 0
        self._memory: npt.NDArray[np.uint64] = np.zeros((0, 0), dtype=np.uint64)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._memory = np.full((num_blocks, block_size), UNWRITTEN, dtype=np.uint64)
        self._info = self._info._replace(bytes_per_block=block_size * SLOT_BYTES)

    def execute(self, step: StepInput) -> StepOutput:
        if self.before_step is not None:
            self.before_step(step)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if len(step.copies):
            self._memory[step.copies[:, 1]] = self._memory[step.copies[:, 0]]
        for row in step.rows:
            self._write(step, row)
        self.steps += 1
        self.tokens_computed += len(step.tokens)
        return StepOutput(tuple(self._outputs(step.rows)))

    def export_blocks(self, blocks: Int32Array, out: UInt8Array) -> None:
        memory = self._bytes()
        require_room(blocks, out, *memory.shape)
        out[:] = memory[blocks]
        self.blocks_exported += len(blocks)

    def import_blocks(self, blocks: Int32Array, payloads: Sequence[memoryview]) -> None:
        memory = self._bytes()
        for block, row in zip(blocks, checked_payloads(blocks, payloads, *memory.shape), strict=True):
            memory[block] = row
        self.blocks_imported += len(blocks)

    def close(self) -> None:
        self.is_closed = True

    def _bytes(self) -> UInt8Array:
        """The memory itself, shape [num_blocks, bytes_per_block]."""
        if self.is_closed or not self._block_size:
            raise ModelError("the runner has no cache: it was closed, or allocate was not called")
        return self._memory.view(np.uint8)

    def _write(self, step: StepInput, row: Row) -> None:
        first = row.context - row.length
        state = int(self._read(row, first)[-1]) if first else self._root
        for index in range(row.start, row.start + row.length):
            mixed = state ^ (int(step.tokens[index]) * 0x9E3779B97F4A7C15) ^ (int(step.positions[index]) << 32)
            state = (mixed * MULTIPLIER + INCREMENT) & MASK or 1
            self._memory.reshape(-1)[step.slots[index]] = state

    def _read(self, row: Row, length: int) -> npt.NDArray[np.uint64]:
        """The numbers of the first ``length`` positions, through the block table."""
        values = self._memory[row.blocks].reshape(-1)[:length]
        if (values == UNWRITTEN).any():
            raise ModelError("a slot was read that nobody has written")
        return values

    def _outputs(self, rows: Sequence[Row]) -> list[RowOutput]:
        wanted = [row for row in rows if row.sampling is not None]
        logits = [self._logits(row, row.context) for row in wanted]
        samplings: list[RowSampling] = [row.sampling for row in wanted if row.sampling is not None]
        sampled = iter(self._sampler.sample(torch.stack(logits), samplings) if wanted else [])
        outputs = []
        for row in rows:
            output = next(sampled) if row.sampling is not None else RowOutput()
            if row.prompt_targets is not None and len(row.prompt_targets):
                scores = self._prompt_logits(row, len(row.prompt_targets))
                prompt_scores = self._sampler.prompt_scores(scores, row.prompt_targets, row.prompt_top)
                output = output._replace(prompt_scores=prompt_scores)
            outputs.append(output)
        return outputs

    def _prompt_logits(self, row: Row, count: int) -> torch.Tensor:
        first = row.context - row.length + 1
        return torch.stack([self._logits(row, length) for length in range(first, first + count)])

    def _logits(self, row: Row, length: int) -> torch.Tensor:
        values = self._read(row, length)
        weights = np.arange(1, 2 * length, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        digest = int((values * weights).sum(dtype=np.uint64))
        noise = np.random.default_rng(digest).normal(size=self._info.vocab_size)
        return torch.from_numpy(noise.astype(np.float32) * 2)


def _identity(fingerprint: str) -> dict[str, str]:
    names = ("computed buffers", "configuration", "position encoding", "tokenizer")
    return {**dict.fromkeys(names, "fake"), "weights": fingerprint, "dtype": "uint64", "geometry": "1 layer x 1 number"}


def _root(parts: Mapping[str, str]) -> int:
    """The number before the first token."""
    changes = sorted(parts.items() - _identity("fake").items())
    return int.from_bytes(hashlib.sha256(json.dumps(changes).encode()).digest()[:SLOT_BYTES]) if changes else INCREMENT


class FakeCodec:
    """A tokenizer of 64 ids or more: id i is the character chr(48 + i), "0" to "o" for the first 64.

    ``special``: ids whose text is a marker like ``<7>``, left out of the text by default. A conversation is the
    contents of its messages one after the other, whatever the roles, with a token for each tool before them and for
    each tool call after its message; ``has_chat_template=False``: it takes none.
    """

    def __init__(
        self, vocab_size: int = 64, special: frozenset[int] = frozenset(), *, has_chat_template: bool = True
    ) -> None:
        self._vocab_size = vocab_size
        self._special = special
        self._has_chat_template = has_chat_template

    def encode(self, text: str) -> list[int]:
        ids = [ord(character) - 48 for character in text]
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise InvalidRequest("the text has a character that the fake tokenizer does not know")
        return ids

    def encode_chat(self, chat: Chat) -> list[int]:
        if not self._has_chat_template:
            raise InvalidRequest("this model has no chat template; send a text prompt")
        ids = [self._stand_in(tool) for tool in chat.tools]
        for message in chat.messages:
            ids += [token for text in self._texts(message) for token in self.encode(text)]
            calls = message.get("tool_calls")
            ids += [self._stand_in(call) for call in (calls if isinstance(calls, list | tuple) else ())]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self._piece(token, skip_special_tokens) for token in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._piece(token_id, False).encode() if token_id >= 0 else b""

    def special_token_id(self, text: str) -> int | None:
        return next((token for token in self._special if text == f"<{token}>"), None)

    @staticmethod
    def _texts(message: ChatMessage) -> list[str]:
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            return []
        parts = [{"text": content}] if isinstance(content, str) else content
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("every message needs a content, a string or a list of text parts")
        return [text for text in texts if isinstance(text, str)]

    def _stand_in(self, value: object) -> int:
        """One token for a whole object: another one for another object, mostly."""
        digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
        return int.from_bytes(digest[:SLOT_BYTES]) % self._vocab_size

    def _piece(self, token: int, skip: bool) -> str:
        if token in self._special:
            return "" if skip else f"<{token}>"
        return chr(48 + token) if token < self._vocab_size else ""
