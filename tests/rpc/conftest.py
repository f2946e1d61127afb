"""What the tests of clients and command line share: a scripted server, and both clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.client_drivers import AsyncDriver, Driver, SyncDriver
from support.fake_services import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.stop()


@pytest.fixture(params=[SyncDriver, AsyncDriver], ids=["sync", "async"])
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param()
    return driver
