from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from octavo import AsyncEngine
from octavo.engine.kv import Census
from octavo.engine.loop import StepLoop
from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.tests.system.client_rig import Served
    from octavo.tests.system.demo_reference import Demo


@pytest.fixture(scope="session")
def demo() -> Demo:
    """The demo model and its reference, loaded once for all tests."""
    from octavo.tests.system import demo_reference  # noqa: PLC0415  # Transformers only for tests that need it

    try:
        return demo_reference.Demo()
    except ModelError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Served]:
    """A server over a fake model, for all tests of a module that leave it as it was."""
    from octavo.tests.system.client_rig import served  # noqa: PLC0415  # OpenAI's client only for tests that need it

    with served() as server:
        yield server


@pytest.fixture
def server(fake_server: Served) -> Iterator[Served]:
    """The same; what it has answered during the test is checked in the end."""
    yield fake_server
    try:
        fake_server.check()
    finally:
        fake_server.exchanges.clear()


@pytest.fixture(autouse=True)
def a_failed_self_check_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine only logs it; here it ends all requests with ``CensusFailed``."""

    def check(loop: StepLoop) -> Census:
        return loop.cache.census()

    monkeypatch.setattr(StepLoop, "_check", check)


@pytest.fixture
def assert_at_rest() -> Callable[[AsyncEngine], None]:
    """Nothing runs, nothing is held, the books are right."""

    def check(engine: AsyncEngine) -> None:
        census, stats = engine.census(), engine.stats()
        assert (census.held, census.in_transfer) == (0, 0)
        assert census.free + census.idle == census.total
        assert (stats.running, stats.waiting, stats.failed_rows) == (0, 0, 0)
        assert not engine._loop.groups

    return check
