"""Everything comes twice: submissions, events, ids; and clocks jump while it does."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from nats.aio.client import Client

from drill import Drill, drilled
from open_load import LoadShape, outcomes, prompt
from waterclock_producer import Producer, new_submission

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEP_US = 5_000_000
REPEATED = 400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def test_submissions_come_twice_while_they_run(drill: Drill) -> None:
    """A producer that heard no acknowledgement sends the same bytes again, at any moment."""
    mesh = drill.mesh
    again = Client()
    await again.connect(
        mesh.bus_url, user="globex", password=mesh.access.tenants["globex"].password
    )
    try:
        load = asyncio.create_task(
            drill.producers.drive(LoadShape(seed=500, rate=150, seconds=2.0, max_tokens=(5, 80)))
        )
        sent = 0
        while not load.done():
            handles = drill.sent("globex")
            for handle in handles[sent:]:
                await again.publish("wc.request.globex", handle.body or b"")
            sent = len(handles)
            await asyncio.sleep(0.01)
    finally:
        await again.close()
    report = await drill.check()
    assert outcomes(await load) == {"completed": len(await load)}
    resubmitted = sum(d.kind == "resubmitted" for d in report.recount.decisions)
    assert resubmitted == sent > 50
    assert report.lost_attempts == 0


async def test_events_stand_on_the_tape_twice(drill: Drill) -> None:
    """Whatever of the tape is said again, byte for byte, changes nothing for anybody."""
    before = await drill.before()
    tape = await drill.watch.stream("EVENTS")
    draw = random.Random(510)
    load = asyncio.create_task(drill.producers.drive(LoadShape(seed=511, rate=80, seconds=2.0)))
    for stored in draw.sample(tape, min(REPEATED, len(tape))):
        await drill.watch.publish(stored.subject, stored.payload)
    kinds = {stored.subject.split(".")[2]: stored for stored in tape}
    for stored in kinds.values():
        await drill.watch.publish(stored.subject, stored.payload)
    handles = await load
    # And what is on its way right now.
    tape = await drill.watch.stream("EVENTS", tape[-1].sequence + 1)
    for stored in tape[-100:]:
        await drill.watch.publish(stored.subject, stored.payload)
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.repeated >= before.repeated + REPEATED + len(kinds)
    assert report.elections == before.elections
    assert report.lost_attempts == before.lost_attempts


async def test_one_id_comes_from_two_connections_at_once(drill: Drill) -> None:
    mesh = drill.mesh
    first = drill.producers.by_tenant["acme"]
    draw = random.Random(520)
    async with Producer.connect(
        mesh.bus_url, tenant="acme", user="acme", password=mesh.access.tenants["acme"].password
    ) as second:
        pairs = []
        for number in range(80):
            text = prompt(draw, 12, chinese=False)
            same = number % 2 == 0
            one, other = (
                new_submission(id=f"race-{number}", prompt=words, max_tokens=8, sent_us=1)  # pyright: ignore[reportCallIssue] - a fixed stamp makes the bytes the same
                for words in (text, text if same else text + "!")
            )
            handles = (first.send(one), second.send(other))
            pairs.append((same, *handles))
            drill.producers.keep("acme", handles[0])
            if draw.randrange(3) == 0:
                await asyncio.sleep(0.002)
        for same, one, other in pairs:
            finals = [await handle.result(timeout_s=10) for handle in (one, other)]
            for handle in (one, other):
                await handle.receipt(timeout_s=10)
            if same:
                assert finals[0] == finals[1]
                assert finals[0].outcome == "completed"
                continue
            # Both hear what is said about the id. Whose body was refused hears that, or, if the
            # answer to the other body is quicker, that it is not about its own.
            assert "completed" in {final.outcome for final in finals}
            for final in finals:
                assert final.outcome == "completed" or final.reject_reason == "id_reused"
            if all(final.outcome == "completed" for final in finals):
                assert one.receipt_doubt or other.receipt_doubt
    report = await drill.check()
    assert report.reasons == {"id_reused": 40}
    kinds = sorted(d.kind for d in report.recount.decisions if d.id.startswith("race-"))
    assert kinds == ["admitted"] * 80 + ["rejected"] * 40 + ["resubmitted"] * 40


async def test_clocks_are_stepped_under_every_service(drill: Drill) -> None:
    """Durations come from the monotonic clock; what walls cannot agree on is kept, and flagged."""
    before = await drill.before()
    load = asyncio.create_task(
        drill.producers.drive(LoadShape(seed=530, rate=80, seconds=5.6, max_tokens=(10, 100)))
    )
    await asyncio.sleep(0.3)
    for name in ("admission", "scheduler", "en-1", "ledger"):
        for step_us in (STEP_US, -STEP_US, 0):
            drill.mesh.step_clock(name, step_us)
            await asyncio.sleep(0.4)
    handles = await load
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    assert report.lost_attempts == before.lost_attempts
    # Only admission's stamp stands beside the bus's own, so only its step can be seen in them.
    assert report.flagged > before.flagged
    longest_us = max(
        handle.final.timings.exec_us
        for handle in handles
        if handle.final and handle.final.timings and handle.final.timings.exec_us
    )
    assert longest_us < STEP_US // 2
