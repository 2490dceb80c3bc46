"""What the engine says about itself. The library configures neither logging nor tracing for its host.

An application may: :func:`setup` sends traces to a collector, :func:`configure_logging` shapes the log.
"""

from .export_settings import SpanLosses
from .log_setup import configure as configure_logging
from .setting_up import Telemetry, setup

__all__ = ["SpanLosses", "Telemetry", "configure_logging", "setup"]
