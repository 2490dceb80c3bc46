"""Naming: from the body of a request to the names of its prompt's blocks, as the caches of the replicas name them.

It takes a tokenizer and no weights. Bodies are read by the functions that the routes of a replica read them with, so
that both see the same tokens; what those refuse has no names here, and the replica says why.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Final, NamedTuple, Self

import anyio.to_thread
import msgspec

from ...errors import OctavoError
from ...policies.routing.base import RoutedRequest
from ...storage.naming import BlockName, Namespace, names_after
from ..config import EngineConfig
from ..intake import Intake
from ..kv import encode_tokens
from ..model.loader import load_text
from ..model.runner import ModelInfo
from ..model.text import TextCodec
from ..request import Prompt
from ..server.access import Caller
from ..server.call import read_form
from ..server.endpoints import chat, completions, responses
from ..server.endpoints.response_input import input_messages
from ..server.endpoints.response_params import as_chat_form
from ..server.endpoints.tool_use import offered_tools, told_tools
from ..server.operations import prompt_of
from ..server.params import DEFAULT_MAX_TOKENS, tenant_of
from ..server.prompt_reader import PromptReader
from ..server.wire.chat import ChatForm
from ..server.wire.completions import CompletionForm
from ..server.wire.generation import GenerationForm
from ..server.wire.operations import OwnExplainForm
from ..server.wire.response_form import ResponseForm
from .base import Scheme

EXPECTED_TOKENS: Final = 256
"""Of an answer that may be as long as it likes."""
BYTES_PER_TOKEN: Final = 4
"""Of a body whose prompt is not known, about."""
RESPONSES: Final = "/v1/responses"
MANY_TOKENS: Final = 16_384
"""From which on blocks are named in a worker thread: it takes about 60 ns a token."""


class TextReader:
    """A :class:`~octavo.engine.server.prompt_reader.PromptReader` without an engine. Takes no weights and no cache."""

    def __init__(self, model: ModelInfo, codec: TextCodec | None, config: EngineConfig) -> None:
        """``config``: that of the replicas."""
        self.model = model
        self.config = config
        self._intake = Intake(model, model.fingerprint, codec, config, clock=time.monotonic, new_id=count().__next__)

    @classmethod
    def open(
        cls,
        model: str,
        config: EngineConfig | None = None,
        *,
        chat_template: str | None = None,
    ) -> Self:
        """Read the tokenizer of ``model``, which is named as for ``AsyncEngine.open``. Blocks for a second or two.

        :raises ModelError: when it cannot be had.
        """
        used = config or EngineConfig()
        found = load_text(model, dtype=used.dtype, chat_template=chat_template)
        info = ModelInfo(model, "", found.vocab_size, found.max_context, frozenset(), 0, MappingProxyType({}))
        return cls(info, found.codec, used)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt of any kind; long texts are tokenised in a worker thread.

        :raises InvalidRequest: when it is malformed, or needs a tokenizer that the model came without.
        """
        return await self._intake.tokenize(prompt)


class Reading(NamedTuple):
    """What is known of a request."""

    request: RoutedRequest
    follows: str | None = None
    """The response that it goes on from, which lies on one replica."""


class _Prompted(NamedTuple):
    """What a body asks for."""

    ids: Sequence[int]
    """Of its first prompt."""
    cache_salt: str | None
    output_tokens: int
    """Of all answers together, at most or as expected."""
    prompts: int = 1


class _Follower(msgspec.Struct):
    """What a body says of the response before it."""

    previous_response_id: str | None = None


_Read = Callable[[PromptReader, bytes], Awaitable[_Prompted]]


class PromptNaming:
    """Names the prompts of requests for one model."""

    def __init__(self, reader: PromptReader | None) -> None:
        """``reader``: of the replicas' model; ``None``: there is none, and nothing is named."""
        self._reader = reader

    async def read(self, path: str, body: bytes, caller: Caller, scheme: Scheme | None) -> Reading:
        """What is known of a request. Whatever keeps its blocks from being named, an error in it too, gives one
        without names. ``scheme``: of the replicas; ``None``: not known yet.
        """
        block_tokens = 1 if scheme is None else scheme.block_tokens
        unknown = RoutedRequest((), len(body) // BYTES_PER_TOKEN + 1, EXPECTED_TOKENS, block_tokens)
        read = _ROUTES.get(path)
        try:
            follows = read_form(body, _Follower).previous_response_id if path == RESPONSES else None
            if self._reader is None or scheme is None or read is None or follows is not None:
                return Reading(unknown, follows)
            found = await read(self._reader, body)
            salted = tenant_of(caller, found.cache_salt)
            names = await _names(found.ids, scheme, salted if caller.tenant is None else caller.tenant)
        except OctavoError:  # the replica finds the same, and has the words for it
            return Reading(unknown)
        prompt_tokens = len(found.ids) * found.prompts
        return Reading(RoutedRequest(names, prompt_tokens, found.output_tokens, block_tokens))


async def _names(ids: Sequence[int], scheme: Scheme, tenant: str | None) -> list[BlockName]:
    """The names of all whole blocks of a prompt."""
    root = Namespace(scheme.model, adapter=None, salt=tenant).checked().shelf().namespace
    tokens = memoryview(encode_tokens(ids)).cast("B")
    name = partial(names_after, root, tokens, scheme.block_tokens)
    return await anyio.to_thread.run_sync(name) if len(ids) >= MANY_TOKENS else name()


async def _of_chat(reader: PromptReader, body: bytes) -> _Prompted:
    form = chat.checked(read_form(body, ChatForm))
    told = told_tools(offered_tools(form))
    prompt, ids = await chat.prompt_of(reader, form, chat.conversation(form, told))
    most = form.max_tokens if form.max_completion_tokens is None else form.max_completion_tokens
    ids = await reader.tokenize(prompt) if ids is None else ids
    return _Prompted(ids, form.cache_salt, _expected(form, most))


async def _of_completion(reader: PromptReader, body: bytes) -> _Prompted:
    form = completions.checked(read_form(body, CompletionForm))
    prompts = completions.prompts_of(form, len(body))
    most = DEFAULT_MAX_TOKENS if form.max_tokens is None else form.max_tokens
    ids = await completions.tokens_of(reader, form, prompts[0])
    return _Prompted(ids, form.cache_salt, _expected(form, most) * len(prompts), len(prompts))


async def _of_response(reader: PromptReader, body: bytes) -> _Prompted:
    form = read_form(body, ResponseForm)
    most = EXPECTED_TOKENS if form.max_output_tokens is None else form.max_output_tokens
    told = told_tools(offered_tools(as_chat_form(form)))
    ids = await reader.tokenize(await responses.conversation(reader, form, input_messages(form.input), told))
    return _Prompted(ids, form.cache_salt, most)


async def _of_explanation(reader: PromptReader, body: bytes) -> _Prompted:
    form = read_form(body, OwnExplainForm)
    ids = await reader.tokenize(prompt_of(form, opens_turn=True))
    return _Prompted(ids, form.cache_salt, EXPECTED_TOKENS)  # it is asked where a request would go


def _expected(form: GenerationForm, most: int | None) -> int:
    samples = max(form.n or 1, form.best_of or 1)
    return samples * (EXPECTED_TOKENS if most is None else most)


_ROUTES: Final[Mapping[str, _Read]] = MappingProxyType(
    {
        "/v1/chat/completions": _of_chat,
        "/v1/completions": _of_completion,
        RESPONSES: _of_response,
        "/v1/cache/explain": _of_explanation,
    }
)
