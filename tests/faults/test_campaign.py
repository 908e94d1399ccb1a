"""The long form: rounds of random faults under random load, from a seed. ``make campaign-faults``.

``WATERCLOCK_CAMPAIGN_SEED`` names the first seed, ``WATERCLOCK_CAMPAIGN_ROUNDS`` how many follow;
a round that fails says its own, and runs alone with it. Each round ends in the whole check.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from drill import Drill, drilled
from drill_mesh import MeshPlan, worker
from open_load import LoadShape, outcomes
from waterclock_producer import ProducerError, Submission

FIRST_SEED = int(os.environ.get("WATERCLOCK_CAMPAIGN_SEED", "1"))
ROUNDS = int(os.environ.get("WATERCLOCK_CAMPAIGN_ROUNDS", "6"))
FAULTS_A_ROUND = 8
CHILDREN = ("admission", "scheduler", "ledger", "zh-1", "en-1", "en-2", "nats", "valkey")
SERVICES = ("admission", "scheduler", "ledger", "zh-1", "en-1", "en-2")

Fault = Callable[[Drill, random.Random], Awaitable[str]]


async def kill(drill: Drill, draw: random.Random) -> str:
    name = draw.choice(CHILDREN)
    drill.mesh.kill(name)
    return f"kill {name}"


async def kill_two(drill: Drill, draw: random.Random) -> str:
    names = draw.sample(CHILDREN, 2)
    for name in names:
        drill.mesh.kill(name)
    return f"kill {' and '.join(names)}"


async def kill_again_at_start(drill: Drill, draw: random.Random) -> str:
    """As soon as it has been started again, and before it is ready."""
    name = draw.choice(SERVICES)
    drill.mesh.kill(name)
    child = drill.mesh.children[name]
    await drill.until("started again", lambda: child.running)
    await asyncio.sleep(draw.uniform(0.2, 1.2))
    drill.mesh.kill(name)
    return f"kill {name} twice"


async def pause(drill: Drill, draw: random.Random) -> str:
    name, seconds = draw.choice(CHILDREN), draw.uniform(0.3, 5.0)
    drill.mesh.pause(name)
    await asyncio.sleep(seconds)
    drill.mesh.resume(name)
    return f"pause {name} for {seconds:.1f} s"


async def pause_two(drill: Drill, draw: random.Random) -> str:
    names, seconds = draw.sample(CHILDREN, 2), draw.uniform(0.3, 3.0)
    for name in names:
        drill.mesh.pause(name)
    await asyncio.sleep(seconds)
    for name in names:
        drill.mesh.resume(name)
    return f"pause {' and '.join(names)} for {seconds:.1f} s"


async def leave(drill: Drill, draw: random.Random) -> str:
    name = draw.choice(SERVICES)
    drill.mesh.children[name].signal(signal.SIGTERM)
    return f"SIGTERM {name}"


async def step(drill: Drill, draw: random.Random) -> str:
    name, step_us = draw.choice(SERVICES), draw.choice((-5_000_000, 5_000_000))
    drill.mesh.step_clock(name, step_us)
    await asyncio.sleep(draw.uniform(0.1, 1.0))
    drill.mesh.step_clock(name, 0)
    return f"step the clock of {name} by {step_us} µs"


async def say_again(drill: Drill, draw: random.Random) -> str:
    tape = await drill.watch.stream("EVENTS")
    for stored in draw.sample(tape, min(100, len(tape))):
        await drill.watch.publish(stored.subject, stored.payload)
    return "say 100 events again"


async def meddle(drill: Drill, draw: random.Random) -> None:
    """A restless producer: cancels what is open, sends again what has ended, asks for outcomes."""
    while True:
        await asyncio.sleep(draw.uniform(0.01, 0.15))
        tenant = draw.choice(sorted(drill.producers.by_tenant))
        producer, handles = drill.producers.by_tenant[tenant], drill.sent(tenant)
        if not handles:
            continue
        handle = draw.choice(handles[-40:])
        match draw.randrange(4):
            case 0:
                await producer.cancel(handle.id)
            case 1 if handle.ended and handle.body is not None and handle.receipts:
                with contextlib.suppress(ProducerError):
                    drill.producers.keep(tenant, producer.send_body(handle.id, handle.body))
            case 2 if handle.ended and handle.receipts:
                with contextlib.suppress(ProducerError):
                    resumed = producer.send(Submission(id=handle.id, resume=True))
                    drill.producers.keep(tenant, resumed)
            case _:
                await producer.cancel(f"never-{draw.randrange(10)}")


FAULTS: tuple[Fault, ...] = (
    kill,
    kill,
    kill_two,
    kill_again_at_start,
    pause,
    pause_two,
    leave,
    step,
    say_again,
)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + ROUNDS))
async def test_a_round_of_random_faults(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    workers = {"zh-1": worker("zh"), "en-1": worker("en"), "en-2": worker("en")}
    done: list[str] = []
    async with drilled(tmp_path / "mesh", MeshPlan(workers=workers)) as drill:
        load = asyncio.create_task(
            drill.producers.drive(
                LoadShape(
                    seed=seed,
                    rate=draw.randint(60, 250),
                    seconds=FAULTS_A_ROUND * 2.5,
                    stream_permille=draw.choice((0, 300, 1000)),
                    max_tokens=draw.choice(((2, 12), (10, 150), (50, 400))),
                    deadline_ms=draw.choice((None, None, 2_500)),
                )
            )
        )
        meddling = asyncio.create_task(meddle(drill, random.Random(seed)))
        try:
            for _ in range(FAULTS_A_ROUND):
                await asyncio.sleep(draw.uniform(0.2, 2.0))
                done.append(await draw.choice(FAULTS)(drill, draw))
            handles = await load
            meddling.cancel()
            await drill.ready(wait_s=40)
            await drill.check(90)
            found = outcomes(handles)
            # After three lost attempts a request has failed, and says so; an admission whose clock
            # was stepped may refuse a deadline as past.
            assert set(found) <= {"completed", "failed", "cancelled", "expired", "rejected"}
            assert found.get("failed", 0) <= len(handles) // 50
            assert found["completed"] > len(handles) // 4
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(done)}")
            raise
        finally:
            load.cancel()
            meddling.cancel()
