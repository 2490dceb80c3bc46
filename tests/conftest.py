from __future__ import annotations

import importlib.util

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("ci")  # another one with --hypothesis-profile=long


def pytest_configure() -> None:
    """One thread: the cores belong to the tests that run side by side, and sums come out the same everywhere."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: PLC0415  # an option of the environment

        torch.set_num_threads(1)
