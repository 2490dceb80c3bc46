"""Recordings: what is in the file, what is not, and that no request ever suffers from it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import anyio
import pytest

from octavo import AsyncEngine, EngineConfig, SamplingParams
from octavo.engine import recording
from octavo.engine.kv import narrator
from octavo.engine.model.runner import ModelRunner
from octavo.engine.model.text import TextCodec
from octavo.engine.recording import Recorder
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, ModelError, TelemetryError
from octavo.policies.history import Admitted, Done, End, Evicted, Gap, Left, Line, Locked, Published
from octavo.policies.simulator.recording import RecordingTrace, events, read_header
from octavo.storage.naming import names_after
from octavo.tests.engine.conftest import EngineOf, FakeClock
from octavo.tests.engine.tier_rig import until

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = list(range(1, 19))


def told(path: Path) -> list[Line]:
    return [event for _, event in events(path)]


@pytest.mark.asyncio
async def test_a_request_from_its_admission_to_its_end(tmp_path: Path, engine_of: EngineOf, clock: FakeClock) -> None:
    path = tmp_path / "run"
    async with engine_of(record=path, block_size=4, num_blocks=32, clock=clock) as engine:
        await engine.complete(PROMPT, GREEDY, priority=3)
        clock.now += 5.0
        await engine.complete(PROMPT, GREEDY, tenant="somebody")
        await engine.complete(PROMPT, GREEDY)
    first, second, third = (event for event in told(path) if isinstance(event, Admitted))
    assert (first.tokens, first.found, first.taken, first.tenant) == (18, 0, 5, 0)
    assert (second.found, second.tenant) == (0, 1)
    assert (third.found, third.taken, third.tenant) == (4, 1, 0)
    assert len(first.names) == 4 * 8
    assert third.names == b""
    held = next(event for event in told(path) if isinstance(event, Locked) and event.number == third.number)
    assert (held.names, held.blocks) == (first.names[-8:], 4)
    assert set(first.names) != set(second.names)
    published = [event for event in told(path) if isinstance(event, Published) and event.number == first.number]
    assert b"".join(event.names for event in published)[: 4 * 8] == first.names
    assert [event.blocks for event in published][-1] == 5
    done = [event for event in told(path) if isinstance(event, Done)]
    assert [(event.prompt_tokens, event.generated_tokens, event.priority, event.end) for event in done] == [
        (18, 4, 3, "length"),
        (18, 4, 0, "length"),
        (18, 4, 0, "length"),
    ]
    assert [event.request for event in done] == [first.request, second.request, third.request]
    assert isinstance(told(path)[-1], End)


@pytest.mark.asyncio
async def test_it_makes_a_trace(tmp_path: Path, engine_of: EngineOf, clock: FakeClock) -> None:
    path = tmp_path / "run"
    async with engine_of(record=path, block_size=4, num_blocks=64, clock=clock) as engine:
        await engine.complete(PROMPT, GREEDY)
        clock.now += 5.0
        await engine.complete([*PROMPT, 7, 7, 7], SamplingParams(max_tokens=2, n=3, temperature=1.0, seed=1))
    first, second = RecordingTrace(path)
    assert (first.arrival, second.arrival) == (0.0, 5.0)
    assert (first.input_tokens, first.output_tokens, first.end) == (18, 4, "length")
    assert len(first.published) == 8  # 21 tokens have K and V: the fifth block is half generated
    assert second.names.startswith(first.names)
    assert (second.input_tokens, second.output_tokens) == (21, 6)


@pytest.mark.asyncio
async def test_tenants_are_forgotten_that_were_not_seen_for_long(
    tmp_path: Path, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrator, "MOST_TENANTS", 2)
    async with engine_of(record=tmp_path / "r") as engine:
        for tenant in ("a", "b", "a", "c", "a", "b"):
            await engine.complete(PROMPT, GREEDY, tenant=tenant)
        assert len(engine._loop.cache._narrator._tenants) == 2
    numbers = [event.tenant for _, event in events(tmp_path / "r") if isinstance(event, Admitted)]
    assert numbers == [1, 2, 1, 3, 1, 4]


@pytest.mark.asyncio
async def test_neither_tokens_nor_text_nor_tenants(tmp_path: Path, engine_of: EngineOf) -> None:
    path = tmp_path / "run"
    async with engine_of(record=path, block_size=4, num_blocks=16, codec=FakeCodec()) as engine:
        await engine.complete("0123456789:;<=>?@ABCDEFG", GREEDY, tenant="the tenant's name", request_id="the id")
        namespace = engine._life.parts.intake.namespace("the tenant's name")
        names = names_after(namespace.shelf().namespace, engine_tokens(engine, "0123456789:;<=>?@ABCDEFG"), 4)
    text = path.read_text()
    for secret in ("the tenant", "the id", "01234", "0, 1, 2", "[0,1,2"):
        assert secret not in text
    names_in_file = {
        event.names[at : at + 8]
        for event in told(path)
        for at in range(0, len(getattr(event, "names", b"")), 8)
        if hasattr(event, "names")
    }
    assert names_in_file
    assert not names_in_file & {name[-8:] for name in names}


def engine_tokens(engine: AsyncEngine, text: str) -> bytes:
    codec = engine.codec
    assert codec is not None
    return b"".join(token.to_bytes(4, "little") for token in codec.encode(text))


@pytest.mark.asyncio
async def test_guesses_cannot_be_tested_from_one_recording_to_the_next(tmp_path: Path, engine_of: EngineOf) -> None:
    """The key is new each time and in no file, so the same prompt has other names in each."""
    seen: list[bytes] = []
    for number in range(2):
        async with engine_of(record=tmp_path / str(number), block_size=4) as engine:
            await engine.complete(PROMPT, GREEDY)
        seen += [event.names for event in told(tmp_path / str(number)) if isinstance(event, Admitted)]
    assert len(seen) == 2
    assert not {seen[0][at : at + 8] for at in range(0, 32, 8)} & {seen[1][at : at + 8] for at in range(0, 32, 8)}


@pytest.mark.asyncio
async def test_only_its_owner_may_read_it_and_the_header_says_what_it_is(tmp_path: Path, engine_of: EngineOf) -> None:
    path = tmp_path / "run"
    async with engine_of(record=path, block_size=4, num_blocks=20, wall=lambda: 1.5e9) as engine:
        await engine.complete(PROMPT, GREEDY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header = read_header(path)
    assert (header.format, header.block_tokens, header.num_blocks) == ("octavo-recording-1", 4, 20)
    assert header.started == 1.5e9
    assert header.eviction_policy.endswith(":Lru")
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.asyncio
async def test_a_file_is_never_overwritten_and_the_model_not_loaded_for_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("mine")
    loaded: list[bool] = []

    def load() -> tuple[ModelRunner, TextCodec | None]:
        loaded.append(True)
        return FakeRunner(), None

    with pytest.raises(TelemetryError, match="never overwrite"):
        async with AsyncEngine(load=load, config=EngineConfig(num_blocks=8), record=path):
            pass
    with pytest.raises(TelemetryError, match="cannot be written"):
        async with AsyncEngine(load=load, config=EngineConfig(num_blocks=8), record=tmp_path / "no" / "run"):
            pass
    assert path.read_text() == "mine"
    assert loaded == []


@pytest.mark.asyncio
async def test_an_engine_that_does_not_open_leaves_no_file(tmp_path: Path) -> None:
    def load() -> tuple[ModelRunner, TextCodec | None]:
        raise ModelError("no such model")

    with pytest.raises(ModelError):
        async with AsyncEngine(load=load, config=EngineConfig(num_blocks=8), record=tmp_path / "run"):
            pass
    assert os.listdir(tmp_path) == []  # noqa: PTH208  # pathlib is frowned upon in here


@pytest.mark.asyncio
async def test_a_disk_that_cannot_follow_leaves_a_gap_that_is_told(
    tmp_path: Path, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setattr(recording, "MOST_BYTES", 2000)
    monkeypatch.setattr(recording, "PAUSE", 0.0)
    async with engine_of(record=path, block_size=4, num_blocks=64) as engine:
        recorder = engine._life._recorder
        assert recorder is not None
        write, recorder._write = recorder._write, nothing  # type: ignore[method-assign]  # the disk stands still
        for number in range(6):
            await engine.complete([number, *PROMPT], GREEDY)
        recorder._write = write  # type: ignore[method-assign]  # and comes back
        await recorder._write()
        await engine.complete(PROMPT, GREEDY)
    gaps = [event.lost for event in told(path) if isinstance(event, Gap)]
    end = told(path)[-1]
    assert isinstance(end, End)
    assert gaps
    assert sum(gaps) == end.lost == recorder.lost > 0
    trace = RecordingTrace(path)
    assert list(trace)
    assert trace.lost == end.lost


@pytest.mark.asyncio
async def test_what_is_noted_during_a_write_counts_as_queued(tmp_path: Path, engine_of: EngineOf) -> None:
    async with engine_of(record=tmp_path / "run", block_size=4, num_blocks=64) as engine:
        recorder = engine._life._recorder
        assert recorder is not None
        await engine.complete(PROMPT, GREEDY)
        write, put = recorder._write, recorder._put
        recorder._write = nothing  # type: ignore[method-assign]  # it writes when the test says

        def put_while_more_comes() -> int:
            written = put()
            anyio.from_thread.run_sync(recorder._note, Left(1.0, 1, "finished"))
            return written

        recorder._put = put_while_more_comes  # type: ignore[method-assign]
        await write()
        recorder._put = put  # type: ignore[method-assign]
        queued = sum(map(recording._size, recorder._queue))
        assert recorder._queued_bytes == queued > 0
        recorder._write = write  # type: ignore[method-assign]


async def nothing() -> None:
    """In place of writing."""


@pytest.mark.asyncio
async def test_a_full_disk_ends_the_recording_and_no_request(
    tmp_path: Path, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Recorder) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "run"
    monkeypatch.setattr(Recorder, "_put", full)
    monkeypatch.setattr(recording, "PAUSE", 0.0)
    async with engine_of(record=path, block_size=4, num_blocks=16) as engine:
        first = await engine.complete(PROMPT, GREEDY)
        again = await engine.complete(PROMPT, GREEDY)
        recorder = engine._life._recorder
        assert recorder is not None
        await until(lambda: not recorder._is_on)  # a thread writes
        assert not engine._loop.cache._watchers.requests
    assert first[0].token_ids == again[0].token_ids
    assert told(path) == []


@pytest.mark.asyncio
async def test_an_abort_while_preempted_is_told(tmp_path: Path, engine_of: EngineOf) -> None:
    """Whoever keeps something for each request hears of the end of each."""
    path = tmp_path / "run"

    async def on_step(number: int) -> None:
        waiting = [sample for sample in engine._loop._scheduler.waiting if sample.group.metrics.preemptions]
        for sample in waiting:
            engine.abort(sample.group.request_id)

    async with engine_of(record=path, block_size=4, num_blocks=12, on_step=on_step) as engine:
        long = SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True)
        prompts = [[number, *PROMPT[:8]] for number in range(3)]
        generations = [await engine.generate(prompt, long).start() for prompt in prompts]
        for generation in generations:
            async for _ in generation:
                pass
    kinds = [event.kind for event in told(path) if isinstance(event, Left)]
    assert kinds.count("abandoned") == kinds.count("preempted") > 0
    assert {event.end for event in told(path) if isinstance(event, Done)} == {"abort", "length"}


@pytest.mark.asyncio
async def test_nothing_is_named_while_nobody_listens(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> list[bytes]:
        raise AssertionError("blocks were named")

    monkeypatch.setattr("octavo.engine.kv.narrator.names_after", never)
    monkeypatch.setattr("octavo.engine.kv.names.names_after", never)
    async with engine_of(block_size=4, num_blocks=12) as engine:
        for number in range(6):
            await engine.complete([number, *PROMPT], GREEDY)
        assert engine.stats().cache.evictions


@pytest.mark.asyncio
async def test_it_works_without_a_prefix_cache_too(tmp_path: Path, engine_of: EngineOf) -> None:
    path = tmp_path / "run"
    async with engine_of(record=path, block_size=4, enable_prefix_caching=False) as engine:
        await engine.complete(PROMPT, GREEDY)
        await engine.complete(PROMPT, GREEDY)
    first, second = RecordingTrace(path)
    assert first.names == second.names
    assert not [event for event in told(path) if isinstance(event, Locked | Evicted | Published)]


def test_record_needs_a_path() -> None:
    with pytest.raises((TypeError, InvalidRequest)):
        AsyncEngine(runner=FakeRunner(), record=3)  # type: ignore[arg-type]  # that is the point
