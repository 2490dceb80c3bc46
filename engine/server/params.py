"""From the fields of a form to SamplingParams, and from the engine's refusals back to the field at fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from ...errors import InvalidRequest
from ..output_format import OutputFormat
from ..request import SamplingParams
from .access import Caller
from .errors import code_of, invalid
from .wire.chat import ChatForm
from .wire.completions import CompletionForm
from .wire.generation import GenerationForm, ResponseFormat, StructuredOutputs

SAME_NAMES: Final = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "best_of",
    "length_penalty",
    "early_stopping",
    "prompt_logprobs",
)
DEFAULT_MAX_TOKENS: Final = 16
"""Of completions, as OpenAI has it."""
FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "include_stop": "include_stop_str_in_output",
        "beam_width": "use_beam_search",
        "template_options": "chat_template_kwargs",
    }
)
"""Name in the engine -> name on the wire, where they differ."""
FORMATS: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tool_choice",
)
ABOUT_FORMAT: Final = re.compile(
    r"(the |an? )?(output.?format|json schema|reg(ular expression|ex)|grammar|choice)\b", re.IGNORECASE
)
"""How the engine's refusals of an output format begin."""


def chat_params(form: ChatForm, output_format: OutputFormat | None, *, shows_special_tokens: bool) -> SamplingParams:
    """How to continue a conversation. ``output_format``: what the answer must look like, all things considered.

    ``shows_special_tokens``: leave them in the text, whatever the client wants, for somebody who reads them there.

    :raises ApiError: 400 when the form contradicts itself or a value is out of range.
    """
    if form.top_logprobs and not form.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    newer, older = form.max_completion_tokens, form.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid(f"max_tokens ({older}) and max_completion_tokens ({newer}) differ; send one", "max_tokens")
    values = _values(form)
    values["max_tokens"] = older if newer is None else newer
    if output_format is not None:
        values["output_format"] = output_format
    if form.logprobs:
        values["logprobs"] = form.top_logprobs or 0
    if shows_special_tokens:
        values["skip_special_tokens"] = False
    return _made(form, values)


def completion_params(form: CompletionForm) -> SamplingParams:
    """How to continue a prompt.

    :raises ApiError: 400 when the form contradicts itself or a value is out of range.
    """
    values = _values(form)
    values["max_tokens"] = DEFAULT_MAX_TOKENS if form.max_tokens is None else form.max_tokens
    if (wanted := output_format(form)) is not None:
        values["output_format"] = wanted
    if form.logprobs is not None:
        values["logprobs"] = form.logprobs
    if form.logprobs is not None and form.echo:
        values["prompt_logprobs"] = max(form.logprobs, form.prompt_logprobs or 0)
    return _made(form, values)


def output_format(form: GenerationForm) -> OutputFormat | None:
    """What the answer has to look like, by whichever of the fields for that.

    :raises ApiError: 400 when several say so, or one is malformed.
    """
    made = list(_formats(form))
    if len(made) > 1:
        raise invalid(f"{' and '.join(name for name, _ in made)} exclude each other; send one", made[1][0])
    return made[0][1] if made else None


def tenant_of(caller: Caller, cache_salt: str | None) -> str | None:
    """As whose the cache is used by a ``caller`` without a tenant.

    :raises ApiError: 400 for a ``cache_salt`` of one who has a tenant.
    """
    if cache_salt is None:
        return None
    if caller.tenant is not None:
        raise invalid("this API key has a cache of its own; leave cache_salt out", "cache_salt")
    return cache_salt


@contextmanager
def naming_fields(form: GenerationForm, prompt: str) -> Iterator[None]:
    """Let the engine's refusals tell the field at fault. ``prompt``: the name of the field that holds the prompt."""
    try:
        yield
    except InvalidRequest as error:
        raise invalid(str(error), _field_at_fault(str(error), form, prompt), code_of(error)) from error


