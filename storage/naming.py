"""Names: how blocks are called below device memory, and who may ask for them.

In memory the prefix tree compares tokens. Below it a block is named by a SHA-256 chain: the name of the block before
it and its own tokens, with the namespace at the root. So a name stands for every token up to the end of the block, for
the model, the adapter and the tenant, and does not depend on the process.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, TypeAlias

from ..errors import InvalidRequest

BlockName: TypeAlias = bytes
"""SHA-256 digest, ``NAME_BYTES`` long."""

NAME_BYTES = 32
TOKEN_BYTES = 4
_SHELF = b"octavo-shelf-1"
_TENANT = b"octavo-tenant-1"


class Shelf(NamedTuple):
    """The part of a tier that one namespace may read and write. Made from a :class:`Namespace` alone, so that no tier
    can be asked without the tenant. Holds digests, never the tenant's salt itself.
    """

    namespace: bytes
    """Digest of model, adapter and salt; also the parent of every first block. ``NAME_BYTES`` long."""
    tenant: bytes
    """Digest of the salt alone, the same for all models: what erasing a tenant goes by. ``NAME_BYTES`` long."""


class Namespace(NamedTuple):
    """Sequences share blocks only inside one namespace. Each part has its own field, so that no two can be confused.

    ``None`` and the empty string are different values.
    """

    model: str
    """Digest of the model's :class:`~octavo.storage.identity.Identity`: weights, geometry, block size, ..."""
    adapter: str | None = None
    salt: str | None = None
    """Secret or name of the tenant."""

    def checked(self) -> Namespace:
        """Itself, when every part has its type.

        :raises InvalidRequest: otherwise; a malformed part must never be read as "no part".
        """
        for name, value in (("adapter", self.adapter), ("tenant", self.salt)):
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be a string or None, not {type(value).__name__}")
        if not isinstance(self.model, str) or not self.model:
            raise InvalidRequest("a namespace needs the identity of its model")
        return self

    def shelf(self) -> Shelf:
        """Where the blocks of this namespace lie in a tier."""
        parts = _framed(self.model) + _framed(self.adapter) + _framed(self.salt)
        return Shelf(hashlib.sha256(_SHELF + parts).digest(), tenant_digest(self.salt))


def tenant_digest(salt: str | None) -> bytes:
    """Under what a tenant's blocks are filed in every tier, whatever the model."""
    return hashlib.sha256(_TENANT + _framed(salt)).digest()


def name_after(parent: BlockName, tokens: bytes | memoryview) -> BlockName:
    """The name of the block that holds ``tokens`` (int32, little-endian, one block of them) after ``parent``."""
    return hashlib.sha256(parent + tokens).digest()


def names_after(parent: BlockName, tokens: bytes | memoryview, block_size: int) -> list[BlockName]:
    """The names of all whole blocks of ``tokens`` (int32) after ``parent``, in order."""
    size = block_size * TOKEN_BYTES
    names = []
    for at in range(0, len(tokens) // size * size, size):
        parent = hashlib.sha256(parent + tokens[at : at + size]).digest()
        names.append(parent)
    return names


def _framed(part: str | None) -> bytes:
    """Typed and with its length, so that no two lists of parts look alike."""
    if part is None:
        return b"\x00"
    data = part.encode("utf-8", "surrogatepass")
    return b"\x01" + len(data).to_bytes(8, "little") + data
