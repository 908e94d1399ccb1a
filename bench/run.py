"""The benchmarks: the mesh's speed beside the bare bound, in one run on one machine.

``python bench/run.py`` runs all and writes ``bench/results.json`` (flat names) and
``bench/RESULTS.md`` from it. ``--quick`` runs every part for a second or two, asserts the same
and writes nothing: the test suite does that.

What is measured: all four services as processes, the engine instant, bodies of 400 bytes,
budgets in Valkey, every event stored and read by the ledger. The generator, the bus and the
services share the machine.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bound import measure_bound

from waterclock.mesh import EmbeddedMesh, MeshOptions
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.logs import configure_logs

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
IN_FLIGHT = 256
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")

CONFIG = """
[tenants.acme]
tier = "gold"
requests_per_minute = 100000000
tokens_per_minute = 100000000
concurrency = 4096
deadline_ms = 60000

[models.sim-8b]
output_tokens_default = 16
output_tokens_max = 4096

[pools.all]
models = ["sim-8b"]
default = true

[ladder]
batch_cap_above = 100000
speculation_off_above = 200000
refuse_above = 300000

[workers.w1]
pool = "all"
models = ["sim-8b"]
profile = "instant"
slots = 512
"""


class Bench:
    """One embedded mesh with an instant engine, and the generator beside it."""

    def __init__(self, folder: Path, *, sync_interval: str = "200ms") -> None:
        self.mesh = EmbeddedMesh(MeshOptions(data_dir=folder, sync_interval=sync_interval))
        self.mesh.configure(CONFIG)

    async def generate(self, over: str, seconds: float, warm_up_s: float, **given: Any) -> Any:
        """Run the generator; its figures, and each process's share of a core meanwhile."""
        mesh = self.mesh
        secret = mesh.tenant_secret("acme")
        argv = [sys.executable, str(HERE / "generate.py"), "--over", over]
        argv += ["--url", mesh.bus_url if over == "nats" else mesh.http_url]
        # With "=", because a secret may begin with a dash.
        argv += [f"--secret={secret.password if over == 'nats' else secret.api_key}"]
        argv += ["--seconds", str(seconds), "--warm-up-s", str(warm_up_s)]
        for name, value in given.items():
            argv += [f"--{name.replace('_', '-')}", str(value)]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert (await process.stdout.readline()).strip() == b"begun"
        await asyncio.sleep(warm_up_s)
        watched = {name: child.pid for name, child in mesh.children.items()}
        watched["generator"] = process.pid
        before, begun = {n: _ticks(p) for n, p in watched.items()}, time.monotonic()
        await asyncio.sleep(max(0.2, seconds - 0.3))
        elapsed = time.monotonic() - begun
        load = {
            name: round(100 * (_ticks(pid) - before[name]) / TICKS_A_SECOND / elapsed)
            for name, pid in watched.items()
        }
        figures = json.loads(await process.stdout.read())
        assert await process.wait() == 0, "the generator failed"
        return figures | {"cpu_percent": load}

    async def stored(self) -> dict[str, tuple[int, int]]:
        """(messages, bytes) of each stream, once the ledger has read every event."""
        bus = await self._operator()
        try:
            give_up = time.monotonic() + 60
            while True:
                streams: dict[str, tuple[int, int]] = {}
                for name in ("REQUESTS", "EVENTS", "ANSWERS"):
                    state = (await bus.api(f"STREAM.INFO.{name}", {}))["state"]
                    streams[name] = (int(state["last_seq"]), int(state["bytes"]))
                read = self.mesh.metrics("ledger").get("waterclock_ledger_sequence", 0.0)
                if int(read) >= streams["EVENTS"][0]:
                    return streams
                assert time.monotonic() < give_up, f"the ledger read {read} of {streams['EVENTS']}"
                await asyncio.sleep(0.1)
        finally:
            await bus.close()

    async def _operator(self) -> Bus:
        log = configure_logs(service="bench", level="error", pretty=False)
        settings = BusSettings(
            url=self.mesh.bus_url,
            user="operator",
            password=self.mesh.access.services["operator"],
        )
        return await Bus.connect(settings, name="bench", log=log)


