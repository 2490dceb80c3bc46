"""Guide: says which tokens may come next so that a text keeps to its form."""

from __future__ import annotations

from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

UInt32Array: TypeAlias = npt.NDArray[np.uint32]


class AllowedTokens(Protocol):
    """The view that a runner has of a guide."""

    def allowed(self) -> UInt32Array:
        """Which ids may be drawn now: bit ``i % 32`` of word ``i // 32``, least significant first. Ids beyond the
        last word may not. End tokens may exactly when the text may end here.

        Takes time, so it is asked for in the model thread. Changes nothing: a step may be made twice.

        :raises CannotContinue: when the form cannot be followed any further.
        """


class Guide(AllowedTokens, Protocol):
    """Where one text stands in its form. Owned by one sample; moved on at step edges only, when no step runs."""

    @property
    def is_done(self) -> bool:
        """Whether the text is complete and nothing can follow."""

    def accept(self, token: int) -> None:
        """Move on by a token that was drawn.

        :raises CannotContinue: when the form cannot be followed any further.
        :raises ModelError: when it was not allowed here.
        """

    def copy(self) -> Self:
        """An independent guide that stands at the same place."""
