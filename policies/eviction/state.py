"""Reading what a policy has saved: it comes from a file, so nothing about it is taken for granted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from .base import Entry, Json


def integers(state: Mapping[str, Json], name: str) -> list[int]:
    """The list of integers under ``name``.

    :raises KeyError: when there is nothing.
    :raises TypeError: when it is something else.
    """
    found = state[name]
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{name} in the state of a policy must be a list, not {type(found).__name__}")
    numbers: list[int] = []
    for number in found:
        if not isinstance(number, int):
            raise TypeError(f"{name} in the state of a policy must have integers only, not {type(number).__name__}")
        numbers.append(number)
    return numbers


def living(keys: Sequence[int], entry: Callable[[int], Entry | None]) -> Iterator[tuple[int, Entry]]:
    """Index in ``keys`` and entry of those that are cached still."""
    for index, key in enumerate(keys):
        known = entry(key)
        if known is not None:
            yield index, known


def floats(state: Mapping[str, Json], name: str) -> list[float]:
    """The list of finite numbers under ``name``. Errors as of :func:`integers`.

    :raises ValueError: when one is infinite or NaN.
    """
    found = state[name]
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise TypeError(f"{name} in the state of a policy must be a list, not {type(found).__name__}")
    numbers: list[float] = []
    for number in found:
        if not isinstance(number, int | float):
            raise TypeError(f"{name} in the state of a policy must have numbers only, not {type(number).__name__}")
        if not math.isfinite(number):
            raise ValueError(f"{name} in the state of a policy has {number}")
        numbers.append(number)
    return numbers


def counts(
    state: Mapping[str, Json], keys: str, values: str, entry: Callable[[int], Entry | None]
) -> Iterator[tuple[int, Entry, int]]:
    """Index, entry and number from two lists, of keys and of numbers; only of those that are cached still. Errors as
    of :func:`integers`.

    :raises ValueError: when the lists have different lengths, or a number is negative.
    """
    names, numbers = integers(state, keys), integers(state, values)
    if len(names) != len(numbers) or any(number < 0 for number in numbers):
        raise ValueError(f"{keys} and {values} in the state of a policy must have the same length and nothing negative")
    for index, known in living(names, entry):
        yield index, known, numbers[index]