async def run(seconds: float, warm_up_s: float, rounds: int, folder: Path) -> dict[str, Any]:
    """All figures of the mesh, and the notes that explain them."""
    results: dict[str, float] = {}
    notes: dict[str, Any] = {}
    bench = Bench(folder / "mesh")
    async with bench.mesh:
        before = await bench.stored()
        rates: list[float] = []
        lost = 0
        for _ in range(rounds):
            figures = await bench.generate("nats", seconds, warm_up_s, in_flight=IN_FLIGHT)
            rates.append(figures["counted"] / figures["seconds"])
            lost += figures["sent"] - figures["answered"]
            notes.setdefault("closed", []).append(figures)
        after = await bench.stored()
        requests = after["REQUESTS"][0] - before["REQUESTS"][0]
        assert requests == sum(figures["sent"] for figures in notes["closed"])
        messages = sum(after[name][0] - before[name][0] for name in after)
        size = sum(after[name][1] - before[name][1] for name in after) // messages
        results["mesh.requests_per_s"] = round(statistics.median(rates))
        results["mesh.lost"] = lost
        notes["messages_per_request"] = round(messages / requests, 2)
        notes["bytes_per_message"] = size
        figures = await bench.generate("nats", seconds, min(warm_up_s, 2.0), rate=200)
        notes["nats_open_200"] = figures
        assert figures["lost"] == figures["refused"] == 0, figures
        results["mesh.nats_added_ms_p50"] = figures["p50_us"] / 1000
        results["mesh.nats_added_ms_p99"] = figures["p99_us"] / 1000
        figures = await bench.generate("http", seconds, min(warm_up_s, 2.0), rate=200)
        notes["http_open_200"] = figures
        assert figures["lost"] == figures["refused"] == 0, figures
        results["mesh.http_added_ms_p50"] = figures["p50_us"] / 1000
        results["mesh.http_added_ms_p99"] = figures["p99_us"] / 1000
    bound = measure_bound(max(20_000, int(seconds * 8_000)), size)
    results["bound.messages_per_s"] = bound
    bound_requests = bound / notes["messages_per_request"]
    results["bound.requests_per_s"] = round(bound_requests)
    results["mesh.bound_ratio"] = round(results["mesh.requests_per_s"] / bound_requests, 3)
    always = Bench(folder / "always", sync_interval="always")
    async with always.mesh:
        figures = await always.generate("nats", seconds, warm_up_s, in_flight=IN_FLIGHT)
        notes["always_closed"] = figures
        results["mesh.sync_always.requests_per_s"] = round(figures["counted"] / figures["seconds"])
        figures = await always.generate("nats", seconds, min(warm_up_s, 2.0), rate=200)
        results["mesh.sync_always.nats_added_ms_p50"] = figures["p50_us"] / 1000
        results["mesh.sync_always.nats_added_ms_p99"] = figures["p99_us"] / 1000
    figures = await _engine_alone(seconds, warm_up_s)
    notes["engine_alone"] = figures
    results["engine_http.requests_per_s"] = round(figures["counted"] / figures["seconds"])
    return {"results": results, "notes": notes}


async def _engine_alone(seconds: float, warm_up_s: float) -> dict[str, Any]:
    """The same load straight at the engine's own HTTP server: what no mesh at all would give."""
    async with start_engine() as url:
        return await generate_http(url, "none", seconds, warm_up_s, in_flight=IN_FLIGHT)


@asynccontextmanager
async def start_engine() -> AsyncGenerator[str]:
    """The instant engine behind its HTTP server; its address."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "waterclock_worker.engine_http", "--profile", "instant"),
        *("--port", "0", "--model", "sim-8b"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        yield (await server.stdout.readline()).decode().split()[-1]
    finally:
        server.terminate()
        await server.wait()


async def generate_http(
    url: str, secret: str, seconds: float, warm_up_s: float, **given: Any
) -> dict[str, Any]:
    """Run the generator against any OpenAI-compatible server."""
    argv = [sys.executable, str(HERE / "generate.py"), "--over", "http", "--url", url]
    argv += [f"--secret={secret}", "--seconds", str(seconds), "--warm-up-s", str(warm_up_s)]
    for name, value in given.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    said = await process.stdout.read()
    assert await process.wait() == 0, "the generator failed"
    return json.loads(said.splitlines()[-1])


def _ticks(pid: int) -> int:
    """Processor time that a process has used, user and system, in clock ticks; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _limiting(figures: dict[str, Any]) -> str:
    load: dict[str, int] = figures["cpu_percent"]
    shares = sorted(load.items(), key=lambda item: -item[1])
    busy = sum(load.values())
    top = ", ".join(f"{name} {share} %" for name, share in shares)
    cores = os.cpu_count() or 1
    what = f"both cores together ({busy} of {100 * cores} %)" if busy > 85 * cores else shares[0][0]
    return f"limited by {what}; of a core: {top}"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def write(measured: dict[str, Any]) -> None:
    """Merge the figures into ``results.json`` and make ``RESULTS.md`` from it."""
    kept: dict[str, Any] = {"figures": {}}
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text())
    kept["figures"] = dict(sorted((kept["figures"] | measured["results"]).items()))
    kept["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, {_cpu()}"
    kept["python"] = platform.python_version()
    kept["commit"] = _commit()
    kept["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    notes = measured["notes"]
    median = sorted(notes["closed"], key=lambda f: f["counted"])[len(notes["closed"]) // 2]
    kept["limits"] = {
        "mesh.requests_per_s": _limiting(median),
        "mesh.sync_always.requests_per_s": _limiting(notes["always_closed"]),
        "mesh.nats_added_ms": _limiting(notes["nats_open_200"]),
        "mesh.http_added_ms": _limiting(notes["http_open_200"]),
        "mesh.bound_ratio": (
            f"{notes['messages_per_request']} stored messages a request,"
            f" {notes['bytes_per_message']} bytes each on average"
        ),
    }
    render(kept)


def render(kept: dict[str, Any]) -> None:
    """Write ``results.json``, and ``RESULTS.md`` from it."""
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n")
    lines = [
        "# Results",
        "",
        "Written by `make bench` from `results.json`. Compare ratios, not machines.",
        "",
        f"{kept['date']}, commit {kept['commit']}, {kept['machine']}, Python {kept['python']}.",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| `{name}` | {value:,} |" for name, value in kept["figures"].items()),
        "",
        "## What limits them",
        "",
        *(f"* `{name}`: {text}" for name, text in kept["limits"].items()),
        "",
    ]
    (HERE / "RESULTS.md").write_text("\n".join(lines))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="waterclock-bench-") as folder:
        shape = (1.5, 0.5, 1) if given.quick else (30.0, 5.0, 3)
        measured = asyncio.run(run(*shape, Path(folder)))
    for name, value in measured["results"].items():
        print(f"{name:42} {value:>12,}")
    if not given.quick:
        write(measured)


if __name__ == "__main__":
    main()
