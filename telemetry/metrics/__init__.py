"""Metrics for Prometheus: what there is (``catalogue``), how it is counted, shown and served."""
