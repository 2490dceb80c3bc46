"""The error body of the OpenAI API."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """What went wrong, in words and in names that a program can go by."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """``{"error": {...}}``."""

    error: ErrorDetail
