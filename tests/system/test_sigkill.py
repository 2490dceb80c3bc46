"""A process that serves from a disk tier is killed with SIGKILL at random moments, over and over. Whoever comes after
it finds what was safe, nothing that nobody asked for, and never a wrong byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Self, TypeAlias

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.sources import DEMO_MODEL, demo_model_path
from octavo.engine.testing import FakeRunner
from octavo.errors import ModelError
from octavo.tests.system.kill_server import BLOCK, GREEDY, TENANTS, VOCAB, WORKERS, Job, engine, prompt, whole

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

Asked: TypeAlias = tuple[str | None, int]
SERVER = Path(__file__).with_name("kill_server.py")
SCORED = replace(GREEDY, logprobs=2)
CLEAR = 1e-3
"""How much more likely the token taken must be than the next one, in logits."""
PAUSE = 0.02
"""Longest time between the line of which a kill waits and the kill."""
TEXTS = 60
KINDS = ("serve", "small", "snapshot", "compact", "close")
DEMOTIONS = ("write_through", "write_back")
"""With these all is stored sooner or later."""


class Server:
    """Forks processes and kills them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def lived(self, job: Job, rng: Random) -> Iterator[list[object]]:
        """What a process says until it is killed, at the latest when it has ended by itself."""
        self._say(json.dumps(job))
        patience = rng.randrange(2 * WORKERS * job.requests)
        _, pid = self._next()
        assert isinstance(pid, int)
        for number in itertools.count():
            event = self._next()
            yield event
            is_last = event[0] == ("closing" if job.kind == "close" else "over")
            if is_last or (job.kind != "close" and number == patience):
                break
        time.sleep(rng.random() * PAUSE)
        os.kill(pid, signal.SIGKILL)
        self._say("reap")
        yield from iter(self._next, ["ended"])

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _next(self) -> list[object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        event: list[object] = json.loads(line)
        return event


@contextmanager
def server(*options: str) -> Iterator[Server]:
    with subprocess.Popen(  # noqa: S603  # our own script
        [sys.executable, str(SERVER), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Server]:
    with server() as started:
        yield started


class References:
    """What an engine without tiers says."""

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._known: dict[int, tuple[int, ...]] = {}

    async def learn(self, texts: int) -> Self:
        settings = EngineConfig(block_size=BLOCK, enable_prefix_caching=False)
        alone = (
            AsyncEngine(runner=FakeRunner(vocab_size=VOCAB), config=settings)
            if self._model is None
            else AsyncEngine.open(self._model, settings)
        )
        async with alone:
            for number in range(texts):
                (output,) = await alone.complete(prompt(number), SCORED)
                assert output.logprobs is not None
                for (_, first), (_, second) in (token.top for token in output.logprobs):
                    assert self._model is None or first - second > CLEAR, "the order of sums could decide this text"
                self._known[number] = output.token_ids
        return self

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._known[number]


@pytest.fixture(scope="module")
def references() -> References:
    return asyncio.run(References().learn(TEXTS))


class Ledger:
    """What is known about one folder, over all processes that used it."""

    def __init__(self, references: References) -> None:
        self.safe: set[Asked] = set()
        """Stored for certain."""
        self.gone: set[Asked] = set()
        """Forgotten for certain."""
        self.snapshots: list[set[Asked]] = []
        """What must be in the snapshot: the last one that was finished, and those that may have replaced it."""
        self.is_finished = False
        """Whether some snapshot was."""
        self._seen: set[Asked] = set()
        self._under_way: Counter[Asked] = Counter()
        self._leaving: set[Asked] = set()
        self._references = references

    def begin(self) -> None:
        """Of a process."""
        self._under_way.clear()
        self._leaving.clear()

    def note(self, event: list[object]) -> None:
        match event:
            case ["asked", tenant, number]:
                self.asked(_asked([tenant, number]))
            case ["said", tenant, int(number), list(tokens)]:
                assert tuple(tokens) == self._references[number]
                self._under_way[_asked([tenant, number])] -= 1  # somebody else may have asked the same
            case ["safe", list(done)]:
                self.safe |= set(map(_asked, done)) - self.gone - self._leaving
            case ["writing", list(done)]:
                self.snapshots.append(set(map(_asked, done)))
            case ["written", list(done)]:
                self.snapshots, self.is_finished = [set(map(_asked, done))], True
            case ["forgetting", tenant, number]:
                self._forgetting(_asked([tenant, number]))
            case ["forgotten", tenant, number]:
                self.gone |= self._leaving & {_asked([tenant, number])}

    def asked(self, which: Asked) -> None:
        """Its blocks may come back."""
        self._seen.add(which)
        self._under_way[which] += 1
        for out in (self.gone, self._leaving):
            out -= {other for other in out if _goes_on(other, which)}

    def _forgetting(self, which: Asked) -> None:
        self.safe = {other for other in self.safe if not _goes_on(which, other)}
        if not any(_goes_on(which, other) for other in self._under_way.elements()):
            self._leaving.add(which)

    async def check(self, found: AsyncEngine, rng: Random) -> None:
        """Nothing is there that nobody asked for or that was forgotten, and every text is right."""
        found.census()
        for tenant, number in self.gone:
            explained = await found.explain(prompt(number), tenant=tenant)
            assert explained.cached_tokens < whole(number), "what was forgotten came back"
        every = [(tenant, number) for tenant in TENANTS for number in range(len(self._references))]
        seen = sorted(self._seen, key=str)
        for which in (*rng.sample(every, min(len(every), 30)), *rng.sample(seen, min(len(seen), 15))):
            tenant, number = which
            explained = await found.explain(prompt(number), tenant=tenant)
            assert explained.cached_tokens <= self._most(which)
            self.asked(which)
            (output,) = await found.complete(prompt(number), GREEDY, tenant=tenant)
            assert output.token_ids == self._references[number]
        assert [(tier.corrupt, tier.tier.corrupt) for tier in found.stats().tiers] == [(0, 0)]
        found.census()

    def _most(self, which: Asked) -> int:
        """The longest beginning that somebody of the same tenant has asked for."""
        mine = prompt(which[1])
        if which in self._seen:
            return len(mine) - 1
        others = ([*prompt(number), *self._references[number]] for tenant, number in self._seen if tenant == which[0])
        return max((_common(mine, other) for other in others), default=0)


async def missing(found: AsyncEngine, wanted: set[Asked]) -> list[Asked]:
    """Which of ``wanted`` are not found whole."""
    lost = []
    for tenant, number in wanted:
        explained = await found.explain(prompt(number), tenant=tenant)
        if explained.cached_tokens < whole(number):
            lost.append((tenant, number))
    return lost


def _goes_on(shorter: Asked, longer: Asked) -> bool:
    """Whether ``longer`` begins with all whole blocks of ``shorter``."""
    end = whole(shorter[1])
    return shorter[0] == longer[0] and prompt(shorter[1])[:end] == prompt(longer[1])[:end]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _asked(pair: object) -> Asked:
    assert isinstance(pair, list)
    tenant, number = pair
    return tenant, int(number)


def bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


async def survive(started: Server, job: Job, references: References, kills: int) -> None:
    """Kill, look, go on, over and over in one folder."""
    ledger, rng = Ledger(references), Random(job.seed)  # noqa: S311  # to be the same every time
    for _ in range(kills):
        ledger.begin()
        life = job._replace(seed=rng.randrange(2**30), demotion=rng.choice(DEMOTIONS))
        for event in started.lived(life, rng):
            ledger.note(event)
        assert bytes_in(job.disk) <= job.disk_bytes
        ledger.begin()
        if job.kind == "snapshot":
            await check_snapshot(life, ledger)
        async with engine(life, clock=still) as found:
            if job.kind != "small":
                assert await missing(found, ledger.safe) == []
            await ledger.check(found, rng)
            if job.kind != "small":  # there blocks may be evicted before they are read
                assert found.stats().transfers.loads.keys() <= {"complete"}
        assert bytes_in(job.disk) <= job.disk_bytes


async def check_snapshot(job: Job, ledger: Ledger) -> None:
    """The old one is there, or the new one, whole."""
    async with engine(job, clock=still, restore=job.snapshot) as found:
        refused = found.stats().restore.refused
        if refused is not None:
            assert not ledger.is_finished, refused
            return
        lost = [await missing(found, kept) for kept in ledger.snapshots]
        assert [] in lost


def still() -> float:
    """A clock by which nothing takes time, so that no load is too slow to be worth it."""
    return 0.0


@pytest.mark.parametrize(
    ("kind", "folders", "kills"),
    [
        *((kind, 1, 1 if kind != "serve" else 2) for kind in KINDS),
        *(pytest.param(kind, 8, 5, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
@pytest.mark.asyncio
async def test_killed_and_started_again(
    fake_server: Server, references: References, tmp_path: Path, kind: str, folders: int, kills: int
) -> None:
    for seed in range(folders):
        job = Job(kind, str(tmp_path / str(seed)), seed, "", TEXTS, 8, None)
        await survive(fake_server, job, references, kills)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "texts", "kills"), [("tiny", 30, 12), ("smollm2", 5, 6)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.asyncio
async def test_a_real_model_killed_and_started_again(tmp_path: Path, model: str, texts: int, kills: int) -> None:
    source = saved_llama(tmp_path / "model") if model == "tiny" else demo_model()
    known = await References(source).learn(texts)
    with server("with transformers") as started:
        await survive(started, Job("serve", str(tmp_path), 1, "", texts, 4, source), known, kills)


def demo_model() -> str:
    try:
        demo_model_path()
    except ModelError as missing:
        pytest.skip(str(missing))
    return DEMO_MODEL


def saved_llama(folder: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
