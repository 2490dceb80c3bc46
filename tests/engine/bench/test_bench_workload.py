from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.bench.file_workload import read_workload
from octavo.engine.bench.settings import Endpoint, Form, Kind, Lengths, Prefix, Prompts, Target
from octavo.engine.bench.transcript import request_body, transcript_of
from octavo.engine.bench.vocabulary import WORDS, Vocabulary
from octavo.engine.bench.workload import Conversation, Synthetic, length
from octavo.errors import InvalidRequest

KINDS = st.sampled_from([Kind.RANDOM, Kind.SHARED_PREFIX, Kind.MULTI_TURN])
TARGET = Target(url="http://localhost")


def synthetic(prompts: Prompts, seed: int = 0, vocabulary: Vocabulary | None = None) -> Synthetic:
    return Synthetic(prompts, vocabulary or Vocabulary(), seed)


def _random(seed: int) -> Random:
    return Random(seed)  # noqa: S311  # a workload, no secret


def words(text: object) -> int:
    assert isinstance(text, str)
    return len(text.split())


@settings(max_examples=25)
@given(KINDS, st.integers(0, 5), st.lists(st.integers(-3, 20), min_size=1, max_size=5))
def test_a_number_and_a_seed_are_one_conversation_in_any_order(kind: Kind, seed: int, numbers: list[int]) -> None:
    prompts = Prompts(kind=kind, lengths=Lengths(prompt_tokens=9, prompt_spread=0.5, output_spread=1), think=1.0)
    first, second = synthetic(prompts, seed), synthetic(prompts, seed)
    expected = {number: first.conversation(number) for number in sorted(numbers)}
    assert {number: second.conversation(number) for number in numbers} == expected
    assert synthetic(prompts, seed + 1).conversation(0) != first.conversation(0)


@given(st.integers(1, 500), st.floats(0, 1), st.integers(0, 2**32))
def test_lengths_stay_within_their_spread(mean: int, share: float, seed: int) -> None:
    drawn = length(_random(seed), mean, share)
    assert max(1, mean * (1 - share) - 1e-9) <= drawn <= mean * (1 + share) + 1e-9


def test_lengths_are_as_long_as_they_should_be_on_average() -> None:
    draw = _random(1)
    drawn = [length(draw, 100, 0.5) for _ in range(4000)]
    assert (min(drawn), max(drawn)) == (50, 150)
    assert sum(drawn) / len(drawn) == pytest.approx(100, abs=2)


@settings(max_examples=25)
@given(st.floats(0, 1), st.integers(1, 4))
def test_the_share_of_shared_prefixes_is_what_was_asked_for(share: float, prefixes: int) -> None:
    prefix = Prefix(tokens=8, prefixes=prefixes, share=share)
    prompts = Prompts(kind=Kind.SHARED_PREFIX, prefix=prefix, lengths=Lengths(prompt_tokens=1))
    workload = synthetic(prompts)
    systems = [workload.conversation(number).system for number in range(300)]
    shared = [system for system, times in Counter(systems).items() if times > 1]
    assert len(shared) <= prefixes
    assert sum(systems.count(system) for system in shared) / len(systems) == pytest.approx(share, abs=0.1)
    assert {words(system) for system in systems} == {8}


def test_only_prefixes_are_shared_and_random_prompts_have_none() -> None:
    workload = synthetic(Prompts(kind=Kind.RANDOM, lengths=Lengths(prompt_tokens=30)))
    conversations = [workload.conversation(number) for number in range(100)]
    assert {conversation.system for conversation in conversations} == {""}
    assert len({conversation.turns[0].user for conversation in conversations}) == 100


def test_words_are_as_many_as_their_tokens_say() -> None:
    assert words(Vocabulary(tokens_per_word=2.0).piece(_random(0), 100)) == 50
    assert words(Vocabulary().piece(_random(0), 100)) == 100
    assert Vocabulary().piece(_random(0), 0) == ""


