"""ChatAnswer: outputs of the engine as messages, with the tool calls that are written in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ...request import RequestOutput, TokenLogprob
from ..tools.base import Piece, TextPiece, ToolCall, ToolReader
from ..wire.chat import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatForm,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    ChunkChoice,
    Delta,
    DeltaToolCall,
)
from ..wire.generation import Finish, PromptLogprobs, Usage
from .answering import Head
from .side_by_side import Heard
from .token_texts import TokenTexts
from .tool_use import ToolUse


class News(NamedTuple):
    """What an output adds to a sample."""

    text: str
    calls: Sequence[DeltaToolCall]
    token_ids: Sequence[int]
    scores: Sequence[TokenLogprob]
    finish_reason: Finish | None


class SampleReader:
    """What was read of one sample. Tells the same in the end, however the outputs are cut."""

    def __init__(self, calls: ToolReader | None) -> None:
        """``calls``: finds tool calls in the text; ``None``: there are none to be found."""
        self.is_told = False
        """Whether its role has been told."""
        self._reader = calls
        self._characters = 0
        self._tokens = 0
        self._calls = 0

    def read(self, output: RequestOutput) -> News:
        """What is new in ``output``."""
        text, self._characters = output.text[self._characters :], len(output.text)
        first, self._tokens = self._tokens, len(output.token_ids)
        pieces = self._pieces(text, ends=output.finish_reason is not None)
        calls = [self._numbered(piece) for piece in pieces if isinstance(piece, ToolCall)]
        return News(
            "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)),
            calls,
            output.token_ids[first:],
            (output.logprobs or ())[first:],
            self._finish_reason(output),
        )

    def _pieces(self, text: str, *, ends: bool) -> list[Piece]:
        if self._reader is None:
            return [TextPiece(text)]
        return [*self._reader.push(text), *(self._reader.finish() if ends else ())]

    def _numbered(self, call: ToolCall) -> DeltaToolCall:
        number, self._calls = self._calls, self._calls + 1
        return DeltaToolCall(number, call.id, CalledFunction(call.name, call.arguments))

    def _finish_reason(self, output: RequestOutput) -> Finish | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason == "length":
            return "length"
        return "tool_calls" if self._calls else "stop"


class ChatAnswer:
    """See :class:`~.answering.Answer`."""

    def __init__(
        self, head: Head, form: ChatForm, texts: TokenTexts, tools: ToolUse | None, prompt_ids: list[int] | None
    ) -> None:
        """``prompt_ids``: ``None``: not to be told."""
        self._head = head
        self._form = form
        self._texts = texts
        self._tools = tools
        self._prompt_ids: list[int] | UnsetType = UNSET if prompt_ids is None else prompt_ids
        self._samples: dict[int, SampleReader] = {}

    def chunks(self, heard: Heard, usage: Usage | UnsetType | None) -> Iterator[ChatChunk]:
        """First the role, once, then what is new, then how it ends."""
        output = heard.output
        sample = self._sample(output.index)
        news = sample.read(output)
        if not sample.is_told:
            sample.is_told = True
            yield self._chunk(ChunkChoice(index=output.index, delta=Delta(role="assistant", content="")), usage)
        if news.text or news.calls or (news.token_ids and self._tells_tokens):
            yield self._chunk(self._choice(output.index, news), usage)
        if news.finish_reason is not None:
            ended = ChunkChoice(
                index=output.index, delta=Delta(), finish_reason=news.finish_reason, stop_reason=output.stop_reason
            )
            yield self._chunk(ended, usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """See :meth:`~.answering.Answer.usage_chunk`."""
        return self._of_choices([], usage)

    def whole(self, last: Sequence[Heard], usage: Usage) -> ChatCompletion:
        """See :meth:`~.answering.Answer.whole`."""
        id_, created, model, fingerprint = self._head
        return ChatCompletion(
            id=id_,
            created=created,
            model=model,
            choices=[self._whole_choice(heard.output) for heard in last],
            usage=usage,
            system_fingerprint=fingerprint,
            prompt_logprobs=self._prompt_logprobs(last[0].output),
            prompt_token_ids=self._prompt_ids,
        )

    @property
    def _tells_tokens(self) -> bool:
        return bool(self._form.logprobs or self._form.return_token_ids)

    def _sample(self, index: int) -> SampleReader:
        if index not in self._samples:
            self._samples[index] = SampleReader(None if self._tools is None else self._tools.reader())
        return self._samples[index]

    def _choice(self, index: int, news: News) -> ChunkChoice:
        return ChunkChoice(
            index=index,
            delta=Delta(content=news.text or UNSET, tool_calls=list(news.calls) or UNSET),
            logprobs=self._logprobs(news),
            token_ids=self._token_ids(news),
        )

    def _whole_choice(self, output: RequestOutput) -> ChatChoice:
        news = self._sample(output.index).read(output)
        calls = [ChatToolCall(call.id, call.function) for call in news.calls]
        return ChatChoice(
            index=output.index,
            message=ChatMessage("assistant", news.text or (None if calls else ""), tool_calls=calls or UNSET),
            logprobs=self._logprobs(news),
            finish_reason=news.finish_reason or "stop",
            stop_reason=output.stop_reason,
            token_ids=self._token_ids(news),
        )

    def _logprobs(self, news: News) -> ChatLogprobs | None:
        return self._texts.chat_logprobs(news.scores) if self._form.logprobs else None

    def _token_ids(self, news: News) -> list[int] | UnsetType:
        return list(news.token_ids) if self._form.return_token_ids else UNSET

    def _prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs | UnsetType:
        most, scores = self._form.prompt_logprobs, output.prompt_logprobs
        return UNSET if most is None or scores is None else self._texts.prompt_logprobs(scores, most)

    def _chunk(self, choice: ChunkChoice, usage: Usage | UnsetType | None) -> ChatChunk:
        chunk = self._of_choices([choice], usage)
        if choice.delta.role is not UNSET:
            chunk.prompt_token_ids = self._prompt_ids
        return chunk

    def _of_choices(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        id_, created, model, fingerprint = self._head
        return ChatChunk(
            id=id_, created=created, model=model, choices=choices, system_fingerprint=fingerprint, usage=usage
        )
