"""Every error that Octavo raises on purpose, in one tree.

Catch :class:`OctavoError` for all of them, :class:`RequestRejected` for what the caller can mend. Cancellation and
deadlines stay the runtime's own exceptions.
"""

from __future__ import annotations

import typing


class OctavoError(Exception):
    """Root of the tree."""


class EngineClosed(OctavoError):
    """The engine is not open (any more): it was closed, is draining, or belongs to another event loop."""


class RequestRejected(OctavoError):
    """The request was refused before any state changed."""


class QueueFull(RequestRejected):
    """The waiting queue has reached its bound; try again later or raise ``max_waiting``."""


class NeverFits(RequestRejected):
    """The request would not fit even in an empty engine; shorten it or enlarge the engine."""


class InvalidRequest(RequestRejected, ValueError):
    """A prompt or parameter is malformed or out of range; the message names it and the allowed range."""


class ContextExceeded(InvalidRequest):
    """Prompt and answer are longer than the model's context; shorten the prompt or lower ``max_tokens``."""


class CannotContinue(OctavoError):
    """The request's own demands leave no token that could come next: all are banned, or its output format cannot be
    followed any further. Loosen them; neither the model nor what is cached is at fault.
    """


class OutOfBlocks(OctavoError):
    """The pool cannot give the blocks that were asked for, not even by eviction. Nothing was changed."""


class CacheMisuse(OctavoError):
    """A call that the cache's contract forbids: double free, reference to a free block, use after finish."""


class CensusFailed(OctavoError):
    """The cache's self-check found a contradiction; the message lists each one."""


class ReplicaLost(OctavoError):
    """A replica of a fleet is gone or cannot be reached, and with it what it had begun of an answer; try again."""

    def __init__(self, message: str, replica: str | None = None, *, has_waited: bool = False) -> None:
        super().__init__(message)
        self.replica = replica
        """Which one; ``None``: there is none at all."""
        self.has_waited = has_waited
        """Whether the request has waited for another one already, for as long as it may."""


class ModelError(OctavoError):
    """The model could not be loaded or a step of it failed; the cause is chained."""


class UnsupportedModel(ModelError):
    """The model cannot run on a paged cache (attention outside the interface, recurrent state, ...)."""


class DeviceOutOfMemory(ModelError):
    """A step or an allocation needs more device memory than there is; the engine retries a step in smaller pieces."""


class PluginError(OctavoError):
    """Root of what can go wrong with a plug-in."""


class UnknownPlugin(PluginError):
    """No installed distribution offers this name; the message lists the names that exist."""


class PluginImportFailed(PluginError):
    """The entry point exists but could not be imported; the message names its distribution."""


class ContractBroken(PluginError):
    """A plug-in has the wrong shape (not a class of the protocol, another major version) or broke its contract."""


class StorageError(OctavoError):
    """Root of what can go wrong below device memory."""


class CorruptBlock(StorageError):
    """A stored block failed its checksum; it is dropped and counts as a miss."""


class FingerprintMismatch(StorageError):
    """Stored state belongs to other weights, another geometry or another format."""


class TelemetryError(OctavoError):
    """Traces, metrics or events cannot be set up as asked; the message says what to install or to change."""


class TraceError(OctavoError, ValueError):
    """A trace cannot be read; the message names the file, the line and what is wrong there."""


_E = typing.TypeVar("_E", bound=BaseException)


def caused(error: _E, cause: BaseException) -> _E:
    """``error`` with ``cause`` chained to it, for errors that are handed on rather than raised."""
    error.__cause__ = cause
    return error


def describe(error: BaseException) -> str:
    """Type and message of a foreign error in one line, also of one whose own text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # foreign code again
        return type(error).__name__
