"""Text to tokens and back, as the model sees them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TypeVar

import anyio.to_thread
from starlette.types import ASGIApp

from ....errors import InvalidRequest
from ...async_engine import AsyncEngine
from ...model.text import TextCodec
from ...request import Chat
from ..call import Call
from ..endpoint import json_response
from ..errors import invalid
from ..wire.tokens import Detokenized, DetokenizeForm, Tokenized, TokenizeForm

T = TypeVar("T")
MANY = 2000
"""Tokens, or characters, from which they are handled in a worker thread, so that the event loop stays free."""


async def tokenize(call: Call) -> ASGIApp:
    """The tokens of a text or of a conversation."""
    form = call.read(TokenizeForm)
    call.check_model(form.model)
    engine = call.service.engine
    try:
        ids = await _token_ids(engine, form)
    except InvalidRequest as error:
        raise invalid(str(error), "prompt" if form.messages is None else "messages") from error
    texts = None
    if form.return_token_strs:
        codec = _codec(engine)
        texts = await _off_loop(len(ids), lambda: [_text(codec, token) for token in ids])
    return json_response(Tokenized(ids, len(ids), engine.model.max_context, texts))


async def detokenize(call: Call) -> ASGIApp:
    """The text of tokens, special ones written out."""
    form = call.read(DetokenizeForm)
    call.check_model(form.model)
    engine = call.service.engine
    codec, size = _codec(engine), engine.model.vocab_size
    if form.tokens and max(form.tokens) >= size:
        raise invalid(f"tokens must be from 0 to {size - 1}", "tokens")
    text = await _off_loop(len(form.tokens), lambda: codec.decode(form.tokens, skip_special_tokens=False))
    return json_response(Detokenized(text))


async def _token_ids(engine: AsyncEngine, form: TokenizeForm) -> list[int]:
    if form.messages is not None:
        if form.prompt is not None:
            raise invalid("give prompt or messages, not both", "messages")
        return await engine.tokenize(_chat(form, form.messages))
    if form.prompt is None:
        raise invalid("prompt or messages are needed", "prompt")
    text = form.prompt
    if form.add_special_tokens is not False:
        return await engine.tokenize(text)
    codec = _codec(engine)
    return await _off_loop(len(text), lambda: _bare(codec, text))


def _chat(form: TokenizeForm, messages: list[dict[str, object]]) -> Chat:
    continues = form.continue_final_message is True
    if continues and form.add_generation_prompt:
        raise invalid("a final message that goes on leaves no room for add_generation_prompt", "continue_final_message")
    return Chat(
        messages,
        form.tools or (),
        form.chat_template_kwargs or {},
        continues_last=continues,
        opens_turn=not continues and form.add_generation_prompt is not False,
    )


def _codec(engine: AsyncEngine) -> TextCodec:
    if engine.codec is None:
        raise invalid("this model came without a tokenizer: it takes and gives token ids only")
    return engine.codec


def _bare(codec: TextCodec, text: str) -> list[int]:
    """The tokens of ``text`` without those that the tokenizer puts around any text: all that an empty one has."""
    around, digit, ids = codec.encode(""), codec.encode("0"), codec.encode(text)
    front = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(around, digit, strict=False)))
    return ids[front : len(ids) - (len(around) - front)]


def _text(codec: TextCodec, token: int) -> str:
    return codec.token_bytes(token).decode("utf-8", "replace")


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(work) if size > MANY else work()
