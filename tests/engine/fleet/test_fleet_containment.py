"""Routing policies that break their contract: no request pays for it, and it is not hidden."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

import pytest

from octavo.engine.fleet.containment import LOG_INTERVAL, ContainedRouter
from octavo.engine.fleet.ray.assigning import Desk
from octavo.engine.kv.containment import MOST_FAULTS, WINDOW
from octavo.policies.routing.base import Choice, Reason, RoutedRequest, RoutingPolicy
from octavo.policies.routing.fleet_view import FleetView
from octavo.policies.routing.status import ReplicaStatus
from octavo.tests.engine.fleet.gateway_rig import COMPLETIONS, FORM, DoorOf, replica_of
from octavo.tests.engine.fleet.ray.ray_doubles import pending

NAMES: Final = (b"0" * 32, b"1" * 32)
REQUEST: Final = RoutedRequest(NAMES, 40, 10, 16)


class Does(RoutingPolicy):
    """What the test says."""

    def __init__(self, answer: Callable[[RoutedRequest, FleetView], Choice]) -> None:
        self.answer = answer
        self.asked = 0

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        self.asked += 1
        return self.answer(request, fleet)


def raising(error: BaseException) -> Callable[[RoutedRequest, FleetView], Choice]:
    def choose(request: RoutedRequest, fleet: FleetView) -> NoReturn:
        raise error

    return choose


def saying(*replicas: str, matched: object = 0, reason: object = Reason.TURN) -> Callable[..., Choice]:
    return lambda *_: Choice(replicas, matched, reason)  # type: ignore[arg-type]  # whatever it is


FAULTS: Final = {
    "raises": raising(ZeroDivisionError()),
    "raises what ends a task": raising(asyncio.CancelledError()),
    "raises what ends the process": raising(SystemExit()),
    "names nobody": saying(),
    "leaves one out": saying("r0"),
    "names a stranger": saying("r0", "stranger"),
    "names one twice": saying("r0", "r0"),
    "names more than there are": saying("r0", "r1", "r1"),
    "names what is no name": lambda *_: Choice([[], {}], 0, Reason.TURN),  # type: ignore[list-item]  # that is the fault
    "returns nothing": lambda *_: None,
    "found more than there is": saying("r0", "r1", matched=len(NAMES) + 1),
    "found less than nothing": saying("r0", "r1", matched=-1),
    "found no number": saying("r0", "r1", matched="many"),
    "has reasons of its own": saying("r0", "r1", reason="because"),
}


def view_of(*replicas: str) -> FleetView:
    view = FleetView(clock=lambda: 0.0)
    for replica in replicas:
        view.join(replica)
    return view


def contained(policy: RoutingPolicy, now: Callable[[], float] = lambda: 0.0) -> ContainedRouter:
    return ContainedRouter(policy, clock=now)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_policy_does_the_least_loaded_replica_is_chosen(fault: str) -> None:
    view = view_of("r0", "r1")
    view.report("r0", ReplicaStatus(waiting_tokens=1000))
    router = contained(Does(FAULTS[fault]))  # type: ignore[arg-type]  # some are no policies at all
    assert router.choose(REQUEST, view) == Choice(["r1", "r0"], 0, Reason.STAND_IN)
    assert router.faults == 1


def test_a_good_choice_is_passed_on() -> None:
    router = contained(Does(saying("r1", "r0", matched=2, reason="prefix")))
    assert router.choose(REQUEST, view_of("r0", "r1")) == Choice(["r1", "r0"], 2, Reason.PREFIX)
    assert router.faults == 0


def test_who_has_failed_a_request_does_not_get_it_again() -> None:
    router, view = contained(Does(saying("r0", "r1"))), view_of("r0", "r1")
    assert router.choose(REQUEST._replace(avoid=frozenset({"r0"})), view).replicas[0] == "r1"
    assert router.faults == 1
    assert router.choose(REQUEST._replace(avoid=frozenset({"r0", "r1"})), view).replicas[0] == "r0"
    assert router.faults == 1  # there is nobody else


def test_many_faults_in_a_row_set_it_aside() -> None:
    policy, view = Does(saying()), view_of("r0", "r1")
    router = contained(policy)
    for _ in range(MOST_FAULTS + 5):
        assert router.choose(REQUEST, view).reason == Reason.STAND_IN
    assert (router.is_set_aside, policy.asked, router.faults) == (True, MOST_FAULTS, MOST_FAULTS)


def test_faults_now_and_then_do_not() -> None:
    good, bad = saying("r0", "r1"), saying()
    policy, view = Does(good), view_of("r0", "r1")
    router = contained(policy)
    every = WINDOW // (MOST_FAULTS - 1) + 1
    for number in range(every * MOST_FAULTS * 2):
        policy.answer = bad if number % every == 0 else good
        expected = Reason.STAND_IN if number % every == 0 else Reason.TURN
        assert router.choose(REQUEST, view).reason == expected
    assert router.faults == MOST_FAULTS * 2


def test_whoever_stops_the_process_is_heard() -> None:
    with pytest.raises(KeyboardInterrupt):
        contained(Does(raising(KeyboardInterrupt()))).choose(REQUEST, view_of("r0"))


def test_it_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    view = view_of("r0")
    router = contained(Does(raising(ZeroDivisionError("a prompt"))), lambda: now)
    for number in range(4):
        now = LOG_INTERVAL * 0.75 * number
        router.choose(REQUEST, view)
    lines = [line for line in caplog.messages if "routing_policy_failed" in line]
    assert [f"faults={count}" in line for line, count in zip(lines, (1, 3), strict=True)] == [True, True]
    assert "policy='Does'" in lines[0]
    assert "ZeroDivisionError" in lines[0]
    assert "a prompt" not in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["raises", "raises what ends a task", "names nobody", "names a stranger"])
async def test_no_request_is_lost_with_its_policy(fault: str, door_of: DoorOf) -> None:
    async with door_of(policy=Does(FAULTS[fault])) as door:  # type: ignore[arg-type]  # as above
        for _ in range(MOST_FAULTS + 2):
            assert (await door.post(COMPLETIONS, **FORM)).status_code == 200
        door.fleet.lose("r0")
        assert replica_of(await door.post(COMPLETIONS, **FORM)) == "r1"
        shown = (await door.get("/metrics")).text
        assert 'octavo_fleet_requests_total{reason="stand_in",replica="r1"}' in shown
        await door.quiet()


class Broken(RoutingPolicy):
    """Cannot choose."""

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        raise ZeroDivisionError


def test_nor_is_one_that_ray_carries() -> None:
    desk = Desk(f"{__name__}:Broken", {}, half_life=30.0, clock=lambda: 0.0)
    desk.view.join("a")
    asked = pending("1", NAMES)
    assert list(desk.rank(asked)) == ["a"]
    assert asked.ticket.routed is not None
    assert asked.ticket.routed.reason == Reason.STAND_IN
