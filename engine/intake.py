"""Intake: from what a caller handed in to a SequenceGroup, or a typed error. Nothing of the engine changes here."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, TypeVar

import anyio.to_thread

from ..errors import ContextExceeded, InvalidRequest, OctavoError, describe
from ..policies.scheduling.base import Job
from ..telemetry.record import NO_TRACE, RequestTrace
from .beam import BeamSearch
from .config import EngineConfig
from .fitting import TOO_LONG, max_tokens
from .guiding import GuideMaker
from .kv import Namespace, Retention, Sequence, encode_tokens
from .model.randomness import derive_seed
from .model.runner import ModelInfo
from .model.text import TextCodec
from .prompts import as_chat, checked_ids, is_longer
from .request import Prompt, SamplingParams, shown
from .sequence import EndTokens, Sample, SequenceGroup

T = TypeVar("T")
LONG_TEXT = 2000
"""Characters from which a text is tokenised in a worker thread, so that the event loop stays free."""
MAX_TOKEN_LENGTH = 128
"""Characters; no usual vocabulary has longer tokens. Of more than that for each token of the context nothing can come,
and to find out with a tokenizer takes seconds per megabyte."""
MAX_PRIORITY = 2**31
MAX_ID_LENGTH = 256


class RequestOptions(NamedTuple):
    """What a caller says about a request beside its prompt and its parameters."""

    request_id: str | None = None
    priority: int = 0
    tenant: str | None = None
    retention: SequenceOf[Retention] = ()

    def check(self) -> None:
        """:raises InvalidRequest: when something is malformed; the tenant is checked with its namespace."""
        request_id, priority = self.request_id, self.priority
        if request_id is not None and not (isinstance(request_id, str) and 0 < len(request_id) <= MAX_ID_LENGTH):
            raise InvalidRequest(f"request_id must be a string of 1 to {MAX_ID_LENGTH} characters")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= MAX_PRIORITY:
            raise InvalidRequest(f"priority must be an integer of 32 bits, not {shown(priority)}")
        ranges = self.retention
        if not isinstance(ranges, SequenceOf) or not all(isinstance(each, Retention) for each in ranges):
            raise InvalidRequest("retention must be a sequence of Retention")


class Intake:
    """Checks requests against the model and the size of the engine, and builds their groups."""

    def __init__(
        self,
        info: ModelInfo,
        identity: str,
        codec: TextCodec | None,
        config: EngineConfig,
        *,
        clock: Callable[[], float],
        new_id: Callable[[], int],
    ) -> None:
        self._info = info
        self._identity = identity
        self._codec = codec
        self._config = config
        self._clock = clock
        self._new_id = new_id
        self._guides = GuideMaker(codec, info)
        self._orders = 0

    def namespace(self, tenant: str | None) -> Namespace:
        """Whose blocks ``tenant`` shares.

        :raises InvalidRequest: when it is no string.
        """
        return Namespace(self._identity, adapter=None, salt=tenant).checked()

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, trace: RequestTrace = NO_TRACE
    ) -> SequenceGroup:
        """A group that is ready to be submitted. ``trace``: where it is noted what becomes of it.

        :raises InvalidRequest: for anything that is malformed or out of range.
        :raises NeverFits: when the engine is too small for the request even if it had it alone.
        """
        arrival = self._clock()
        options.check()
        namespace = self.namespace(options.tenant)
        self._check_params(params)
        ids = await self.token_ids(prompt)
        wanted = params.output_format
        guide = None if wanted is None else await self._guides.make(wanted, options.tenant)
        group = self._group(params, tuple(ids), namespace, options, arrival, trace)
        sequence = self.sequence(group, ids)
        group.samples.append(Sample(group, 0, sequence, next(group.sample_seeds()), group.new_text(), guide))
        if params.beam_width > 1 and group.max_tokens > 0:
            group.beam = BeamSearch(
                width=params.beam_width,
                max_tokens=group.max_tokens,
                eos_token_ids=group.ends.ids,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                n=params.n,
            )
        return group

    def continuation(
        self,
        source: SequenceGroup,
        params: SamplingParams,
        request_id: str | None,
        trace: RequestTrace = NO_TRACE,
    ) -> SequenceGroup:
        """A group for a request that goes on where a sample of ``source`` stands; the sample is the caller's to add.

        :raises InvalidRequest: when ``params`` or the id are not possible.
        :raises NeverFits: when the engine is too small.
        """
        options = RequestOptions(request_id, source.job.priority, source.namespace.salt, source.retention)
        options.check()
        self._check_params(params)
        if params.samples > 1 or params.prompt_logprobs is not None or source.beam is not None:
            raise InvalidRequest("a fork continues one plain sample: without n, beams and prompt_logprobs")
        if params.output_format != source.params.output_format:
            raise InvalidRequest("a fork keeps the output_format of its source: the text so far is in that")
        if params.logprobs is not None and source.params.logprobs is None:
            raise InvalidRequest("logprobs of the tokens so far are unknown: the source did not ask for them")
        return self._group(params, source.prompt_ids, source.namespace, options, self._clock(), trace)

    def sequence(self, group: SequenceGroup, ids: SequenceOf[int]) -> Sequence:
        """A sequence of ``group`` that holds nothing yet."""
        return Sequence(
            self._new_id(),
            encode_tokens(ids),
            group.namespace,
            block_size=self._config.block_size,
            retention=group.retention,
            request=group.job.order,
        )

    def _group(
        self,
        params: SamplingParams,
        prompt_ids: tuple[int, ...],
        namespace: Namespace,
        options: RequestOptions,
        arrival: float,
        trace: RequestTrace,
    ) -> SequenceGroup:
        most = max_tokens(len(prompt_ids), params, self._info.max_context, self._config)
        self._orders += 1
        special_stops = self._special_stops(params)
        own, none = self._info.eos_token_ids, frozenset[int]()
        eos = none if params.ignore_eos else own
        return SequenceGroup(
            options.request_id or uuid.uuid4().hex,
            params,
            job=Job(self._orders, arrival, options.priority, namespace.salt, len(prompt_ids), most),
            namespace=namespace,
            prompt_ids=prompt_ids,
            ends=EndTokens(
                eos.union(params.stop_token_ids, special_stops),
                special_stops,
                of_format=none if params.output_format is None else own,
            ),
            seed=params.seed if params.seed is not None else derive_seed(self._config.seed, self._orders),
            codec=self._codec,
            retention=tuple(options.retention),
            trace=trace,
        )

    async def token_ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt of any kind, checked.

        :raises InvalidRequest: when it is malformed, empty, or out of the vocabulary.
        """
        ids = await self.tokenize(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        if not 0 <= min(ids) <= max(ids) < self._info.vocab_size:
            raise InvalidRequest(f"prompt token ids must be from 0 to {self._info.vocab_size - 1}")
        return ids

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt of any kind; there may be none. Ids are returned as they are.

        :raises InvalidRequest: when it is malformed.
        :raises ContextExceeded: when it is a text that cannot possibly fit.
        """
        most = MAX_TOKEN_LENGTH * self._info.max_context
        if isinstance(prompt, str):
            encode = self._require_codec("a text prompt").encode
            self._check_size(len(prompt) > most)
            return await self._encode(encode, prompt, len(prompt) > LONG_TEXT)
        chat = as_chat(prompt)
        if chat is None:
            return checked_ids(prompt)
        encode_chat = self._require_codec("a chat prompt").encode_chat
        self._check_size(is_longer(chat, most))
        return await self._encode(encode_chat, chat, is_longer(chat, LONG_TEXT))

    def _check_size(self, is_too_long: bool) -> None:
        context = self._info.max_context
        if is_too_long:
            raise ContextExceeded(
                f"{TOO_LONG}: more than {MAX_TOKEN_LENGTH * context} characters cannot fit into the model's context of "
                f"{context} tokens"
            )

    @staticmethod
    async def _encode(encode: Callable[[T], list[int]], prompt: T, is_long: bool) -> list[int]:
        try:
            return await anyio.to_thread.run_sync(encode, prompt) if is_long else encode(prompt)
        except OctavoError:
            raise
        except Exception as error:
            raise InvalidRequest(f"the prompt could not be tokenised: {describe(error)}") from error

    def _require_codec(self, what: str) -> TextCodec:
        if self._codec is None:
            raise InvalidRequest(f"{what} needs a tokenizer, which this model came without; pass token ids")
        return self._codec

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, not {type(params).__name__}")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(token >= self._info.vocab_size for token in ids):
                raise InvalidRequest(f"{name} holds an id beyond the vocabulary of {self._info.vocab_size}")
        if params.stop:
            self._require_codec("a stop string")
            if params.beam_width > 1 and len(self._special_stops(params)) < len(params.stop):
                raise InvalidRequest("stop strings are not supported with beam search; use stop_token_ids")

    def _special_stops(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are one special token: their text never shows, so they are found by id."""
        if self._codec is None:
            return {}
        by_id = {self._codec.special_token_id(stop): stop for stop in params.stop}
        return {token: stop for token, stop in by_id.items() if token is not None}
