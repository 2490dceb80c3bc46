"""The routing policies that come with Octavo, by their contract, and faults that the contract finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.engine.fleet.routing import ROUTING_POLICIES, made_router
from octavo.errors import InvalidRequest, UnknownPlugin
from octavo.policies.routing import Choice, FleetView, Reason, RoutedRequest, RoutingPolicy
from octavo.policies.routing.least_loaded import LeastLoaded
from octavo.policies.routing.power_of_two import PowerOfTwo
from octavo.policies.routing.prefix import Prefix
from octavo.policies.routing.rendezvous import Rendezvous
from octavo.policies.routing.round_robin import RoundRobin
from octavo.policies.testing import RoutingPolicyContract

POLICIES: dict[str, type[RoutingPolicy]] = {
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix": Prefix,
    "rendezvous": Rendezvous,
    "round_robin": RoundRobin,
}


class TestLeastLoaded(RoutingPolicyContract):
    def make(self) -> RoutingPolicy:
        return LeastLoaded()


class TestPowerOfTwo(RoutingPolicyContract):
    def make(self) -> RoutingPolicy:
        return PowerOfTwo(seed=3)


class TestPrefix(RoutingPolicyContract):
    def make(self) -> RoutingPolicy:
        return Prefix()


class TestPrefixWithoutThresholds(RoutingPolicyContract):
    def make(self) -> RoutingPolicy:
        return Prefix(overload=1.0, min_match=0.0, first_blocks=1)


class TestRendezvous(RoutingPolicyContract):
    def make(self) -> RoutingPolicy:
        return Rendezvous()


class TestRoundRobin(RoutingPolicyContract):
    def make(self) -> RoutingPolicy:
        return RoundRobin()


# by name


def test_all_are_found_by_name() -> None:
    assert {name: ROUTING_POLICIES.resolve(name) for name in ROUTING_POLICIES.names()} == POLICIES


@pytest.mark.parametrize("name", POLICIES)
def test_they_are_made_by_name_with_their_settings(name: str) -> None:
    assert type(made_router(name)) is POLICIES[name]


def test_the_longest_prefix_is_the_default() -> None:
    assert isinstance(made_router(), Prefix)


def test_settings_reach_the_policy() -> None:
    with pytest.raises(InvalidRequest, match=r"routing_options: prefix: overload must be 1 or more, not 0\.5"):
        made_router("prefix", {"overload": 0.5})
    with pytest.raises(InvalidRequest, match="routing_options: 'round_robin' knows no pace; its settings: none"):
        made_router("round_robin", {"pace": 1})
    with pytest.raises(UnknownPlugin, match="Did you mean 'prefix'"):
        made_router("prefixes")


@pytest.mark.parametrize("settings", [{"min_match": -0.1}, {"min_match": 1.5}, {"first_blocks": 0}, {"overload": 0.9}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=f"prefix: {next(iter(settings))} must be"):
        made_router("prefix", settings)


def test_rendezvous_needs_a_block() -> None:
    with pytest.raises(InvalidRequest, match="rendezvous: first_blocks must be 1 or more, not 0"):
        made_router("rendezvous", {"first_blocks": 0})


# faults


class _Forgets(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        choice = super().choose(request, fleet)
        return choice._replace(replicas=choice.replicas[:2])


class _NamesTwice(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        choice = super().choose(request, fleet)
        return choice._replace(replicas=[*choice.replicas, choice.replicas[0]])


class _Remembers(LeastLoaded):
    """Whom it knew at first, whoever is there now."""

    def __init__(self) -> None:
        self._known: list[str] | None = None

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        self._known = self._known or list(fleet.replicas)
        return Choice(self._known, 0, Reason.TURN)


class _Insists(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        return super().choose(request._replace(avoid=frozenset()), fleet)


class _GivesToTheLeaving(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        avoided = sorted(fleet.replicas, key=lambda each: each in request.avoid)
        return Choice(avoided, fleet.matched(request.names).get(avoided[0], 0), Reason.LOAD)


class _Boasts(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        return super().choose(request, fleet)._replace(matched=len(request.names))


class _Meddles(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        choice = super().choose(request, fleet)
        fleet.placed(request, choice.replicas[0], 0)
        return choice


class _NeedsNames(LeastLoaded):
    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        assert request.names[0]
        return super().choose(request, fleet)


class _Moody(LeastLoaded):
    moods = 0

    def choose(self, request: RoutedRequest, fleet: FleetView) -> Choice:
        _Moody.moods += 1
        choice = super().choose(request, fleet)
        return choice if _Moody.moods % 7 else choice._replace(replicas=choice.replicas[::-1])


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (_Forgets, RoutingPolicyContract.test_ranks_every_replica_once),
        (_NamesTwice, RoutingPolicyContract.test_ranks_every_replica_once),
        (_Remembers, RoutingPolicyContract.test_ranks_every_replica_once),
        (_Insists, RoutingPolicyContract.test_who_is_avoided_or_drains_comes_after_the_others),
        (_GivesToTheLeaving, RoutingPolicyContract.test_who_is_avoided_or_drains_comes_after_the_others),
        (_Boasts, RoutingPolicyContract.test_says_what_the_first_one_has),
        (_Meddles, RoutingPolicyContract.test_choosing_changes_nothing),
        (_NeedsNames, RoutingPolicyContract.test_does_with_a_request_of_which_nothing_is_known),
        (_Moody, RoutingPolicyContract.test_the_same_events_give_the_same_choices),
    ],
)
def test_a_fault_of_a_routing_policy_is_found(
    policy: type[RoutingPolicy], test: Callable[[RoutingPolicyContract], None]
) -> None:
    class Contract(RoutingPolicyContract):
        def make(self) -> RoutingPolicy:
            return policy()

    with pytest.raises((AssertionError, IndexError)):
        test(Contract())
