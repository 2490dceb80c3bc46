"""The books of a fleet, one case after the other."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest

from octavo.policies.routing import DigestBuilder, FleetView, IndexLimits, ReplicaStatus, RoutedRequest
from octavo.tests.policies.routing.small_fleet import chain

LIMITS = IndexLimits(told_seconds=5.0, untold_seconds=60.0)
CHATS = [chain("system", *[f"{chat}.{number}" for number in range(4)]) for chat in range(3)]
CHATS.append(chain(*["other"] * 3))
NAMES = sorted({name for chat in CHATS for name in chat})


def view_of(*replicas: str, limits: IndexLimits = LIMITS) -> tuple[FleetView, list[float]]:
    now = [0.0]
    view = FleetView(clock=lambda: now[0], half_life=10.0, limits=limits)
    for replica in replicas:
        view.join(replica)
    return view, now


def request(names: list[bytes]) -> RoutedRequest:
    return RoutedRequest(names, len(names) * 16, 10, 16)


def test_a_half_life_is_positive() -> None:
    with pytest.raises(ValueError, match="half_life must be a positive number of seconds"):
        FleetView(clock=float, half_life=0.0)


def test_what_is_told_of_strangers_is_ignored() -> None:
    view, _ = view_of("a")
    for told in (view.stored, view.removed):
        told("stranger", NAMES)
    view.cleared("stranger")
    view.silenced("stranger")
    view.leave("stranger")
    view.report("stranger", ReplicaStatus(digest=b"nonsense"))
    view.finished(view.placed(request(CHATS[0]), "stranger", 0))
    assert view.matched(CHATS[0]) == {}
    assert (list(view.replicas), view.load("a"), view.digests_refused) == (["a"], 0.0, 0)
    assert "stranger" not in view


def test_a_placement_of_a_former_life_does_not_count_in_the_next() -> None:
    view, _ = view_of("a")
    placement = view.placed(request(CHATS[0]), "a", 0)
    view.leave("a")
    view.join("a")
    view.finished(placement)
    assert (view.load("a"), view.requests.tolist(), view.matched(CHATS[0])) == (0.0, [0], {})


def test_a_digest_that_cannot_be_read_is_counted_and_the_rest_of_the_report_holds() -> None:
    view, _ = view_of("a")
    view.report("a", ReplicaStatus(digest=b"nonsense", waiting_tokens=70, is_draining=True))
    assert view.digests_refused == 1
    assert (view.load("a"), view.draining.tolist()) == (70.0, [True])
    assert view.matched(CHATS[0]) == {}


def test_exact_news_make_the_digest_superfluous_until_they_stop() -> None:
    view, _ = view_of("a")
    builder = DigestBuilder(100)
    builder.add(CHATS[0])
    view.report("a", ReplicaStatus(digest=builder.to_bytes()))
    assert view.matched(CHATS[0]) == {"a": 5}
    view.stored("a", CHATS[0][:2])
    assert view.matched(CHATS[0]) == {"a": 2}
    view.silenced("a")
    assert view.matched(CHATS[0]) == {"a": 5}


def test_a_placement_fills_the_gaps_of_a_digest() -> None:
    view, now = view_of("a")
    builder = DigestBuilder(100)
    builder.add([CHATS[0][0], CHATS[0][1], CHATS[0][3], CHATS[0][4]])
    view.placed(request(CHATS[0][:3]), "a", 0)
    view.report("a", ReplicaStatus(digest=builder.to_bytes()))
    assert view.matched(CHATS[0]) == {"a": 5}
    now[0] += LIMITS.told_seconds
    assert view.matched(CHATS[0]) == {"a": 2}


def test_expectations_are_as_many_as_the_cache_has_blocks_and_the_deepest_of_the_oldest_go_first() -> None:
    view, _ = view_of("a")
    view.report("a", ReplicaStatus(total_blocks=6))
    view.placed(request(CHATS[0]), "a", 0)
    view.placed(request(CHATS[3]), "a", 0)
    assert view.matched(CHATS[0]) == {"a": 3}
    assert view.matched(CHATS[3]) == {"a": 3}


def test_news_are_remembered_up_to_a_limit_and_what_prompts_begin_with_stays() -> None:
    view, _ = view_of("a", limits=LIMITS._replace(known=6))
    view.stored("a", CHATS[0])
    view.stored("a", CHATS[1])
    assert len(view._index) == 6
    assert (view.matched(CHATS[0]), view.matched(CHATS[1])) == ({"a": 5}, {"a": 2})
    view.removed("a", CHATS[0][3:])
    view.stored("a", CHATS[1])
    assert len(view._index) == 6
    assert (view.matched(CHATS[0]), view.matched(CHATS[1])) == ({"a": 3}, {"a": 4})


@pytest.mark.parametrize("tells", [True, False])
def test_memory_is_bounded_however_long_it_runs(tells: bool) -> None:
    view, now = view_of("a", "b", limits=IndexLimits(known=50, expected=50))

    def run(rounds: int) -> int:
        for number in range(rounds):
            now[0] += 0.01
            names = [number.to_bytes(32), (number + 1).to_bytes(32)]
            if tells:
                view.stored("ab"[number % 2], names)
            view.finished(view.placed(request(names), "ab"[number % 2], 0))
            view.leave("c")
            view.join("c")
        return len(view._index) + len(view._index._ends) + len(view._loads)

    tracemalloc.start()
    early, before = run(300), tracemalloc.get_traced_memory()[0]
    late, after = run(3000), tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert late <= early + 5
    assert after - before < 20_000


def test_who_tells_and_falls_silent_over_and_over_leaves_nothing_behind() -> None:
    view, now = view_of("a")
    for _ in range(100):
        now[0] += 1.0
        view.placed(request(CHATS[0]), "a", 0)
        view.stored("a", CHATS[3])
        view.silenced("a")
        view.matched(CHATS[0])
    now[0] += LIMITS.untold_seconds
    assert view.matched(CHATS[0]) == {}
    assert view._index._ends == []


def test_who_leaves_and_comes_back_over_and_over_is_looked_at_once() -> None:
    view, now = view_of("a")
    for _ in range(300):
        now[0] += 1.0
        view.placed(request(CHATS[0]), "a", 0)
        view.matched(CHATS[0])
        view.leave("a")
        view.join("a")
    assert len(view._index._ends) <= LIMITS.untold_seconds


def test_a_newcomer_counts_as_having_had_its_share() -> None:
    view, _ = view_of("a", "b")
    view.finished(view.placed(request(CHATS[0]), "a", 0))
    view.join("c")
    assert view.loads.tolist() == [90.0, 0.0, 45.0]


def test_a_report_older_than_our_placements_blames_nobody_else_for_them() -> None:
    view, _ = view_of("a")
    placement = view.placed(request(CHATS[0]), "a", 0)
    view.finished(placement)
    view.report("a", ReplicaStatus(running=1, waiting_tokens=90))
    assert (view.load("a"), view.requests.tolist()) == (90.0, [0])
    view.report("a", ReplicaStatus(running=1, waiting_tokens=90))
    assert (view.load("a"), view.requests.tolist()) == (180.0, [1])


def test_loads_outlast_long_pauses() -> None:
    view, now = view_of("a", "b")
    for _ in range(5):
        now[0] += 1e7
        view.finished(view.placed(request(CHATS[0]), "a", 0))
        assert view.loads.tolist() == pytest.approx([90.0, 0.0])


def test_names_of_any_length_will_do() -> None:
    view, _ = view_of("a")
    names = [bytes([number]) * 8 for number in range(5)]
    view.stored("a", names[:3])
    assert view.matched(names) == {"a": 3}


def test_requests_cross_processes() -> None:
    asked = RoutedRequest(tuple(CHATS[0]), 80, 5, 16, frozenset({"a"}))
    assert pickle.loads(pickle.dumps(asked)) == asked  # noqa: S301  # our own
