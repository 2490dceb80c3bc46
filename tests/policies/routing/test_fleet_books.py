"""The books of a fleet, against the same books in plain sets and lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from octavo.policies.routing import DigestBuilder, FleetView, IndexLimits, Placement, ReplicaStatus, RoutedRequest
from octavo.tests.policies.routing.small_fleet import chain

HALF_LIFE = 10.0
LIMITS = IndexLimits(told_seconds=5.0, untold_seconds=60.0)
CHATS = [chain("system", *[f"{chat}.{number}" for number in range(4)]) for chat in range(3)]
CHATS.append(chain(*["other"] * 3))
NAMES = sorted({name for chat in CHATS for name in chat})
REPLICAS = [f"replica {number}" for number in range(70)]  # more than fit a machine word


@dataclass
class Book:
    """What is known of one replica, said plainly."""

    known: set[bytes] = field(default_factory=set)
    expected: dict[bytes, float] = field(default_factory=dict)
    digest: set[bytes] | None = None
    is_exact: bool = False
    work: dict[int, int] = field(default_factory=dict)
    done: list[tuple[float, float]] = field(default_factory=list)
    """When, and how much work."""
    foreign: tuple[float, float] = (0.0, 0.0)
    foreign_requests: int = 0
    most: tuple[int, int] = (0, 0)

    def has(self, name: bytes, now: float) -> bool:
        digest = self.digest if self.digest is not None and not self.is_exact else set()
        return name in self.known or name in digest or self.expected.get(name, now) > now

    def hasten(self, now: float) -> None:
        self.expected = {name: min(until, now + LIMITS.told_seconds) for name, until in self.expected.items()}

    def expect(self, names: list[bytes], now: float) -> None:
        tells = self.is_exact or self.digest is not None
        until = now + (LIMITS.told_seconds if tells else LIMITS.untold_seconds)
        self.expected |= {name: until for name in names if name not in self.known}

    def become_exact(self, now: float) -> None:
        if not self.is_exact:
            self.hasten(now)
        self.is_exact = True

    def load(self, now: float) -> float:
        decaying = (work * 2 ** ((when - now) / HALF_LIFE) for when, work in (*self.done, self.foreign))
        return sum(self.work.values()) + sum(decaying)


class Machine(RuleBasedStateMachine):
    placements: Bundle[tuple[Placement, Book | None]] = Bundle("placements")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        self.view = FleetView(clock=lambda: self.now, half_life=HALF_LIFE, limits=LIMITS)
        self.books: dict[str, Book] = {}

    @initialize(replicas=st.sampled_from([1, 2, 3, 70]))
    def begin(self, replicas: int) -> None:
        for replica in REPLICAS[:replicas]:
            self.join(replica)

    @rule(replica=st.sampled_from(REPLICAS[:4]))
    def join(self, replica: str) -> None:
        if replica not in self.books:
            lately = (each for book in self.books.values() for each in book.done)
            share = sum(work * 2 ** ((when - self.now) / HALF_LIFE) for when, work in lately)
            self.books[replica] = Book(done=[(self.now, share / len(self.books))] if self.books else [])
        self.view.join(replica)

    @rule(replica=st.sampled_from(REPLICAS[:4]))
    def leave(self, replica: str) -> None:
        self.books.pop(replica, None)
        self.view.leave(replica)

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0, 70.0, 1e5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=st.sampled_from(REPLICAS[:4]), names=st.lists(st.sampled_from(NAMES)))
    def stored(self, replica: str, names: list[bytes]) -> None:
        self.view.stored(replica, names)
        if book := self.books.get(replica):
            book.become_exact(self.now)
            book.known |= set(names)
            book.expected = {name: until for name, until in book.expected.items() if name not in names}

    @rule(names=st.lists(st.sampled_from(NAMES)))
    def stored_by_all(self, names: list[bytes]) -> None:
        for replica in REPLICAS:
            self.stored(replica, names)

    @rule(replica=st.sampled_from(REPLICAS[:4]), names=st.lists(st.sampled_from(NAMES)))
    def removed(self, replica: str, names: list[bytes]) -> None:
        self.view.removed(replica, names)
        if book := self.books.get(replica):
            book.become_exact(self.now)
            book.known -= set(names)
            book.expected = {name: until for name, until in book.expected.items() if name not in names}

    @rule(replica=st.sampled_from(REPLICAS[:4]))
    def cleared(self, replica: str) -> None:
        self.view.cleared(replica)
        if book := self.books.get(replica):
            book.become_exact(self.now)
            book.known, book.expected = set(), {}

    @rule(replica=st.sampled_from(REPLICAS[:4]))
    def silenced(self, replica: str) -> None:
        self.view.silenced(replica)
        if book := self.books.get(replica):
            book.known, book.is_exact = set(), False

    @rule(
        replica=st.sampled_from(REPLICAS[:4]),
        names=st.none() | st.lists(st.sampled_from(NAMES)),
        waiting_tokens=st.sampled_from([0, 50, 5000]),
        running=st.integers(0, 3),
    )
    def report(self, replica: str, names: list[bytes] | None, waiting_tokens: int, running: int) -> None:
        builder = DigestBuilder(1000)
        builder.add(names or ())
        digest = None if names is None else builder.to_bytes()
        self.view.report(replica, ReplicaStatus(waiting_tokens=waiting_tokens, running=running, digest=digest))
        if book := self.books.get(replica):
            if names is not None and book.digest is None:
                book.hasten(self.now)
            book.digest = None if names is None else set(names)
            book.foreign = self.now, max(waiting_tokens - book.most[0], 0)
            book.foreign_requests = max(running - book.most[1], 0)
            book.most = sum(book.work.values()), len(book.work)

    @rule(
        target=placements,
        replica=st.sampled_from(REPLICAS[:4]),
        chat=st.sampled_from(CHATS),
        blocks=st.integers(0, 5),
        matched=st.integers(0, 5),
    )
    def place(self, replica: str, chat: list[bytes], blocks: int, matched: int) -> tuple[Placement, Book | None]:
        names = chat[:blocks]
        request = RoutedRequest(names, len(names) * 16 + 5, 7, 16)
        placement = self.view.placed(request, replica, min(matched, len(names)))
        assert placement.work == request.work(min(matched, len(names)))
        book = self.books.get(replica)
        if book is not None:
            book.work[placement.number] = placement.work
            book.most = max(book.most[0], sum(book.work.values())), max(book.most[1], len(book.work))
            book.expect(names, self.now)
        return placement, book

    @rule(placed=placements)
    def finish(self, placed: tuple[Placement, Book | None]) -> None:
        """Some are finished twice, or after their replica left, or after it came back."""
        placement, book = placed
        self.view.finished(placement)
        if book is None or book is not self.books.get(placement.replica):
            return
        work = book.work.pop(placement.number, None)
        if work is not None:
            book.done.append((self.now, work))
            if not book.is_exact:
                book.expect(list(placement.request.names), self.now)

    @invariant()
    def is_the_same(self) -> None:
        view = self.view
        assert list(view.replicas) == list(self.books)
        assert len(view) == len(self.books)
        for names in CHATS:
            expected = {
                replica: len(list(takewhile(lambda name, book=book: book.has(name, self.now), names)))  # type: ignore[misc]
                for replica, book in self.books.items()
            }
            assert view.matches(names).tolist() == list(expected.values())
            assert view.matched(names) == {replica: blocks for replica, blocks in expected.items() if blocks}
        loads = [book.load(self.now) for book in self.books.values()]
        assert view.loads == pytest.approx(np.array(loads), rel=1e-6, abs=1e-6)
        assert view.requests.tolist() == [len(book.work) + book.foreign_requests for book in self.books.values()]

    def teardown(self) -> None:
        """Nothing is left of those who are gone."""
        for replica in list(self.books):
            self.leave(replica)
        assert len(self.view._index) == 0


TestFleetView = Machine.TestCase
TestFleetView.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
