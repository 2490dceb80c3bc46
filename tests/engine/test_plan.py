"""From a plan to the arrays that a runner takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo import SamplingParams
from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.kv.cache_manager import Copies
from octavo.engine.model.randomness import derive_seed
from octavo.engine.plan import PlannedRow, StepPlan, pack
from octavo.engine.sequence import EndTokens, Sample, SequenceGroup
from octavo.policies.eviction.lru import Lru
from octavo.policies.scheduling import Job

B = 4
NAMESPACE = Namespace("w")
MakeSample = Callable[..., Sample]


@pytest.fixture
def cache() -> CacheManager:
    return CacheManager(32, B, Lru(32), clock=lambda: 0.0, on_fault=lambda *_: None)


@pytest.fixture
def sample_of(cache: CacheManager) -> MakeSample:
    """An admitted sample with some tokens computed."""

    def make(prompt: list[int], params: SamplingParams, computed: int = 0, output: tuple[int, ...] = ()) -> Sample:
        group = SequenceGroup(
            "r",
            params,
            job=Job(0, 0.0, 0, None, len(prompt), params.max_tokens or 0),
            namespace=NAMESPACE,
            prompt_ids=tuple(prompt),
            ends=EndTokens(frozenset({9}), {}),
            seed=77,
            codec=None,
        )
        sequence = Sequence(prompt[0], encode_tokens([*prompt, *output]), NAMESPACE, block_size=B)
        sample = Sample(group, 0, sequence, derive_seed(77, 0), None)
        sample.token_ids = list(output)
        group.samples.append(sample)
        cache.admit(sequence)
        cache.commit(sequence, computed)
        return sample

    return make


def test_rows_are_packed_one_after_the_other(cache: CacheManager, sample_of: MakeSample) -> None:
    """Tokens, positions and slots of each row lie together; the table covers just what is read."""
    params = SamplingParams(max_tokens=5)
    first = sample_of([1, 2, 3, 4, 5, 6, 7], params, computed=4)
    second = sample_of([20, 21, 22, 23, 24, 25], params)
    step = pack([PlannedRow(first, 3, ((8, 9),)), PlannedRow(second, 4, ()), PlannedRow(second, 4, ((9, 10),))][:2])
    assert step.tokens.tolist() == [5, 6, 7, 20, 21, 22, 23]
    assert step.positions.tolist() == [4, 5, 6, 0, 1, 2, 3]
    blocks = [first.sequence.table.blocks[1], second.sequence.table.blocks[0]]
    assert step.slots.tolist() == [*range(blocks[0] * B, blocks[0] * B + 3), *range(blocks[1] * B, blocks[1] * B + 4)]
    assert [(row.start, row.length, row.context) for row in step.rows] == [(0, 3, 7), (3, 4, 4)]
    assert [row.blocks.tolist() for row in step.rows] == [first.sequence.table.blocks.tolist(), [blocks[1]]]
    assert step.copies.tolist() == [[8, 9]]
    assert step.rows[1].sampling is None  # not its last chunk
    sampling = step.rows[0].sampling
    assert sampling is not None
    assert (sampling.history.tolist(), sampling.prompt_length) == ([1, 2, 3, 4, 5, 6, 7], 7)


def test_a_pack_shares_nothing_with_the_tables(cache: CacheManager, sample_of: MakeSample) -> None:
    sample = sample_of([1, 2, 3], SamplingParams(max_tokens=5))
    step = pack([PlannedRow(sample, 3, ())])
    before = (step.tokens.tolist(), step.slots.tolist(), step.rows[0].blocks.tolist())
    cache.preempt(sample.sequence)
    sample.sequence.tokens[0] = 50
    assert (step.tokens.tolist(), step.slots.tolist(), step.rows[0].blocks.tolist()) == before
    assert step.copies.shape == (0, 2)


@pytest.mark.parametrize("started", [False, True])
def test_the_row_of_a_prompt_draws_for_every_sample(started: bool, sample_of: MakeSample) -> None:
    sample = sample_of([1, 2], SamplingParams(max_tokens=5, n=3))
    if started:
        sample.group.metrics = sample.group.metrics._replace(first_token=1.0)
    sampling = pack([PlannedRow(sample, 2, ())]).rows[0].sampling
    assert sampling is not None
    assert sampling.seeds == tuple(derive_seed(77, i) for i in range(1 if started else 3))


@pytest.mark.parametrize(("output", "banned"), [((), {9}), ((5,), {9}), ((5, 6), set()), ((5, 6, 7), set())])
def test_end_tokens_are_banned_until_min_tokens(
    output: tuple[int, ...], banned: set[int], sample_of: MakeSample
) -> None:
    sample = sample_of([1], SamplingParams(max_tokens=5, min_tokens=2), output=output)
    sampling = pack([PlannedRow(sample, 1 + len(output), ())]).rows[0].sampling
    assert sampling is not None
    assert sampling.banned == banned
    assert (sampling.history.tolist(), sampling.prompt_length) == ([1, *output], 1)


@pytest.mark.parametrize(("begin", "count", "targets"), [(0, 2, [2, 3]), (2, 2, [4, 5]), (4, 1, [])])
def test_prompt_targets_are_the_tokens_that_follow(
    begin: int, count: int, targets: list[int], sample_of: MakeSample
) -> None:
    sample = sample_of([1, 2, 3, 4, 5], SamplingParams(max_tokens=0, prompt_logprobs=3), computed=begin)
    (row,) = pack([PlannedRow(sample, count, ())]).rows
    assert row.prompt_targets is not None
    assert row.prompt_targets.tolist() == targets
    assert (row.prompt_top, row.sampling) == (3, None)  # nothing is to be generated, so nothing is drawn


def test_a_plan_counts_its_tokens(sample_of: MakeSample) -> None:
    plan = StepPlan(10)
    assert not len(plan)
    first, second = sample_of([1, 2, 3, 4, 5], SamplingParams()), sample_of([20], SamplingParams())
    copies: Copies = ((1, 2),)
    row = PlannedRow(first, 3, copies)
    plan.add(row)
    plan.add(PlannedRow(second, 1, ()))
    assert (plan.tokens, plan.left, len(plan)) == (4, 6, 2)
    plan.widen(row, 2)
    assert (plan.tokens, plan.row(first), row.is_last, row.is_prefill) == (6, row, True, True)
    assert plan.drop(first) == copies
    assert plan.drop(first) == ()
    assert (plan.tokens, plan.rows, plan.row(first)) == (1, [plan.row(second)], None)
