"""The runtime's micro-benchmark runs, and what it measures is work that was done."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "runtime_paths.py"


@pytest.mark.bench
def test_the_runtimes_paths_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = dict(line.split() for line in done.stdout.splitlines()[1:])
    for path in (
        "event_emitted_and_read_back",
        "event_read",
        "submission_stored",
        "submission_taken",
        "body_got",
    ):
        assert int(figures[f"{path}_per_s"].replace(",", "")) > 0
        assert float(figures[f"{path}_cpu_us"]) > 0
