"""Octavo: an embeddable asyncio engine for language-model decoding whose KV cache is the point.

from octavo import AsyncEngine, EngineConfig, SamplingParams

async with AsyncEngine.open("smollm2", EngineConfig(num_blocks=512)) as engine:
    async for output in engine.generate("The capital of France is", SamplingParams(max_tokens=16, temperature=0.0)):
        print(output.text_delta, end="")
"""

from .engine.acceleration import Acceleration
from .engine.async_engine import AsyncEngine
from .engine.blocking import BlockingEngine
from .engine.config import EngineConfig
from .engine.counters import EngineStats
from .engine.explanation import Explanation
from .engine.following import follow
from .engine.generation import Generation
from .engine.kv import CacheStats, Census, Retention
from .engine.output_format import OutputFormat
from .engine.pins import Pin
from .engine.request import Chat, FinishReason, Metrics, RequestOutput, SamplingParams, TokenLogprob
from .engine.snapshotting import SnapshotReport
from .errors import OctavoError

__version__ = "0.1.0"

__all__ = [
    "Acceleration",
    "AsyncEngine",
    "BlockingEngine",
    "CacheStats",
    "Census",
    "Chat",
    "EngineConfig",
    "EngineStats",
    "Explanation",
    "FinishReason",
    "Generation",
    "Metrics",
    "OctavoError",
    "OutputFormat",
    "Pin",
    "RequestOutput",
    "Retention",
    "SamplingParams",
    "SnapshotReport",
    "TokenLogprob",
    "__version__",
    "follow",
]
