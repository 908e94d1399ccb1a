"""Two of a kind, zombies that wake up, and orderly leaving: one decides, and nothing is lost."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import pytest
import pytest_asyncio

from drill import Drill, drilled
from open_load import LoadShape, outcomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

ELECTED = ("admission", "scheduler")
SERVICES = ("admission", "scheduler", "en-1", "ledger")
LEAVE_WAIT_S = 6.0
"""Well below the grace after which a process that does not end is cut off."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh")) as running:
        yield running


@contextmanager
def beside(drill: Drill, name: str, environ: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """A second process of a service, started by hand with the first one's environment."""
    child = drill.mesh.children[name]
    with (drill.mesh.data_dir / "logs" / f"{name}-second.log").open("ab") as log:
        second = subprocess.Popen(
            child.argv,
            env={**child.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield second
    finally:
        second.terminate()
        try:
            second.wait(timeout=15)
        except subprocess.TimeoutExpired:
            second.kill()
            second.wait()


@pytest.mark.parametrize("name", ELECTED)
async def test_a_zombie_wakes_up_beside_its_successor(drill: Drill, name: str) -> None:
    """The first sleeps while a second is elected and works, and wakes up in the middle of it."""
    before = await drill.before()
    mesh = drill.mesh
    first = mesh.children[name]
    assert first.process is not None
    first.held = True
    load = asyncio.create_task(
        drill.producers.drive(LoadShape(seed=400 + ELECTED.index(name), rate=140, seconds=3.6))
    )
    await asyncio.sleep(0.6)
    mesh.pause(name)
    try:
        with beside(drill, name, {"WATERCLOCK_HTTP__PORT": "0"}) as second:
            await asyncio.sleep(2.0)
            mesh.resume(name)
            handles = await load
            await drill.until("the zombie ends", lambda: not first.running)
            assert first.process.returncode == 1
            assert any(why in mesh.logs(name) for why in ("FenceLost", "ConsumerTaken"))
            assert second.poll() is None
            report = await drill.check()
            assert outcomes(handles) == {"completed": len(handles)}
            assert report.elections[name] == before.elections[name] + 1
        assert second.returncode == 0
    finally:
        first.held = False
    await drill.until("it is back", lambda: first.running)
    await drill.ready()


@pytest.mark.parametrize("name", ELECTED)
async def test_a_second_one_is_started_beside_a_busy_first(drill: Drill, name: str) -> None:
    """Both believe to be elected for a moment; whoever was elected last decides alone."""
    before = await drill.before()
    load = asyncio.create_task(
        drill.producers.drive(LoadShape(seed=410 + ELECTED.index(name), rate=140, seconds=3.0))
    )
    await asyncio.sleep(0.5)
    with beside(drill, name, {"WATERCLOCK_HTTP__PORT": "0"}) as second:
        handles = await load
        # The first was deposed, came up again, and deposed the second in its turn.
        await drill.until("the second ends", lambda: second.poll() is not None)
        assert second.returncode == 1
    await drill.ready()
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.elections[name] == before.elections[name] + 2
    assert report.lost_attempts == before.lost_attempts


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_is_told_to_leave_under_load(drill: Drill, name: str) -> None:
    """It finishes what it has: no attempt is lost, and its process ends well."""
    before = await drill.before()
    child = drill.mesh.children[name]
    process = child.process
    assert process is not None
    load = asyncio.create_task(
        drill.producers.drive(LoadShape(seed=420 + SERVICES.index(name), rate=140, seconds=2.2))
    )
    await asyncio.sleep(0.7)
    child.signal(signal.SIGTERM)
    handles = await load
    await drill.until("it left", lambda: process.poll() is not None, LEAVE_WAIT_S)
    assert process.returncode == 0, child.last_log()
    await drill.ready()
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.lost_attempts == before.lost_attempts
    assert report.superseded == before.superseded
