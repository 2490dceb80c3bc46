"""Chats that are made up."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.policies.eviction.base import NAME_BYTES
from octavo.policies.simulator import ATOMIC, Request
from octavo.policies.simulator.fleet import Chats, ChatTrace, FleetSetting, simulate
from octavo.policies.simulator.fleet.chats import parse_chats
from octavo.policies.simulator.fleet.names import shortened, split
from octavo.tests.policies.simulator.fleet.fleet_rig import ToFirst

CHATS = st.builds(
    Chats,
    chats=st.integers(1, 12),
    fewest_turns=st.integers(1, 3),
    most_turns=st.integers(3, 5),
    system_tokens=st.integers(0, 40),
    turn_tokens=st.integers(1, 40),
    answer_tokens=st.integers(0, 40),
    chats_per_second=st.sampled_from([0.1, 5.0, math.inf]),
    think_seconds=st.sampled_from([0.0, 3.0]),
    block_tokens=st.integers(1, 16),
    seed=st.integers(0, 9),
)


def by_chat(trace: ChatTrace) -> dict[int, list[Request]]:
    chats = defaultdict[int, list[Request]](list)
    for request in trace:
        chats[request.session].append(request)
    return chats


@settings(max_examples=100, deadline=None)
@given(chats=CHATS)
def test_every_turn_goes_on_where_the_last_one_ended(chats: Chats) -> None:
    trace = ChatTrace(chats)
    requests = list(trace)
    assert requests == list(trace)
    assert all(one.arrival <= two.arrival for one, two in pairwise(requests))
    shared = split(requests[0].names)[: chats.system_tokens // chats.block_tokens]
    seen = defaultdict[bytes, set[int]](set)
    said = by_chat(trace)
    assert sorted(said) == list(range(chats.chats))
    for chat, turns in said.items():
        assert chats.fewest_turns <= len(turns) <= chats.most_turns
        cached = b""
        for turn, request in enumerate(turns):
            assert request.input_tokens == chats.system_tokens + chats.turn_tokens + turn * (
                chats.turn_tokens + chats.answer_tokens
            )
            assert len(request.names) // NAME_BYTES == request.input_tokens // chats.block_tokens
            assert request.names.startswith(cached)
            cached = request.names + request.published
            computed = request.input_tokens + max(chats.answer_tokens - 1, 0)
            assert len(cached) // NAME_BYTES == computed // chats.block_tokens
        for name in split(cached):
            seen[name].add(chat)
    for name, holders in seen.items():
        assert holders == (set(said) if name in shared else holders)
        assert name in shared or len(holders) == 1


def test_the_seed_decides_when_they_come() -> None:
    arrivals = [[r.arrival for r in ChatTrace(Chats(9, seed=seed))] for seed in (0, 0, 1)]
    assert arrivals[0] == arrivals[1] != arrivals[2]


def test_on_one_replica_without_bounds_a_chat_misses_only_what_is_new() -> None:
    chats = Chats(20, 4, 4, system_tokens=32, turn_tokens=16, answer_tokens=16)
    found = simulate(ChatTrace(chats), FleetSetting(1, 10_000, ToFirst, service=ATOMIC))
    asked = sum(32 + 16 + turn * 32 for turn in range(4)) * 20
    assert found.input_tokens == asked
    new = 32 + 20 * (16 * 4 + 16 * 3)  # the system prompt once, what was asked, and the last block of each answer
    assert found.input_tokens - found.hit_tokens == new


def test_what_a_command_line_says_of_chats() -> None:
    assert parse_chats("200:5") == Chats(200, 5, 5)
    text = "9:3-8:system=512:user=1:answer=2:rate=0.5:think=0:block=8"
    assert parse_chats(text, 7) == Chats(9, 3, 8, 512, 1, 2, 0.5, 0.0, 8, 7)


@pytest.mark.parametrize("text", ["", "9", "9:", "nine:3", "9:3:system", "9:3:what=1", "9:3:system=1.5", "9:3-x"])
def test_what_says_nothing_of_chats_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="describes no chats"):
        parse_chats(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chats": 0},
        {"fewest_turns": 0},
        {"fewest_turns": 6},
        {"block_tokens": 0},
        {"system_tokens": -1},
        {"turn_tokens": 0},
        {"answer_tokens": -1},
        {"chats_per_second": 0.0},
        {"think_seconds": math.nan},
        {"turn_tokens": 2**30},
    ],
)
def test_chats_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        ChatTrace(Chats(9)._replace(**wrong))


def test_names_of_a_live_engine_are_shortened_alike() -> None:
    names = [bytes(range(start, start + 32)) for start in (0, 100)]
    assert split(shortened(names)) == [name[:NAME_BYTES] for name in names]
