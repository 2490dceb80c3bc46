"""A replica without Ray: it answers, tells how it is, and leaves its cache to the next one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import anyio
import msgspec
import pytest

from octavo import EngineConfig
from octavo.engine.fleet.base import AnswerHead, HttpRequest
from octavo.engine.fleet.ray.host import Host
from octavo.engine.fleet.ray.spec import ReplicaSpec
from octavo.engine.life import Loaded
from octavo.engine.model.runner import StepInput
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import EngineClosed, InvalidRequest, ModelError
from octavo.policies.routing.status import ReplicaStatus

PROMPT = "0123456789" * 4
WHOLE = 36
"""Tokens of it that can be cached: one at least is computed."""


def load() -> Loaded:
    return FakeRunner(), FakeCodec()


def load_broken() -> Loaded:
    def fail(step: StepInput) -> None:
        raise ModelError("broken")

    return FakeRunner(before_step=fail), FakeCodec()


SPEC = ReplicaSpec(
    model="fake",
    load=load,
    engine=EngineConfig(block_size=4, eviction_policy="octavo.policies.eviction.lru:Lru"),
    publishes_kv_events=False,
    drain_timeout=0.2,
    save_timeout=5.0,
)


def post(path: str, body: Mapping[str, object]) -> HttpRequest:
    return HttpRequest("POST", path, b"", [(b"content-type", b"application/json")], msgspec.json.encode(body))


def asked(**more: object) -> HttpRequest:
    return post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more})


async def cached(host: Host) -> int:
    """Tokens of the prompt that it did not have to compute."""
    answer = await host.whole(asked())
    assert answer.head.status == 200
    assert answer.head.replica == host.replica
    found: int = msgspec.json.decode(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.asyncio
async def test_it_answers_as_a_server_does_and_says_who_it_is() -> None:
    host = await Host.opened(SPEC, "r1")
    async with aclosing(host.answer(asked(stream=True))) as pieces:
        head, *body = [piece async for piece in pieces]
    assert isinstance(head, AnswerHead)
    assert (head.status, head.replica) == (200, "r1")
    assert b"".join(piece for piece in body if isinstance(piece, bytes)).endswith(b"data: [DONE]\n\n")
    metrics = await host.whole(HttpRequest("GET", "/metrics", b"", [], b""))
    assert b'replica="r1"' in metrics.body
    await host.close()


@pytest.mark.asyncio
async def test_closing_an_answer_aborts_it_in_the_engine() -> None:
    host = await Host.opened(SPEC, "r1")
    async with aclosing(host.answer(asked(stream=True, max_tokens=3000))) as pieces:
        for _ in range(4):
            await anext(pieces)
        assert (await host.status()).running == 1
    with anyio.fail_after(10.0):  # at the next step edge
        while (await host.status()).running:  # noqa: ASYNC110  # it tells nobody
            await anyio.sleep(0.001)
    await host.close()


@pytest.mark.asyncio
async def test_its_status_is_plain_data_and_says_how_it_names_blocks() -> None:
    host = await Host.opened(replace(SPEC, publishes_kv_events=True), "r1")
    await cached(host)
    status = await host.status()
    assert ReplicaStatus.from_dict(status.to_dict()) == status
    assert host.scheme == (status.namespace, 4)
    assert status.kv_events is not None
    assert status.kv_events.startswith("tcp://127.0.0.1:")
    assert status.free_blocks == status.total_blocks
    assert not status.is_draining
    await host.close()


@pytest.mark.asyncio
async def test_a_dead_model_is_told_to_ray() -> None:
    host = await Host.opened(replace(SPEC, load=load_broken), "r1")
    await host.check()
    for _ in range(5):
        await host.whole(asked())
    with pytest.raises(EngineClosed, match="r1: dead"):
        await host.check()
    await host.close()


@pytest.mark.asyncio
async def test_a_replica_takes_up_what_another_one_left(tmp_path: Path) -> None:
    spec = replace(SPEC, snapshots=tmp_path / "snapshots")
    first, other = await Host.opened(spec, "r1"), await Host.opened(spec, "r2")
    assert await cached(first) == 0
    await first.close()
    await other.close()  # it has nothing to leave
    again = await Host.opened(spec, "r3")
    assert await cached(again) == WHOLE
    await again.close()  # over the snapshot that it began with
    last = await Host.opened(spec, "r4")
    assert await cached(last) == WHOLE
    await last.close()


@pytest.mark.asyncio
async def test_what_does_not_end_in_time_is_aborted_and_the_cache_is_saved(tmp_path: Path) -> None:
    host = await Host.opened(replace(SPEC, snapshots=tmp_path), "r1")
    pieces = host.answer(asked(stream=True, max_tokens=3000))
    await anext(pieces)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.close)
        rest = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
    assert b"error" in rest
    assert (tmp_path / "0" / "snapshot").exists()


@pytest.mark.asyncio
async def test_each_replica_has_a_disk_folder_of_its_own(tmp_path: Path) -> None:
    config = replace(SPEC.engine, tiers=("disk",), disk_path=tmp_path / "disk", disk_bytes=2**22)
    first = await Host.opened(replace(SPEC, engine=config), "r1")
    second = await Host.opened(replace(SPEC, engine=config), "r2")
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"0", "1"}
    await cached(first)
    await first.close()
    await second.close()
    again = await Host.opened(replace(SPEC, engine=config), "r3")
    third = await Host.opened(replace(SPEC, engine=config), "r4")
    assert WHOLE in [await cached(host) for host in (again, third)]
    await again.close()
    await third.close()


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_loaded_leaves_nothing_open(tmp_path: Path) -> None:
    def missing() -> Loaded:
        raise ModelError("there is none")

    with pytest.raises(ModelError, match="there is none"):
        await Host.opened(replace(SPEC, load=missing, snapshots=tmp_path), "r1")
    host = await Host.opened(replace(SPEC, snapshots=tmp_path), "r2")
    assert os.listdir(tmp_path) == ["0"]  # noqa: PTH208  # of a test
    await host.close()


@pytest.mark.parametrize("wrong", [{"drain_timeout": -1}, {"save_timeout": float("inf")}, {"model": ""}])
def test_a_wrong_setting_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        ReplicaSpec(**{"model": "fake", **wrong})  # type: ignore[arg-type]  # that is the point