def test_ids_are_exact_and_from_the_vocabulary() -> None:
    vocabulary = Vocabulary(Form.IDS, ids=(3, 5, 8))
    prompts = Prompts(
        kind=Kind.SHARED_PREFIX, form=Form.IDS, prefix=Prefix(tokens=7), lengths=Lengths(prompt_tokens=11)
    )
    conversation = synthetic(prompts, vocabulary=vocabulary).conversation(0)
    prompt = transcript_of(conversation, Endpoint.COMPLETIONS).ask(conversation.turns[0])["prompt"]
    assert isinstance(prompt, tuple)
    assert len(prompt) == 18
    assert set(prompt) <= {3, 5, 8}
    assert prompt[:7] == conversation.system


def test_the_words_are_all_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400


def multi_turn(turns: int) -> Conversation:
    prompts = Prompts(kind=Kind.MULTI_TURN, turns=turns, think=2.0, prefix=Prefix(tokens=5))
    return synthetic(prompts).conversation(0)


@given(st.integers(1, 6))
def test_in_a_chat_each_request_repeats_the_one_before_and_its_answer(turns: int) -> None:
    conversation = multi_turn(turns)
    transcript = transcript_of(conversation, Endpoint.CHAT)
    before: list[dict[str, str]] = []
    for place, turn in enumerate(conversation.turns):
        messages = cast("list[dict[str, str]]", transcript.ask(turn)["messages"])
        assert messages[: len(before)] == before
        assert [message["role"] for message in messages] == ["system", "user", *["assistant", "user"] * place]
        assert (turn.think > 0) == (place > 0)
        transcript.answered(f"answer {place}")
        before = [*messages, {"role": "assistant", "content": f"answer {place}"}]


@given(st.integers(1, 6))
def test_as_text_each_prompt_begins_with_the_one_before_and_its_answer(turns: int) -> None:
    conversation = multi_turn(turns)
    transcript = transcript_of(conversation, Endpoint.COMPLETIONS)
    before = ""
    for turn in conversation.turns:
        prompt = transcript.ask(turn)["prompt"]
        assert isinstance(prompt, str)
        assert prompt.startswith(before)
        transcript.answered("<answer>")
        before = prompt + "<answer>"


def test_fields_of_the_target_win_and_null_takes_one_away() -> None:
    target = Target(url="http://localhost", fields={"stream_options": None, "max_tokens": 3, "top_k": 5})
    turn = multi_turn(1).turns[0]
    body = request_body(target, "m", turn, {"prompt": "x"})
    assert body == {"model": "m", "prompt": "x", "max_tokens": 3, "stream": True, "top_k": 5}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_of_a_file_are_asked_in_their_order_and_again(tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hello"}]
    path = write(tmp_path / "w", {"messages": hello, "top_k": 2}, "", {"prompt": "p", "max_completion_tokens": 7})
    workload = read_workload(path, Endpoint.CHAT, 5)
    assert workload.conversations == 2
    [turn] = workload.conversation(2).turns
    body = request_body(TARGET, "m", turn, transcript_of(workload.conversation(2), Endpoint.CHAT).ask(turn))
    assert (body["messages"], body["top_k"], body["max_tokens"]) == (hello, 2, 5)
    [turn] = workload.conversation(1).turns
    assert turn.fields == {"messages": [{"role": "user", "content": "p"}], "max_completion_tokens": 7}


def test_prompts_of_a_file_may_be_ids_for_completions(tmp_path: Path) -> None:
    workload = read_workload(write(tmp_path / "w", {"prompt": [1, 2]}), Endpoint.COMPLETIONS, 5)
    assert workload.conversation(0).turns[0].fields == {"prompt": [1, 2], "max_tokens": 5}


@pytest.mark.parametrize(
    ("line", "endpoint", "problem"),
    [
        ("{", Endpoint.CHAT, "w:2: "),
        ("[]", Endpoint.CHAT, "w:2: "),
        ("{}", Endpoint.CHAT, "either"),
        ({"prompt": "a", "messages": []}, Endpoint.CHAT, "either"),
        ({"messages": []}, Endpoint.COMPLETIONS, "--endpoint chat"),
        ({"prompt": [1]}, Endpoint.CHAT, "--endpoint completions"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, line: object, endpoint: Endpoint, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_workload(write(tmp_path / "w", "", line), endpoint, 5)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no requests"):
        read_workload(write(tmp_path / "w", ""), Endpoint.CHAT, 5)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_workload(tmp_path / "none", Endpoint.CHAT, 5)
