"""The router's books: each request is placed once, and nothing is left of it when it is over."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.fleet.base import Wanted
from octavo.engine.fleet.ray.assigning import UNKNOWN, Desk
from octavo.engine.fleet.ray.ticket import Ticket
from octavo.policies.routing.base import Reason
from octavo.policies.routing.status import ReplicaStatus
from octavo.tests.engine.fleet.ray.ray_doubles import FakeMetadata, FakePending, FakeResult, pending

NAMES = tuple(bytes([number]) * 32 for number in range(8))


def desk(*replicas: str) -> Desk:
    made = Desk("prefix", {}, half_life=30.0, clock=lambda: 0.0)
    for replica in replicas:
        made.view.join(replica)
    return made


def test_the_first_of_a_ranking_counts_as_chosen_and_the_ticket_says_why() -> None:
    books = desk("a", "b")
    books.view.stored("b", NAMES)
    books.view.report("b", ReplicaStatus(namespace="model", block_tokens=16))
    asked = pending("1", NAMES)
    assert books.rank(asked)[0] == "b"
    routed = asked.ticket.routed
    assert routed is not None
    assert (routed.reason, routed.matched) == (Reason.PREFIX, len(NAMES))
    assert asked.ticket.scheme == ("model", 16)
    assert books.in_flight("b") == 1


def test_who_took_it_counts_even_if_somebody_else_was_first() -> None:
    books, asked = desk("a", "b"), pending("1", NAMES)
    first = books.rank(asked)[0]
    [other] = {"a", "b"} - {first}
    books.taken(asked, other, FakeResult())
    assert (books.in_flight(first), books.in_flight(other)) == (0, 1)
    books.completed("1", other)
    assert books.in_flight(other) == 0


def test_the_ticket_tells_of_who_took_it_not_of_who_was_to() -> None:
    books, asked = desk("a", "b"), pending("1", NAMES)
    books.view.stored("b", NAMES)
    assert books.rank(asked)[0] == "b"
    books.taken(asked, "a", FakeResult())
    assert asked.ticket.routed == (Reason.OVERLOAD, 0, 0.0)


def test_a_request_that_is_over_before_it_is_taken_leaves_nothing() -> None:
    """Ray tells of both in its event loop, of the end of a short one sometimes first."""
    books, asked = desk("a"), pending("1", NAMES)
    books.rank(asked)
    books.completed("1", "a")
    books.taken(asked, "a", FakeResult())
    assert books.in_flight("a") == 0


def test_who_took_it_may_be_gone_by_then() -> None:
    books, asked = desk("a", "b"), pending("1", NAMES)
    first = books.rank(asked)[0]
    [other] = {"a", "b"} - {first}
    books.view.leave(other)
    books.taken(asked, other, FakeResult())
    assert (books.in_flight(first), books.in_flight(other)) == (0, 0)


def test_what_ray_does_not_tell_the_end_of_is_swept_up() -> None:
    books, asked, other = desk("a"), pending("1", NAMES), pending("2", NAMES)
    books.rank(asked)
    books.rank(other)
    asked.ticket.is_over = True
    books.sweep()
    assert books.in_flight("a") == 1
    books.completed("1", "a")
    books.completed("2", "a")
    assert books.in_flight("a") == 0


def test_the_end_of_an_earlier_attempt_does_not_end_a_later_one() -> None:
    books = desk("a", "b")
    early, late = pending("1", only="a"), pending("1", only="b")
    books.rank(early)
    books.taken(early, "a", FakeResult())
    books.rank(late)
    books.completed("1", "a")
    assert (books.in_flight("a"), books.in_flight("b")) == (0, 1)


def test_a_request_that_is_cancelled_before_anybody_has_it_leaves_nothing() -> None:
    books, asked = desk("a"), pending("1", NAMES)
    books.rank(asked)
    asked.future.cancel()
    assert books.in_flight("a") == 0


def test_a_replica_that_is_not_there_is_refused_at_once() -> None:
    books, asked = desk("a"), pending("1", only="gone")
    assert books.rank(asked) == ()
    assert asked.future.cancelled()
    assert "gone" in str(asked.ticket.problem)


def test_only_one_replica_may_be_asked_for() -> None:
    books, asked = desk("a", "b", "c"), pending("1", NAMES, only="b")
    assert list(books.rank(asked)) == ["b"]
    routed = asked.ticket.routed
    assert routed is not None
    assert routed.reason is None


def test_nobody_is_known_so_ray_is_left_to_wait() -> None:
    books, asked = desk(), pending("1", NAMES)
    assert books.rank(asked) == ()
    assert not asked.future.cancelled()


def test_calls_without_a_ticket_are_routed_too() -> None:
    books = desk("a")
    plain = FakePending(FakeMetadata("1"), [])
    assert list(books.rank(plain)) == ["a"]
    books.taken(plain, "a", FakeResult())
    books.completed("1", "a")
    assert books.in_flight("a") == 0


def test_a_replica_that_is_to_end_keeps_its_requests_for_a_while() -> None:
    books, later = desk("a", "b"), list[tuple[float, Callable[[], None]]]()
    short, long, elsewhere = pending("1", only="a"), pending("2", only="a"), pending("3", only="b")
    results = {}
    for asked in (short, long, elsewhere):
        [replica] = books.rank(asked)
        results[asked.metadata.internal_request_id] = FakeResult()
        books.taken(asked, replica, results[asked.metadata.internal_request_id])
    books.view.leave("a")
    books.retire("a", 7.0, lambda delay, callback: later.append((delay, callback)))
    books.completed("1", "a")
    assert [delay for delay, _ in later] == [7.0, 7.0]
    for _, callback in later:
        callback()
    assert [results[number].is_cancelled for number in "123"] == [False, True, False]


def test_a_replica_that_was_only_away_keeps_its_requests() -> None:
    """As when Ray's controller has to start anew."""
    books, later, asked, result = desk("a"), list[Callable[[], None]](), pending("1"), FakeResult()
    books.rank(asked)
    books.taken(asked, "a", result)
    books.view.leave("a")
    books.retire("a", 7.0, lambda _, callback: later.append(callback))
    books.view.join("a")
    later.pop()()
    assert not result.is_cancelled


def test_a_ticket_stays_in_its_process() -> None:
    ticket = Ticket(Wanted(UNKNOWN))
    assert pickle.loads(pickle.dumps(ticket)) is None  # noqa: S301  # ours


@given(st.lists(st.tuples(st.sampled_from(["rank", "take", "other", "end", "drop"]), st.integers(0, 4)), max_size=60))
def test_nothing_is_left_when_all_is_over(steps: list[tuple[str, int]]) -> None:
    """Whatever order Ray calls in: once every request has ended, no replica has anything in hand."""
    books, asked = desk("a", "b", "c"), dict[int, tuple[FakePending, str]]()
    for step, number in steps:
        if step == "rank":
            request = pending(str(number), NAMES[:number])
            asked[number] = request, books.rank(request)[0]
        elif number in asked:
            request, chosen = asked[number]
            if step == "drop":
                request.future.cancel()
                del asked[number]
            elif step == "end":
                books.completed(str(number), chosen)
                del asked[number]
            else:
                chosen = chosen if step == "take" else "c"
                books.taken(request, chosen, FakeResult())
                asked[number] = request, chosen
    for number, (request, chosen) in asked.items():
        request.future.resolve()
        books.completed(str(number), chosen)
    assert [books.in_flight(replica) for replica in "abc"] == [0, 0, 0]
