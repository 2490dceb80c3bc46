from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.policies.eviction.base import Json
from octavo.policies.eviction.hazard import EDGES, END, HazardTable, Use, step_of

KINDS = 3
STEPS = len(EDGES)
SEEDS = st.integers(0, 2**32)

Rows = list[list[float]]


@dataclass
class Block:
    """One block of one use, on its own."""

    when: float
    kind: int
    end: float | None = None


class SlowTable:
    """Every block of every use that ever was, in a list."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def counts(self, now: float) -> tuple[Rows, Rows]:
        returns, at_risk = ([[0.0] * STEPS for _ in range(KINDS)] for _ in range(2))
        for block in self.blocks:
            age = (now if block.end is None else block.end) - block.when
            reached = [step for step, edge in enumerate(EDGES) if age >= edge]
            for step in reached:
                at_risk[block.kind][step] += 1
            if block.end is not None and block.end - block.when < END:
                returns[block.kind][reached[-1]] += 1
        return returns, at_risk


def slow_hazards(returns: Rows, at_risk: Rows, evidence: float) -> Rows:
    """Of the docstring, number by number."""
    common = []
    for step in range(STEPS):
        used = sum(row[step] for row in returns) + 0.05 * evidence / 30
        common.append(used / (sum(row[step] for row in at_risk) + evidence / 30))
    ratio, hazards = 1.0, []
    for kind in range(KINDS):
        expected = sum(risk * usual for risk, usual in zip(at_risk[kind], common, strict=True))
        first_guess = ratio * 1.2 if kind else 1.0
        ratio = (sum(returns[kind]) + 0.1 * evidence * first_guess) / (expected + 0.1 * evidence)
        guesses = [min(0.9, ratio * usual) for usual in common]
        counted = zip(returns[kind], at_risk[kind], guesses, strict=True)
        hazards.append([(used + evidence * guess) / (risk + evidence) for used, risk, guess in counted])
    return hazards


def slow_index(hazards: list[float], age: int) -> float:
    """The best patience, tried one by one; on average half of the present step has passed."""
    best = gain = seconds = 0.0
    alive = 1.0
    for step in range(age, STEPS):
        width = (EDGES[step + 1] if step + 1 < STEPS else 2 * EDGES[step]) - EDGES[step]
        share = 0.5 if step == age else 1.0
        hazard = hazards[step] * share
        gain += alive * hazard
        seconds += alive * (1 - hazard / 2) * width * share
        alive *= 1 - hazard
        best = max(best, gain / seconds)
    return best


def played(table: HazardTable, seed: int, acts: int) -> tuple[SlowTable, float]:
    """The same uses and returns for both; the time at the end."""
    random, slow, now = Random(seed), SlowTable(), 1000.0  # noqa: S311  # reproducible, not secret
    uses: list[tuple[Use, list[Block]]] = []
    for _ in range(acts):
        now += random.choice([0.0, 0.25, 1.0, 30.0, 1000.0, 40_000.0])
        match random.randrange(5):
            case 0 | 1:
                kind, blocks = random.randrange(KINDS), [Block(now, 0) for _ in range(random.randint(1, 5))]
                for block in blocks:
                    block.kind = kind
                slow.blocks += blocks
                uses.append((table.begin(now, kind, len(blocks)), blocks))
            case 2 | 3 if uses:
                use, blocks = uses.pop(random.randrange(len(uses)))
                some = random.randint(1, len(blocks))
                table.returned(use, some, now)
                for block in blocks[:some]:
                    block.end = now
                if blocks[some:]:
                    uses.append((use, blocks[some:]))
            case _:
                table.advance(now)
    table.advance(now)
    return slow, now


def counted(table: HazardTable) -> tuple[Rows, Rows]:
    """As they come out of a file."""
    state = json.loads(json.dumps(table.dump(), allow_nan=False))
    return state["returns"], state["at_risk"]


@settings(max_examples=50)
@given(seed=SEEDS)
def test_every_block_is_counted_once_in_every_step_that_it_reaches(seed: int) -> None:
    table = HazardTable(KINDS, most_uses=1000)
    slow, now = played(table, seed, acts=80)
    assert counted(table) == slow.counts(now)


@settings(max_examples=25)
@given(seed=SEEDS, evidence=st.sampled_from([1.0, 60.0, 2000.0]))
def test_hazards_and_indices_are_those_of_their_definitions(seed: int, evidence: float) -> None:
    table = HazardTable(KINDS, most_uses=1000)
    slow, now = played(table, seed, acts=80)
    hazards = slow_hazards(*slow.counts(now), evidence)
    for found, expected in zip(table.hazards(evidence).tolist(), hazards, strict=True):
        assert found == pytest.approx(expected)
    for found, row in zip(table.indices(evidence), hazards, strict=True):
        assert found == pytest.approx([slow_index(row, age) for age in range(STEPS)])


def test_without_evidence_more_uses_promise_more_and_age_promises_less() -> None:
    worth = HazardTable(KINDS, most_uses=10).indices(60.0)
    assert worth[0][0] < worth[1][0] < worth[2][0]
    assert all(later <= earlier for row in worth for earlier, later in pairwise(row[1:]))


def test_what_comes_back_at_an_age_is_worth_most_right_before() -> None:
    table = HazardTable(1, most_uses=1000)
    for number in range(100):
        table.returned(table.begin(float(number), 0, 1), 1, number + 100.0)
    [worth] = table.indices(1.0)
    assert max(range(STEPS), key=worth.__getitem__) in {step_of(100.0), step_of(100.0) - 1}
    assert worth[step_of(1000.0)] < worth[0]


def test_of_blocks_taken_away_nothing_is_counted_from_then_on() -> None:
    table = HazardTable(1, most_uses=10)
    use = table.begin(0.0, 0, 3)
    table.advance(1.0)
    table.add(use, -2)
    table.advance(100.0)
    [row] = counted(table)[1]
    assert row[: step_of(1.0) + 1] == [3.0] * 2
    assert set(row[2 : step_of(100.0) + 1]) == {1.0}


def test_blocks_added_to_a_use_count_with_it() -> None:
    table = HazardTable(1, most_uses=10)
    table.add(table.begin(0.0, 0, 3), 2)
    table.advance(0.5)
    assert counted(table)[1][0][0] == 5.0


def test_of_too_many_uses_the_oldest_are_no_longer_watched() -> None:
    table = HazardTable(1, most_uses=10)
    uses = [table.begin(0.0, 0, 1) for _ in range(100)]
    table.advance(0.0)
    before = counted(table)
    for old in uses[:80]:
        table.returned(old, 1, 5.0)
        table.add(old, -1)
    assert counted(table) == before
    table.returned(uses[-1], 1, 5.0)
    assert sum(counted(table)[0][0]) == 1.0


def test_a_use_that_is_told_late_counts_once() -> None:
    """A class that is learned later, from a saved state, replaces an earlier use."""
    table = HazardTable(1, most_uses=10)
    table.begin(50.0, 0, 1)
    table.advance(60.0)
    early = table.begin(10.0, 0, 1)
    assert early.when == 10.0
    table.advance(1e9)
    assert set(counted(table)[1][0]) == {2.0}


def test_halved_counts_give_the_same_hazards_where_there_is_no_first_guess() -> None:
    table = HazardTable(KINDS, most_uses=1000)
    played(table, seed=3, acts=80)
    returns, at_risk = counted(table)
    before = table.hazards(2.0)
    table.halve()
    assert counted(table) == ([[x / 2 for x in row] for row in returns], [[x / 2 for x in row] for row in at_risk])
    assert table.hazards(1.0).tolist() == [pytest.approx(row) for row in before.tolist()]


@given(seed=SEEDS)
def test_a_restored_table_has_learned_the_same(seed: int) -> None:
    table, other = HazardTable(KINDS, most_uses=1000), HazardTable(KINDS, most_uses=1000)
    played(table, seed, acts=60)
    played(other, seed + 1, acts=20)
    other.load(json.loads(json.dumps(table.dump())))
    assert other.indices(60.0) == table.indices(60.0)


@pytest.mark.parametrize(
    "rows",
    [None, "abc", 3, [], [[0.0] * STEPS], [[0.0] * 3] * KINDS, [["x"] * STEPS] * KINDS, [[-1.0] * STEPS] * KINDS,
     [[float("nan")] * STEPS] * KINDS, [[1e300] * STEPS] * KINDS, [None] * KINDS, ["x" * STEPS] * KINDS],
)  # fmt: skip
def test_a_broken_state_is_refused_and_changes_nothing(rows: Json) -> None:
    table = HazardTable(KINDS, most_uses=1000)
    played(table, seed=1, acts=60)
    before = table.dump()
    with pytest.raises(ValueError, match="hazards"):
        table.load({**before, "at_risk": rows})
    assert table.dump() == before


@given(age=st.floats(-1e9, 1e9))
def test_the_step_of_an_age_is_the_last_that_has_begun(age: float) -> None:
    step = step_of(age)
    assert step == max(number for number, edge in enumerate(EDGES) if edge <= max(age, 0.0))
