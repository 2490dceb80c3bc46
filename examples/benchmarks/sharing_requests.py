"""The requests of ``sharing.py``: what they look like, when they come, and what stands for them in each arm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from octavo import SamplingParams

VOCABULARY = 40_000
"""Token ids of prompts are below this."""
UNSHARED, SHARED, COPY_ON_WRITE = "no sharing", "prefix sharing", "copy-on-write"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the requests look like."""

    name: str
    shared: int
    """Tokens that all prompts begin with."""
    own: int
    output: int
    """Tokens of each sample."""
    samples: int
    rates: tuple[float, ...]
    """Requests a second."""
    requests: int
    is_beam: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        return (UNSHARED, SHARED) if self.samples == 1 else (UNSHARED, SHARED, COPY_ON_WRITE)


SCENARIOS = (
    Scenario("prefix", shared=512, own=32, output=32, samples=1, rates=(0.5, 1, 2, 4), requests=12),
    Scenario("n=4", shared=0, own=256, output=32, samples=4, rates=(0.5, 1, 2), requests=6),
    Scenario("n=8", shared=0, own=256, output=32, samples=8, rates=(0.25, 0.5, 1), requests=4),
    Scenario("beam 4", shared=0, own=256, output=32, samples=4, rates=(0.5, 1, 2), requests=4, is_beam=True),
)
QUICK = (
    Scenario("prefix", shared=512, own=32, output=16, samples=1, rates=(2, 8), requests=8),
    Scenario("n=4", shared=0, own=128, output=8, samples=4, rates=(4,), requests=3),
    Scenario("n=8", shared=0, own=128, output=8, samples=8, rates=(4,), requests=2),
    Scenario("beam 4", shared=0, own=128, output=8, samples=4, rates=(4,), requests=2, is_beam=True),
)


class Cell(NamedTuple):
    """One run."""

    scenario: Scenario
    rate: float
    arm: str

    def __str__(self) -> str:
        return f"{self.scenario.name}, {self.rate:g} requests/s, {self.arm}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a user."""

    at: float
    """Seconds from the first."""
    prompt: list[int]
    seed: int


def arrivals(scenario: Scenario, rate: float) -> Iterator[Arrival]:
    """The same for every arm, different for every scenario and rate."""
    random = Random(f"{scenario.name} {rate}")  # noqa: S311  # not for secrets
    shared = random.choices(range(VOCABULARY), k=scenario.shared)
    at = 0.0
    for seed in range(scenario.requests):
        yield Arrival(at, shared + random.choices(range(VOCABULARY), k=scenario.own), seed)
        at += random.expovariate(rate)


def calls(scenario: Scenario, arm: str, seed: int) -> list[SamplingParams]:
    """The requests to the engine that stand for one of a user."""
    fixed = SamplingParams(max_tokens=scenario.output, ignore_eos=True, temperature=0.0, seed=seed)
    count = scenario.samples
    if arm == COPY_ON_WRITE:
        return [
            replace(fixed, n=count, beam_width=count) if scenario.is_beam else replace(fixed, n=count, temperature=1.0)
        ]
    if count == 1 or scenario.is_beam:
        return [fixed] * count
    return [replace(fixed, temperature=1.0, seed=seed * count + sample) for sample in range(count)]
