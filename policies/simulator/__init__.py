"""The simulator: request traces through the very policy objects of the engine, beside the offline optimum.

Blocks have names and no contents, so a day of traffic takes seconds.
"""

from .costs import CostModel, Geometry
from .kvtrace import Merging
from .optimum import Optimum, Survey, optimum_at, survey
from .readers import open_trace
from .replay import replay
from .results import Outcome
from .service import ATOMIC, DEFAULT, Service
from .trace import ListTrace, Request, Trace, TraceInfo

__all__ = [
    "ATOMIC",
    "DEFAULT",
    "CostModel",
    "Geometry",
    "ListTrace",
    "Merging",
    "Optimum",
    "Outcome",
    "Request",
    "Service",
    "Survey",
    "Trace",
    "TraceInfo",
    "open_trace",
    "optimum_at",
    "replay",
    "survey",
]
