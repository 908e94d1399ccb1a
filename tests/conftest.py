"""Real servers for the tests here: each test that asks for one gets its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from valkey_process import ValkeyProcess


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A running nats-server that lets everybody in."""
    server = BrokerProcess(tmp_path / "broker").start()
    yield server
    server.stop()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """A running, empty Valkey server."""
    server = ValkeyProcess(tmp_path / "valkey").start()
    yield server
    server.stop()
