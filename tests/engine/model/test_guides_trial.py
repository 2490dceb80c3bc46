"""Definitions that do harm do it in another process; GuideMaker refuses them, and says why."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import pytest

from octavo.engine.guiding import COMPILERS, GuideMaker
from octavo.engine.model import guide_trial
from octavo.engine.model.guide_trial import try_out
from octavo.engine.output_format import OutputFormat
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest

ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"a.*{'a' * (i % 7)}{i}"} for i in range(40)]})
"""Takes more than a minute to compile, and nobody knows how much more."""
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "a"'
"""Overflows the stack of a thread."""


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "integer"}', None),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", DEEP, "too complex to compile (exit status -"),
        ("json_schema", ENDLESS, "more than 1.5 seconds"),
    ],
)
def test_what_a_trial_says(kind: str, text: str, said: str | None) -> None:
    """LOOP-06."""
    fault = try_out(kind, text, seconds=1.5 if text is ENDLESS else 60)
    assert fault is None if said is None else fault is not None and said in fault


def maker(codec: FakeCodec | None = None) -> GuideMaker:
    return GuideMaker(codec or FakeCodec(), FakeRunner().info)


def test_a_format_is_tried_once_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time would tell one tenant what another one uses."""
    tried = []
    monkeypatch.setattr(guide_trial, "try_out", lambda *what: tried.append(what))

    async def use() -> None:
        guides = maker()
        for tenant in ("x", None, "x", "y", None):
            for pattern in ("ab", "ac"):
                guide = await guides.make(OutputFormat.regex(pattern), tenant)
                assert not guide.is_done

    asyncio.run(use())
    assert len(tried) == 6


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (OutputFormat.regex("("), "regex parse error"),
        (OutputFormat.regex("a(?=b)"), "look-around"),
        (OutputFormat.json_schema({"type": "foo"}), "Invalid type: foo"),
        (OutputFormat.json_schema("{"), "EOF while parsing"),
        (OutputFormat.json_schema("[]"), "Expecting object schema"),
        (OutputFormat.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (OutputFormat.json_schema(False), "Unsatisfiable"),
        (OutputFormat.grammar(""), "Empty grammar"),
        (OutputFormat.choice(["é"]), "cannot write"),
        (OutputFormat.regex(""), "empty text"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    wanted: OutputFormat, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_trial, "try_out", lambda *_: None)
    with pytest.raises(InvalidRequest, match=rf"^the output format \({wanted.kind}\) cannot be used: ") as caught:
        asyncio.run(maker().make(wanted, None))
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert len(message) < 400


def test_compiling_leaves_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(guide_trial, "try_out", lambda *_: threads.append(threading.current_thread()))
    asyncio.run(maker().make(OutputFormat.regex("ab"), None))
    assert threads != [threading.main_thread()]
    assert len(threads) == 1


def test_a_client_that_leaves_while_its_format_is_tried_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        began.set()
        go_on.wait(60)

    monkeypatch.setattr(guide_trial, "try_out", slow)

    async def leave() -> None:
        asked = asyncio.create_task(maker().make(OutputFormat.regex("ab"), None))
        await asyncio.to_thread(began.wait, 60)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert not go_on.is_set()
        go_on.set()

    asyncio.run(leave())


def test_clients_that_leave_do_not_let_more_be_tried_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most, seen = threading.Semaphore(0), [0], []

    def slow(*what: object) -> None:
        seen.append(what)
        most[0] = max(most[0], len(seen))
        busy.acquire(timeout=60)
        seen.remove(what)

    monkeypatch.setattr(guide_trial, "try_out", slow)

    async def storm() -> None:
        guides = maker()
        for number in range(20):
            asked = asyncio.create_task(guides.make(OutputFormat.regex("a" * (number + 1)), None))
            await asyncio.sleep(0.005)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        busy.release(COMPILERS)
        busy.release(1)
        assert not (await guides.make(OutputFormat.regex("b"), None)).is_done

    asyncio.run(storm())
    assert most[0] <= COMPILERS


def test_a_format_that_is_known_does_not_wait_behind_others_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    known, began, go_on = OutputFormat.regex("k+"), threading.Semaphore(0), threading.Event()

    def slow(_: str, text: str, __: float) -> None:
        if text != known.definition:
            began.release()
            go_on.wait(60)

    monkeypatch.setattr(guide_trial, "try_out", slow)

    async def ask() -> None:
        guides = maker()
        await guides.make(known, "a")
        slow_ones = [asyncio.create_task(guides.make(OutputFormat.regex("a" * (n + 1)), "b")) for n in range(5)]
        for _ in range(COMPILERS):
            await asyncio.to_thread(began.acquire, timeout=60)
        async with asyncio.timeout(60):
            await guides.make(known, "a")
        assert not go_on.is_set()
        go_on.set()
        await asyncio.gather(*slow_ones)

    asyncio.run(ask())


def test_a_tokenizer_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeCodec, token_id: int) -> bytes:
        raise KeyError(token_id)

    monkeypatch.setattr(FakeCodec, "token_bytes", broken)
    with pytest.raises(InvalidRequest, match="cannot be used with the tokenizer of this model: KeyError"):
        asyncio.run(maker().make(OutputFormat.regex("ab"), None))


def test_a_process_that_is_not_to_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(InvalidRequest, match="could not be tried out: FileNotFoundError"):
        asyncio.run(maker().make(OutputFormat.regex("ab"), None))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "octavo.engine.model.llguide", raising=False)
    monkeypatch.delitem(sys.modules, "octavo.engine.model.guide_trial", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'octavo\[guided\]'"):
        asyncio.run(maker().make(OutputFormat.regex("ab"), None))


def test_without_a_tokenizer_there_is_no_format() -> None:
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        asyncio.run(GuideMaker(None, FakeRunner().info).make(OutputFormat.regex("ab"), None))
