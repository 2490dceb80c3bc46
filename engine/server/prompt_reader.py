"""PromptReader: what it takes to know the tokens of a request's prompt. No weights, and no cache."""

from __future__ import annotations

from typing import Protocol

from ..config import EngineConfig
from ..model.runner import ModelInfo
from ..request import Prompt


class PromptReader(Protocol):
    """An engine, as those who only read prompts see it."""

    @property
    def model(self) -> ModelInfo:
        """Whose prompts they are."""

    @property
    def config(self) -> EngineConfig:
        """How much an engine has room for."""

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """As :meth:`~octavo.engine.async_engine.AsyncEngine.tokenize`."""
