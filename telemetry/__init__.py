"""What the engine says about itself. The library configures neither logging nor tracing for its host.

An application may: :func:`setup` sends traces to a collector, :func:`serve_metrics` answers Prometheus,
:func:`configure_logging` shapes the log.
"""

from .export.setting_up import Telemetry, setup
from .export.settings import SpanLosses
from .log_setup import configure as configure_logging
from .metrics.endpoint import MetricsServer, serve_metrics

__all__ = ["MetricsServer", "SpanLosses", "Telemetry", "configure_logging", "serve_metrics", "setup"]
