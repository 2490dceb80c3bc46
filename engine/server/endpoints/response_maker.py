"""ResponseMaker: from the engine's outputs to a response, and to the events that tell of it on the way."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...request import FinishReason, RequestOutput
from ..errors import ApiError
from ..event_stream import event as sse_event
from ..tools.base import Piece, TextPiece, ToolCall
from ..tools.reader import ToolReader
from ..wire.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Failed,
    Incomplete,
    InProgress,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    StreamEvent,
    TextDelta,
    TextDone,
)
from ..wire.responses import (
    FunctionCall,
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    OutputDetails,
    OutputMessage,
    OutputText,
    Response,
    ResponseError,
    ResponseUsage,
)


class ResponseMaker:
    """Makes one response. Whether it is streamed or not, it is made in the same way: who wants no events drops them.

    The order: ``begin``, ``push`` for each output, then ``end``, or ``fail`` at any time.
    """

    def __init__(
        self,
        response: Response,
        reader: ToolReader | None,
        *,
        block_size: int | None,
        new_number: Callable[[], str],
        wall: Callable[[], float],
    ) -> None:
        """``response``: as it stands before anything was generated; filled here. ``reader``: parts tool calls from
        text. ``block_size``: of a cache that keeps prompts. ``new_number``: gives random digits for ids. ``wall``:
        seconds since the epoch.
        """
        self.response = response
        self._reader = reader
        self._block_size = block_size
        self._new_number = new_number
        self._wall = wall
        self._message_id: str | None = None
        """Of the message that is being written."""
        self._text: list[str] = []
        self._finish: FinishReason | None = None

    def begin(self) -> list[StreamEvent]:
        """The request is accepted."""
        return [Created(response=self._snapshot()), InProgress(response=self._snapshot())]

    def push(self, output: RequestOutput) -> list[StreamEvent]:
        """The engine says more."""
        self._finish = output.finish_reason
        self.response.usage = self._usage(output)
        if self._reader is None:
            return self._say(output.text_delta)
        pieces = list(self._reader.push(output.text_delta))
        if output.finish_reason is not None:
            pieces += self._reader.finish()
        return [event for piece in pieces for event in self._take(piece)]

    def end(self) -> list[StreamEvent]:
        """Nothing more comes; the response is whole, or was cut off."""
        is_cut = self._finish is FinishReason.LENGTH
        status: ItemStatus = "incomplete" if is_cut else "completed"
        events = [] if self.response.output or self._message_id is not None else self._open()
        events += self._close(status)
        self.response.status = status
        if is_cut:
            self.response.incomplete_details = IncompleteDetails()
            return [*events, Incomplete(response=self._snapshot())]
        self.response.completed_at = int(self._wall())
        return [*events, Completed(response=self._snapshot())]

    def fail(self, error: ApiError) -> StreamEvent:
        """It comes to nothing, but for the items that are done."""
        self.response.status = "failed"
        self.response.error = _told(error)
        return Failed(response=self._snapshot())

    def _take(self, piece: Piece) -> list[StreamEvent]:
        return (
            self._say(piece.text) if isinstance(piece, TextPiece) else [*self._close("completed"), *self._call(piece)]
        )

    def _say(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        events = self._open() if self._message_id is None else []
        self._text.append(text)
        return [*events, TextDelta(item_id=self._message_id or "", output_index=self._index, delta=text)]

    def _open(self) -> list[StreamEvent]:
        item_id = self._message_id = f"msg_{self._new_number()}"
        return [
            ItemAdded(output_index=self._index, item=OutputMessage(item_id, [], "in_progress")),
            PartAdded(item_id=item_id, output_index=self._index, part=OutputText()),
        ]

    def _close(self, status: ItemStatus) -> list[StreamEvent]:
        if self._message_id is None:
            return []
        item_id, index, text = self._message_id, self._index, "".join(self._text)
        self._message_id, self._text = None, []
        item = OutputMessage(item_id, [OutputText(text)], status)
        self.response.output.append(item)
        return [
            TextDone(item_id=item_id, output_index=index, text=text),
            PartDone(item_id=item_id, output_index=index, part=OutputText(text)),
            ItemDone(output_index=index, item=item),
        ]

    def _call(self, call: ToolCall) -> list[StreamEvent]:
        item_id, index = f"fc_{self._new_number()}", self._index
        done = FunctionCall(item_id, call.id, call.name, call.arguments, "completed")
        self.response.output.append(done)
        return [
            ItemAdded(output_index=index, item=FunctionCall(item_id, call.id, call.name, "", "in_progress")),
            ArgumentsDelta(item_id=item_id, output_index=index, delta=call.arguments),
            ArgumentsDone(item_id=item_id, output_index=index, name=call.name, arguments=call.arguments),
            ItemDone(output_index=index, item=done),
        ]

    @property
    def _index(self) -> int:
        """Of the item that is being written, or is next."""
        return len(self.response.output)

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        given, made, cached = output.prompt_tokens, len(output.token_ids), output.cached_tokens
        kept = 0 if self._block_size is None else given // self._block_size * self._block_size
        details = InputDetails(cached, max(0, kept - cached))
        return ResponseUsage(given, details, made, OutputDetails(), given + made)

    def _snapshot(self) -> Response:
        return msgspec.structs.replace(self.response, output=list(self.response.output))


class EventWriter:
    """Numbers the events of a stream and writes them down."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, event: StreamEvent) -> bytes:
        event.sequence_number = self._count
        self._count += 1
        return sse_event(msgspec.json.encode(event), str(event.__struct_config__.tag))


def _told(error: ApiError) -> ResponseError:
    message = error.body.error.message
    if error.status == 400:
        return ResponseError(message, "invalid_prompt")
    return ResponseError(message, "rate_limit_exceeded" if error.status == 429 else "server_error")
