"""SequenceGroup: one request inside the engine. Sample: one of the sequences that it runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from ..policies.scheduling.base import Job
from ..telemetry.names import OPERATION_COMPLETION
from ..telemetry.record import NO_TRACE, RequestTrace
from .beam import BeamHypothesis, BeamSearch
from .kv import Namespace, Retention, Sequence
from .kv.cache_manager import Copies
from .model.guides import Guide
from .model.randomness import derive_seed
from .model.runner import PromptScore, SampledToken
from .model.text import TextCodec
from .output_text import OutputText
from .request import FinishReason, Metrics, SamplingParams, TokenLogprob
from .stream import OutputStream, as_logprob
from .token_log import TokenLog


class Phase(Enum):
    """Where a sample is."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


class EndTokens(NamedTuple):
    """Which tokens end a sample."""

    ids: frozenset[int]
    special_stops: dict[int, str]
    """Those of them that were given as a stop string which is one special token."""
    of_format: frozenset[int] = frozenset()
    """The model's own where an output format says when they may come: they end a sample at any length, and if they are
    to be ignored, too.
    """


class Sample:
    """One line of output: a parallel sample or a live beam.

    A sequence whose tokens are all computed but the last is decoding; otherwise it is in prefill, be it its first or
    the recomputation after a preemption. There is no other difference between the two.
    """

    __slots__ = (
        "copies",
        "cumulative_logprob",
        "finish_reason",
        "following_since",
        "group",
        "guide",
        "index",
        "last_step",
        "log",
        "logprobs",
        "phase",
        "seed",
        "sequence",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        group: SequenceGroup,
        index: int,
        sequence: Sequence,
        seed: int,
        text: OutputText | None,
        guide: Guide | None = None,
    ) -> None:
        self.group = group
        self.index = index
        self.sequence = sequence
        self.seed = seed
        self.text = text
        self.phase = Phase.WAITING
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = [] if group.params.logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.guide = guide
        """Where it stands in the output format, if it has one."""
        self.copies: Copies = ()
        """Block copies that must precede its next row; their sources are pinned."""
        self.following_since: float | None = None
        self.log = TokenLog()
        """The tokens of ``sequence``, for steps."""
        self.last_step = 0
        """Number of the last step that computed something of it."""

    @property
    def is_admitted(self) -> bool:
        """Whether it holds blocks."""
        return self.phase in (Phase.LOADING, Phase.RUNNING)

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token has to be computed."""
        return self.sequence.uncomputed == 1

    @property
    def is_spoilt(self) -> bool:
        """Whether its text cannot be made, for which it has not been ended yet."""
        is_ended = self.finish_reason is FinishReason.ERROR
        return self.text is not None and self.text.fault is not None and not is_ended

    @property
    def has_prompt_behind(self) -> bool:
        """Whether nothing but new tokens is left to compute: it decodes, or was forked off one that does."""
        return self.sequence.uncomputed < 1 or (self.is_decoding and bool(self.token_ids))

    def accept(self, sampled: SampledToken) -> None:
        """Take the next token and decide whether it is the last.

        :raises ModelError: when the output format does not allow it. :raises CannotContinue: when that cannot be
            followed any further.
        """
        params = self.group.params
        self.token_ids.append(sampled.token_id)
        self.cumulative_logprob += sampled.logprob
        if self.logprobs is not None:
            self.logprobs.append(as_logprob(sampled))
        if self.guide is not None:
            self.guide.accept(sampled.token_id)
        may_stop = len(self.token_ids) > params.min_tokens
        if self._ends_with(sampled.token_id, may_stop=may_stop):
            self._end_by_token(sampled.token_id)
        elif self.text is not None and (stop := self.text.push(sampled.token_id, may_stop=may_stop)) is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        elif self.guide is not None and self.guide.is_done:
            self.end(FinishReason.STOP)
        elif len(self.token_ids) >= self.group.max_tokens:
            self.end(FinishReason.LENGTH)

    def _ends_with(self, token: int, *, may_stop: bool) -> bool:
        ends = self.group.ends
        return (may_stop and token in ends.ids) or token in ends.of_format

    def end(self, reason: FinishReason) -> None:
        """Stop here, and show the text that was held back."""
        self.finish_reason = reason
        if self.group.beam is not None:  # a live beam has no text yet
            self.write(self.token_ids)
        if self.text is not None and (stop := self.text.finish()) is not None and reason is FinishReason.LENGTH:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop

    def write(self, tokens: Iterable[int]) -> None:
        """Add the text of ``tokens``, without a look for stop strings."""
        if self.text is not None:
            for token in tokens:
                self.text.push(token, may_stop=False)

    def mean_logprob(self) -> float:
        """By which ``best_of`` chooses."""
        return self.cumulative_logprob / max(len(self.token_ids), 1)

    def branch(self, index: int, sequence: Sequence, seed: int) -> Sample:
        """Another sample of the same group with the same past, on ``sequence``."""
        return self.continued_by(self.group, index, sequence, seed)

    def continued_by(self, group: SequenceGroup, index: int, sequence: Sequence, seed: int) -> Sample:
        """A sample of ``group`` that goes on from here."""
        # what was held back has been shown where this sample has ended already (aborted at the same step edge)
        same_text = self.finish_reason is None and group.params.shows_text_as(self.group.params)
        text = self.text.copy() if same_text and self.text is not None else group.new_text()
        guide = None if self.guide is None else self.guide.copy()
        twin = Sample(group, index, sequence, seed, text, guide)
        twin.token_ids = list(self.token_ids)
        if not same_text:
            twin.write(self.token_ids)
        if twin.logprobs is not None:
            twin.logprobs = list(self.logprobs or ())
        twin.cumulative_logprob, twin.last_step = self.cumulative_logprob, self.last_step
        return twin

    def end_as_beam(self, reason: FinishReason) -> None:
        """Stop as the beam that ``token_ids`` is, whose last token is an end token if ``reason`` says so."""
        if reason is FinishReason.STOP:
            self.write(self.token_ids[:-1])
            self._end_by_token(self.token_ids[-1])
        else:
            self.end(reason)

    def _end_by_token(self, token: int) -> None:
        self.finish_reason = FinishReason.STOP
        if token in self.group.params.stop_token_ids:
            self.stop_reason = token
        elif token in self.group.ends.special_stops:
            self.stop_reason = self.group.ends.special_stops[token]
        if self.text is None:
            return
        if self.group.params.include_stop:
            self.text.push(token, may_stop=False)
        self.text.finish()


class SequenceGroup:
    """A request with all it runs. Owned by the loop once it was submitted."""

    def __init__(  # noqa: PLR0913  # what a caller asked for and what the engine made of it
        self,
        request_id: str,
        params: SamplingParams,
        *,
        job: Job,
        namespace: Namespace,
        prompt_ids: tuple[int, ...],
        ends: EndTokens,
        seed: int,
        codec: TextCodec | None,
        retention: tuple[Retention, ...] = (),
        trace: RequestTrace = NO_TRACE,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.job = job
        self.namespace = namespace
        self.prompt_ids = prompt_ids
        self.ends = ends
        self.seed = seed
        self.retention = retention
        self.trace = trace
        self._codec = codec
        self.samples: list[Sample] = []
        """Every sample that was started; of a beam search, the live beams."""
        self.beam: BeamSearch | None = None
        self.cached_tokens = 0
        self.generated = 0
        """Tokens that came out for it, over all samples; a step of a beam search counts as one."""
        self.is_streamed = True
        """Whether anybody wants to see it grow."""
        self.operation = OPERATION_COMPLETION
        """What the GenAI conventions call a request like this."""
        self.prompt_scores: list[PromptScore] = []
        self.metrics = Metrics(arrival=job.arrival)
        self.error: BaseException | None = None
        self.ended_by: FinishReason | None = None
        """Set when the whole group was ended at once: aborted or failed."""
        self.stream = OutputStream(self)

    @property
    def max_tokens(self) -> int:
        """Most tokens that a sample of it may get, where ``params`` leave it open, too."""
        return self.job.max_tokens

    @property
    def is_started(self) -> bool:
        """Whether its prompt is computed, so that all of its samples exist."""
        return self.metrics.first_token is not None

    @property
    def is_over(self) -> bool:
        """Whether its end is decided; whoever waits for it may not have been told."""
        return self.metrics.finished is not None

    @property
    def is_shown_whole(self) -> bool:
        """Whether nothing is shown before all is over: which samples those will be may not be known before."""
        params = self.params
        return not self.is_streamed or params.beam_width > 1 or params.samples > params.n

    @property
    def is_done(self) -> bool:
        return self.ended_by is not None or all(sample.phase is Phase.DONE for sample in self.samples)

    def fail(self, error: BaseException) -> None:
        """It is over, and now it shows that the text of some of its samples cannot be made."""
        self.ended_by, self.error = FinishReason.ERROR, error
        for sample in self.samples:
            if sample.is_spoilt:
                sample.finish_reason = FinishReason.ERROR

    @property
    def live(self) -> list[Sample]:
        """Samples that are not done."""
        return [sample for sample in self.samples if sample.phase is not Phase.DONE]

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether prompt log-probabilities are asked for and not complete, so that the prompt must be computed."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt_ids) - 1

    def new_text(self) -> OutputText | None:
        """An empty text for one sample; ``None`` when there is no tokenizer."""
        return OutputText(self._codec, self.params) if self._codec is not None else None

    def hypothesis(self, index: int, found: BeamHypothesis) -> Sample:
        """A finished beam in the form of a sample."""
        sample = Sample(self, index, self.samples[0].sequence, self.seed, self.new_text())
        sample.phase = Phase.DONE
        sample.token_ids, sample.cumulative_logprob = list(found.token_ids), found.sum_logprob
        sample.end_as_beam(found.finish_reason)
        return sample

    def results(self) -> list[Sample] | None:
        """What to hand out at the end in place of all samples: the best of them. ``None``: hand out all."""
        params = self.params
        if not self.samples:
            return []
        if self.max_tokens == 0 and self.samples[0].finish_reason is FinishReason.LENGTH:
            return [self._empty(index) for index in range(params.n)]
        if params.samples == params.n and self.beam is None:
            return None
        ranked = self.samples if self.beam is not None else sorted(self.samples, key=Sample.mean_logprob, reverse=True)
        for index, sample in enumerate(ranked[: params.n]):
            sample.index = index
        return ranked[: params.n]

    def _empty(self, index: int) -> Sample:
        """A sample of a request for no tokens."""
        first = self.samples[0]
        sample = first.branch(index, first.sequence, first.seed)
        sample.phase, sample.finish_reason = first.phase, first.finish_reason
        return sample

    def sample_seeds(self) -> Iterator[int]:
        """The seed of each sample, in order."""
        return (derive_seed(self.seed, index) for index in range(self.params.samples))
