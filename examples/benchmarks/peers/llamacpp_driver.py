"""llama.cpp's driver: ``llama-cpp-python`` batches nothing, so the loop of llama.cpp's server is here in small.

One batch a step: a token for each sequence that generates, and as much of the prompts as fits. A prompt begins with a
copy of the longest beginning that any sequence in the cache has, as ``llama_memory_seq_cp`` makes it: no cell is stored
twice. A request that begins like one that is being computed waits for it. Sequences that are done stay until their
cells are needed, the oldest goes first. There is no beam search.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.driver import SAMPLING_SEED, Ended, Opening, Stepped, Turn, serve
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from driver import SAMPLING_SEED, Ended, Opening, Stepped, Turn, serve

LONGEST = 1024
"""Tokens of a sequence where each has cells of its own."""
NO_CELLS = 1
"""What ``llama_decode`` returns when the cache is full."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence in the cache."""

    number: int
    tokens: list[int] = field(default_factory=list)
    """Prompt and output."""
    computed: int = 0
    """How many of them are in the cache."""
    outputs: list[int] = field(default_factory=list)
    need: int = 0
    """Cells that it may come to take."""
    key: int | None = None
    """Of the request that it works for; ``None``: kept for what begins like it."""
    source: Slot | None = None
    shared: int = 0
    """Tokens whose cells belong to ``source``, too."""

    @property
    def cells(self) -> int:
        """That it may come to take alone."""
        borrowed = self.source is not None and self.source.key is not None
        return self.need - (self.shared if borrowed else 0)


class LlamaCpp:
    """A context of llama.cpp, and who has which sequence of it."""

    def __init__(self, opening: Opening) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            opening.model.encode(), llama_cpp.llama_model_default_params()
        )
        most = 4 * opening.max_running if opening.caching else opening.pool_tokens // LONGEST
        self._context = llama_cpp.llama_init_from_model(self._model, _parameters(opening, most))
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(opening.batch_tokens, 0, 1)
        self._opening = opening
        self._free = list(range(most))
        self._most_active = min(most, opening.max_running)
        self._slots: list[Slot] = []
        self._waiting: list[tuple[int, list[int], Turn]] = []
        self._turns: dict[int, Turn] = {}
        self._random = np.random.default_rng(SAMPLING_SEED)

    def submit(self, key: int, prompt: list[int], turn: Turn) -> None:
        if turn.beams > 1:
            raise RuntimeError("no beam search")
        self._waiting.append((key, prompt, turn))

    def step(self) -> Iterable[Ended]:
        while self._waiting and self._admit(*self._waiting[0]):
            del self._waiting[0]
        rows = self._fill()
        self._decode()
        for slot, row in rows:
            self._sample(slot, row)
        for key in {slot.key for slot, _ in rows if slot.key is not None}:
            turn, mine = self._turns[key], [slot for slot in self._slots if slot.key == key]
            if all(len(slot.outputs) == turn.out for slot in mine):
                for slot in mine:
                    slot.key = None
                yield Ended(key, [slot.outputs for slot in mine])

    # who comes in

    def _active(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.key is not None]

    def _admit(self, key: int, prompt: list[int], turn: Turn) -> bool:
        """Give the request a sequence, if there is room for all that it may come to."""
        active, need = self._active(), len(prompt) + turn.out * turn.samples
        source, shared = self._closest(prompt)
        if source is not None and source.computed < shared:
            return False
        borrowed = shared if source is not None and source.key is not None else 0
        taken = sum(slot.cells for slot in active)
        if len(active) + turn.samples > self._most_active or taken + need - borrowed > self._opening.pool_tokens:
            return False
        slot = self._take(source, shared)
        slot.tokens, slot.outputs, slot.need, slot.key = prompt.copy(), [], need, key
        self._turns[key] = turn
        return True

    def _closest(self, prompt: list[int]) -> tuple[Slot | None, int]:
        """The sequence that begins most like ``prompt``, and how far; the last token is always computed."""
        if not self._opening.caching:
            return None, 0
        found, most = None, 0
        for slot in self._slots:
            same = min(_common(prompt, slot.tokens), len(prompt) - 1)
            if same > most:
                found, most = slot, same
        return found, most

    def _take(self, source: Slot | None, shared: int) -> Slot:
        """A sequence that begins with ``shared`` tokens of ``source``: ``source`` itself, if nobody works on it."""
        if source is not None and source.key is None:
            llama_cpp.llama_memory_seq_rm(self._memory, source.number, shared, -1)
            self._slots.remove(source)
            slot = Slot(source.number, computed=shared)
        else:
            if not self._free:
                self._forget_oldest()
            slot = Slot(self._free.pop(), computed=shared, source=source, shared=shared)
            if source is not None:
                llama_cpp.llama_memory_seq_cp(self._memory, source.number, slot.number, 0, shared)
        self._slots.append(slot)
        return slot

    def _forget_oldest(self) -> None:
        slot = next((slot for slot in self._slots if slot.key is None), None)
        if slot is None:
            raise RuntimeError("the cache is full of running sequences")
        llama_cpp.llama_memory_seq_rm(self._memory, slot.number, -1, -1)
        self._slots.remove(slot)
        self._free.append(slot.number)

    # one step

    def _fill(self) -> list[tuple[Slot, int]]:
        """Put into the batch what is due, those that generate first; the rows whose logits are wanted."""
        self._batch.n_tokens, rows = 0, []
        for slot in sorted(self._active(), key=lambda slot: not slot.outputs):
            room = self._opening.batch_tokens - self._batch.n_tokens
            until = min(len(slot.tokens), slot.computed + room)
            for at in range(slot.computed, until):
                self._put(slot, at)
            slot.computed = until
            if until == len(slot.tokens) and room:
                rows.append((slot, self._batch.n_tokens - 1))
        return rows

    def _put(self, slot: Slot, at: int) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row] = slot.tokens[at], at
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot.number
        batch.logits[row] = at == len(slot.tokens) - 1
        batch.n_tokens += 1

    def _decode(self) -> None:
        while code := llama_cpp.llama_decode(self._context, self._batch):
            if code != NO_CELLS:
                raise RuntimeError(f"llama_decode returned {code}")
            self._forget_oldest()

    def _sample(self, slot: Slot, row: int) -> None:
        """The next token of ``slot``; after its prompt, of all samples that go on from there."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        turn = self._turns[slot.key if slot.key is not None else -1]
        twins = [] if slot.outputs else [self._twin(slot) for _ in range(turn.samples - 1)]
        for each in (slot, *twins):
            token = self._draw(logits) if turn.samples > 1 else int(logits.argmax())
            each.outputs.append(token)
            if len(each.outputs) < turn.out:
                each.tokens.append(token)

    def _twin(self, slot: Slot) -> Slot:
        twin = self._take(slot, slot.computed)
        twin.tokens, twin.key = slot.tokens.copy(), slot.key
        twin.need = twin.shared  # its cells were counted for the first one
        return twin

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        """At temperature 1, by the Gumbel-max trick."""
        noise = self._random.gumbel(size=self._vocabulary)
        return int((logits + noise).argmax())


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _parameters(opening: Opening, sequences: int) -> llama_cpp.llama_context_params:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = opening.pool_tokens
    parameters.n_batch = parameters.n_ubatch = opening.batch_tokens
    parameters.n_seq_max = sequences
    parameters.n_threads = parameters.n_threads_batch = opening.threads
    parameters.kv_unified = opening.caching
    parameters.no_perf = True
    return parameters


if __name__ == "__main__":
    serve(lambda opening: Stepped(LlamaCpp(opening)))
