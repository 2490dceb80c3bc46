"""OutputStream: from the loop to one consumer, bounded and without a queue.

The samples themselves are the buffer. The loop only says that something is new; the consumer, when it comes, takes
what has grown since its last visit. So a slow consumer gets fewer and larger outputs, holds up nobody, and costs no
memory beyond the output itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from .model.runner import PromptScore, SampledToken
from .request import RequestOutput, TokenLogprob

if TYPE_CHECKING:
    from .sequence import Sample, SequenceGroup


class OutputStream:
    """What one consumer has seen of a group. Single consumer; all calls from the engine's event loop."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._news = anyio.Event()
        self._results: list[Sample] | None = None
        self._seen_text: dict[int, int] = {}
        self._seen_tokens: dict[int, int] = {}
        self._ended: set[int] = set()
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._closed = False

    def notify(self) -> None:
        """Something is new. Never blocks."""
        self._news.set()

    def close(self, results: list[Sample] | None = None) -> None:
        """Nothing more will come. ``results``: what to hand out in place of the group's samples (beams, best of)."""
        self._results = results
        self._closed = True
        self._news.set()

    async def next(self) -> RequestOutput | None:
        """The next output; ``None`` when all are delivered.

        :raises OctavoError: the group's error, once what came before it is delivered.
        """
        while True:
            if self._news.is_set():
                self._news = anyio.Event()
            if news := [sample for sample in self._visible() if self._is_new(sample)]:
                # of a consumer that is slower than the steps, the first sample would have all the attention
                return self._take(min(news, key=lambda sample: self._seen_tokens.get(sample.index, 0)))
            if self._closed:
                if self._group.error is not None:
                    raise self._group.error
                return None
            await self._news.wait()

    def _visible(self) -> list[Sample]:
        if self._results is not None:
            return self._results
        return [] if self._group.is_shown_whole and not self._closed else self._group.samples

    def _is_new(self, sample: Sample) -> bool:
        if sample.index in self._ended:
            return False
        grown = sample.finish_reason is not None or self._seen_tokens.get(sample.index, 0) < len(sample.token_ids)
        return grown and not sample.is_spoilt

    def _take(self, sample: Sample) -> RequestOutput:
        group, index = self._group, sample.index
        text = sample.text.text if sample.text is not None else ""
        tokens = tuple(sample.token_ids)
        seen_text, self._seen_text[index] = self._seen_text.get(index, 0), len(text)
        seen_tokens, self._seen_tokens[index] = self._seen_tokens.get(index, 0), len(tokens)
        if sample.finish_reason is not None:
            self._ended.add(index)
        return RequestOutput(
            request_id=group.request_id,
            index=index,
            text=text,
            text_delta=text[seen_text:],
            token_ids=tokens,
            new_token_ids=tokens[seen_tokens:],
            logprobs=tuple(sample.logprobs) if sample.logprobs is not None else None,
            prompt_logprobs=self._prompt(),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            cumulative_logprob=sample.cumulative_logprob,
            prompt_tokens=len(group.prompt_ids),
            cached_tokens=group.cached_tokens,
            metrics=group.metrics,
        )

    def _prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        group = self._group
        if group.params.prompt_logprobs is None or group.wants_prompt_scores:
            return None
        if self._prompt_logprobs is None:
            self._prompt_logprobs = (None, *map(as_logprob, group.prompt_scores))
        return self._prompt_logprobs


def as_logprob(score: SampledToken | PromptScore) -> TokenLogprob:
    """The caller's form of what the model step reports."""
    return TokenLogprob(score.token_id, score.logprob, tuple((top.token_id, top.logprob) for top in score.top))
