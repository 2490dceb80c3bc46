"""GuideMaker: from an output format to a guide for a request, off the event loop and with bounded effort."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..errors import InvalidRequest, describe
from .model.guides import Guide
from .model.runner import ModelInfo
from .model.text import TextCodec
from .output_format import OutputFormat

if TYPE_CHECKING:
    from .model.llguide import GuideVocabulary

COMPILERS = 2
"""Formats that are compiled at a time; others wait."""
TRIAL_SECONDS = 5.0
MAX_TRIED = 4096


class GuideMaker:
    """Makes guides for one model. The tokens are prepared with the first request that has a format."""

    def __init__(self, codec: TextCodec | None, info: ModelInfo, *, trial_seconds: float = TRIAL_SECONDS) -> None:
        """``trial_seconds``: how long a format may take to compile."""
        self._codec = codec
        self._info = info
        self._trial_seconds = trial_seconds
        # threads of its own: one whose client has left is busy until its trial ends, and no other takes its place
        self._threads = ThreadPoolExecutor(COMPILERS, "octavo-format")
        # nor do formats that are known to be good wait behind those that somebody sends to be refused
        self._threads_of_tried = ThreadPoolExecutor(COMPILERS, "octavo-format-tried")
        self._lock = threading.Lock()
        self._vocabulary: GuideVocabulary | None = None
        self._tried: dict[bytes, None] = {}
        """Digests of formats that came through their trial, oldest first."""

    async def make(self, wanted: OutputFormat, tenant: str | None) -> Guide:
        """A guide at the beginning of a text in this format. ``tenant``: whose requests may notice by the time it takes
        that the format was used before.

        :raises InvalidRequest: when the format is malformed or too complex, or cannot be used here; says why.
        """
        if self._codec is None:
            raise InvalidRequest("an output format needs a tokenizer, which this model came without")
        loop = asyncio.get_running_loop()
        digest = hashlib.sha256(repr((tenant, wanted.kind, wanted.definition)).encode()).digest()
        threads = self._threads_of_tried if digest in self._tried else self._threads
        return await loop.run_in_executor(threads, self._make, self._codec, wanted, digest)

    def _make(self, codec: TextCodec, wanted: OutputFormat, digest: bytes) -> Guide:
        vocabulary = self._prepared(codec)
        self._try_out(wanted, digest)
        try:
            return vocabulary.guide(wanted.kind, wanted.definition)
        except BaseException as error:  # panics of native code, too; nobody cancels this thread
            raise InvalidRequest(f"the output format ({wanted.kind}) cannot be used: {error}") from error

    def _prepared(self, codec: TextCodec) -> GuideVocabulary:
        try:
            from .model.llguide import GuideVocabulary  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise InvalidRequest(
                f"an output format needs llguidance: pip install 'octavo[guided]' ({error})"
            ) from error
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._made(GuideVocabulary, codec)
            return self._vocabulary

    def _made(self, make: type[GuideVocabulary], codec: TextCodec) -> GuideVocabulary:
        try:
            return make(codec, self._info.vocab_size, self._info.eos_token_ids)
        except BaseException as error:  # a tokenizer is foreign code, and so is llguidance
            message = f"output formats cannot be used with the tokenizer of this model: {describe(error)}"
            raise InvalidRequest(message) from error

    def _try_out(self, wanted: OutputFormat, digest: bytes) -> None:
        from .model.guide_trial import try_out  # noqa: PLC0415  # an extra

        if digest in self._tried:
            return
        try:
            fault = try_out(wanted.kind, wanted.definition, self._trial_seconds)
        except OSError as error:
            raise InvalidRequest(f"the output format could not be tried out: {describe(error)}") from error
        if fault is not None:
            raise InvalidRequest(f"the output format ({wanted.kind}) cannot be used: {fault}")
        with self._lock:
            self._tried[digest] = None
            if len(self._tried) > MAX_TRIED:
                del self._tried[next(iter(self._tried))]
