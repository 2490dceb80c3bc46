"""What was said, in the words of the GenAI conventions: messages of parts.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..prompts import as_chat, checked_ids
from ..request import ChatMessage, Prompt


def input_messages(prompt: Prompt) -> list[Mapping[str, object]]:
    """A prompt of any kind that was accepted."""
    if isinstance(prompt, str):
        return [text_message("user", prompt)]
    chat = as_chat(prompt)
    if chat is None:
        return [{"role": "user", "parts": [{"type": "token_ids", "content": checked_ids(prompt)}]}]
    return [{"role": str(message.get("role", "")), "parts": list(_parts(message))} for message in chat.messages]


def text_message(role: str, text: str) -> Mapping[str, object]:
    """A message of one text."""
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _parts(message: ChatMessage) -> Iterator[Mapping[str, object]]:
    texts = list(_texts(message.get("content")))
    if message.get("role") == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": "\n".join(texts)}
        return
    for text in texts:
        yield {"type": "text", "content": text}
    for call in _objects(message.get("tool_calls")):
        [function] = _objects([call.get("function")]) or [{}]
        yield {
            "type": "tool_call",
            "id": call.get("id"),
            "name": function.get("name"),
            "arguments": function.get("arguments"),
        }


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in _objects(content):
        yield str(part.get("text", ""))


def _objects(values: object) -> list[Mapping[str, object]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list | tuple) else []
