"""The fake model is the judge of many tests: here it is judged itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.engine.model.runner import Row, RowSampling, StepInput
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, ModelError

SIZE = 4


def step(
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    begin: int = 0,
    copies: Sequence[tuple[int, int]] = (),
    slots: Sequence[int] | None = None,
) -> StepInput:
    """Compute ``tokens`` from position ``begin`` on, in ``blocks``, and draw greedily."""
    end = begin + len(tokens)
    params = SamplingParams(temperature=0.0)
    sampling = RowSampling(params=params, seeds=(0,), history=np.zeros(end, dtype=np.int32), prompt_length=end)
    places = [blocks[p // SIZE] * SIZE + p % SIZE for p in range(begin, end)] if slots is None else slots
    return StepInput(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.arange(begin, end, dtype=np.int32),
        slots=np.array(places, dtype=np.int64),
        rows=(Row(0, len(tokens), end, np.array(blocks, dtype=np.int32), sampling),),
        copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
    )


@pytest.fixture
def runner() -> FakeRunner:
    fake = FakeRunner()
    fake.allocate(8, SIZE)
    return fake


def drawn(runner: FakeRunner, work: StepInput) -> tuple[int, float]:
    sampled = runner.execute(work).rows[0].sampled[0]
    return sampled.token_id, sampled.logprob


PROMPT = [5, 6, 7, 8, 9, 10]


def test_it_says_the_same_in_other_blocks_and_other_pieces(runner: FakeRunner) -> None:
    whole = drawn(runner, step(PROMPT, [0, 1]))
    assert drawn(runner, step(PROMPT, [7, 3])) == whole
    runner.execute(step(PROMPT[:5], [4, 2]))
    assert drawn(runner, step(PROMPT[5:], [4, 2], begin=5)) == whole


@pytest.mark.parametrize("changed", range(len(PROMPT)))
def test_every_token_counts(runner: FakeRunner, changed: int) -> None:
    other = [token + (place == changed) for place, token in enumerate(PROMPT)]
    assert drawn(runner, step(other, [2, 3])) != drawn(runner, step(PROMPT, [0, 1]))


def test_a_wrong_block_shows(runner: FakeRunner) -> None:
    runner.execute(step(PROMPT, [0, 1]))
    runner.execute(step([40, 41, 42, 43], [2]))
    right = drawn(runner, step([11], [0, 1], begin=6))
    assert drawn(runner, step([11], [2, 1], begin=6)) != right


def test_a_slot_that_nobody_wrote_raises(runner: FakeRunner) -> None:
    runner.execute(step(PROMPT[:3], [0]))
    with pytest.raises(ModelError, match="nobody has written"):
        runner.execute(step([1], [0, 1], begin=4))
    with pytest.raises(ModelError, match="nobody has written"):
        runner.execute(step([1, 2], [5], slots=[20, 22]))


def test_a_missing_copy_shows_and_copies_come_before_writes(runner: FakeRunner) -> None:
    runner.execute(step(PROMPT, [0, 1]))
    with pytest.raises(ModelError, match="nobody has written"):
        runner.execute(step([11], [0, 2], begin=6))
    copied = drawn(runner, step([11], [0, 2], begin=6, copies=[(1, 2)]))
    assert copied == drawn(runner, step([11], [0, 1], begin=6))
    assert drawn(runner, step([12], [0, 2], begin=7)) == drawn(runner, step([12], [0, 1], begin=7))


def test_all_sources_are_read_before_any_destination_is_written(runner: FakeRunner) -> None:
    runner.execute(step([1, 2, 3, 4], [0]))
    runner.execute(step([5, 6, 7, 8], [1]))
    one, two = runner._memory[0].copy(), runner._memory[1].copy()
    runner.execute(step([9], [3], copies=[(0, 1), (1, 0)]))
    assert (runner._memory[1] == one).all()
    assert (runner._memory[0] == two).all()


def test_a_stale_write_after_the_position_does_not_show(runner: FakeRunner) -> None:
    """Blocks are reused without being wiped."""
    runner.execute(step([1, 2, 3, 4], [0]))
    assert drawn(runner, step([9, 8], [0])) == drawn(runner, step([9, 8], [1]))


def test_the_codec_is_one_to_one_but_for_what_is_special() -> None:
    codec = FakeCodec(special=frozenset({7}))
    assert codec.decode(codec.encode("hello@:")) == "hello@:"
    assert codec.decode([1, 7, 2]) == "12"
    assert codec.decode([1, 7, 2], skip_special_tokens=False) == "1<7>2"
    assert codec.special_token_id("<7>") == 7
    assert codec.special_token_id("<8>") is None
    assert codec.encode_chat([{"role": "user", "content": "12"}, {"role": "user", "content": "3"}]) == [1, 2, 3]
    with pytest.raises(InvalidRequest):
        codec.encode("é")
