"""The acts that ``bookkeeping.py`` measures, on any side: octavo, the yardstick, or another engine's manager.

Nothing but the standard library is imported here, for peers run this file in environments of their own.
"""

from __future__ import annotations

import gc
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from statistics import median
from time import perf_counter_ns
from typing import Generic, Protocol, TypeVar

BLOCK_SIZE = 16
PROMPTS = 64
VOCABULARY = 50_000
DECODED = 48
"""Tokens of each sequence in a round: three blocks."""

Handle = TypeVar("Handle")
Prompt = TypeVar("Prompt")


class Side(Protocol[Prompt, Handle]):
    """What is measured, on either side."""

    def encode(self, tokens: list[int]) -> Prompt: ...
    def admit(self, prompt: Prompt) -> Handle: ...
    def commit(self, handle: Handle) -> None: ...
    def decode(self, handle: Handle, token: int) -> None: ...
    def finish(self, handle: Handle) -> None: ...


class Track(Generic[Prompt, Handle]):
    """One side with its prompts, its running sequences and its times in microseconds by name."""

    def __init__(self, side: Side[Prompt, Handle], prompts: list[list[int]]) -> None:
        self.side = side
        self.times: dict[str, list[float]] = defaultdict(list)
        self.running: dict[int, Handle] = {}
        self.prompts = [array("i", tokens) for tokens in prompts]

    def admit(self, index: int, name: str) -> None:
        """``name`` gets the time of the admission, *name, encode* what was done to the list of ids before it."""
        prompt = self._encoded(index, name)
        start = perf_counter_ns()
        handle = self.side.admit(prompt)
        self._note(name, start)
        self.running[index] = handle

    def commit(self, index: int, name: str) -> None:
        side, handle = self.side, self.running[index]
        start = perf_counter_ns()
        side.commit(handle)
        self._note(name, start)

    def finish(self, index: int, name: str) -> None:
        side, handle = self.side, self.running.pop(index)
        start = perf_counter_ns()
        side.finish(handle)
        self._note(name, start)

    def whole(self, index: int, name: str) -> None:
        """Admit, commit and finish one prompt; ``name`` gets the sum, *name, encode* as in ``admit``."""
        side, prompt = self.side, self._encoded(index, name)
        start = perf_counter_ns()
        handle = side.admit(prompt)
        side.commit(handle)
        side.finish(handle)
        self._note(name, start)

    def decode(self, tokens: int, name: str) -> None:
        """``tokens`` steps of everything that runs; the time is that of one token."""
        decode, handles = self.side.decode, list(self.running.values())
        start = perf_counter_ns()
        for token in range(tokens):
            for handle in handles:
                decode(handle, token)
        self.times[name].append((perf_counter_ns() - start) / 1000 / tokens / len(handles))

    def finish_all(self) -> None:
        """Without a measurement."""
        for handle in self.running.values():
            self.side.finish(handle)
        self.running.clear()

    def _encoded(self, index: int, name: str) -> Prompt:
        tokens = self.prompts[index].tolist()  # new objects, and just touched: as a tokenizer leaves them
        start = perf_counter_ns()
        prompt = self.side.encode(tokens)
        self._note(f"{name}, encode", start)
        return prompt

    def _note(self, name: str, start: int) -> None:
        self.times[name].append((perf_counter_ns() - start) / 1000)


def one_round(make: Callable[[int], Side[Prompt, Handle]], tokens: int, seed: int) -> dict[str, float]:
    """Medians in microseconds of what a request costs from its list of ids on, which every engine does in other
    portions: ``admit`` is everything until its prompt is published, *ids packed* without what octavo does when a prompt
    is submitted; ``churn`` admits, publishes and finishes distinct prompts in a pool that holds a quarter of them.
    ``make(num_blocks)`` gives a new side.
    """
    random = Random(seed)  # noqa: S311  # not for secrets
    shared = prompts_with_shared_half(tokens, PROMPTS, random)
    distinct = [random_tokens(tokens, random) for _ in range(PROMPTS)]
    with quiet():
        track = Track(make((PROMPTS + 2) * ((tokens + DECODED) // BLOCK_SIZE + 2)), shared)
        for index in range(PROMPTS):
            track.admit(index, "admit")
            track.commit(index, "commit")
        track.decode(DECODED, "decode")
        for index in range(PROMPTS):
            track.finish(index, "finish")
        small = Track(make(PROMPTS // 4 * -(-tokens // BLOCK_SIZE)), distinct)
        for name in ("filling", "churn", "churn"):
            for index in range(PROMPTS):
                small.whole(index, name)
    found = {name: median(times) for name, times in track.times.items()}
    packed, churn = found["admit"] + found["commit"], median(small.times["churn"])
    return {
        "admit": found["admit, encode"] + packed,
        "admit, ids packed": packed,
        "decode": found["decode"],
        "finish": found["finish"],
        "churn": median(small.times["churn, encode"]) + churn,
        "churn, ids packed": churn,
    }


def prompts_with_shared_half(tokens: int, count: int, random: Random) -> list[list[int]]:
    """``count`` prompts of ``tokens`` tokens that have the first half in common."""
    shared = random_tokens(tokens // 2, random)
    return [shared + random_tokens(tokens - len(shared), random) for _ in range(count)]


def random_tokens(count: int, random: Random) -> list[int]:
    """So many ids, each as likely as the others."""
    return random.choices(range(VOCABULARY), k=count)


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while the clock runs; what is there now stays out of the next one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
