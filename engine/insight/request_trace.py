"""What a request's span says about it, in the words of the GenAI conventions and our own."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...telemetry import names
from ...telemetry.record import Attributes, Value
from ..prompts import as_chat
from ..request import FinishReason, Prompt, SamplingParams
from ..sequence import Sample, SequenceGroup
from .message_text import input_messages, text_message


def operation_of(prompt: Prompt) -> str:
    """What the convention calls a request like this."""
    return names.OPERATION_COMPLETION if as_chat(prompt) is None else names.OPERATION_CHAT


def asked(group: SequenceGroup, *, streams: bool) -> Attributes:
    """What the caller wants of ``group``. No text of the prompt."""
    params = group.params
    wanted: dict[str, Value] = {
        names.REQUEST_ID: encodable(group.request_id),
        names.RESPONSE_ID: encodable(group.request_id),
        names.REQUEST_STREAM: streams,
        names.PRIORITY: group.job.priority,
        names.USAGE_INPUT_TOKENS: len(group.prompt_ids),
        **_params(params),
    }
    if group.namespace.salt is not None:
        wanted[names.TENANT] = encodable(group.namespace.salt)
    return wanted


def encodable(text: str) -> str:
    """``text`` as UTF-8 can say it: of a client's lone surrogates, exporters would make an error each."""
    return text.encode("utf-8", "backslashreplace").decode()


def _params(params: SamplingParams) -> dict[str, Value]:
    shown: dict[str, Value] = {
        names.REQUEST_TEMPERATURE: params.temperature,
        names.REQUEST_TOP_P: params.top_p,
        names.REQUEST_TOP_K: params.top_k,
        names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
        names.REQUEST_CHOICE_COUNT: params.n,
    }
    if params.max_tokens is not None:
        shown[names.REQUEST_MAX_TOKENS] = params.max_tokens
    if params.seed is not None:
        shown[names.REQUEST_SEED] = (
            params.seed if params.seed < 2**63 else params.seed - 2**64
        )  # its integers are signed
    return shown


def finish_trace(group: SequenceGroup, results: Sequence[Sample] | None) -> None:
    """``group`` is over: say how it went, and close its trace. ``results``: what is handed out, if not all samples."""
    trace, metrics = group.trace, group.metrics
    samples = group.samples if results is None else results
    shown: dict[str, Value] = {
        names.RESPONSE_FINISH_REASONS: [str(sample.finish_reason or group.ended_by) for sample in samples],
        names.USAGE_OUTPUT_TOKENS: sum(len(s.token_ids) for s in (group.samples if group.beam is None else samples)),
        names.USAGE_CACHE_READ: group.cached_tokens,
        names.TOKENS: group.generated,
        names.PREEMPTIONS: metrics.preemptions,
    }
    if metrics.scheduled is not None:
        shown[names.QUEUE_SECONDS] = metrics.scheduled - metrics.arrival
    if metrics.first_token is not None:
        shown[names.RESPONSE_TIME_TO_FIRST_CHUNK] = metrics.first_token - metrics.arrival
    trace.describe(shown)
    if trace.shows_text:
        trace.describe(output_text(samples))
    if group.error is not None:
        trace.finish(type(group.error).__name__, f"the request failed: {type(group.error).__name__}")
    elif group.ended_by is FinishReason.ABORT:
        trace.finish("aborted", "the request was aborted")
    else:
        trace.finish()


def input_text(prompt: Prompt, params: SamplingParams) -> Attributes:
    """The prompt itself and the stop strings, for hosts that ask for them, in the form of the convention."""
    shown: dict[str, Value] = {names.INPUT_MESSAGES: json.dumps(input_messages(prompt), default=str)}
    if params.stop:
        shown[names.REQUEST_STOP_SEQUENCES] = tuple(params.stop)
    return shown


def output_text(samples: Sequence[Sample]) -> Attributes:
    """The text that came out, for hosts that ask for it."""
    messages = [
        {**text_message("assistant", sample.text.text if sample.text is not None else ""), "finish_reason": str(reason)}
        for sample in samples
        if (reason := sample.finish_reason) is not None
    ]
    return {names.OUTPUT_MESSAGES: json.dumps(messages)}
