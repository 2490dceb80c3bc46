"""What all replicas are asked, when some cannot answer: the others' answers come, and nothing that failed is hidden."""

from __future__ import annotations

from itertools import count
from typing import Final, NoReturn

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from octavo.engine.model.runner import StepInput
from octavo.engine.server.endpoints.health import DEAD_AFTER
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.errors import InvalidRequest
from octavo.policies.routing.least_loaded import LeastLoaded
from octavo.tests.engine.fleet.gateway_rig import ADMIN, COMPLETIONS, FORM, Door, DoorOf, replica_of

SETTINGS: Final = ServerSettings(admin_token=ADMIN)
SHORT: Final = 0.3
"""Seconds that a replica which hangs is waited for; the others take a hundredth of it."""


async def hanging(scope: Scope, receive: Receive, send: Send) -> None:
    """Says nothing, and does not notice either that nobody waits any more."""
    await anyio.sleep_forever()


def hang(door: Door, replica: str) -> None:
    behind = door.fleet._members[replica].replica
    behind._app, behind._grace = hanging, 0.01


@pytest.mark.asyncio
async def test_one_that_hangs_holds_up_nobody(door_of: DoorOf) -> None:
    async with door_of(count=3, fleet={"ask_timeout": SHORT}) as door:
        hang(door, "r1")
        health = await door.get("/health")
        assert health.status_code == 200
        found = health.json()["replicas"]
        assert [found[each].get("status") for each in ("r0", "r1", "r2")] == ["ok", None, "ok"]
        assert found["r1"]["error"]["code"] == "replica_lost"
        metrics = await door.get("/metrics")
        assert metrics.status_code == 200
        shown = {each for each in ("r0", "r1", "r2") if f'replica="{each}"' in metrics.text}
        assert shown == {"r0", "r2"}
        assert not door.fleet._members["r1"].replica._tasks


@pytest.mark.asyncio
async def test_a_fleet_that_hangs_is_not_well(door_of: DoorOf) -> None:
    async with door_of(count=1, fleet={"ask_timeout": SHORT / 10}) as door:
        hang(door, "r0")
        assert (await door.get("/ready")).status_code == 503


@pytest.mark.asyncio
async def test_where_something_was_not_done_is_told(door_of: DoorOf) -> None:
    """To erase on all but one is not to erase."""
    async with door_of(settings=SETTINGS) as door:
        door.headers = {"authorization": f"Bearer {ADMIN}"}

        async def lost(scope: Scope, receive: Receive, send: Send) -> None:
            door.fleet.lose("r0")
            await anyio.sleep_forever()

        door.fleet._members["r0"].replica._app = lost
        answer = await door.post("/admin/erase", tenant="t")
        assert answer.status_code == 503
        found = answer.json()["replicas"]
        assert found["r0"]["error"]["code"] == "replica_lost"
        assert "error" not in found["r1"]


@pytest.mark.asyncio
async def test_a_dead_model_does_not_draw_everything(door_of: DoorOf) -> None:
    """It fails at once, so it has always the least to do."""

    def fail(step: StepInput) -> NoReturn:
        raise RuntimeError("the device is gone")

    ticks = count()
    async with door_of(
        policy=LeastLoaded(),
        each=lambda replica: {"runner": FakeRunner(before_step=fail)} if replica == "r0" else {},
        fleet={"clock": lambda: float(next(ticks))},
    ) as door:
        statuses = [(await door.post(COMPLETIONS, **FORM)).status_code for _ in range(4 * DEAD_AFTER)]
        assert statuses.count(500) == DEAD_AFTER
        assert statuses[-2 * DEAD_AFTER :] == [200] * (2 * DEAD_AFTER)
        found = (await door.get("/health")).json()["replicas"]
        assert [found[each]["status"] for each in ("r0", "r1")] == ["dead", "ok"]


@pytest.mark.asyncio
async def test_one_without_an_engine_is_passed_over(door_of: DoorOf, monkeypatch: pytest.MonkeyPatch) -> None:
    async with door_of() as door:
        with monkeypatch.context() as patch:
            patch.setattr(door.services["r0"], "_engine", None)
            assert replica_of(await door.post(COMPLETIONS, **FORM)) == "r1"
            assert "octavo_fleet_retries_total{" not in (await door.get("/metrics")).text


@pytest.mark.asyncio
async def test_engines_that_could_share_nothing_are_no_fleet(door_of: DoorOf) -> None:
    with pytest.raises(InvalidRequest, match="same model"):
        async with door_of(each=lambda replica: {"block_size": 8 if replica == "r0" else 4}):
            pass
