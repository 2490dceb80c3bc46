"""Text to tokens and back: the forms of ``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TokenizeForm(msgspec.Struct):
    """A text in ``prompt``, or a conversation in ``messages``: one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None
    """Functions that the model's chat template is to tell the model about."""
    chat_template_kwargs: dict[str, object] | None = None
    """More variables for the chat template."""
    add_generation_prompt: bool | None = None
    """Whether the assistant's turn begins after the messages; by default it does."""
    continue_final_message: bool | None = None
    """Whether the last message, the assistant's, goes on."""
    add_special_tokens: bool | None = None
    """Whether a ``prompt`` gets what the tokenizer puts around texts, such as a BOS; by default it does. Messages get
    what their template writes."""
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    """The tokens of a prompt, as the model would see them."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
    """The text of each token alone, if asked for; U+FFFD where it is only a part of a character."""


class DetokenizeForm(msgspec.Struct):
    """Tokens to be shown as text."""

    tokens: list[TokenId]
    model: str | None = None


class Detokenized(msgspec.Struct):
    """Their text, with special tokens written out."""

    prompt: str
