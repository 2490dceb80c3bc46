"""OutputText: the text of one sample while its tokens come in, with stop strings."""

from __future__ import annotations

from .model.detokenizer import IncrementalDetokenizer
from .model.stops import StopChecker
from .model.text import TextCodec
from .request import SamplingParams


class OutputText:
    """Joins detokeniser and stop checker. ``text`` is all that may be shown so far."""

    __slots__ = ("_detokenizer", "_stops", "text")

    def __init__(self, codec: TextCodec, params: SamplingParams) -> None:
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(tuple(params.stop), params.include_stop)

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Take one token; returns the stop string that it completed, if any. ``may_stop=False``: look for none yet."""
        delta = self._detokenizer.push((token,))
        if not may_stop:
            self.text += self._stops.flush() + delta
            return None
        result = self._stops.push(delta)
        self.text += result.emit
        return result.stopped_by

    def finish(self) -> str | None:
        """Show what was held back; returns the stop string that the last characters complete, if any."""
        result = self._stops.push(self._detokenizer.flush())
        self.text += result.emit
        if result.stopped_by is None:
            self.text += self._stops.flush()
        return result.stopped_by

    def copy(self) -> OutputText:
        """An independent text with the same past."""
        twin: OutputText = OutputText.__new__(OutputText)
        twin.text = self.text
        twin._detokenizer, twin._stops = self._detokenizer.copy(), self._stops.copy()
        return twin
