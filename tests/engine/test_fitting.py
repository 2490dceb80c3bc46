"""max_tokens: refused where it cannot fit, and where it is left open, exactly all that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import EngineConfig, SamplingParams
from octavo.engine.fitting import max_tokens
from octavo.errors import ContextExceeded, NeverFits, RequestRejected


def fits(prompt: int, length: int, params: SamplingParams, context: int, config: EngineConfig) -> bool:
    """Whether that many tokens may be asked for by name."""
    try:
        return max_tokens(prompt, replace(params, max_tokens=length), context, config) == length
    except RequestRejected:
        return False


@given(
    prompt=st.integers(1, 100),
    context=st.integers(1, 200),
    blocks=st.integers(1, 30),
    block_size=st.integers(1, 8),
    samples=st.integers(1, 4),
    beams=st.booleans(),
    caching=st.booleans(),
)
def test_left_open_it_is_the_most_that_could_be_asked_for(
    prompt: int, context: int, blocks: int, block_size: int, samples: int, beams: bool, caching: bool
) -> None:
    config = EngineConfig(num_blocks=blocks, block_size=block_size, enable_prefix_caching=caching)
    params = SamplingParams(max_tokens=None, n=samples, beam_width=samples if beams else 1)
    if fits(prompt, 1, params, context, config):
        most = max_tokens(prompt, params, context, config)
        assert fits(prompt, most, params, context, config)
        assert not fits(prompt, most + 1, params, context, config)
    else:
        with pytest.raises(RequestRejected):
            max_tokens(prompt, params, context, config)


@pytest.mark.parametrize(
    ("prompt", "context", "min_tokens", "error", "message"),
    [
        (20, 20, 0, ContextExceeded, "20 prompt tokens leave no room for 1 more in the model's context of 20 tokens"),
        (10, 20, 11, ContextExceeded, "leave no room for 11 more"),
        (65, 200, 0, NeverFits, "may need 17 blocks of 4 tokens and the pool has 16"),
        (10, 200, 60, NeverFits, "may need 18 blocks"),
    ],
)
def test_where_nothing_fits_it_says_what_is_short(
    prompt: int, context: int, min_tokens: int, error: type[Exception], message: str
) -> None:
    config = EngineConfig(num_blocks=16, block_size=4)
    with pytest.raises(error, match=message):
        max_tokens(prompt, SamplingParams(max_tokens=None, min_tokens=min_tokens), context, config)


def test_more_samples_than_ever_run_are_refused() -> None:
    config = EngineConfig(max_running=4)
    for params in (SamplingParams(n=5), SamplingParams(n=5, max_tokens=None)):
        with pytest.raises(NeverFits, match="at most 4 side by side"):
            max_tokens(1, params, 100, config)
