"""The file of API keys, in TOML.

Like this::

    [[keys]]
    name = "team-a"                # for people; unique
    sha256 = "9f86d081884c7d65..." # of the key: printf %s "$KEY" | sha256sum
    quota = 0.3                    # of the pool: what it holds within that is never taken for others
    priority = 5                   # higher is more urgent, under the scheduling policy "priority"
    weight = 2.0                   # of its share of the work, under the scheduling policy "fair"
    max_concurrent = 16            # requests under way at once

    [[keys]]
    name = "team-b"
    key = "sk-..."                 # the key itself, if the file is safe
    tenant = "research"            # shares cached prefixes with other keys of this tenant

Only ``name`` and one of ``sha256`` and ``key`` are needed. A key without ``tenant`` is a tenant of its own, by its
name.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import InvalidRequest, describe
from ...telemetry.logging import Logger
from .access import Caller, Keys, digest, is_sendable

SHORTEST_KEY = 8
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One ``[[keys]]``."""

    name: Text
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    key: str | None = None
    tenant: Text | None = None
    priority: int = 0
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] | None = None
    quota: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None

    @property
    def owner(self) -> str:
        """The tenant as which its requests run."""
        return self.name if self.tenant is None else self.tenant


class KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    keys: list[KeyEntry]


def load_keys(path: str | os.PathLike[str], logger: Logger | None = None) -> Keys:
    """The keys in the file at ``path``. ``logger`` is told when others can read it.

    :raises InvalidRequest: when it cannot be read or is malformed. The message says where, and holds no key.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            values = tomllib.load(file)
        entries = msgspec.convert(values, KeysFile).keys
    except (OSError, UnicodeDecodeError) as error:
        reason = "is no UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {describe(error)}"
        raise InvalidRequest(f"the file of API keys, {os.fspath(path)}, {reason}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"the file of API keys, {os.fspath(path)}, is malformed: {error}") from None
    if logger is not None and mode & stat.S_IROTH:
        logger.warning("keys_file_is_readable_by_everybody", path=os.fspath(path), advice="chmod 600")
    return keys_of(entries)


def keys_of(entries: Iterable[KeyEntry]) -> Keys:
    """The keys that ``entries`` describe.

    :raises InvalidRequest: when they contradict each other.
    """
    entries = list(entries)
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"API keys: the name {twice[0]!r} is there twice")
    callers: dict[bytes, Caller] = {}
    for entry in entries:
        known = callers.setdefault(
            _digest(entry), Caller(entry.owner, entry.priority, entry.max_concurrent, entry.name)
        )
        if known.name != entry.name:
            raise InvalidRequest(f"API keys: {known.name!r} and {entry.name!r} have the same key")
    quotas, weights = _by_tenant(entries, "quota"), _by_tenant(entries, "weight")
    if sum(quotas.values()) > 1 + 1e-9:
        raise InvalidRequest(f"API keys: the quotas are {sum(quotas.values()):.4g} together, and must be at most 1")
    return Keys(callers, quotas, weights)


def _digest(entry: KeyEntry) -> bytes:
    if (entry.key is None) == (entry.sha256 is None):
        raise InvalidRequest(f"API keys: {entry.name!r} needs a key or a sha256, and not both")
    if entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    if entry.key is None or len(entry.key) < SHORTEST_KEY or not is_sendable(entry.key):
        raise InvalidRequest(
            f"API keys: the key of {entry.name!r} needs {SHORTEST_KEY} characters, ASCII, none around them"
        )
    return digest(entry.key)


def _by_tenant(entries: Iterable[KeyEntry], field: str) -> dict[str, float]:
    """What the keys of each tenant say; those that say nothing agree with all."""
    found: dict[str, float] = {}
    for entry in entries:
        value: float | None = getattr(entry, field)
        if value is not None and found.setdefault(entry.owner, value) != value:
            raise InvalidRequest(f"API keys: those of the tenant {entry.owner!r} disagree on {field}")
    return found
