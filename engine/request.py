"""What a caller hands in and gets back: prompts, SamplingParams, RequestOutput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from ..errors import InvalidRequest
from .output_format import OutputFormat

ChatMessage: TypeAlias = Mapping[str, object]
"""``role`` and ``content`` (text, or a list of ``{"type": "text", "text": ...}``), and what else the model's chat
template knows: ``name``, ``tool_calls``, ``tool_call_id``, ``reasoning_content``."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with what the model's chat template needs beside its messages."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, object]] = ()
    """Functions that the model may call, as the OpenAI API has them: ``{"type": "function", "function": {...}}``."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """More variables for the template, such as ``enable_thinking``."""
    continues_last: bool = False
    """The last message is the assistant's, and goes on; otherwise a new turn of the assistant begins."""
    opens_turn: bool = True
    """The assistant's turn begins after the messages, unless the last one goes on. ``False``: the messages alone, as
    for counting their tokens (``add_generation_prompt`` of chat templates)."""


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | Chat
"""Text, token ids, or chat messages."""

MAX_SAMPLES = 1024
MAX_LOGPROBS = 1024
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_TOKENS = 2**24


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Checked when made; unknown names are refused by the constructor itself.

    ``presence_penalty`` and ``frequency_penalty`` count output tokens only, ``repetition_penalty`` counts prompt and
    output. A temperature below 1e-5 is greedy.

    :raises InvalidRequest: when a value has the wrong type or is out of range; the message names the parameter.
    """

    max_tokens: int | None = 256
    """Most tokens to generate, 0 for none (then only ``prompt_logprobs`` has a use). ``None``: as many as the model's
    context and the engine's pool can take."""
    min_tokens: int = 0
    """No end of sequence and no stop is honoured before this many tokens."""
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p, in [0, 1]; at least one is kept."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits, token id -> bias in [-100, 100]; +100 forces a token and -100 bans it, greedy or not."""
    seed: int | None = None
    """Root of the random stream of this request; ``None``: the engine picks one."""
    stop: str | Sequence[str] = ()
    """Strings that end the text; they are cut off unless ``include_stop``."""
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    """Samples to return."""
    best_of: int | None = None
    """Samples to draw, of which the ``n`` with the highest mean log-probability are returned."""
    beam_width: int = 1
    """Above 1: beam search (deterministic), returns the ``n`` best beams."""
    length_penalty: float = 1.0
    """Beam scores are log-probability / generated length ** length_penalty."""
    early_stopping: bool | Literal["never"] = False
    """Beam search: as in Hugging Face's ``generate``."""
    logprobs: int | None = None
    """Alternatives to report with each token; 0 reports the chosen token alone."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens. Such a request computes its whole prompt, whatever is cached."""
    output_format: OutputFormat | None = None
    """What the text has to look like. It ends with ``stop`` as soon as nothing can follow, whatever ``min_tokens`` and
    ``ignore_eos`` say; ``max_tokens`` and stop strings may cut it before."""

    def __post_init__(self) -> None:
        for check in (_check_numbers, _check_token_ids, _check_stops, _check_samples):
            check(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < 1e-5

    @property
    def samples(self) -> int:
        """Sequences that this request runs side by side."""
        return self.beam_width if self.beam_width > 1 else (self.best_of or self.n)

    def shows_text_as(self, other: SamplingParams) -> bool:
        """Whether both make the same text of the same tokens."""
        return (self.stop, self.include_stop, self.skip_special_tokens) == (
            other.stop,
            other.include_stop,
            other.skip_special_tokens,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> SamplingParams:
        """Build from untyped data (JSON, a config file).

        :raises InvalidRequest: for an unknown name; the message lists the known ones.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise InvalidRequest(
                f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**values)  # type: ignore[arg-type]  # the checks of __post_init__ are the types' judge here


class Metrics(NamedTuple):
    """Times of a request in seconds of the engine's monotonic clock; ``None`` where it did not happen (yet)."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


class TokenLogprob(NamedTuple):
    """A token with its log-probability under the model's raw distribution, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one sample of a request, with what is new since the last output of that sample.

    Outputs that a slow consumer did not fetch are merged, so the deltas of the outputs it does see always join to the
    whole. The last output of a sample carries its ``finish_reason``.
    """

    request_id: str
    index: int
    """Which sample or beam, 0-based."""
    text: str
    text_delta: str
    token_ids: tuple[int, ...]
    """Generated ids so far. A stop token id is included, the text of it is not."""
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    """One per generated token, when asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    """One per prompt token (``None`` for the first, which nothing precedes), when asked for."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or stop token id that ended the sample."""
    cumulative_logprob: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed because their K and V were in the cache at first admission."""
    metrics: Metrics


def _check_numbers(p: SamplingParams) -> None:
    if p.max_tokens is not None:
        _integer("max_tokens", p.max_tokens, 0, MAX_TOKENS)
    _integer("min_tokens", p.min_tokens, 0, MAX_TOKENS)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})")
    _integer("top_k", p.top_k, 0, 2**31 - 1)
    _number("temperature", p.temperature, 0.0, 100.0)
    _number("top_p", p.top_p, 0.0, 1.0)
    _number("min_p", p.min_p, 0.0, 1.0)
    _number("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", p.repetition_penalty, 0.01, 100.0)
    _number("length_penalty", p.length_penalty, -100.0, 100.0)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(p, name) is not None:
            _integer(name, getattr(p, name), 0, MAX_LOGPROBS)
    if p.seed is not None:
        _integer("seed", p.seed, -(2**63), 2**64 - 1)
    if not isinstance(p.output_format, OutputFormat | None):
        raise InvalidRequest(f"output_format must be an OutputFormat, not {shown(p.output_format)}")
    for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if not isinstance(getattr(p, name), bool):
            raise InvalidRequest(f"{name} must be true or false, not {getattr(p, name)!r}")


def _check_token_ids(p: SamplingParams) -> None:
    _list("stop_token_ids", p.stop_token_ids)
    for token in p.stop_token_ids:
        _integer("stop_token_ids", token, 0, 2**31 - 1)
    object.__setattr__(p, "stop_token_ids", tuple(p.stop_token_ids))
    if not isinstance(p.logit_bias, Mapping):
        raise InvalidRequest("logit_bias must map token ids to numbers")
    for token, bias in p.logit_bias.items():
        _integer("logit_bias key", token, 0, 2**31 - 1)
        _number("logit_bias value", bias, -100.0, 100.0)
    object.__setattr__(p, "logit_bias", dict(p.logit_bias))


def _check_stops(p: SamplingParams) -> None:
    stops = (p.stop,) if isinstance(p.stop, str) else p.stop
    _list("stop", stops)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings, not {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"stop must be non-empty strings of at most {MAX_STOP_LENGTH} characters")
    object.__setattr__(p, "stop", tuple(stops))


def _check_samples(p: SamplingParams) -> None:
    _integer("n", p.n, 1, MAX_SAMPLES)
    _integer("beam_width", p.beam_width, 1, MAX_SAMPLES)
    if p.best_of is not None:
        _integer("best_of", p.best_of, 1, MAX_SAMPLES)
        if p.best_of < p.n:
            raise InvalidRequest(f"best_of ({p.best_of}) must be at least n ({p.n})")
    if not isinstance(p.early_stopping, bool) and p.early_stopping != "never":
        raise InvalidRequest(f"early_stopping must be true, false or 'never', not {p.early_stopping!r}")
    if p.beam_width > 1 and p.n > p.beam_width:
        raise InvalidRequest(f"n ({p.n}) must not exceed beam_width ({p.beam_width})")
    if p.beam_width > 1 and p.best_of is not None:
        raise InvalidRequest("best_of and beam_width exclude each other")
    if p.beam_width > 1 and p.output_format is not None:
        raise InvalidRequest("output_format is not supported with beam search; set beam_width to 1")
    if p.beam_width > 1 and p.logprobs is not None:
        raise InvalidRequest("logprobs are not reported for beam search; leave it out or set beam_width to 1")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}, not {shown(value)}")


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]  # good says it is a number; NaN is in no range
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {shown(value)}")


def _list(name: str, value: object) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{name} must be a list, not {shown(value)}")


def shown(value: object) -> str:
    """A short form for messages: never a whole prompt."""
    try:
        return repr(value)[:40]
    except Exception:  # noqa: BLE001  # integers of thousands of digits refuse to be shown, foreign objects may do anything
        return f"a {type(value).__name__} that cannot be shown"
