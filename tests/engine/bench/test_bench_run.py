"""Whole runs, in their own time: how many requests, when, in which order."""

from __future__ import annotations

import datetime as dt
import lzma
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.bench.live import Live, Phase
from octavo.engine.bench.load import GONE_AFTER, Budget, arrivals_of
from octavo.engine.bench.recorder import Recorder
from octavo.engine.bench.report import Report
from octavo.engine.bench.run import Bench
from octavo.engine.bench.settings import (
    Arrivals,
    Endpoint,
    Form,
    Kind,
    Lengths,
    Load,
    Pace,
    Prefix,
    Prompts,
    Settings,
    Target,
)
from octavo.errors import InvalidRequest, TraceError
from octavo.tests.engine.bench.stub_server import Body, FakeTime, Reply, Stub, refusal, story

BEGAN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
SHORT = Lengths(prompt_tokens=4, output_tokens=2)


class Silent:
    interval = 3600.0

    def __init__(self) -> None:
        self.shown: list[Live] = []

    def show(self, live: Live) -> None:
        self.shown.append(live)


def bench_of(stub: Stub, load: Load, prompts: Prompts | None = None, **target: object) -> Bench:
    settings = Settings(
        target=Target(url="http://stub", **target),  # type: ignore[arg-type]  # a test says it by name
        load=load,
        prompts=prompts or Prompts(lengths=SHORT),
    )
    return Bench(settings, {"x-test": "1"}, stub.time.clock, BEGAN, transport=stub)


def run(stub: Stub, load: Load, prompts: Prompts | None = None, **target: object) -> Report:
    bench = bench_of(stub, load, prompts, **target)
    anyio.run(bench.run, Silent())
    report = bench.report()
    assert report is not None
    return report


def closed(concurrency: int = 2, **load: float) -> Load:
    return Load(pace=Pace(concurrency=concurrency), **load)  # type: ignore[arg-type]  # a test says it by name


def contents(bodies: Sequence[Body]) -> list[str]:
    return [str(body["messages"]) for body in bodies]


def test_a_closed_loop_sends_exactly_the_requests_asked_for() -> None:
    stub = Stub()
    report = run(stub, closed(3, requests=10))
    assert (report.requests.all, report.requests.ok, len(stub.bodies)) == (10, 10, 10)
    assert len(set(contents(stub.bodies))) == 10
    assert report.tokens.output == 20
    assert report.environment.model == "stub-model"
    assert report.environment.server == "stub 1"
    assert stub.headers["x-test"] == "1"
    assert {body["model"] for body in stub.bodies} == {"stub-model"}


@settings(max_examples=12)
@given(st.integers(1, 5), st.integers(0, 3))
def test_what_is_asked_depends_on_the_seed_alone(concurrency: int, seed: int) -> None:
    one, other = Stub(), Stub()
    run(one, closed(concurrency, requests=6, seed=seed))
    run(other, closed(1, requests=6, seed=seed))
    assert sorted(contents(one.bodies)) == sorted(contents(other.bodies))


def test_never_more_conversations_at_a_time_than_asked_for() -> None:
    most = under_way = 0

    class Counting(Stub):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal most, under_way
            under_way += 1
            most = max(most, under_way)
            await anyio.lowlevel.checkpoint()
            under_way -= 1
            return await super().handle_async_request(request)

    run(Counting(), closed(3, requests=20))
    assert most == 3


def test_warming_up_counts_nowhere_and_shares_the_prefixes_only() -> None:
    stub = Stub()
    prompts = Prompts(kind=Kind.SHARED_PREFIX, prefix=Prefix(tokens=6), lengths=SHORT)
    report = run(stub, closed(2, requests=5, warmup=4), prompts)
    assert (report.requests.all, len(stub.bodies)) == (5, 9)
    assert len(set(contents(stub.bodies))) == 9
    systems = {str(body["messages"][0]) for body in stub.bodies if isinstance(body["messages"], list)}
    assert len(systems) == 1


def test_a_duration_ends_it_and_what_is_under_way_may_finish() -> None:
    stub = Stub(lambda _body: story(["a"], first=3))
    report = run(stub, closed(1, duration=10))
    assert stub.sent_at == [0, 3, 6, 9]
    assert report.requests.ok == 4
    assert report.seconds == 12


def test_multi_turn_conversations_grow_by_their_answers() -> None:
    stub = Stub()
    report = run(stub, closed(1, requests=6), Prompts(kind=Kind.MULTI_TURN, turns=3, think=5, lengths=SHORT))
    assert report.requests.ok == 6
    lists = [body["messages"] for body in stub.bodies]
    assert [len(messages) for messages in lists if isinstance(messages, list)] == [1, 3, 5, 1, 3, 5]
    assert isinstance(lists[1], list)
    assert lists[1][1] == {"role": "assistant", "content": "abab"}
    assert [later - earlier > 0 for earlier, later in pairwise(stub.sent_at)] == [True, True, False, True, True]


