"""OutputText: the text of one sample while its tokens come in, with stop strings."""

from __future__ import annotations

from .model.detokenizer import IncrementalDetokenizer
from .model.stops import StopChecker
from .model.text import TextCodec
from .request import SamplingParams


class OutputText:
    """Joins detokeniser and stop checker.

    A stop string decides whether its sample goes on, so with any the text follows each token at once. Without, tokens
    only pile up here until somebody looks at ``text``: the next step does not wait for words.
    """

    __slots__ = ("_detokenizer", "_fault", "_is_over", "_is_watched", "_shown", "_stops", "_waiting")

    def __init__(self, codec: TextCodec, params: SamplingParams) -> None:
        self._fault: Exception | None = None
        self._shown = ""
        self._waiting: list[int] = []
        self._is_over = False
        self._is_watched = bool(params.stop)
        self._detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(tuple(params.stop), params.include_stop)

    @property
    def text(self) -> str:
        """All that may be shown so far. Never raises; see ``fault``."""
        self._catch_up()
        return self._shown

    @property
    def fault(self) -> Exception | None:
        """What the tokenizer raises when it is asked for what has piled up; the text stays as it was before."""
        self._catch_up()
        return self._fault

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Take one token; returns the stop string that it completed, if any. ``may_stop=False``: look for none yet."""
        if not self._is_watched:
            self._waiting.append(token)
            return None
        delta = self._detokenizer.push((token,))
        if not may_stop:
            self._shown += self._stops.flush() + delta
            return None
        result = self._stops.push(delta)
        self._shown += result.emit
        return result.stopped_by

    def finish(self) -> str | None:
        """Show what was held back; returns the stop string that the last characters complete, if any."""
        if not self._is_watched:
            self._is_over = True
            return None
        result = self._stops.push(self._detokenizer.flush())
        self._shown += result.emit
        if result.stopped_by is None:
            self._shown += self._stops.flush()
        return result.stopped_by

    def copy(self) -> OutputText:
        """An independent text with the same past."""
        twin: OutputText = OutputText.__new__(OutputText)
        twin._fault, twin._shown, twin._waiting = self._fault, self._shown, list(self._waiting)
        twin._is_over, twin._is_watched = self._is_over, self._is_watched
        twin._detokenizer, twin._stops = self._detokenizer.copy(), self._stops.copy()
        return twin

    def _catch_up(self) -> None:
        waiting, is_over = self._waiting, self._is_over
        if self._fault is not None or not (waiting or is_over):
            return
        self._waiting, self._is_over = [], False
        try:
            if waiting:
                self._shown += self._detokenizer.push(waiting)
            if is_over:
                self._shown += self._detokenizer.flush()
        except Exception as error:  # noqa: BLE001  # a tokenizer may raise anything
            self._fault = error
