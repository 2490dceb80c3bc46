"""Options of tiers and backends: a mapping, as the user gave it, read into a typed and frozen class."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from ..errors import InvalidRequest
from .base import Options

_T = TypeVar("_T")

PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
NaturalInt: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, msgspec.Meta(gt=0.0, le=sys.float_info.max)]
NaturalFloat: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


def read_options(kind: type[_T], options: Options, what: str) -> _T:
    """``options`` as an instance of ``kind``, a :class:`msgspec.Struct` or dataclass with one field per option.

    Types are taken as they are: no text for a number, no truth value for one. A path may be given where ``kind`` has
    text, and text where it has a :class:`~pathlib.Path`. Ranges come from ``Annotated`` types such as those above and
    from ``__post_init__``, whose ``ValueError`` and ``TypeError`` count as a wrong value. ``what`` is who asks, as in
    "host tier".

    :raises InvalidRequest: for an option that is unknown, missing, of another type or out of range; the message names
        it and never repeats its value, which may hold a password.
    """
    known = _fields(kind)
    for name in options:
        if name not in known:
            raise InvalidRequest(_unknown(name, known, what))
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()}
    try:
        return msgspec.convert(plain, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_invalid(str(error), what)) from error


def _fields(kind: type) -> list[str]:
    info = msgspec.inspect.type_info(kind)
    if not isinstance(info, (msgspec.inspect.StructType, msgspec.inspect.DataclassType)):
        raise TypeError(f"options are read into a msgspec.Struct or a dataclass, not {kind!r}")
    return [field.encode_name for field in info.fields]


def _unknown(name: object, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} has no option {name!r}.{hint} It knows {', '.join(known) or 'none'}."


def _invalid(message: str, what: str) -> str:
    """The library says what it expected and, behind ``$.``, for which option."""
    reason, at, place = message.partition(" - at `$.")
    if not at:
        return f"{what}: {message.replace('Object missing required field', 'needs the option')}"
    return f"option {place.rstrip('`')!r} of {what}: {reason[:1].lower()}{reason[1:]}"


def _path(wanted: type, value: object) -> object:
    if wanted is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"Expected `{wanted.__name__}`, got `{type(value).__name__}`")
