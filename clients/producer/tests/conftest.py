from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from waterclock_producer import Producer
from waterclock_producer.fake import FakeMesh, ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def mesh(clock: ManualClock):
    """A simulated mesh; the test fails if the producer broke the contract."""
    mesh = FakeMesh("acme", clock=clock)
    yield mesh
    assert mesh.violations == []


@pytest.fixture
def connected(mesh: FakeMesh, clock: ManualClock):
    """Makes producers that are connected to ``mesh``: ``async with connected(...) as producer``."""

    @asynccontextmanager
    async def connect(**options) -> AsyncIterator[Producer]:
        async with Producer(mesh, tenant="acme", clock=clock, **options) as producer:
            yield producer

    return connect
