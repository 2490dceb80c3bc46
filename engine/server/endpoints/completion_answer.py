"""CompletionAnswer: outputs of the engine as texts, which may begin with their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ...request import RequestOutput, TokenLogprob
from ..wire.completions import Completion, CompletionChoice, CompletionForm, CompletionLogprobs
from ..wire.generation import Finish, PromptLogprobs, Usage
from .answering import Head
from .side_by_side import Heard
from .token_texts import CompletionLog, TokenTexts


class PromptEcho(NamedTuple):
    """A prompt, for those who want to see it again."""

    ids: Sequence[int]
    text: str
    """What the text begins with; empty when it is not echoed."""


class CompletionSample:
    """What was read of one sample of one prompt. Tells the same in the end, however the outputs are cut."""

    def __init__(self, index: int, form: CompletionForm, texts: TokenTexts, echo: PromptEcho) -> None:
        """``index``: among all choices of the answer."""
        self._index = index
        self._form = form
        self._texts = texts
        self._echo = echo
        self._log = CompletionLog(texts)
        self._characters = 0
        self._tokens = 0
        self._has_begun = False

    def read(self, output: RequestOutput) -> CompletionChoice:
        """What is new in ``output``, apart from how it ends."""
        is_first, self._has_begun = not self._has_begun, True
        text, self._characters = output.text[self._characters :], len(output.text)
        first, self._tokens = self._tokens, len(output.token_ids)
        ids = output.token_ids[first:]
        logprobs = self._logprobs(ids, (output.logprobs or ())[first:], output if is_first else None)
        return CompletionChoice(
            index=self._index,
            text=self._echo.text + text if is_first else text,
            logprobs=logprobs,
            finish_reason=None,
            token_ids=list(ids) if self._form.return_token_ids else UNSET,
            prompt_token_ids=list(self._echo.ids) if is_first and self._form.return_token_ids else UNSET,
        )

    def end(self, output: RequestOutput) -> CompletionChoice:
        """How it ends."""
        return CompletionChoice(
            index=self._index,
            text="",
            logprobs=None,
            finish_reason=finish_reason(output),
            stop_reason=output.stop_reason,
        )

    def whole(self, output: RequestOutput) -> CompletionChoice:
        """All of it. ``output``: its last."""
        choice = self.read(output)
        choice.finish_reason, choice.stop_reason = finish_reason(output), output.stop_reason
        choice.prompt_logprobs = self._prompt_logprobs(output)
        return choice

    def _logprobs(
        self, ids: Sequence[int], scores: Sequence[TokenLogprob], first: RequestOutput | None
    ) -> CompletionLogprobs | None:
        """``first``: the first output, which brings those of the prompt."""
        most = self._form.logprobs
        if most is None:
            return None
        if first is None or not self._form.echo:
            return self._log.take(ids, scores, most)
        return self._log.take([*self._echo.ids, *ids], [*(first.prompt_logprobs or ()), *scores], most)

    def _prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs | UnsetType:
        most, scores = self._form.prompt_logprobs, output.prompt_logprobs
        return UNSET if most is None or scores is None else self._texts.prompt_logprobs(scores, most)


class CompletionAnswer:
    """See :class:`~.answering.Answer`."""

    def __init__(self, head: Head, form: CompletionForm, texts: TokenTexts, echoes: Sequence[PromptEcho]) -> None:
        self._head = head
        self._form = form
        self._texts = texts
        self._echoes = echoes
        self._samples: dict[int, CompletionSample] = {}

    def chunks(self, heard: Heard, usage: Usage | UnsetType | None) -> Iterator[Completion]:
        """What is new, then how it ends."""
        sample = self._sample(heard)
        news = sample.read(heard.output)
        if news.text or news.token_ids or news.prompt_token_ids or (news.logprobs is not None and news.logprobs.tokens):
            yield self._of_choices([news], usage)
        if heard.output.finish_reason is not None:
            yield self._of_choices([sample.end(heard.output)], usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """See :meth:`~.answering.Answer.usage_chunk`."""
        return self._of_choices([], usage)

    def whole(self, last: Sequence[Heard], usage: Usage) -> Completion:
        """See :meth:`~.answering.Answer.whole`."""
        return self._of_choices([self._sample(heard).whole(heard.output) for heard in last], usage)

    def _sample(self, heard: Heard) -> CompletionSample:
        index = heard.number * (self._form.n or 1) + heard.output.index
        if index not in self._samples:
            self._samples[index] = CompletionSample(index, self._form, self._texts, self._echoes[heard.number])
        return self._samples[index]

    def _of_choices(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        id_, created, model, fingerprint = self._head
        return Completion(
            id=id_, created=created, model=model, choices=choices, usage=usage, system_fingerprint=fingerprint
        )


def finish_reason(output: RequestOutput) -> Finish | None:
    """Why a sample ended, as clients know it; ``None``: it has not."""
    if output.finish_reason is None:
        return None
    return "length" if output.finish_reason == "length" else "stop"
