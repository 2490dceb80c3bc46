"""How many replicas there should be: by the tokens that wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from ....errors import InvalidRequest


class ScalingContext(Protocol):
    """What this policy reads of Ray's ``AutoscalingContext``."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[object, float]] | None:
        """By metric and replica, over the last ``look_back_period_s``."""

    @property
    def total_num_requests(self) -> float:
        """That run or wait, at replicas and in front of them."""


class WaitingTokens:
    """So many replicas that each has ``tokens`` waiting and at most ``requests`` under way, for Ray's
    ``AutoscalingPolicy(policy_function=..., policy_kwargs=...)``.

    Tokens of prompts that are still to be computed say how long a newcomer waits for its first token, which a number of
    requests does not: one may bring ten tokens or a hundred thousand. Requests that only decode have none waiting, so
    their number bounds the answer from below. Ray itself keeps to the least and the most, and waits as long as
    ``upscale_delay_s`` and ``downscale_delay_s`` say.
    """

    def __init__(self, tokens: float, requests: float) -> None:
        """:raises InvalidRequest: when one is not above 0."""
        if not (tokens > 0 and requests > 0):
            raise InvalidRequest("autoscaling needs a number of tokens and of requests above 0 for each replica")
        self._tokens = tokens
        self._requests = requests

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, object]]:
        """How many, and nothing to remember."""
        waiting = math.fsum((context.aggregated_metrics or {}).get("waiting_tokens", {}).values())
        by_tokens = math.ceil(waiting / self._tokens)
        by_requests = math.ceil(context.total_num_requests / self._requests)
        return max(by_tokens, by_requests), {}