def refuse(reasons: Mapping[str, str], form: GenerationForm) -> None:
    """Refuse fields that are known, that would change the answer, and that mean nothing here. Field -> what to do.

    :raises ApiError: 400 when one of them is not null.
    """
    for name, reason in reasons.items():
        if getattr(form, name) is not None:
            raise invalid(f"{name} is not supported: {reason}", name)


def check_stream(form: GenerationForm) -> None:
    """Whether what it says of streams makes sense.

    :raises ApiError: 400 when it says how to stream without asking for a stream, or wants what no stream tells.
    """
    if form.stream_options is not None and not form.stream:
        raise invalid("stream_options need stream to be true", "stream_options")
    if form.prompt_logprobs is not None and form.stream:
        raise invalid("prompt_logprobs are not told in a stream; leave out stream", "prompt_logprobs")


def _values(form: GenerationForm) -> dict[str, object]:
    values: dict[str, object] = {name: value for name in SAME_NAMES if (value := getattr(form, name)) is not None}
    if form.logit_bias is not None:
        values["logit_bias"] = {int(token): bias for token, bias in form.logit_bias.items()}
    if form.top_k is not None:
        values["top_k"] = max(form.top_k, 0)
    if form.include_stop_str_in_output is not None:
        values["include_stop"] = form.include_stop_str_in_output
    if form.use_beam_search:
        values["beam_width"] = values.pop("best_of", form.n or 1)
        values["temperature"] = 0.0  # one beam is the likeliest token each time
    return values


def _made(form: GenerationForm, values: Mapping[str, object]) -> SamplingParams:
    with naming_fields(form, "prompt"):
        return SamplingParams.from_mapping(values)


def _formats(form: GenerationForm) -> Iterator[tuple[str, OutputFormat]]:
    with naming_fields(form, "prompt"):
        if form.response_format is not None and form.response_format.type != "text":
            yield "response_format", _of_response_format(form.response_format)
        if form.structured_outputs is not None:
            yield "structured_outputs", _of_structured_outputs(form.structured_outputs)
        guided = StructuredOutputs(form.guided_json, form.guided_regex, form.guided_choice, form.guided_grammar)
        for name, made in _structured(guided):
            yield f"guided_{name}", made


def _of_response_format(wanted: ResponseFormat) -> OutputFormat:
    if wanted.type == "json_object":
        return OutputFormat.json_object()
    if wanted.json_schema is None:
        raise invalid("response_format needs json_schema: {name, schema}", "response_format.json_schema")
    schema = wanted.json_schema.schema
    return OutputFormat.json_object() if schema is None else OutputFormat.json_schema(schema)


def _of_structured_outputs(wanted: StructuredOutputs) -> OutputFormat:
    made = list(_structured(wanted))
    if len(made) != 1:
        raise invalid("structured_outputs needs one of json, regex, choice, grammar, json_object", "structured_outputs")
    return made[0][1]


def _structured(wanted: StructuredOutputs) -> Iterator[tuple[str, OutputFormat]]:
    if wanted.json is not None:
        yield "json", OutputFormat.json_schema(wanted.json)
    if wanted.regex is not None:
        yield "regex", OutputFormat.regex(wanted.regex)
    if wanted.choice is not None:
        yield "choice", OutputFormat.choice(wanted.choice)
    if wanted.grammar is not None:
        yield "grammar", OutputFormat.grammar(wanted.grammar)
    if wanted.json_object:
        yield "json_object", OutputFormat.json_object()


def _field_at_fault(message: str, form: GenerationForm, prompt: str) -> str | None:
    """Messages of the engine begin with the name of the parameter; all others are about the prompt, or the format."""
    first = message.split(maxsplit=1)[0].rstrip(":,")
    name = FIELDS.get(first, first)
    if name in form.__struct_fields__:
        return name
    if ABOUT_FORMAT.match(message):
        return next((name for name in FORMATS if getattr(form, name, None) is not None), None)
    return prompt
