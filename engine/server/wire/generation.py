"""What chat and completions have in common: the fields that say how to generate, and how tokens are counted.

Reference: https://platform.openai.com/docs/api-reference/chat. The fields beyond it are those of vLLM, which clients
send through ``extra_body``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from ...request import MAX_SAMPLES, MAX_STOP_LENGTH, MAX_STOPS, MAX_TOKENS

MAX_ALTERNATIVES = 20
"""As OpenAI and vLLM have it. All of them are written out for every token, in the event loop."""
MAX_BIASED = 2**14
"""Tokens that a request may favour or ban: each costs time in each step."""
MAX_STOP_IDS = 1024
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Samples: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
Alternatives: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_ALTERNATIVES)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Stop: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BiasKey: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,10}$", description="A token id.")]
Bias: TypeAlias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


class JsonSchemaFormat(msgspec.Struct):
    """A schema with a name."""

    name: str
    schema: dict[str, object] | None = None
    strict: bool | None = None
    """Without effect: the schema is always kept to."""
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """What the answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """What the answer has to look like, as vLLM has it: one of these."""

    json: dict[str, object] | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    """One more chunk before the end, without choices, that counts the tokens."""
    continuous_usage_stats: bool | None = None
    """Every chunk counts the tokens so far."""


class GenerationForm(msgspec.Struct, kw_only=True):
    """The fields that both forms have."""

    model: str | None = None
    max_tokens: Tokens | None = None
    n: Samples | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], msgspec.Meta(max_length=MAX_BIASED)] | None = None
    response_format: ResponseFormat | None = None

    # of vLLM and its kin
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 or -1 keeps all tokens."""
    min_p: Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    min_tokens: Tokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    best_of: Samples | None = None
    """Samples to draw, of which the ``n`` with the highest mean log-probability are returned."""
    use_beam_search: bool | None = None
    """Search with ``best_of`` beams, or ``n`` without it."""
    length_penalty: Annotated[float, msgspec.Meta(ge=-100, le=100)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Alternatives | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Keep this many tokens at the end of the prompt."""
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    """Higher is more urgent; at most that of the API key."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Share cached prefixes only with requests of the same salt. Not for keys with a tenant of their own."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name their tokens as ``token_id:7``."""

    # known, and without effect here
    user: str | None = None
    metadata: dict[str, object] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None
    guided_decoding_backend: str | None = None


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, how many were not computed because they were in the cache."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Of the completion's tokens; there are no other kinds than text here."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a request: each prompt once, and all samples that are returned."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct):
    """One token at a place of the prompt, as vLLM has it."""

    logprob: float
    rank: int | None
    """1 for the likeliest; ``null`` when it is none of the alternatives asked for."""
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt: id -> that token and the likeliest alternatives; ``null`` for the first."""
