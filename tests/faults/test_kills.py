"""kill −9 of every process, at idle and under load: nothing is lost, nothing happens twice."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from drill import Drill, drilled
from drill_mesh import MODEL
from open_load import MARK_EN, LoadShape, outcomes

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


async def test_http_clients_with_a_key_outlive_an_admission_that_is_killed(drill: Drill) -> None:
    """The edge dies with it. Who comes again with the same key gets the one answer."""
    mesh = drill.mesh
    before = await drill.before()
    async with AsyncOpenAI(
        base_url=f"{mesh.http_url}/v1",
        api_key=mesh.access.tenants["acme"].api_key,
        max_retries=10,
        timeout=20,
    ) as client:

        async def call(number: int) -> str | None:
            await asyncio.sleep(number * 0.04)
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"{MARK_EN} number {number}"}],
                max_tokens=200,
                extra_body={"ignore_eos": True},
                extra_headers={"Idempotency-Key": f"outlives-{number}"},
            )
            return answer.choices[0].message.content

        calls = [asyncio.create_task(call(number)) for number in range(30)]
        await asyncio.sleep(0.6)
        mesh.kill("admission")
        answers = await asyncio.gather(*calls)
    assert all(answers)
    report = await drill.check()
    assert report.requests == before.requests + 30
    keys = [r for r in report.recount.requests.values() if r.id.startswith("outlives-")]
    assert [len(request.attempts) for request in keys] == [1] * 30
