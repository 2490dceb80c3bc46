from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction.hazard import Use
from octavo.policies.eviction.stretches import Stretch, Stretches

SEEDS = st.integers(0, 2**32)


def made(random: Random, parts: int) -> Stretches:
    return Stretches([Stretch(random.randint(1, 4), random.random(), Use(0.0, 0, number)) for number in range(parts)])


def spelled(run: Stretches) -> list[tuple[float, Use]]:
    """The history of each block."""
    return [(part.weight, part.use) for part in run.parts for _ in range(part.blocks)]


@given(seed=SEEDS, parts=st.integers(0, 5))
def test_a_head_is_cut_off(seed: int, parts: int) -> None:
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    run = made(random, parts)
    before, cut = spelled(run), random.randint(0, run.blocks)
    head = run.cut_head(cut)
    assert (spelled(head), spelled(run)) == (before[:cut], before[cut:])


@given(seed=SEEDS, parts=st.integers(1, 5))
def test_a_tail_is_cut_off(seed: int, parts: int) -> None:
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    run = made(random, parts)
    before, cut = spelled(run), random.randint(1, run.blocks)
    tail = run.cut_tail(cut)
    keep = len(before) - cut
    assert (spelled(run), spelled(tail)) == (before[:keep], before[keep:])
    assert (run.blocks, tail.blocks) == (keep, cut)
    assert tail.last.use is before[-1][1]


@given(seed=SEEDS, parts=st.integers(1, 5))
def test_what_returns_replaces_as_many_blocks(seed: int, parts: int) -> None:
    random = Random(seed)  # noqa: S311  # reproducible, not secret
    run, back = made(random, parts), made(random, 3)
    before, first = spelled(run), random.randint(0, run.blocks)
    back.cut_tail(max(back.blocks - (len(before) - first), 0) or back.blocks)
    end = first + back.blocks
    replaced = run.replace(first, back)
    assert spelled(run) == before[:first] + spelled(back) + before[end:]
    assert spelled(Stretches(replaced)) == before[first:end]


def test_pieces_share_nothing_that_changes() -> None:
    run = Stretches([Stretch(5, 1.0, Use(0.0, 0, 0))])
    head = run.cut_head(2)
    head.parts[0].weight = 9.0
    head.cut_tail(1)
    assert (run.blocks, run.last.weight, head.blocks) == (3, 1.0, 1)


def test_neighbours_become_one_with_their_mean_weight() -> None:
    one, other = Stretch(3, 1.0, Use(0.0, 0, 0)), Stretch(1, 2.0, Use(0.0, 0, 1))
    one.take(other)
    assert (one.blocks, one.weight) == (4, 1.25)
