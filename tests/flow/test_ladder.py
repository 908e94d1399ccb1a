"""A burst climbs the ladder up to refusing; when it is over, the mesh comes down again."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from drill import Drill, drilled
from drill_mesh import MODEL, MeshPlan, worker
from open_load import outcomes, prompt
from waterclock_producer import Final, Handle, new_submission

pytestmark = pytest.mark.asyncio(loop_scope="module")

LADDER = {
    "batch_cap_above": 4,
    "batch_cap_below": 2,
    "speculation_off_above": 8,
    "speculation_off_below": 4,
    "refuse_above": 14,
    "refuse_below": 6,
    "batch_cap": 2,
    "rise_ms": 50,
    "dwell_ms": 250,
    "retry_after_ms_min": 200,
    "retry_after_ms_max": 4_000,
    "drain_window_ms": 2_000,
}
SOLO = "solo-8b"
"""Has one pool alone, so admission knows that it refuses, and says so at the door. Of the other
model the pool is known when the text has been read, so there the scheduler refuses."""
SLOTS = 4
ABOVE = (LADDER["batch_cap_above"], LADDER["speculation_off_above"], LADDER["refuse_above"])
BELOW = (LADDER["batch_cap_below"], LADDER["speculation_off_below"], LADDER["refuse_below"])
TOKENS = 20
"""A tenth of a second on this worker."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    plan = MeshPlan(
        pools={
            "zh": {"models": [MODEL], "languages": ["zh"], "policy": "fcfs"},
            "en": {"models": [MODEL], "policy": "fcfs", "default": True},
            "solo": {"models": [SOLO], "policy": "fcfs", "default": True},
        },
        workers={
            "zh-1": worker("zh"),
            "en-1": worker("en", SLOTS, speed_permille=1000),
            "solo-1": worker("solo", SLOTS, models=[SOLO], speed_permille=1000),
        },
        models={MODEL: {"output_tokens_max": 4096}, SOLO: {"output_tokens_max": 4096}},
        sections={"ladder": LADDER},
    )
    async with drilled(tmp_path_factory.mktemp("mesh"), plan) as running:
        yield running


async def burst(drill: Drill, model: str, name: str, count: int, pause_s: float) -> list[Handle]:
    draw = random.Random(name)
    handles: list[Handle] = []
    for number in range(count):
        handle = drill.producers.by_tenant["acme"].send(
            new_submission(
                id=f"{name}-{number}",
                model=model,
                prompt=prompt(draw, 8, chinese=False),
                max_tokens=TOKENS,
                ignore_eos=True,
            )
        )
        handles.append(drill.producers.keep("acme", handle))
        await asyncio.sleep(pause_s)
    return handles


@pytest.mark.parametrize(
    ("model", "pool", "at_the_door"),
    [pytest.param(SOLO, "solo", True, id="door"), pytest.param(MODEL, "en", False, id="scheduler")],
)
async def test_a_burst_is_shed_and_told_when_to_come_again(
    drill: Drill, model: str, pool: str, at_the_door: bool
) -> None:
    before = await drill.before()
    async with AsyncOpenAI(
        base_url=f"{drill.mesh.http_url}/v1",
        api_key=drill.mesh.access.tenants["globex"].api_key,
        max_retries=0,
    ) as client:
        # Connected before it matters.
        await client.models.list()
        load = asyncio.create_task(burst(drill, model, pool, 240, 0.005))
        await drill.until("it refuses", lambda: rejected(drill.sent("acme"), pool))
        chat: Any = [{"role": "user", "content": "Is there any room left for this one today?"}]
        status, headers = 0, cast(Any, {})
        while not headers and not load.done():
            try:
                # While it sheds, the pool comes down as soon as it can, and lets somebody in.
                await client.chat.completions.create(model=model, messages=chat, max_tokens=2)
            except openai.InternalServerError as error:
                status, headers = error.status_code, error.response.headers
        assert status == 503
        assert headers["x-waterclock-reason"] == "load_shed"
        assert 200 <= int(headers["retry-after-ms"]) <= 4_000
        assert 1 <= int(headers["retry-after"]) <= 4
        # Who comes again when told to gets in, when the burst is over.
        handles = await load
        patient = client.with_options(max_retries=8)
        answer = await patient.chat.completions.create(model=model, messages=chat, max_tokens=2)
        assert answer.choices[0].message.content
    refused = rejected(handles, pool)
    assert {final.reject_reason for final in refused} == {"load_shed"}
    for final in refused:
        assert final.retry_after_ms is not None
        assert 200 <= final.retry_after_ms <= 4_000
    await drill.until("it is on the ground again", lambda: rung_of(drill, pool) == 0)
    report = await drill.check()
    assert set(outcomes(handles)) == {"completed", "rejected"}
    assert outcomes(handles)["completed"] >= LADDER["refuse_above"]
    shed = report.reasons["load_shed"] - before.reasons.get("load_shed", 0)
    by_scheduler = report.outcomes.get("rejected", 0) - before.outcomes.get("rejected", 0)
    assert shed >= len(refused)
    if at_the_door:
        # But for those that were under way when the pool began to refuse.
        assert by_scheduler < shed
    else:
        assert by_scheduler == shed


