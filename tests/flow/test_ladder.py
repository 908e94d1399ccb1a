"""A burst climbs the ladder up to refusing; when it is over, the mesh comes down again."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from drill import Drill, drilled
from drill_mesh import MODEL, MeshPlan, worker
from open_load import outcomes, prompt
from waterclock_producer import Handle, new_submission

pytestmark = pytest.mark.asyncio(loop_scope="module")

LADDER = {
    "batch_cap_above": 4,
    "batch_cap_below": 2,
    "speculation_off_above": 8,
    "speculation_off_below": 4,
    "refuse_above": 14,
    "refuse_below": 6,
    "batch_cap": 2,
    "dwell_ms": 250,
    "retry_after_ms_min": 200,
    "retry_after_ms_max": 4_000,
    "drain_window_ms": 2_000,
}
SLOTS = 4
ABOVE = (LADDER["batch_cap_above"], LADDER["speculation_off_above"], LADDER["refuse_above"])
BELOW = (LADDER["batch_cap_below"], LADDER["speculation_off_below"], LADDER["refuse_below"])
TOKENS = 20
"""A tenth of a second on this worker."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    plan = MeshPlan(
        pools={"all": {"models": [MODEL], "policy": "fcfs", "default": True}},
        workers={"all-1": worker("all", SLOTS, speed_permille=1000)},
        sections={"ladder": LADDER},
    )
    async with drilled(tmp_path_factory.mktemp("mesh"), plan) as running:
        yield running


async def burst(drill: Drill, name: str, count: int, pause_s: float) -> list[Handle]:
    draw = random.Random(name)
    handles: list[Handle] = []
    for number in range(count):
        handle = drill.producers.by_tenant["acme"].send(
            new_submission(
                id=f"{name}-{number}",
                prompt=prompt(draw, 8, chinese=False),
                max_tokens=TOKENS,
                ignore_eos=True,
            )
        )
        handles.append(drill.producers.keep("acme", handle))
        await asyncio.sleep(pause_s)
    return handles


async def test_a_burst_is_shed_and_told_when_to_come_again(drill: Drill) -> None:
    load = asyncio.create_task(burst(drill, "burst", 160, 0.005))
    await drill.until("it refuses", lambda: rejected(drill.sent("acme")))
    async with AsyncOpenAI(
        base_url=f"{drill.mesh.http_url}/v1",
        api_key=drill.mesh.access.tenants["globex"].api_key,
        max_retries=0,
    ) as client:
        chat: Any = [{"role": "user", "content": "Is there room?"}]
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=chat, max_tokens=2)
        assert caught.value.status_code == 503
        headers = caught.value.response.headers
        assert headers["x-waterclock-reason"] == "load_shed"
        assert 200 <= int(headers["retry-after-ms"]) <= 4_000
        assert 1 <= int(headers["retry-after"]) <= 4
        # Who comes again when told to gets in, when the burst is over.
        handles = await load
        patient = client.with_options(max_retries=8)
        answer = await patient.chat.completions.create(model=MODEL, messages=chat, max_tokens=2)
        assert answer.choices[0].message.content
    refused = rejected(handles)
    assert {final.reject_reason for final in refused} == {"load_shed"}
    for final in refused:
        assert final.retry_after_ms is not None
        assert 200 <= final.retry_after_ms <= 4_000
    await drill.until("it is on the ground again", lambda: on_the_ground(drill))
    report = await drill.check()
    assert set(outcomes(handles)) == {"completed", "rejected"}
    assert outcomes(handles)["completed"] >= LADDER["refuse_above"]
    # Some were let in by admission and refused by the scheduler, who knows their pool; the others
    # were refused at the door.
    assert report.outcomes["rejected"] >= 1
    assert report.reasons["load_shed"] > report.outcomes["rejected"]


async def test_the_ladder_climbs_above_and_comes_down_below(drill: Drill) -> None:
    """Every move is on the tape with the depth that made it, and says what holds from then on."""
    report = await drill.check()
    moves = [data for _, data in report.recount.rungs]
    assert max(move["rung_to"] for move in moves) == 3
    assert moves[-1]["rung_to"] == 0
    standing = 0
    names = ("batch_cap", "speculation_off", "refuse")
    for move in moves:
        rung_from, rung_to = move["rung_from"], move["rung_to"]
        assert rung_from == standing
        if rung_to > rung_from:
            assert move["depth"] > ABOVE[rung_to - 1]
        else:
            assert rung_to == rung_from - 1, "one rung at a time"
            assert move["depth"] <= BELOW[rung_from - 1]
        assert move["actions"] == list(names[:rung_to])
        assert (move.get("batch_cap") == LADDER["batch_cap"]) == (rung_to > 0)
        assert (move.get("retry_after_ms") is not None) == (rung_to == 3)
        standing = rung_to
    # Without hysteresis a burst around a threshold would make it swing.
    assert len(moves) <= 12
    log = drill.mesh.logs("all-1")
    assert log.count("rung_obeyed") == len(moves)


async def test_fewer_run_at_once_while_the_batch_is_capped(drill: Drill) -> None:
    """Slots are counted from the tape: with a cap of two no third one is given out."""
    report = await drill.check()
    recount = report.recount
    capped = False
    running: set[tuple[str, int]] = set()
    most = {True: 0, False: 0}
    rungs = dict(recount.rungs)
    for stored in await drill.watch.stream("EVENTS"):
        if stored.sequence in rungs:
            capped = rungs[stored.sequence]["rung_to"] > 0
            # What ran before the cap goes on; only what is given out under it is counted.
            running = set()
            continue
        kind, key = event_of(stored.payload)
        if kind == "dispatched":
            running.add(key)
            most[capped] = max(most[capped], len(running))
        elif kind in ("completed", "cancelled", "expired", "failed", "attempt_lost"):
            running.discard(key)
    assert 0 < most[True] <= LADDER["batch_cap"]
    assert most[False] <= SLOTS


async def test_after_it_everything_is_as_before(drill: Drill) -> None:
    handles = await burst(drill, "after", 12, 0.06)
    await drill.check()
    assert outcomes(handles) == {"completed": 12}


def rejected(handles: list[Handle]) -> list:
    finals = [handle.final for handle in handles if handle.final is not None]
    return [final for final in finals if final.outcome == "rejected"]


def on_the_ground(drill: Drill) -> bool:
    metrics = drill.mesh.metrics("scheduler")
    return metrics['waterclock_pool_rung{pool="all"}'] == 0


def event_of(payload: bytes) -> tuple[str, tuple[str, int]]:
    envelope = json.loads(payload)
    kind = envelope["type"].removeprefix("waterclock.").removesuffix(".v1")
    data = envelope["data"]
    return kind, (data.get("id", ""), data.get("attempt", 0))
