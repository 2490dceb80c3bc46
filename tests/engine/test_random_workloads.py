"""The whole engine under random use: whatever happens around a request, it ends as it would have ended alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from random import Random

import pytest

from octavo import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from octavo.engine.generation import Generation
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, NeverFits

EngineOf = Callable[..., AbstractAsyncContextManager[AsyncEngine]]
Alone = Callable[..., Awaitable[list[RequestOutput]]]
Read = Callable[[Generation], Coroutine[object, object, list[RequestOutput]]]
VOCAB = 6
EOS = frozenset({5})
REQUESTS = 24
SCHEDULING = tuple(
    f"octavo.policies.scheduling.{each}"
    for each in ("fcfs:Fcfs", "priority:Priority", "prefix_first:PrefixFirst", "fair:Fair")
)
EVICTION = (
    "octavo.policies.eviction.lru:Lru",
    "octavo.policies.eviction.lfu:Lfu",
    "octavo.policies.eviction.cost_aware:CostAware",
)


@dataclass
class Sent:
    """A request that was taken."""

    prompt: list[int]
    params: SamplingParams
    tenant: str | None
    answer: asyncio.Task[list[RequestOutput]]
    forked_from: Sent | None = None
    aborted: bool = False
    past: int = 0
    """Of a fork: most tokens that its source can have had."""


class Crowd:
    """Sends random requests to an engine and disturbs them, from inside its steps."""

    def __init__(self, random: Random, read: Read) -> None:
        self.sent: dict[str, Sent] = {}
        self._random = random
        self._read = read
        self.engine: AsyncEngine | None = None
        self._texts = [[random.randrange(3) for _ in range(24)] for _ in range(3)]

    async def on_step(self, step: int) -> None:
        assert step < 20_000, "the engine works without getting anywhere"
        for _ in range(self._random.choice((0, 0, 1, 1, 2))):
            await self.act()

    async def act(self) -> None:
        kind = self._random.choices(("send", "abort", "fork"), (6, 1, 2))[0]
        if kind == "send":
            await self.send()
        elif self.sent and kind == "abort":
            self.abort()
        elif self.sent:
            await self.fork()

    async def send(self) -> None:
        if len(self.sent) >= REQUESTS or self.engine is None:
            return
        prompt = self._random.choice(self._texts)[: self._random.randint(1, 24)]
        if self._random.random() < 0.3:
            prompt = [*prompt, self._random.randrange(VOCAB)]
        params, tenant = self.params(), self._random.choice((None, None, "t"))
        priority = self._random.randint(-1, 1)
        name = f"r{len(self.sent)}"
        try:
            generation = await self.engine.generate(
                prompt, params, request_id=name, priority=priority, tenant=tenant
            ).start()
        except NeverFits:
            return
        self._keep(name, Sent(prompt, params, tenant, asyncio.create_task(self._read(generation))))

    def abort(self) -> None:
        name = self._random.choice(list(self.sent))
        if self.engine is not None and self.engine.abort(name):
            self.sent[name].aborted = True

    async def fork(self) -> None:
        source = self._random.choice(list(self.sent))
        if len(self.sent) >= REQUESTS or self.engine is None:
            return
        params = replace(self.params(), n=1, best_of=None, beam_width=1, prompt_logprobs=None, temperature=0.0)
        name = f"f{len(self.sent)}"
        try:
            generation = await self.engine.fork(source, params, new_id=name)
        except (InvalidRequest, NeverFits):
            return
        parent = self.sent[source]
        samples = self.engine._loop.groups[source].samples  # none yet, if it is a fork that was just asked for
        past = 1 + max((len(sample.token_ids) for sample in samples), default=parent.past)
        task = asyncio.create_task(self._read(generation))
        self._keep(name, Sent(parent.prompt, params, parent.tenant, task, forked_from=parent, past=past))

    def _keep(self, name: str, sent: Sent) -> None:
        self.sent[name] = sent

    def params(self) -> SamplingParams:
        random = self._random
        shape = random.choices(("plain", "n", "best", "beam"), (6, 2, 1, 2))[0]
        max_tokens = random.choice((0, 1, 2, 3, 4, 5, 8, 13))
        width = random.randint(2, 3)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=random.randint(0, max_tokens) if random.random() < 0.2 else 0,
            temperature=random.choice((0.0, 1.0)),
            seed=random.randrange(100),
            repetition_penalty=random.choice((1.0, 1.0, 1.5)),
            frequency_penalty=random.choice((0.0, 0.0, 0.7)),
            stop=random.choice(((), (), ("01",), ("2", "010"))) if shape != "beam" else (),
            include_stop=random.random() < 0.3,
            stop_token_ids=random.choice(((), (), (4,))),
            ignore_eos=random.random() < 0.2,
            n=width if shape == "n" else 1,
            best_of=3 if shape == "best" else None,
            beam_width=width if shape == "beam" else 1,
            prompt_logprobs=random.choice((None, None, None, 0, 2)),
            logprobs=random.choice((None, 1)) if shape != "beam" else None,
        )


def shown(output: RequestOutput) -> tuple[object, ...]:
    """What must not depend on the neighbours."""
    return (
        output.index,
        output.token_ids,
        output.text,
        output.finish_reason,
        output.stop_reason,
        output.logprobs,
        output.prompt_logprobs,
        output.cumulative_logprob,
        output.prompt_tokens,
    )


async def run_workload(seed: int, engine_of: EngineOf, alone: Alone, read: Read) -> list[str]:
    random = Random(seed)  # noqa: S311  # nothing is secret here
    crowd = Crowd(random, read)
    codec = FakeCodec(VOCAB)
    block_size = random.choice((1, 2, 4, 4, 5))
    least = -(-37 // block_size) + 1
    async with engine_of(
        runner=FakeRunner(vocab_size=VOCAB, eos_token_ids=EOS),
        codec=codec,
        on_step=crowd.on_step,
        block_size=block_size,
        num_blocks=random.choice((least, least + 2, 2 * least, 4 * least)),
        max_batch_tokens=random.choice((1, 2, 3, 5, 8, 12, 16, 64)),
        max_running=random.choice((3, 4, 16)),
        prefill_chunk=random.choice((None, None, 1, 3, 4)),
        scheduling_policy=random.choice(SCHEDULING),
        eviction_policy=random.choice(EVICTION),
        enable_prefix_caching=random.random() < 0.85,
        prefix_wait=random.choice((0.0, 5.0)),
        admission_reserve=random.choice((0.0, 0.1)),
    ) as engine:
        crowd.engine = engine
        while len(crowd.sent) < 4:
            await crowd.send()
        while not all(sent.answer.done() for sent in crowd.sent.values()):
            await asyncio.gather(*(sent.answer for sent in crowd.sent.values()))
    return [f"{name}: {fault}" for name, sent in crowd.sent.items() if (fault := await fault_of(sent, alone, codec))]


async def fault_of(sent: Sent, alone: Alone, codec: FakeCodec) -> str | None:
    outputs = sent.answer.result()
    if any(output.finish_reason is FinishReason.ABORT for output in outputs):
        return None if sent.aborted else f"aborted by nobody: {outputs}"
    if sent.aborted and sent.params.best_of is not None:
        return None  # the best of those that had ended, and of what the others had by then
    if sent.forked_from is not None:
        return await fault_of_fork(sent, outputs[0], alone)
    expected = await alone(sent.prompt, sent.params, codec=codec, vocab_size=VOCAB, eos_token_ids=EOS)
    if list(map(shown, outputs)) != list(map(shown, expected)):
        return f"{sent.prompt} {sent.params}\n  got      {outputs}\n  expected {expected}"
    limit = outputs[0].prompt_tokens
    return None if outputs[0].cached_tokens < limit else f"{outputs[0].cached_tokens} of {limit} tokens cached"


async def fault_of_fork(sent: Sent, output: RequestOutput, alone: Alone) -> str | None:
    """Greedy forks: every token after the common past is what a fresh request over the same tokens begins with."""
    ids = list(output.token_ids)
    if not ids:
        return None if sent.params.max_tokens == 0 else f"nothing came of {sent.prompt} {sent.params}"
    if len(ids) <= sent.past:
        return None  # perhaps the source came to its end first, or had as many tokens as the fork may have
    for start in range(min(len(ids), sent.past + 1)):
        if await continues(sent, ids, start, alone):
            return None
    return f"{sent.prompt} goes on as {output}"


async def continues(sent: Sent, ids: list[int], start: int, alone: Alone) -> bool:
    """Whether greedy decoding after ``ids[:start]`` yields the rest; penalties count the past as output."""
    params = sent.params
    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.min_tokens:
        return True  # a fresh request would count the past as prompt; other tests compare these
    params = replace(
        params,
        max_tokens=len(ids) - start,
        min_tokens=0,
        stop=(),
        ignore_eos=True,
        stop_token_ids=(),
        logprobs=None,
    )
    expected = await alone([*sent.prompt, *ids[:start]], params, vocab_size=VOCAB)
    return list(expected[0].token_ids) == ids[start:]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(30))
async def test_every_request_ends_as_it_would_alone(seed: int, engine_of: EngineOf, alone: Alone, read: Read) -> None:
    assert await run_workload(seed, engine_of, alone, read) == []


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(1000, 1600))
async def test_many_more_workloads(seed: int, engine_of: EngineOf, alone: Alone, read: Read) -> None:
    assert await run_workload(seed, engine_of, alone, read) == []
