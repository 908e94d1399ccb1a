"""Admission processes that are gone when a test ends, whatever became of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from admission_host import AdmissionHost
from broker_process import BrokerProcess

MakeHost = Callable[..., AdmissionHost]


@pytest.fixture
def make_host(broker: BrokerProcess, tmp_path: Path) -> Iterator[MakeHost]:
    """Makes admissions at the test's own bus, by name."""
    made: list[AdmissionHost] = []

    def make(name: str = "admission", **options: object) -> AdmissionHost:
        host = AdmissionHost(tmp_path / name, broker.url, **options)
        made.append(host)
        return host

    yield make
    for host in made:
        if host.process is not None and host.process.poll() is None:
            host.kill()
