"""TokenLog: the tokens of one sample in the form that a step takes, without a copy for each step."""

from __future__ import annotations

from array import array

import numpy as np

from .model.runner import Int32Array


class TokenLog:
    """Append only, so what was handed out never changes, and the model's thread may read it while more comes."""

    __slots__ = ("_ids", "_length", "_shown")

    def __init__(self) -> None:
        self._length = 0
        self._allocate(0)

    def upto_now(self, tokens: array[int]) -> Int32Array:
        """All of ``tokens``, which begin with those of the last call. Shape [len(tokens)], read only.

        Takes time for what is new; now and then, as lists do, for all.
        """
        count = len(tokens)
        if count > len(self._ids):
            self._allocate(count + count // 2 + 16)
            self._length = 0  # what was handed out keeps the old memory
        if count > self._length:
            self._ids[self._length : count] = tokens[self._length :]
            self._length = count
        return self._shown[:count]

    def _allocate(self, room: int) -> None:
        self._ids: Int32Array = np.empty(room, dtype=np.int32)
        self._shown = self._ids.view()
        self._shown.flags.writeable = False
