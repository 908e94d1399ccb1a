"""Processes that stop for longer than anybody waits, and then go on as if nothing had happened."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from drill import Drill, drilled
from drill_mesh import LEASE_MS, MeshPlan, worker
from open_load import LoadShape, outcomes

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    workers = {"zh-1": worker("zh"), "en-1": worker("en"), "en-2": worker("en")}
    async with drilled(tmp_path_factory.mktemp("mesh"), MeshPlan(workers=workers)) as running:
        yield running


async def test_a_worker_sleeps_past_its_lease(drill: Drill) -> None:
    """What it had goes to the other one; what it says when it wakes up does not count."""
    before = await drill.before()
    shape = LoadShape(seed=300, rate=90, seconds=4.0, max_tokens=(60, 400), zh_permille=100)
    load = asyncio.create_task(drill.producers.drive(shape))
    await asyncio.sleep(0.7)
    drill.mesh.pause("en-1")
    await asyncio.sleep(LEASE_MS / 1000 + 0.8)
    drill.mesh.resume("en-1")
    handles = await load
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.lost_attempts > before.lost_attempts
    lives = [life for life in report.recount.busy if life.startswith("en-1-")]
    assert len(lives) == 1, "it is the same life as before"
    taken = [at for at, life, lost_ns, _ in report.recount.dispatches if life in lives and lost_ns]
    assert taken, "and it was given work again"


async def test_the_scheduler_sleeps_for_six_seconds(drill: Drill) -> None:
    """It was the scheduler that could not hear its workers: none of them loses anything."""
    before = await drill.before()
    handles = await pause_under_load(drill, "scheduler", seed=310)
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.lost_attempts == before.lost_attempts
    assert report.elections["scheduler"] == before.elections["scheduler"]


async def test_admission_sleeps_for_six_seconds(drill: Drill) -> None:
    before = await drill.before()
    handles = await pause_under_load(drill, "admission", seed=311)
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.elections["admission"] == before.elections["admission"]


async def test_the_cache_sleeps_and_budgets_are_kept_by_the_local_rule(drill: Drill) -> None:
    mesh = drill.mesh
    mesh.pause("valkey")
    try:
        handles = await drill.producers.drive(LoadShape(seed=320, rate=100, seconds=1.5))
        assert "Redis is away" in mesh.health("admission")["budgets"]
        assert mesh.metrics("admission")["waterclock_admission_budgets_degraded"] == 1
    finally:
        mesh.resume("valkey")
    assert "budgets" in mesh.logs("admission")
    await drill.until("recovered", lambda: "budgets" not in mesh.health("admission"))
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    # Nobody waited long: an answer of the cache has a bound, and the second late one is its last.
    waits_us = [
        (handle.times.receipt_ns - handle.times.sent_ns) // 1000
        for handle in handles
        if handle.times.receipt_ns is not None
    ]
    assert len(waits_us) == len(handles)
    assert max(waits_us) < 1_000_000
    assert report.reasons.get("concurrency", 0) == 0


async def pause_under_load(drill: Drill, name: str, *, seed: int) -> list:
    load = asyncio.create_task(
        drill.producers.drive(LoadShape(seed=seed, rate=60, seconds=6.6, max_tokens=(10, 200)))
    )
    await asyncio.sleep(0.5)
    drill.mesh.pause(name)
    await asyncio.sleep(6.0)
    drill.mesh.resume(name)
    return await load
