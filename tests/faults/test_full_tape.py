"""The bus has no room for events any more: services wait and say so, and go on when there is."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from drill import Drill, drilled
from open_load import LoadShape, outcomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVENTS_BYTES_MAX = 2_500_000
"""Some 300 requests."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    environ = {"WATERCLOCK_BUS__EVENTS_BYTES_MAX": str(EVENTS_BYTES_MAX)}
    async with drilled(tmp_path_factory.mktemp("mesh"), environ=environ) as running:
        yield running


async def test_a_full_tape_stops_everybody_until_the_operator_makes_room(drill: Drill) -> None:
    mesh = drill.mesh
    load = asyncio.create_task(
        drill.producers.drive(LoadShape(seed=600, rate=180, seconds=3.0, max_tokens=(4, 40)))
    )
    await drill.until(
        "somebody says that the tape is full",
        lambda: any(not mesh.is_ready(name) for name in mesh.services),
        20,
    )
    handles = await load
    _, full_at = await drill.watch.bounds("EVENTS")
    await asyncio.sleep(2.0)
    waiting = [handle for handle in handles if not handle.ended]
    assert waiting, "with the tape full nothing ends"
    said = {name: json.dumps(mesh.health(name)) for name in mesh.services}
    stalled = {name for name, text in said.items() if "tape" in text and not mesh.is_ready(name)}
    assert "admission" in stalled, said
    assert "tape_refuses_events" in mesh.logs("admission")
    # Services that are killed or started meanwhile change nothing.
    mesh.kill("scheduler")
    await asyncio.sleep(1.0)
    _, now_at = await drill.watch.bounds("EVENTS")
    # A smaller event may still find its place; nothing that was refused is lost for it.
    assert now_at - full_at < 40

    config = (await drill.watch.api("STREAM.INFO.EVENTS"))["config"]
    await drill.watch.api("STREAM.UPDATE.EVENTS", config | {"max_bytes": 400_000_000})

    await drill.ready()
    report = await drill.check(40)
    assert outcomes(handles) == {"completed": len(handles)}
    assert "tape_takes_events_again" in mesh.logs("admission")
    assert report.outcomes == {"completed": len(handles)}
    again = await drill.producers.drive(LoadShape(seed=601, rate=60, seconds=0.5))
    await drill.check()
    assert outcomes(again) == {"completed": len(again)}
