from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

StartRedis = Callable[..., subprocess.Popen[bytes]]

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("ci")  # another one with --hypothesis-profile=long


def pytest_configure() -> None:
    """One thread: the cores belong to the tests that run side by side, and sums come out the same everywhere."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: PLC0415  # an option of the environment

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def start_redis() -> Iterator[StartRedis]:
    """Start a server on a Unix socket, with more options of ``redis-server`` behind it; all are killed in the end."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server and no valkey-server on PATH")
    servers: list[subprocess.Popen[bytes]] = []

    def start(path: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(path.parent), "--save", ""]
        servers.append(subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL))  # noqa: S603  # ours
        _wait_for(path, servers[-1])
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def redis_socket(start_redis: StartRedis) -> Iterator[Path]:
    """The socket of a server that all tests share, each with a prefix of its own."""
    with tempfile.TemporaryDirectory(prefix="octavo-redis-") as folder:
        path = Path(folder) / "socket"
        start_redis(path)
        yield path


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path for a socket, in a folder whose name is short enough for one."""
    with tempfile.TemporaryDirectory(prefix="octavo-redis-") as folder:
        yield Path(folder) / "socket"


def _wait_for(path: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket(socket.AF_UNIX) as connection:
            if connection.connect_ex(str(path)) == 0:
                return
        time.sleep(0.01)
    pytest.fail(f"redis-server did not start, exit status {server.poll()}")
