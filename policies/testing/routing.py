"""What every routing policy must hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from random import Random

from ..routing.base import Choice, Reason, ReplicaId, RoutedRequest, RoutingPolicy
from ..routing.digest import DigestBuilder
from ..routing.fleet_view import FleetView, Placement
from ..routing.status import ReplicaStatus

_BLOCK = 16


class RoutingPolicyContract(ABC):
    """Subclass, say how the policy is made, run pytest: it collects subclasses whose name starts with ``Test``."""

    @abstractmethod
    def make(self) -> RoutingPolicy:
        """A new policy; with the same seed each time, if it draws random numbers."""

    def test_is_written_for_this_version(self) -> None:
        assert self.make().api_version[0] == RoutingPolicy.api_version[0]

    def test_ranks_every_replica_once(self) -> None:
        for seed in range(5):
            for walk, _, choice in self._choices(seed):
                ranked = list(choice.replicas)
                assert sorted(ranked) == sorted(walk.view.replicas), "all that are there, each once, and nobody else"
                assert choice.reason in Reason

    def test_says_what_the_first_one_has(self) -> None:
        for seed in range(5):
            for walk, request, choice in self._choices(seed):
                assert choice.matched == walk.view.matched(request.names).get(choice.replicas[0], 0)

    def test_who_is_avoided_or_drains_comes_after_the_others(self) -> None:
        for seed in range(5):
            for walk, request, choice in self._choices(seed):
                standing = [(each in request.avoid, walk.drains(each)) for each in choice.replicas]
                assert standing == sorted(standing), "those that may be chosen, those that drain, those to be avoided"

    def test_ranks_a_single_replica_whatever_is_wrong_with_it(self) -> None:
        walk = _Walk(0, replicas=1)
        (only,) = walk.view.replicas
        walk.view.report(only, ReplicaStatus(is_draining=True))
        request = walk.request()._replace(avoid=frozenset({only, "gone"}))
        assert list(self.make().choose(request, walk.view).replicas) == [only]

    def test_does_with_a_request_of_which_nothing_is_known(self) -> None:
        walk = _Walk(0, replicas=3)
        for request in (RoutedRequest((), 0, 0, 0), RoutedRequest((), 100, 10, _BLOCK)):
            assert sorted(self.make().choose(request, walk.view).replicas) == sorted(walk.view.replicas)

    def test_choosing_changes_nothing(self) -> None:
        walk, policy = _Walk(1), self.make()
        for _ in range(40):
            walk.step(policy)
            request, before = walk.request(), walk.seen()
            policy.choose(request, walk.view)
            assert walk.seen() == before

    def test_the_same_events_give_the_same_choices(self) -> None:
        first = [list(choice.replicas) for _, _, choice in self._choices(2)]
        assert [list(choice.replicas) for _, _, choice in self._choices(2)] == first

    def _choices(self, seed: int) -> Iterator[tuple[_Walk, RoutedRequest, Choice]]:
        walk, policy = _Walk(seed), self.make()
        for _ in range(60):
            request, choice = walk.step(policy)
            yield walk, request, choice


class _Walk:
    """A fleet to which things happen: replicas come and go, tell what they have, and get what was chosen for them."""

    def __init__(self, seed: int, replicas: int = 4) -> None:
        self.now = 0.0
        self.view = FleetView(clock=lambda: self.now)
        self._random = Random(seed)  # noqa: S311  # not for secrets
        self._joined = 0
        self._open: list[Placement] = []
        self._chosen: tuple[RoutedRequest, Choice] | None = None
        for _ in range(replicas):
            self._join()

    def drains(self, replica: ReplicaId) -> bool:
        status = self.view.status(replica)
        return status is not None and status.is_draining

    def request(self) -> RoutedRequest:
        names, random = self._names(), self._random
        avoid = random.sample(list(self.view.replicas), random.choice((0, 0, 1, len(self.view))))
        return RoutedRequest(names, len(names) * _BLOCK + random.randrange(_BLOCK), 32, _BLOCK, frozenset(avoid))

    def seen(self) -> object:
        """What can be seen of the fleet."""
        names = [self.view.matched(tuple(_name(chat, depth) for depth in range(8))) for chat in range(6)]
        loads, requests = self.view.loads.tolist(), self.view.requests.tolist()
        return self.now, list(self.view.replicas), loads, requests, self.view.draining.tolist(), names

    def step(self, policy: RoutingPolicy) -> tuple[RoutedRequest, Choice]:
        """Something happens, a request comes, and a replica is chosen for it; the next step sends it there."""
        self._send()
        self.now += self._random.random() * 5
        self._happen()
        request = self.request()
        choice = policy.choose(request, self.view)
        self._chosen = request, choice
        return request, choice

    def _send(self) -> None:
        """To the best one, mostly; then the oldest but three is answered."""
        if self._chosen is not None:
            request, choice = self._chosen
            replica = choice.replicas[0 if self._random.random() < 0.8 else -1]
            self._open.append(self.view.placed(request, replica, self.view.matched(request.names).get(replica, 0)))
        if len(self._open) > 3:
            self.view.finished(self._open.pop(0))

    def _happen(self) -> None:
        random = self._random
        replica = random.choice(list(self.view.replicas))
        what = random.randrange(7)
        if what == 0 and len(self.view) < 9:
            self._join()
        elif what == 1 and len(self.view) > 1:
            self.view.leave(replica)
        elif what == 2:
            self.view.stored(replica, self._names())
        elif what == 3:
            self.view.removed(replica, self._names()[-2:])
        elif what == 4:
            self.view.report(replica, self._status())

    def _join(self) -> None:
        self._joined += 1
        self.view.join(f"replica-{self._joined}")

    def _status(self) -> ReplicaStatus:
        random, digest = self._random, DigestBuilder(16)
        digest.add(self._names())
        return ReplicaStatus(
            running=random.randrange(4),
            waiting_tokens=random.randrange(2000),
            digest=random.choice((digest.to_bytes(), None)),
            is_draining=random.random() < 0.3,
        )

    def _names(self) -> tuple[bytes, ...]:
        """Of one of six chats with a beginning in common, some blocks or none."""
        chat = self._random.randrange(6)
        return tuple(_name(chat, depth) for depth in range(self._random.randrange(9)))


def _name(chat: int, depth: int) -> bytes:
    return f"block {chat if depth > 1 else 'shared':>6} {depth}".encode()
