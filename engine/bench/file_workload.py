"""FileWorkload: requests from a file of JSON lines, each ``{"messages": [...]}`` or ``{"prompt": ...}``.

Further fields of a line (``max_tokens``, ``tools``, ``temperature``...) go into its request as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...errors import InvalidRequest, describe
from .settings import Endpoint
from .workload import Conversation, Turn

Fields = dict[str, object]


class FileWorkload:
    """The lines in their order, over and over."""

    def __init__(self, lines: Sequence[Fields]) -> None:
        self._lines = lines

    @property
    def conversations(self) -> int | None:
        return len(self._lines)

    def conversation(self, number: int) -> Conversation:
        return Conversation("", (Turn(None, None, fields=self._lines[number % len(self._lines)]),))


def read_workload(path: Path, endpoint: Endpoint, output_tokens: int) -> FileWorkload:
    """``output_tokens``: for lines that do not say how many.

    :raises InvalidRequest: when the file cannot be read, is empty, or a line does not fit; the message names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the workload cannot be read: {describe(error)}") from error
    numbered = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    lines = [_request(f"{path}:{number}", line, endpoint) for number, line in numbered]
    if not lines:
        raise InvalidRequest(f"{path} has no requests: give one JSON object a line, with messages or a prompt")
    return FileWorkload([_bounded(fields, output_tokens) for fields in lines])


def _bounded(fields: Fields, output_tokens: int) -> Fields:
    if "max_tokens" in fields or "max_completion_tokens" in fields:
        return fields
    return fields | {"max_tokens": output_tokens}


def _request(where: str, line: bytes, endpoint: Endpoint) -> Fields:
    try:
        fields = msgspec.json.decode(line, type=Fields)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{where}: {error}") from error
    prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InvalidRequest(f"{where}: give either messages or a prompt")
    if endpoint is Endpoint.COMPLETIONS:
        if prompt is None:
            raise InvalidRequest(f"{where}: messages need --endpoint chat")
        return fields | {"prompt": prompt}
    if messages is None:
        if not isinstance(prompt, str):
            raise InvalidRequest(f"{where}: a prompt of ids needs --endpoint completions")
        messages = [{"role": "user", "content": prompt}]
    return fields | {"messages": messages}
