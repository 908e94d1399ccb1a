"""What the instant engine costs: it must not be what limits a benchmark of the mesh.

Rates are in jobs per second of this process's processor time, so that other processes on the
machine count for little; ``pytest --junit-xml`` records them.
"""

import asyncio
import itertools
import time
from contextlib import aclosing

import pytest

from waterclock_worker.engine import EngineJob, EngineOutput
from waterclock_worker.simulated import SimulatedEngine
from waterclock_worker.simulated_profiles import PROFILES

JOBS = 20_000
IN_FLIGHT = 256
JOBS_PER_S_MIN = 20_000
"""Well above what the mesh reaches; the engine reaches several times as much."""


def job(number: int) -> EngineJob:
    return EngineJob(
        job_id=f"tenant/{number}/1",
        prompt="How long does water take to leave a vessel?",
        model="instant",
        prompt_tokens_estimate=11,
        output_tokens_max=1 + number % 4,
        ignore_eos=True,
    )


async def push(engine: SimulatedEngine) -> int:
    """A closed loop of callbacks; returns the tokens made."""
    numbers = iter(range(JOBS))
    done = asyncio.get_running_loop().create_future()
    tokens = ended = 0

    def sink(output: EngineOutput) -> None:
        nonlocal tokens, ended
        tokens += output.tokens
        if output.finish is not None:
            ended += 1
            number = next(numbers, None)
            if number is not None:
                engine.submit(job(number), sink)
            elif ended == JOBS:
                done.set_result(None)

    for number in itertools.islice(numbers, IN_FLIGHT):
        engine.submit(job(number), sink)
    await done
    return tokens


async def stream(engine: SimulatedEngine) -> int:
    """A closed loop of tasks that iterate; returns the tokens made."""
    numbers = iter(range(JOBS))
    tokens = 0

    async def work() -> None:
        nonlocal tokens
        for number in numbers:
            async with aclosing(engine.generate(job(number))) as outputs:
                async for output in outputs:
                    tokens += output.tokens

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return tokens


@pytest.mark.parametrize("drive", [push, stream])
async def test_the_instant_engine_is_quick_enough(drive, record_property) -> None:
    engine = SimulatedEngine(PROFILES["instant"])
    await engine.start()
    begun_ns = time.process_time_ns()
    tokens = await drive(engine)
    spent_ns = time.process_time_ns() - begun_ns
    assert tokens == JOBS * (1 + 2 + 3 + 4) // 4
    assert (await engine.health()).in_flight == 0
    rate = JOBS * 10**9 // spent_ns
    record_property("jobs_per_s", rate)
    assert rate >= JOBS_PER_S_MIN
