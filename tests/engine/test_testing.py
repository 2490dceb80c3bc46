"""The fake model is the judge of many tests: here it is judged itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.engine.model.runner import Row, RowSampling, StepInput
from octavo.engine.request import Chat
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


def out_of(runner: FakeRunner, blocks: Sequence[int]) -> list[memoryview]:
    rows = np.zeros((len(blocks), 3 + runner.info.bytes_per_block), dtype=np.uint8)[:, 3:]
    runner.export_blocks(np.array(blocks, dtype=np.int32), rows)
    return [memoryview(row) for row in rows]


def test_blocks_go_out_and_into_another_runner(runner: FakeRunner) -> None:
    assert runner.info.bytes_per_block == 8 * SIZE
    expected = drawn(runner, step([*PROMPT, 11, 12, 13], [0, 1, 2]))
    other = FakeRunner()
    other.allocate(3, SIZE)
    other.import_blocks(np.array([2, 0], dtype=np.int32), out_of(runner, [0, 1]))
    assert drawn(other, step([13], [2, 0, 1], begin=8)) == expected
    assert (runner.blocks_exported, other.blocks_imported) == (2, 2)
    with pytest.raises(ModelError, match="nobody has written"):
        other.execute(step([9], [2, 1, 0], begin=8, slots=[0]))


def test_a_wrong_imported_block_shows(runner: FakeRunner) -> None:
    right = drawn(runner, step([*PROMPT, 11, 12, 13], [0, 1, 2]))
    one, two = out_of(runner, [0, 1])
    runner.import_blocks(np.array([3, 4], dtype=np.int32), [two, one])
    assert drawn(runner, step([13], [3, 4, 5], begin=8)) != right
    runner.import_blocks(np.array([3, 4], dtype=np.int32), [one, two])
    assert drawn(runner, step([13], [3, 4, 5], begin=8)) == right


def test_transfers_that_do_not_fit_are_refused(runner: FakeRunner) -> None:
    one, size = np.zeros(1, dtype=np.int32), runner.info.bytes_per_block
    runner.execute(step(PROMPT[:4], [0]))
    before = runner._memory.copy()
    for out in (np.zeros((1, size + 1), dtype=np.uint8), np.zeros((2, size), dtype=np.uint8)):
        with pytest.raises(ModelError, match="shape"):
            runner.export_blocks(one, out)
    for blocks, payloads in (
        ([0, 0], [size, size]),
        ([0], [size - 1]),
        ([0], []),
        ([8], [size]),
        ([-1], [size]),
    ):
        with pytest.raises(ModelError):
            runner.import_blocks(np.array(blocks, dtype=np.int32), [memoryview(bytes(n)) for n in payloads])
    assert (runner._memory == before).all()
    runner.close()
    for closed in (runner, FakeRunner()):
        with pytest.raises(ModelError, match="no cache"):
            closed.export_blocks(one, np.zeros((1, size), dtype=np.uint8))
        with pytest.raises(ModelError, match="no cache"):
            closed.import_blocks(one, [memoryview(bytes(size))])


def test_another_identity_is_another_model_and_says_something_else(runner: FakeRunner) -> None:
    parts = runner.info.identity
    said = {drawn(runner, step(PROMPT, [0, 1]))}
    others = [FakeRunner(identity={part: "other"}) for part in parts]
    for other in (*others, FakeRunner(fingerprint="other, too")):
        other.allocate(8, SIZE)
        assert sum(other.info.identity[part] != value for part, value in parts.items()) == 1
        said.add(drawn(other, step(PROMPT, [0, 1])))
    assert len(said) == len(parts) + 2
    same = FakeRunner(identity=parts)
    same.allocate(8, SIZE)
    assert drawn(same, step(PROMPT, [0, 1])) == drawn(runner, step(PROMPT, [2, 3]))


def test_the_codec_is_one_to_one_but_for_what_is_special() -> None:
    codec = FakeCodec(special=frozenset({7}))
    assert codec.decode(codec.encode("hello@:")) == "hello@:"
    assert codec.decode([1, 7, 2]) == "12"
    assert codec.decode([1, 7, 2], skip_special_tokens=False) == "1<7>2"
    assert codec.special_token_id("<7>") == 7
    assert codec.special_token_id("<8>") is None
    assert codec.encode_chat(Chat([{"role": "user", "content": "12"}, {"role": "user", "content": "3"}])) == [1, 2, 3]
    with pytest.raises(InvalidRequest):
        codec.encode("é")


def test_the_codec_has_a_token_for_every_object_of_a_conversation() -> None:
    codec = FakeCodec()
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ("{}", "[]")]
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    chat = Chat(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}],
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    ids = codec.encode_chat(chat)
    assert (len(ids), ids[1:3]) == (5, [1, 2])
    assert len({ids[0], *ids[3:]}) == 3
    assert codec.encode_chat(chat) == ids
    with pytest.raises(InvalidRequest, match="no chat template"):
        FakeCodec(has_chat_template=False).encode_chat(chat)