def test_a_conversation_ends_with_its_first_failure_and_the_next_begins() -> None:
    bench = bench_of(
        Stub(lambda _body: Reply(status=500)),
        closed(1, requests=4),
        Prompts(kind=Kind.MULTI_TURN, turns=3, lengths=SHORT),
    )
    anyio.run(bench.run, Silent())
    assert [(row.conversation, row.turn) for row in bench.recorder.rows] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert bench.recorder.outcomes == {"http 500": 4}


def test_an_open_loop_sends_when_it_is_time() -> None:
    stub = Stub()
    report = run(stub, Load(pace=Pace(rate=2.0, arrivals=Arrivals.CONSTANT), requests=5))
    assert report.requests.ok == 5
    assert stub.sent_at == pytest.approx([0, 0.5, 1, 1.5, 2])


def test_an_open_loop_ends_with_its_duration() -> None:
    stub = Stub()
    run(stub, Load(pace=Pace(rate=1.0, arrivals=Arrivals.CONSTANT), duration=3))
    assert len(stub.sent_at) == 3


def test_of_long_conversations_fewer_begin() -> None:
    arrivals = arrivals_of(Load(pace=Pace(rate=2.0, arrivals=Arrivals.CONSTANT)), 4)
    assert [next(arrivals) for _ in range(3)] == [0, 2, 4]


@given(st.floats(0.1, 100), st.integers(0, 3))
def test_poisson_arrivals_come_at_their_rate_and_by_their_seed(rate: float, seed: int) -> None:
    load = Load(pace=Pace(rate=rate), seed=seed)
    moments = list(takewhile(lambda moment: moment < 1000 / rate, arrivals_of(load, 1)))
    assert len(moments) == pytest.approx(1000, abs=130)  # four standard deviations
    assert moments == sorted(moments)
    assert moments[0] > 0
    again = arrivals_of(load, 1)
    assert [next(again) for _ in range(5)] == moments[:5]


def test_more_than_the_most_in_flight_wait_and_their_wait_is_told() -> None:
    stub = Stub(lambda _body: story(["a"], first=4))
    pace = Pace(rate=1000.0, arrivals=Arrivals.CONSTANT)
    bench = bench_of(stub, Load(pace=pace, requests=3, max_in_flight=1))
    anyio.run(bench.run, Silent())
    assert [round(row.queue) for row in bench.recorder.rows] == [0, 4, 8]
    assert [row.ttft for row in bench.recorder.rows] == pytest.approx([4, 4, 4])


def test_arrivals_may_be_those_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.xz"
    head = '{"format": "kvtrace-1", "name": "t", "block_tokens": 16, "arrivals": "absolute"}'
    lines = [f'[{moment}, 20, 5, -1, "", [[0, 1]]]' for moment in (0.0, 1.5, 4.0, 10.0)]
    path.write_bytes(lzma.compress("\n".join([head, *lines]).encode()))
    stub = Stub()
    report = run(stub, Load(pace=Pace(trace=path, speed=2.0)))
    assert stub.sent_at == [0, 0.75, 2, 5]
    assert report.requests.ok == 4
    path.write_bytes(b"nothing")
    with pytest.raises(TraceError):
        run(Stub(), Load(pace=Pace(trace=path)))


def test_a_file_is_asked_once_unless_said_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}')
    prompts = Prompts(kind=Kind.FILE, file=path, lengths=SHORT)
    stub = Stub()
    assert run(stub, closed(1), prompts).requests.ok == 3
    assert run(Stub(), closed(1, requests=7), prompts).requests.ok == 7


def test_without_an_end_it_is_a_hundred_requests() -> None:
    assert run(Stub(), closed(8)).requests.all == 100


def test_prompts_are_measured_where_the_server_can() -> None:
    stub = Stub(tokenizes=True)
    report = run(stub, closed(1, requests=1), Prompts(lengths=Lengths(prompt_tokens=20, output_tokens=1)))
    assert (report.environment.tokens_per_word, report.environment.vocabulary_measured) == (2.0, True)
    messages = stub.bodies[0]["messages"]
    assert isinstance(messages, list)
    assert len(messages[0]["content"].split()) == 10


def test_prompts_of_ids_are_as_long_as_asked_for() -> None:
    stub = Stub(tokenizes=True)
    prompts = Prompts(form=Form.IDS, lengths=SHORT)
    report = run(stub, closed(1, requests=2), prompts, endpoint=Endpoint.COMPLETIONS)
    assert report.requests.ok == 2
    prompt = stub.bodies[0]["prompt"]
    assert isinstance(prompt, list)
    assert len(prompt) == 4
    with pytest.raises(InvalidRequest, match="/tokenize"):
        run(Stub(), closed(1, requests=2), prompts, endpoint=Endpoint.COMPLETIONS)


