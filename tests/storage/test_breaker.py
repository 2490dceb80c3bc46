from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.storage.manager.breaker import Breaker
from octavo.tests.storage.manager_rig import Clock


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        era = breaker.admit()
        assert era is not None
        breaker.report(era, False)


def state(breaker: Breaker) -> str:
    """Asked anew each time, also in the eyes of a type checker."""
    return breaker.state


def admitted(breaker: Breaker) -> int:
    era = breaker.admit()
    assert era is not None
    return era


def test_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker(3, 5.0, Clock())
    fail(breaker, 2)
    breaker.report(admitted(breaker), True)
    fail(breaker, 2)
    assert state(breaker) == "closed"
    fail(breaker, 1)
    assert state(breaker) == "open"
    assert breaker.admit() is None


def test_calls_that_were_given_up_neither_count_nor_clear() -> None:
    breaker = Breaker(2, 5.0, Clock())
    fail(breaker, 1)
    breaker.report(admitted(breaker), None)
    fail(breaker, 1)
    assert state(breaker) == "open"


def test_one_trial_after_the_pause() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    fail(breaker, 1)
    clock.now += 4.99
    assert not breaker.usable()
    clock.now += 0.01
    assert breaker.usable()
    assert state(breaker) == "open"
    trial = admitted(breaker)
    assert state(breaker) == "trial"
    assert breaker.admit() is None
    assert not breaker.usable()
    breaker.report(trial, True)
    assert state(breaker) == "closed"
    assert breaker.usable()


def test_a_failed_trial_doubles_the_pause_up_to_the_longest_and_success_resets_it() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock, longest=18.0)
    fail(breaker, 1)
    for pause in (5.0, 10.0, 18.0, 18.0):
        clock.now += pause - 0.01
        assert breaker.admit() is None
        clock.now += 0.01
        breaker.report(admitted(breaker), False)
    clock.now += 18.0
    breaker.report(admitted(breaker), True)
    fail(breaker, 1)
    clock.now += 5.0
    assert breaker.usable()


def test_a_trial_that_was_given_up_is_given_to_the_next() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    fail(breaker, 1)
    clock.now += 5.0
    breaker.report(admitted(breaker), None)
    assert breaker.usable()
    breaker.report(admitted(breaker), True)
    assert state(breaker) == "closed"


def test_what_began_before_it_opened_is_ignored() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    early, late = admitted(breaker), admitted(breaker)
    fail(breaker, 1)
    breaker.report(early, True)
    assert state(breaker) == "open"
    clock.now += 5.0
    trial = admitted(breaker)
    breaker.report(late, False)
    breaker.report(early, True)
    assert state(breaker) == "trial"
    breaker.report(trial, True)
    assert state(breaker) == "closed"


@given(st.lists(st.tuples(st.floats(0, 7), st.sampled_from([True, False, None])), max_size=60))
def test_never_admits_during_a_pause_and_always_after_the_longest(events: list[tuple[float, bool | None]]) -> None:
    clock = Clock()
    breaker = Breaker(2, 5.0, clock, longest=20.0)
    until = 0.0
    for passed, outcome in events:
        clock.now += passed
        era = breaker.admit()
        assert (era is None) == (clock.now < until)
        if era is None:
            continue
        breaker.report(era, outcome)
        if state(breaker) == "open" and outcome is False:
            until = clock.now + breaker._pause
            assert 5.0 <= breaker._pause <= 20.0
    clock.now += 20.0
    assert breaker.usable()
