"""The page at ``/ui``: fixed files out of the package, with headers that let it load and run nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from types import MappingProxyType
from typing import Final, NamedTuple

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ... import server

INDEX: Final = "index.html"
ASSETS: Final = (
    "api.js",
    "app.js",
    "base.css",
    "cache.css",
    "cache.js",
    "chat.css",
    "chat.js",
    "composer.js",
    "dom.js",
    "format.js",
    "head.css",
    "icon.svg",
    "operations.js",
    "panels.js",
    "pool.js",
    "replicas.js",
    "sparkline.js",
    "sse.js",
    "tree.css",
    "tree.js",
    "turn.js",
)
MEDIA_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "css": "text/css; charset=utf-8",
        "html": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
)
RULES: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # what servers and models say can only become text
    "trusted-types 'none'",
)
"""https://www.w3.org/TR/CSP3/. The page shows what models and strangers have written, beside the admin token."""
HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": "; ".join(RULES),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # ask each time, with the tag: another release of the server has another page
    }
)


class File(NamedTuple):
    """A file of the page, as it goes out."""

    content: bytes
    headers: Mapping[str, str]
    tag: str
    """Its ``ETag``."""


class Page:
    """An ASGI app: ``/ui`` and the files below it. Anybody may have them; what they show is asked for with keys."""

    def __init__(self) -> None:
        self._files = {"" if name == INDEX else name: _read(name) for name in (INDEX, *ASSETS)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._files.get(scope.get("path_params", {}).get("file", ""))
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if found.tag in Headers(scope=scope).get("if-none-match", ""):
            response = Response(None, HTTPStatus.NOT_MODIFIED, found.headers)
        else:
            response = Response(found.content, HTTPStatus.OK, found.headers)
        await response(scope, receive, send)


def _read(name: str) -> File:
    content = (files(server) / "ui" / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    return File(content, {**HEADERS, "Content-Type": media_type, "ETag": tag}, tag)