def test_refusals_are_no_errors() -> None:
    report = run(Stub(lambda _body: refusal("1")), closed(1, requests=3), retries=1)
    assert (report.requests.refused, report.requests.failed, report.requests.refusals) == (3, 0, 6)
    assert report.errors == {}


def test_it_gives_up_when_the_server_is_gone() -> None:
    sent = 0

    def answer(body: Body) -> Reply:
        nonlocal sent
        sent += 1
        if sent > 5:
            raise httpx.ConnectError("gone")
        return story(["a"])

    report = run(Stub(answer), closed(1, requests=1000))
    assert (report.requests.ok, report.requests.failed) == (5, GONE_AFTER)
    assert any("found no server" in note for note in report.notes)


def test_cancelled_it_has_what_it_found() -> None:
    sent, stuck = 0, anyio.Event()

    def answer(body: Body) -> Reply:
        nonlocal sent
        sent += 1
        if sent == 5:
            stuck.set()
        return story(["a"]) if sent <= 3 else Reply(hangs=True)

    bench = bench_of(Stub(answer), closed(2, requests=50))

    async def interrupted() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.run, Silent())
            await stuck.wait()
            await anyio.lowlevel.checkpoint()  # the last request is under way now
            tasks.cancel_scope.cancel()

    anyio.run(interrupted)
    report = bench.report(interrupted=True)
    assert report is not None
    assert (report.requests.ok, report.requests.unfinished) == (3, 2)
    assert bench.recorder.in_flight == 0
    assert "interrupted, with 2 requests" in report.notes[0]


def test_a_server_that_is_not_there_is_told_at_once_or_after_the_wait() -> None:
    class Late(Stub):
        asked = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            Late.asked += 1
            if Late.asked < 4:
                raise httpx.ConnectError("not yet")
            return await super().handle_async_request(request)

    bench = bench_of(Late(), closed(requests=1))
    with pytest.raises(InvalidRequest, match="no server is ready at http://stub"):
        anyio.run(bench.run, Silent())
    assert bench.report() is None
    stub = Late()
    patient = Bench(bench.settings, {}, stub.time.clock, BEGAN, wait=10, transport=stub)
    anyio.run(patient.run, Silent())
    report = patient.report()
    assert report is not None
    assert report.requests.ok == 1


def test_a_server_that_lists_no_models_needs_a_name() -> None:
    class Bare(Stub):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(404)
            return await super().handle_async_request(request)

    with pytest.raises(InvalidRequest, match="--model"):
        run(Bare(), closed(requests=1))
    assert run(Bare(), closed(requests=1), model="mine").environment.model == "mine"


def test_a_budget_is_never_overdrawn() -> None:
    time = FakeTime()
    budget = Budget(time.clock, 2, 10.0)
    assert not budget.take(at=10.0)
    assert [budget.take(), budget.take(at=9.9), budget.take()] == [True, True, False]
    late = Budget(time.clock, None, 10.0)
    time.now = 10.0
    assert not late.take()


def test_live_rates_are_of_the_last_seconds() -> None:
    recorder = Recorder()
    phase = Phase("running", recorder, 0.0, duration=40.0)
    assert phase.look(0.0).request_rate == 0
    recorder.content_events = 100
    assert phase.look(10.0).content_rate == 10
    assert phase.look(20.0).content_rate == 0
    assert phase.look(20.0).share == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Target(url="localhost:8000"),
        lambda: Target(url="http://me:secret@host"),
        lambda: Target(url="http://host", timeout=0),
        lambda: Target(url="http://host", retries=-1),
        Pace,
        lambda: Pace(concurrency=1, rate=1),
        lambda: Pace(rate=0),
        lambda: Pace(rate=float("nan")),
        lambda: Load(pace=Pace(rate=1), requests=0),
        lambda: Load(pace=Pace(rate=1), warmup=-1),
        lambda: Lengths(prompt_tokens=0),
        lambda: Lengths(prompt_spread=1.5),
        lambda: Prefix(share=-1),
        lambda: Prefix(prefixes=0),
        lambda: Prompts(kind=Kind.RANDOM, prefix=Prefix(tokens=3)),
        lambda: Prompts(kind=Kind.FILE),
        lambda: Prompts(file=Path("x")),
        lambda: Prompts(kind=Kind.MULTI_TURN, form=Form.IDS),
        lambda: Settings(target=Target(url="http://h"), load=closed(), prompts=Prompts(form=Form.IDS)),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert "secret" not in str(caught.value)


def test_the_url_may_end_in_v1() -> None:
    assert {Target(url=f"http://h:1{end}").base_url for end in ("", "/", "/v1", "/v1/")} == {"http://h:1"}
