"""A Ray of one machine, on loopback, that leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STORE_BYTES = 80 * 2**20
"""Of Ray's object store: answers go through it in small pieces."""


@contextmanager
def loopback(cpus: int = 8, port: int | None = None) -> Iterator[None]:
    """Start Ray and Serve here; both are gone when the context is left. ``cpus``: that Ray thinks it has; replicas are
    scheduled by them, and share the real ones. ``port``: of Serve's HTTP proxy; ``None``: there is none.
    """
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_HTTP_REQUEST_TIMEOUT_S="0")
    import ray  # noqa: PLC0415  # reads its environment when it is imported
    from ray import serve  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="oct-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            serve.start(
                proxy_location="Disabled" if port is None else "HeadOnly",
                http_options={"host": "127.0.0.1", "port": port or 8000},
                logging_config={"log_level": "WARNING"},
            )
            yield
        finally:
            serve.shutdown()
            ray.shutdown()
