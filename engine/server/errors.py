"""From the engine's errors to HTTP's, in one place: status, OpenAI's error body, ``Retry-After``."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from ...errors import (
    CannotContinue,
    ContextExceeded,
    EngineClosed,
    FingerprintMismatch,
    NeverFits,
    OctavoError,
    OutOfBlocks,
    PluginError,
    QueueFull,
    RequestRejected,
)
from .wire.errors import ErrorBody, ErrorDetail

INVALID: Final = "invalid_request_error"
AUTHENTICATION: Final = "authentication_error"
PERMISSION: Final = "permission_error"
NOT_FOUND: Final = "not_found_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class ApiError(OctavoError):
    """A refusal or failure that is ready to be sent."""

    def __init__(  # the fields of an error answer, each by its name
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """``kind``: OpenAI's ``type``. ``code``: a name for programs. ``headers``: to be sent with it."""
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is malformed: 400, with the field at fault."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def code_of(error: Exception) -> str | None:
    """The name for programs of what is wrong with a request, if it has one; OpenAI's where there is one."""
    if isinstance(error, ContextExceeded):
        return "context_length_exceeded"
    if isinstance(error, NeverFits):
        return "never_fits"
    return "cannot_continue" if isinstance(error, CannotContinue) else None


def too_many(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """There is no room: 429, and when to come again (seconds)."""
    headers = {"Retry-After": str(max(1, round(retry_after)))}
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, kind=RATE_LIMIT, code=code, headers=headers)


def unavailable(message: str, code: str, retry_after: float = 1.0) -> ApiError:
    """Not now: 503, and when to come again (seconds)."""
    headers = {"Retry-After": str(max(1, round(retry_after)))}
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, kind=SERVER, code=code, headers=headers)


def api_error(error: Exception, *, retry_after: float = 1.0) -> ApiError:
    """What a client is told of ``error``. Of errors that are not on purpose it learns nothing but that there was one.

    ``retry_after``: seconds after which a refusal for want of room is worth another try.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull | OutOfBlocks):
        return too_many(str(error), "queue_full" if isinstance(error, QueueFull) else "out_of_blocks", retry_after)
    if isinstance(error, RequestRejected | CannotContinue | PluginError):
        return invalid(str(error), code=code_of(error))
    if isinstance(error, FingerprintMismatch):
        return ApiError(HTTPStatus.CONFLICT, str(error), code="fingerprint_mismatch")
    if isinstance(error, EngineClosed):
        return unavailable(str(error), "shutting_down")
    is_ours = isinstance(error, OctavoError) and error.__cause__ is None  # a foreign error may quote anybody's text
    message = str(error) if is_ours else "the server failed on this request; its log says why"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, kind=SERVER, code="internal_error")
