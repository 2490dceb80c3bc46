"""Why a prompt is found on the device as far as it is, and no further."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

from ...storage.naming import TOKEN_BYTES, Namespace
from .ghosts import Ghosts
from .prefix_tree import Match, PrefixTree, agreeing_tokens

AROUND = 8
"""Stored tokens that are shown before and after the first one that differs."""


class EvictedBefore(NamedTuple):
    """The first missing block was here once."""

    seconds_ago: float
    reason: str
    """``allocate``, ``watermark`` or ``call``."""
    policy: str
    """Class of the eviction policy."""


class Relative(NamedTuple):
    """The stored text of the same namespace that has most in common with a prompt and then goes on otherwise."""

    position: int
    """Number of the first token that differs."""
    start: int
    """Number of the first of ``stored``."""
    stored: tuple[int, ...]
    """Its tokens around ``position``."""


class DeviceExplanation(NamedTuple):
    """What the device has of a prompt, and why it has not more."""

    cached_tokens: int
    """Tokens that an admission now would not compute, the part of a block included; at least one always is."""
    missing_from: int | None
    """Number of the first token whose whole block is not there; ``None``: all whole blocks are."""
    evicted: EvictedBefore | None
    """How the block at ``missing_from`` left, as far as that is remembered."""
    relative: Relative | None
    """``None``: what is stored ends there too, or nothing is."""
    other_salt: bool | None
    """Whether another namespace (tenant, adapter, model) has more of it; never whose. ``None``: not asked."""


def explain(
    tree: PrefixTree, ghosts: Ghosts, namespace: Namespace, tokens: array[int], *, now: float, others: bool
) -> DeviceExplanation:
    """See :class:`DeviceExplanation`. Changes nothing."""
    key = tokens.tobytes()
    match = tree.match(namespace, key, len(tokens))
    whole = len(match.ids) * tree.block_size
    missing = whole if whole + tree.block_size <= len(tokens) else None
    return DeviceExplanation(
        cached_tokens=min(whole + match.partial_tokens, len(tokens) - 1),
        missing_from=missing,
        evicted=None if missing is None else _evicted(tree, ghosts, namespace, tokens, missing, now),
        relative=_relative(tree, match, key),
        other_salt=_has_more(tree, namespace, key, len(match.ids)) if others else None,
    )


def _evicted(
    tree: PrefixTree, ghosts: Ghosts, namespace: Namespace, tokens: array[int], missing: int, now: float
) -> EvictedBefore | None:
    ghost = ghosts.peek(namespace, tokens[: missing + tree.block_size].tobytes())
    return None if ghost is None else EvictedBefore(now - ghost.when, ghost.reason, ghost.policy)


def _relative(tree: PrefixTree, match: Match, key: bytes) -> Relative | None:
    """Compares the block after the match with those that are stored there."""
    whole = len(match.ids) * tree.block_size
    rest = key[whole * TOKEN_BYTES :]
    stored = _continuation(tree, match, rest)
    agreed = agreeing_tokens(stored, rest)
    if not stored or agreed * TOKEN_BYTES == len(rest):
        return None
    position = whole + agreed
    start = max(position - AROUND, 0)
    text = key[start * TOKEN_BYTES : whole * TOKEN_BYTES] + stored[max(start - whole, 0) * TOKEN_BYTES :]
    shown = text[: (position + AROUND + 1 - start) * TOKEN_BYTES]
    return Relative(position, start, tuple(memoryview(shown).cast("i")))


def _continuation(tree: PrefixTree, match: Match, rest: bytes) -> bytes:
    """What is stored after the match: of several branches, the one that agrees longest with ``rest``."""
    node = match.node
    if node is None:
        return b""
    if match.used < len(node.ids):
        return bytes(node.tokens[match.used * tree.block_size * TOKEN_BYTES :])
    near = bisect_left(node.keys, rest)
    branches = [bytes(node.children[each].tokens) for each in node.keys[max(near - 1, 0) : near + 1]]
    return max(branches, key=lambda stored: agreeing_tokens(stored, rest), default=b"")


def _has_more(tree: PrefixTree, namespace: Namespace, key: bytes, blocks: int) -> bool:
    limit = len(key) // TOKEN_BYTES
    return any(len(tree.match(other, key, limit).ids) > blocks for other in tree.namespaces() if other != namespace)
