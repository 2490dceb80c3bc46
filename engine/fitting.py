"""How long an answer may get: what the model's context and the pool can take of a request that has them alone."""

from __future__ import annotations

from ..errors import ContextExceeded, NeverFits
from .config import EngineConfig
from .request import MAX_TOKENS, SamplingParams

TOO_LONG = "the prompt is too long"
"""LangChain and LiteLLM look for these words: it is by them that an agent learns to shorten a conversation."""


def max_tokens(prompt_tokens: int, params: SamplingParams, max_context: int, config: EngineConfig) -> int:
    """Most tokens to generate: what ``params`` ask for, or all that there is room for where they leave it open.

    :raises ContextExceeded: when context or prompt leave no room for it.
    :raises NeverFits: when it could not run even alone.
    """
    _check_width(params, config)
    if params.max_tokens is not None:
        _check_length(prompt_tokens, params.max_tokens, params, max_context, config)
        return params.max_tokens
    least = max(params.min_tokens, 1)
    if prompt_tokens + least > max_context:
        raise ContextExceeded(
            f"{TOO_LONG}: {prompt_tokens} prompt tokens leave no room for {least} more in the model's context of "
            f"{max_context} tokens"
        )
    in_pool = _room_in_pool(prompt_tokens, params, config)
    if in_pool < least:
        raise NeverFits(_too_many(_blocks(prompt_tokens, least, params, config), config))
    return min(max_context - prompt_tokens, in_pool, MAX_TOKENS)


def _check_width(params: SamplingParams, config: EngineConfig) -> None:
    most = min(config.max_running, config.max_batch_tokens if params.beam_width > 1 else config.max_running)
    if params.samples > most:
        raise NeverFits(f"{params.samples} sequences are asked for and this engine runs at most {most} side by side")


def _check_length(
    prompt_tokens: int, wanted: int, params: SamplingParams, max_context: int, config: EngineConfig
) -> None:
    if prompt_tokens + wanted > max_context:
        raise ContextExceeded(
            f"{TOO_LONG} for max_tokens {wanted}: with its {prompt_tokens} tokens that exceeds the model's context of "
            f"{max_context} tokens"
        )
    needed = _blocks(prompt_tokens, wanted, params, config)
    if needed > config.num_blocks:
        raise NeverFits(_too_many(needed, config))


def _too_many(needed: int, config: EngineConfig) -> str:
    return (
        f"the request may need {needed} blocks of {config.block_size} tokens and the pool has {config.num_blocks}; "
        "lower max_tokens or raise num_blocks"
    )


def _blocks(prompt_tokens: int, wanted: int, params: SamplingParams, config: EngineConfig) -> int:
    """Blocks that the request may come to hold at the same time."""
    computed = prompt_tokens + max(wanted - 1, 0)  # the last token's K and V are never needed
    shared = _shared(prompt_tokens, params, config)
    return shared + params.samples * (-(-computed // config.block_size) - shared)


def _room_in_pool(prompt_tokens: int, params: SamplingParams, config: EngineConfig) -> int:
    """The greatest length for which ``_blocks`` are no more than there are; below 1 if there is none."""
    shared = _shared(prompt_tokens, params, config)
    each = shared + (config.num_blocks - shared) // params.samples
    return each * config.block_size - prompt_tokens + 1


def _shared(prompt_tokens: int, params: SamplingParams, config: EngineConfig) -> int:
    """Blocks of the prompt that all samples hold together."""
    # beams run together or not at all; preempted ones come back to a shared prompt only if there is a prefix cache
    sharing = params.samples > 1 and (config.enable_prefix_caching or params.beam_width == 1)
    return prompt_tokens // config.block_size if sharing else 0