async def test_the_ladder_climbs_above_and_comes_down_below(drill: Drill) -> None:
    """Every move is on the tape with the depth that made it, and says what holds from then on."""
    report = await drill.check()
    for pool in ("solo", "en"):
        moves = [data for _, data in report.recount.rungs if data["pool"] == pool]
        check_moves(moves)
        log = drill.mesh.logs(f"{pool}-1")
        assert log.count("rung_obeyed") == len(moves)


def check_moves(moves: list[dict[str, Any]]) -> None:
    assert max(move["rung_to"] for move in moves) == 3
    assert moves[-1]["rung_to"] == 0
    standing = since_ns = 0
    names = ("batch_cap", "speculation_off", "refuse")
    for move in moves:
        rung_from, rung_to = move["rung_from"], move["rung_to"]
        assert rung_from == standing
        if rung_to > rung_from:
            assert move["depth"] > ABOVE[rung_to - 1]
        else:
            assert rung_to == rung_from - 1, "one rung at a time"
            assert move["depth"] <= BELOW[rung_from - 1]
            # Hysteresis: it stays for as long as the depth must have been low.
            stood_ns = move["changed"]["mono_ns"] - since_ns
            assert stood_ns >= LADDER["dwell_ms"] * 1_000_000
        assert move["actions"] == list(names[:rung_to])
        assert (move.get("batch_cap") == LADDER["batch_cap"]) == (rung_to > 0)
        assert (move.get("retry_after_ms") is not None) == (rung_to == 3)
        standing, since_ns = rung_to, move["changed"]["mono_ns"]


async def test_fewer_run_at_once_while_the_batch_is_capped(drill: Drill) -> None:
    """Slots are counted from the tape: with a cap of two no third one is given out."""
    report = await drill.check()
    recount = report.recount
    capped = False
    running: set[tuple[str, int]] = set()
    most = {True: 0, False: 0}
    rungs = {at: data for at, data in recount.rungs if data["pool"] == "solo"}
    for stored in await drill.watch.stream("EVENTS"):
        if stored.sequence in rungs:
            capped = rungs[stored.sequence]["rung_to"] > 0
            # What ran before the cap goes on; only what is given out under it is counted.
            running = set()
            continue
        kind, key = event_of(stored.payload)
        if kind == "dispatched" and ".solo-1-" in stored.subject:
            running.add(key)
            most[capped] = max(most[capped], len(running))
        elif kind in ("completed", "cancelled", "expired", "failed", "attempt_lost"):
            running.discard(key)
    assert 0 < most[True] <= LADDER["batch_cap"]
    assert 0 < most[False] <= SLOTS


async def test_after_it_everything_is_as_before(drill: Drill) -> None:
    handles = await burst(drill, SOLO, "after", 12, 0.06)
    await drill.check()
    assert outcomes(handles) == {"completed": 12}


def rejected(handles: list[Handle], name: str) -> list[Final]:
    finals = [handle.final for handle in handles if handle.id.startswith(f"{name}-")]
    return [final for final in finals if final is not None and final.outcome == "rejected"]


def rung_of(drill: Drill, pool: str) -> float:
    return drill.mesh.metrics("scheduler")[f'waterclock_pool_rung{{pool="{pool}"}}']


def event_of(payload: bytes) -> tuple[str, tuple[str, int]]:
    envelope = json.loads(payload)
    kind = envelope["type"].removeprefix("waterclock.").removesuffix(".v1")
    data = envelope["data"]
    return kind, (data.get("id", ""), data.get("attempt", 0))
