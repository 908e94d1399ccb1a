"""Starts bus servers for these tests: the real one, on a port of the system's choosing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker_process import BrokerProcess

StartServer = Callable[[Callable[[Path], str]], str]
"""Takes a function from a fresh folder to a configuration; returns the server's address."""


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers that end with the module's tests."""
    brokers: list[BrokerProcess] = []

    def start(configure: Callable[[Path], str]) -> str:
        folder = tmp_path_factory.mktemp("bus")
        brokers.append(BrokerProcess(folder, config_text=configure(folder)))
        return brokers[-1].start().url

    yield start
    for broker in brokers:
        broker.stop()
