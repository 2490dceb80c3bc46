"""``POST /v1/completions``: what goes in, and what comes out, whole or as a stream.

Reference: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from .generation import Alternatives, Finish, GenerationForm, PromptLogprobs, Usage


class CompletionForm(GenerationForm, kw_only=True):
    """A request to continue one prompt or several."""

    prompt: str | list[str | int | list[int]]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    echo: bool | None = None
    """Begin the text, and the log-probabilities, with the prompt."""
    logprobs: Alternatives | None = None
    suffix: str | None = None
    """Refused unless ``null``: nothing here fills gaps."""


class CompletionLogprobs(msgspec.Struct):
    """Lists with one entry per token; with ``echo`` those of the prompt, too, of which the first has none."""

    tokens: list[str]
    """Texts of the tokens; ``bytes:\\x..`` for parts of characters."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The token itself, and the likeliest alternatives."""
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt, or what is new in it. The samples of a prompt are numbered one after the other."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    """``null`` while more is to come."""
    stop_reason: str | int | UnsetType | None = UNSET
    """The stop string or stop token id that ended it."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The whole answer, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
