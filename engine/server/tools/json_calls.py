"""Calls that are written as JSON: an object with name and arguments, or a list of such."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from .pieces import Invocation

ARGUMENTS: Final = ("arguments", "parameters")
"""Keys that hold the arguments; models mix them up."""
MAX_NAME: Final = 256


def parsed(text: str) -> object:
    """The value, of JSON as models write it: with line breaks in strings, too.

    :raises ValueError: when it is none.
    :raises RecursionError: when it is too deep.
    """
    return json.loads(text, strict=False)


def calls_in(text: str) -> list[Invocation] | None:
    """The calls in a JSON text; ``None``: it is something else."""
    try:
        value = parsed(text)
    except (ValueError, RecursionError):
        return None
    return all_or_none(invocation_of(item) for item in (value if isinstance(value, list) else [value]))


def all_or_none(found: Iterable[Invocation | None]) -> list[Invocation] | None:
    """All calls; ``None`` if one of them is none."""
    calls = list(found)
    whole = [call for call in calls if call is not None]
    return whole if len(whole) == len(calls) else None


def invocation_of(value: object) -> Invocation | None:
    """The call that a JSON object is."""
    if not isinstance(value, Mapping):
        return None
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    return invocation(value.get("name"), arguments)


def invocation(name: object, arguments: object) -> Invocation | None:
    """A call, if these are a name and arguments: an object, its text, or nothing."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not _is_text(name):
        return None
    try:
        values = parsed(arguments) if isinstance(arguments, str) else arguments
        text = json_text({} if values is None else values)
    except (ValueError, TypeError, RecursionError):
        return None
    return Invocation(name, text) if text.startswith("{") else None


def json_text(value: object) -> str:
    """``value`` as JSON.

    :raises ValueError: for infinite numbers.
    :raises TypeError: when it cannot be written as JSON.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_text(text) else json.dumps(value, allow_nan=False)


def _is_text(text: str) -> bool:
    """Whether it can be sent: a lone half of a surrogate pair cannot."""
    return text.isascii() or text.encode("utf-8", "ignore").decode() == text
