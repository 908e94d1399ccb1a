"""kill −9 of every process, at idle and under load: nothing is lost, nothing happens twice."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from drill import Drill, drilled
from open_load import LoadShape, outcomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHILDREN = ("admission", "scheduler", "en-1", "ledger", "nats", "valkey")
SERVICES = ("ledger", "scheduler", "admission", "zh-1", "en-1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def test_the_idle_mesh_outlives_each_of_its_processes(drill: Drill) -> None:
    """One after the other, without a pause between them: what comes back meets the next fall."""
    for seed, name in enumerate(CHILDREN):
        drill.mesh.kill(name)
        # Sent while it is down or coming up, and answered all the same.
        handles = await drill.producers.drive(LoadShape(seed=100 + seed, rate=20, seconds=0.3))
        await drill.ready()
        await drill.finish()
        assert set(outcomes(handles)) <= {"completed"}
    report = await drill.check()
    assert report.elections["admission"] >= 2
    assert report.elections["scheduler"] >= 2


@pytest.mark.parametrize("name", CHILDREN)
async def test_a_process_is_killed_under_load(drill: Drill, name: str) -> None:
    shape = LoadShape(seed=200 + CHILDREN.index(name), rate=180, seconds=2.2)
    load = asyncio.create_task(drill.producers.drive(shape))
    await asyncio.sleep(0.8)
    drill.mesh.kill(name)
    handles = await load
    await drill.ready(SERVICES)
    await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
