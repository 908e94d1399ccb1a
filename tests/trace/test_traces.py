"""Recorded traffic through the real mesh: the public Azure and Mooncake traces at ten times speed.

Arrivals come ten times as dense, deadlines are ten times as short, and the simulated engines'
steps take a tenth of their time, so that queueing is what it would be at the recorded speed. The
workers are sized beforehand, by the profile's own arithmetic, to an offered load of at most 0.8.

``make test`` runs the first part of each trace; ``make campaign-traces`` the first ten minutes.
"""

import asyncio
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from msgspec import Struct

from drill import drilled
from drill_mesh import MODEL, TENANTS, MeshPlan, worker
from waterclock.load import LoadOptions, Login, run_load
from waterclock.load_result import LoadResult
from waterclock.traces import TraceOptions, plan_trace, read_trace
from waterclock_ledger import check, record, report
from waterclock_worker.simulated_profiles import PROFILES

SPEED = 10
DEADLINE_MS = 600_000
"""Ten minutes of recorded time."""
OFFERED_LOAD_PERMILLE_MAX = 800
SLOTS = 32
COMPLETED_PERMILLE_MIN = 950


class Sizing(Struct, frozen=True):
    """How many workers, and what load that makes for each."""

    workers: int
    load_permille: int
    requests: int


def size_workers(path: Path, profile_name: str, seconds: int) -> Sizing:
    """Workers for the busiest stretch of the trace's first ``seconds``.

    A request costs its prefill (``token_ns`` a token, over the steps it takes) and its share of
    the decode steps: a step of ``SLOTS`` sequences serves as many tokens. The engine is busy for
    the sum of these; the load is that over the time in which they arrive.
    """
    profile = PROFILES[profile_name]
    # The weights are read once a step, whatever is in it: shared by as many as run at once.
    step_ns = profile.step_ns + profile.weights_ns + SLOTS * profile.sequence_ns
    busy_ns: dict[int, int] = {}
    requests = 0
    width_us = 30_000_000
    for arrival in read_trace(path):
        if arrival.at_us >= seconds * 1_000_000:
            break
        requests += 1
        context = arrival.input_tokens + arrival.output_tokens // 2
        cost = arrival.input_tokens * profile.token_ns
        cost += arrival.output_tokens * (step_ns // (SLOTS // 2) + profile.kv_token_ns * context)
        slot = arrival.at_us // width_us
        busy_ns[slot] = busy_ns.get(slot, 0) + cost
    width_ns = width_us * 1000
    whole = [busy for slot, busy in busy_ns.items() if (slot + 1) * width_us <= seconds * 10**6]
    busiest = max(whole or busy_ns.values())
    workers = max(1, -(-busiest * 1000 // (width_ns * OFFERED_LOAD_PERMILLE_MAX)))
    return Sizing(workers, busiest * 1000 // (width_ns * workers), requests)


def mesh_of(profile: str, workers: int) -> MeshPlan:
    """One pool, simulated engines at ten times speed, and a ladder that sheds late."""
    return MeshPlan(
        pools={"all": {"models": [MODEL], "policy": "edf", "default": True}},
        workers={
            f"w{number}": worker("all", SLOTS, profile=profile, speed_permille=1000 * SPEED)
            for number in range(1, workers + 1)
        },
        models={MODEL: {"context_tokens": PROFILES[profile].context_tokens_max}},
    )


async def replay_trace(folder: Path, path: Path, profile: str, seconds: int) -> str:
    """Run it and check everything; what was measured, in words."""
    sizing = size_workers(path, profile, seconds)
    async with drilled(folder / "mesh", mesh_of(profile, sizing.workers)) as drill:
        plan = plan_trace(
            TraceOptions(
                path=path,
                speed=Fraction(SPEED),
                limit=sizing.requests,
                tenants=dict.fromkeys(TENANTS, 1),
                languages={"en": 2, "zh": 1},
                deadline_ms=DEADLINE_MS,
                stream=False,
                seed=1,
            )
        )
        mesh = drill.mesh
        logins = {
            name: Login(user=name, password=mesh.tenant_secret(name).password) for name in TENANTS
        }
        result = await run_load(LoadOptions(plan=plan, url=mesh.bus_url, logins=logins))
        # Everything that can be seen from outside, and one end that counts for each request; the
        # same again when the block ends, and two replays with everything stopped.
        report = await drill.check(60)
        assert report.requests + sum(report.reasons.values()) == result.sent
        assert sum(report.outcomes.values()) == report.requests
        assert report.flagged == 0
    return judge(folder / "mesh" / "ledger", result, sizing)


def judge(ledger: Path, result: LoadResult, sizing: Sizing) -> str:
    """Every claim about the run, from its record."""
    assert result.problems == [], result.problems[:5]
    assert result.sent == sizing.requests
    completed = result.outcomes["completed"]
    assert completed * 1000 >= COMPLETED_PERMILLE_MIN * result.sent, result.outcomes
    found = check.check(ledger)
    assert found.violations == []
    assert found.open == []
    summaries = [s for tape in record.read_record(ledger).tapes for s in tape.summaries()]
    assert len(summaries) + result.outcomes.get("rejected", 0) >= result.sent
    for summary in summaries:
        assert sum(summary.segments.values()) == summary.total_us, summary
        if summary.exec_us is not None:
            assert summary.total_us is not None
            assert summary.total_us >= summary.exec_us or summary.flags, summary
    once = report.replay(ledger)
    assert once.to_text() == report.replay(ledger).to_text()
    assert once.to_json() == report.replay(ledger).to_json()
    queue = next(g for g in once.groups if g.tenant == "acme").ended["queue_clock"]
    return (
        f"{completed} of {result.sent} completed ({dict(sorted(result.outcomes.items()))}) on"
        f" {sizing.workers} workers at an offered load of {sizing.load_permille / 1000:.2f};"
        f" acme's queue clock P50 {queue.p50_us / 1000:.1f} ms, P99 {queue.p99_us / 1000:.1f} ms;"
        f" record {once.totals.sha256[:16]}"
    )


def tell(measured: str) -> None:
    """Say what was measured; pytest shows it with -s, and of a failed test."""
    sys.stdout.write(f"{measured}\n")


TRACES = [
    pytest.param("traces-azure-2023/conv.csv.gz", "h200-8b", id="azure-conversation"),
    pytest.param(
        "traces-mooncake-fast25/conversation_trace.jsonl.gz", "h200-8b-128k", id="mooncake"
    ),
]


@pytest.mark.shared_data
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "profile"), TRACES)
def test_the_beginning_of_a_trace_is_served_and_recorded(
    shared_data: Path, tmp_path: Path, name: str, profile: str
) -> None:
    tell(asyncio.run(replay_trace(tmp_path, shared_data / "data" / name, profile, seconds=40)))


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "profile"), TRACES)
def test_the_first_ten_minutes_of_a_trace_are_served_and_recorded(
    shared_data: Path, tmp_path: Path, name: str, profile: str
) -> None:
    tell(asyncio.run(replay_trace(tmp_path, shared_data / "data" / name, profile, seconds=600)))


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """A trace of our own in the Mooncake format, so that this runs where no data is."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 400 * n, "input_length": 200 + n, "output_length": 5 + n % 7, "hash_ids": [n]}
        for n in range(100)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.timeout(120)
def test_a_trace_of_our_own_is_served_and_recorded(small_trace: Path, tmp_path: Path) -> None:
    tell(asyncio.run(replay_trace(tmp_path, small_trace, "h200-8b", seconds=60)))
