"""What a benchmark is to do: whom it drives, how much, with which prompts. Frozen, checked once, no secrets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import InvalidRequest

DEFAULT_REQUESTS = 100
DEFAULT_PREFIX_TOKENS = 512
DEFAULT_CONCURRENCY = 8


class Endpoint(StrEnum):
    """Which of the two forms of the API is driven."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Arrivals(StrEnum):
    """How the moments of an open loop are spread."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Kind(StrEnum):
    """Of workload."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    FILE = "file"


class Form(StrEnum):
    """Of prompts."""

    TEXT = "text"
    IDS = "ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and what each request says beside its prompt.

    :raises InvalidRequest: when a value is out of range; the message names it.
    """

    url: str
    """With or without ``/v1``."""
    model: str | None = None
    """``None``: the first one that the server lists."""
    endpoint: Endpoint = Endpoint.CHAT
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of every request, in place of others; one that is null takes a field away."""
    timeout: float = 600.0
    """Seconds that one answer may take in all."""
    retries: int = 0
    """How often a request that was answered with 429 is sent again, after the time of ``Retry-After``."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        _require(parts.scheme in ("http", "https") and bool(parts.hostname), "--url must be like http://host:8000")
        _require(parts.username is None, "--url must not hold a password, which would be reported: use --header")
        _require(self.timeout > 0, "--timeout must be above 0 seconds")
        _require(self.retries >= 0, "--retry must not be negative")

    @property
    def base_url(self) -> str:
        """Without ``/v1`` and without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests are sent. Exactly one of ``concurrency``, ``rate`` and ``trace`` is given.

    :raises InvalidRequest: when that does not hold or a value is out of range.
    """

    concurrency: int | None = None
    """Closed loop: so many conversations at a time, a new one as soon as one ends."""
    rate: float | None = None
    """Open loop: requests that come in a second, whatever the server does. Of conversations with several turns
    correspondingly fewer begin."""
    arrivals: Arrivals = Arrivals.POISSON
    trace: Path | None = None
    """Open loop: the moments of arrival are those of this trace."""
    speed: float = 1.0
    """How much faster than it was recorded."""

    def __post_init__(self) -> None:
        given = sum(value is not None for value in (self.concurrency, self.rate, self.trace))
        _require(given == 1, "give one of --concurrency, --rate and --trace")
        _require_positive(self, "concurrency", "rate", "speed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many requests, and when.

    :raises InvalidRequest: when a value is out of range.
    """

    pace: Pace
    requests: int | None = None
    duration: float | None = None
    """Seconds after which no more requests are sent; those under way may finish."""
    warmup: int = 0
    """Requests that come before and do not count."""
    max_in_flight: int | None = None
    """Requests that the server is given at a time; more wait here, and their wait is reported as ``queue``."""
    seed: int = 0
    """Of prompts, lengths and arrivals."""

    def __post_init__(self) -> None:
        _require_positive(self, "requests", "duration", "max_in_flight")
        _require(self.warmup >= 0, "--warmup must not be negative")

    @property
    def workers(self) -> int:
        """Conversations at a time in a closed loop, and while it warms up."""
        return self.pace.concurrency or self.max_in_flight or DEFAULT_CONCURRENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """In tokens, as far as the vocabulary can be measured (see ``Vocabulary``).

    :raises InvalidRequest: when a value is out of range.
    """

    prompt_tokens: int = 256
    """Of each question, on average."""
    prompt_spread: float = 0.0
    """From 0 to 1: lengths are uniform in mean * (1 - spread) to mean * (1 + spread)."""
    output_tokens: int = 128
    output_spread: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self, "prompt_tokens", "output_tokens")
        _require_share(self, "prompt_spread", "output_spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The system message that comes before the first question.

    :raises InvalidRequest: when a value is out of range.
    """

    tokens: int | None = None
    """They do not count among ``prompt_tokens``. Default: 512 for shared-prefix, else none."""
    prefixes: int = 1
    """How many different ones are shared."""
    share: float = 1.0
    """Of the conversations that begin with a shared one; the others have one of their own, as long."""

    def __post_init__(self) -> None:
        _require(self.tokens is None or self.tokens >= 0, "--prefix-tokens must not be negative")
        _require_positive(self, "prefixes")
        _require_share(self, "share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What is asked.

    :raises InvalidRequest: when a value is out of range or does not belong to this kind of workload.
    """

    kind: Kind = Kind.RANDOM
    form: Form = Form.TEXT
    lengths: Lengths = field(default_factory=Lengths)
    prefix: Prefix = field(default_factory=Prefix)
    turns: int = 4
    """Of each conversation in multi-turn."""
    think: float = 0.0
    """Seconds between an answer and the next question, on average (exponential)."""
    file: Path | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "turns")
        _require(self.think >= 0, "--think must not be negative")
        _require((self.file is not None) == (self.kind is Kind.FILE), "--file belongs to --workload file, and needs it")
        prefixed = self.kind in (Kind.SHARED_PREFIX, Kind.MULTI_TURN)
        _require(prefixed or not self.prefix.tokens, f"--prefix-tokens has no meaning for --workload {self.kind}")
        with_ids = self.form is Form.IDS
        _require(not with_ids or self.kind in (Kind.RANDOM, Kind.SHARED_PREFIX), f"--workload {self.kind} needs text")

    @property
    def turns_each(self) -> int:
        return self.turns if self.kind is Kind.MULTI_TURN else 1

    @property
    def prefix_tokens(self) -> int:
        if self.prefix.tokens is not None:
            return self.prefix.tokens
        return DEFAULT_PREFIX_TOKENS if self.kind is Kind.SHARED_PREFIX else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one run.

    :raises InvalidRequest: when the parts do not fit together.
    """

    target: Target
    load: Load
    prompts: Prompts
    slo: Mapping[str, float] = field(default_factory=dict)
    """Seconds by the name of a metric: what a good answer keeps."""

    def __post_init__(self) -> None:
        as_ids = self.prompts.form is Form.IDS
        _require(
            not as_ids or self.target.endpoint is Endpoint.COMPLETIONS, "prompts of ids need --endpoint completions"
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)


def _require_positive(settings: Pace | Load | Lengths | Prefix | Prompts, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(value is None or 0 < value < math.inf, f"--{name.replace('_', '-')} must be above 0")


def _require_share(settings: Lengths | Prefix, *names: str) -> None:
    for name in names:
        _require(0 <= getattr(settings, name) <= 1, f"--{name.replace('_', '-')} must be from 0 to 1")
