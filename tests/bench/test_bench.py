"""The benchmarks run, and compute what they say: once, short, in every test run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = (
    "mesh.requests_per_s",
    "mesh.bound_ratio",
    "mesh.lost",
    "mesh.nats_added_ms_p50",
    "mesh.nats_added_ms_p99",
    "mesh.http_added_ms_p50",
    "mesh.sync_always.requests_per_s",
    "engine_http.requests_per_s",
)


@pytest.mark.bench
@pytest.mark.timeout(150)
def test_the_benchmarks_run_and_lose_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "run.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = dict(line.split() for line in done.stdout.splitlines())
    assert set(FIGURES) <= set(figures)
    assert figures["mesh.lost"] == "0"
    assert float(figures["mesh.requests_per_s"].replace(",", "")) > 0
