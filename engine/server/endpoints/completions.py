"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from starlette.types import ASGIApp

from ....errors import ContextExceeded
from ..call import Call
from ..errors import invalid
from ..params import check_stream, completion_params, naming_fields, refuse, tenant_of
from ..prompt_reader import PromptReader
from ..wire.completions import CompletionForm
from ..wire.generation import StreamOptions
from .answering import Head, respond
from .completion_answer import CompletionAnswer, PromptEcho
from .side_by_side import start_all
from .token_texts import TokenTexts

OnePrompt: TypeAlias = str | list[int]
UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {"suffix": "nothing here fills gaps; put what comes before into the prompt"}
)


async def completions(call: Call) -> ASGIApp:
    """How a prompt goes on, or each of several.

    One JSON object, or, with `stream`, a stream of chunks that ends with `[DONE]`. One prompt that is refused refuses
    all of them, before anything runs.
    """
    form = checked(call.read(CompletionForm))
    head = Head.of(call, "cmpl", call.check_model(form.model))
    params, tenant = completion_params(form), tenant_of(call.caller, form.cache_salt)
    prompts = prompts_of(form, call.service.settings.max_prompts)
    with naming_fields(form, "prompt"):
        tokens = [await tokens_of(call.engine, form, prompt) for prompt in prompts]
        generations = [call.generate(ids, params, priority=form.priority, tenant=tenant) for ids in tokens]
        # the longest first: what the engine has room for then, it has room for with the others
        await start_all(
            generations[number] for number in sorted(range(len(tokens)), key=lambda each: -len(tokens[each]))
        )
    texts = TokenTexts(
        call.engine.codec,
        as_ids=form.return_tokens_as_token_ids is True,
        skip_special_tokens=form.skip_special_tokens is not False,
    )
    echoes = [PromptEcho(ids, _text(call, form, prompt, ids)) for prompt, ids in zip(prompts, tokens, strict=True)]
    answer = CompletionAnswer(head, form, texts, echoes)
    return await respond(call, generations, answer, (form.stream_options or StreamOptions()) if form.stream else None)


def checked(form: CompletionForm) -> CompletionForm:
    """Itself, when it asks for nothing that is not served.

    :raises ApiError: 400 otherwise.
    """
    refuse(UNSERVED, form)
    check_stream(form)
    return form


def prompts_of(form: CompletionForm, most: int) -> list[OnePrompt]:
    """Its prompts, each for itself; at most ``most``.

    :raises ApiError: 400 for a list that is empty, too long, or of numbers and other things.
    """
    prompt = form.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    several: list[OnePrompt] = [item for item in prompt if not isinstance(item, int)]
    if not prompt or (ids and several):
        raise invalid("prompt must be a text, token ids, or a list of texts or of lists of token ids", "prompt")
    if len(several) > most:
        raise invalid(f"{len(several)} prompts are more than the {most} that one request may have", "prompt")
    return several or [ids]


async def tokens_of(reader: PromptReader, form: CompletionForm, prompt: OnePrompt) -> list[int]:
    """The tokens of one of the prompts of ``form``.

    :raises ApiError: 400 when there are none, or some that the model does not have.
    :raises InvalidRequest: when it cannot be tokenised or is too long.
    """
    most = form.truncate_prompt_tokens
    if not isinstance(prompt, str):
        prompt = prompt if most is None else prompt[-most:]
        if len(prompt) > reader.model.max_context:  # before anybody looks at each of what may be millions
            raise ContextExceeded(
                f"the prompt is too long: its {len(prompt)} tokens exceed the model's context of "
                f"{reader.model.max_context} tokens"
            )
    ids, size = await reader.tokenize(prompt), reader.model.vocab_size
    if not ids:
        raise invalid("the prompt is empty; at least one token is needed", "prompt")
    if not 0 <= min(ids) <= max(ids) < size:
        raise invalid(f"prompt token ids must be from 0 to {size - 1}", "prompt")
    return ids if most is None else ids[-most:]


def _text(call: Call, form: CompletionForm, prompt: OnePrompt, ids: Sequence[int]) -> str:
    """The prompt as the text begins with it, if it does."""
    codec = call.engine.codec
    if not form.echo or codec is None:
        return ""
    if isinstance(prompt, str) and form.truncate_prompt_tokens is None:
        return prompt
    return codec.decode(ids, skip_special_tokens=form.skip_special_tokens is not False)
