"""SamplingParams refuses every malformed value with an error that names the parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.engine.output_format import OutputFormat
from octavo.engine.request import MAX_SAMPLES, MAX_STOP_LENGTH, MAX_STOPS
from octavo.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # beyond every float
UNSHOWABLE = 10**5000  # beyond what Python turns into digits
NOT_INTEGERS: list[object] = [None, True, False, 1.0, 1.5, "5", NAN, INF, [1], HUGE, UNSHOWABLE, np.int64(1), object()]
NOT_NUMBERS: list[object] = [None, True, "0.5", NAN, INF, -INF, [0.5], HUGE, -HUGE, UNSHOWABLE, 1j, object()]

BAD: dict[str, list[object]] = {
    "max_tokens": [*NOT_INTEGERS[1:], -1, 10**12],
    "min_tokens": [*NOT_INTEGERS, -1],
    "temperature": [*NOT_NUMBERS, -0.1, 101],
    "top_k": [*NOT_INTEGERS, -1, 2**31],
    "top_p": [*NOT_NUMBERS, -0.1, 1.1],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 101],
    "length_penalty": [*NOT_NUMBERS, -101, 101],
    "seed": [*NOT_INTEGERS[1:], -(2**63) - 1, 2**64],
    "n": [*NOT_INTEGERS, 0, -1, 10**6],
    "best_of": [*NOT_INTEGERS[1:], 0, MAX_SAMPLES + 1],
    "beam_width": [*NOT_INTEGERS, 0, -1, 10**6],
    "logprobs": [*NOT_INTEGERS[1:], -1, 10**6],
    "prompt_logprobs": [*NOT_INTEGERS[1:], -1, 10**6],
    "stop_token_ids": [
        None,
        5,
        "5",
        b"5",
        {5},
        [-1],
        [True],
        ["5"],
        [1.0],
        [[1]],
        [2**31],
        [UNSHOWABLE],
        [np.int64(1)],
    ],
    "logit_bias": [
        None,
        [1],
        {"1": 1.0},
        {"abc": 1.0},
        {"1.0": 1.0},
        {"1e3": 1.0},
        {-1: 1.0},
        {1.0: 1.0},
        {True: 1.0},
        {2**31: 1.0},
        {1: 1e9},
        {1: NAN},
        {1: INF},
        {1: "5"},
        {1: None},
        {1: True},
        {1: HUGE},
    ],
    "stop": [
        "",
        [""],
        ["a", ""],
        None,
        5,
        b"x",
        [b"x"],
        [5],
        [None],
        {"a"},
        ["x" * (MAX_STOP_LENGTH + 1)],
        ["x"] * (MAX_STOPS + 1),
    ],
    "ignore_eos": [0, 1, None, "yes"],
    "include_stop": [0, 1, None, "yes"],
    "skip_special_tokens": [0, 1, None, "yes"],
    "early_stopping": [0, 1, 1.0, None, "always", "Never", [True]],
    "output_format": [0, True, "json_object", {}, {"type": "json_object"}],
}
CASES = [
    pytest.param(name, value, id=f"{name}-{index}")
    for name, values in BAD.items()
    for index, value in enumerate(values)
]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_bad_values_are_client_errors_that_name_the_parameter(name: str, value: object) -> None:
    """LOOP-04, INPUT-03, INPUT-11: wrong types, out of range, NaN, infinite and huge."""
    bad: Mapping[str, object] = {name: value}
    with pytest.raises(InvalidRequest, match=name) as direct:
        SamplingParams(**bad)  # type: ignore[arg-type]  # what is tested
    assert len(str(direct.value)) < 300
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams.from_mapping(bad)


@pytest.mark.parametrize(
    "together",
    [
        {"max_tokens": 2, "min_tokens": 3},
        {"n": 3, "best_of": 2},
        {"n": 3, "beam_width": 2},
        {"best_of": 3, "beam_width": 2},
        {"logprobs": 0, "beam_width": 2},
        {"output_format": OutputFormat.json_object(), "beam_width": 2},
    ],
)
def test_what_excludes_each_other_is_refused(together: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams.from_mapping(together)


def test_every_field_is_tried() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    "edge",
    [
        {"max_tokens": 0},
        {"max_tokens": None, "min_tokens": 1000},
        {"temperature": 0},
        {"temperature": 5e-324},
        {"temperature": 100},
        {"top_p": 0.0},
        {"top_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"seed": None},
        {"stop": "x"},
        {"stop": ("x", "y" * MAX_STOP_LENGTH)},
        {"stop": ["x"] * MAX_STOPS},
        {"logit_bias": {0: 100, 1: -100.0}},
        {"logit_bias": dict.fromkeys(range(10_000), 1.0)},
        {"early_stopping": "never"},
        {"early_stopping": True},
        {"n": MAX_SAMPLES},
    ],
)
def test_edges_are_taken(edge: dict[str, object]) -> None:
    SamplingParams.from_mapping(edge)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown sampling parameter temprature.*temperature"):
        SamplingParams.from_mapping({"temprature": 1.0})
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]  # what is tested


def test_params_do_not_follow_what_they_were_made_of() -> None:
    ids, bias = [1], {1: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias, stop="x")
    ids.append(2)
    bias[2] = 1.0
    assert (params.stop_token_ids, params.logit_bias, params.stop) == ((1,), {1: 1.0}, ("x",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]  # what is tested


@pytest.mark.parametrize(
    ("params", "samples"),
    [
        (SamplingParams(), 1),
        (SamplingParams(n=3), 3),
        (SamplingParams(n=2, best_of=5), 5),
        (SamplingParams(n=2, beam_width=4), 4),
    ],
)
def test_samples_counts_what_runs_side_by_side(params: SamplingParams, samples: int) -> None:
    assert params.samples == samples


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
