"""``waterclock demo``: a mesh, a load with a burst in it, and what the record says afterwards.

Everything is real but the engines, which are simulated (no model runs; steps take as long as a
GPU's published figures say). The numbers come from the ledger's files after the mesh has been
stopped, not from the load's own measurements.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec import Struct
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from waterclock.load import LoadOptions, Login, run_load
from waterclock.load import Progress as LoadProgress
from waterclock.load_result import LoadResult
from waterclock.mesh import EmbeddedMesh, MeshError, MeshOptions, default_config
from waterclock.mix import MixOptions, Phase, Spread, plan_mix
from waterclock.plot import Phase as PlotPhase
from waterclock.plot import Point, plot_clocks
from waterclock_ledger.fold import Summary
from waterclock_ledger.record import Record, read_record
from waterclock_ledger.report import build, nearest_rank

THRESHOLD_MS: Final = 300
STEADY_S: Final = 20
BURST_S: Final = 6
RECOVERY_S: Final = 10
SLOTS: Final = 4
"""Of each worker; few, so that a modest rate is a burst."""
RATE_MILLI: Final = 24_000
BURST_TIMES: Final = 3
PROMPT_TOKENS: Final = Spread(points=((0, 20), (500, 120), (900, 400), (1000, 900)))
OUTPUT_TOKENS: Final = Spread(points=((0, 6), (500, 18), (900, 26), (1000, 30)))
"""Short answers, so that a GPU of the simulated class can keep 300 ms once it has started."""

LADDER: Final = """
# Gentler than the default, so that the burst is seen as waiting before it is refused.
[ladder]
batch_cap = 3
speculation_off_above = 30
speculation_off_below = 20
refuse_above = 60
refuse_below = 30
"""


class Split(Struct, frozen=True):
    """One tenant's requests that arrived in the burst, under both clocks."""

    tenant: str
    tier: str
    count: int
    exec_p99_us: int
    queue_p99_us: int


async def run_demo(folder: Path, console: Console) -> None:
    """Run it in a new folder below ``folder``; leaves the record there and nothing running.

    Raises:
        MeshError: the mesh could not be started, or the record does not hold.
    """
    data = folder / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    data.mkdir(parents=True)
    mesh = EmbeddedMesh(MeshOptions(data_dir=data))
    mesh.configure(default_config().replace("slots = 8", f"slots = {SLOTS}") + LADDER)
    phases = (
        Phase(name="steady", duration_ms=STEADY_S * 1000),
        Phase(name="burst", duration_ms=BURST_S * 1000, rate_permille=BURST_TIMES * 1000),
        Phase(name="recovery", duration_ms=RECOVERY_S * 1000),
    )
    with console.status("starting bus, cache and four services …"):
        begun_s = time.monotonic()
        await mesh.start()
    try:
        console.print(
            f"A mesh of {len(mesh.children)} processes is up in"
            f" {time.monotonic() - begun_s:.1f} s. Engines are simulated; all else is real."
        )
        console.print(
            "Three tenants (acme is the VIP), Chinese and English:"
            f" {RATE_MILLI // 1000} requests/s, then {BURST_TIMES} times as many for {BURST_S} s,"
            " then as before.\n"
        )
        result = await _load(mesh, phases, console)
    finally:
        with console.status("stopping: services finish what they have …"):
            await mesh.stop()
    console.print("\nThe mesh is stopped. What follows is read from the ledger's files alone.\n")
    _tell(data, result, phases, console)


async def _load(mesh: EmbeddedMesh, phases: Sequence[Phase], console: Console) -> LoadResult:
    total_us = sum(phase.duration_ms for phase in phases) * 1000
    ends_us: list[tuple[int, str]] = []
    for phase in phases:
        ends_us.append(((ends_us[-1][0] if ends_us else 0) + phase.duration_ms * 1000, phase.name))
    bar = Progress(
        TextColumn("{task.fields[phase]:>9}"),
        BarColumn(bar_width=30),
        TextColumn("sent {task.fields[sent]:>5}  open {task.fields[open]:>4}"),
        TextColumn("{task.fields[outcomes]}"),
        TimeElapsedColumn(),
        console=console,
    )
    task = bar.add_task("load", total=total_us, phase="steady", sent=0, open=0, outcomes="")

    def progress(now: LoadProgress) -> None:
        phase = next((name for end_us, name in ends_us if now.elapsed_us < end_us), "answers")
        outcomes = "  ".join(f"{name} {count}" for name, count in sorted(now.outcomes.items()))
        bar.update(
            task,
            completed=min(now.elapsed_us, total_us),
            phase=phase,
            sent=now.sent,
            open=now.open,
            outcomes=outcomes,
        )

    logins = {
        tenant: Login(user=tenant, password=access.password)
        for tenant, access in mesh.access.tenants.items()
        if tenant in mesh.config["tenants"]
    }
    options = LoadOptions(
        plan=plan_mix(
            MixOptions(
                rate_milli=RATE_MILLI,
                phases=phases,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                seed=7,
            )
        ),
        url=mesh.bus_url,
        logins=logins,
        drain_s=60,
        receipts=str(mesh.data_dir / "receipts"),
    )
    with Live(bar, console=console, refresh_per_second=8):
        return await run_load(options, progress)


def _tell(data: Path, result: LoadResult, phases: Sequence[Phase], console: Console) -> None:
    record = read_record(data / "ledger")
    console.print(build(record).to_text(), markup=False, highlight=False, soft_wrap=True)
    spans = _spans(result.begun_us, phases)
    burst = next(span for span in spans if span.name == "burst")
    splits = split_by_clock(record, burst.start_us, burst.end_us)
    if not splits:
        raise MeshError(f"no request of the burst completed; see {data / 'logs'}")
    worst = max(splits, key=lambda split: split.queue_p99_us - split.exec_p99_us)
    points = [
        Point(s.arrival_us, s.total_us, s.exec_us)
        for s in _completed(record)
        if s.tenant == worst.tenant
        and s.arrival_us is not None
        and s.total_us is not None
        and s.exec_us is not None
    ]
    picture = data / "clocks.png"
    plot_clocks(
        points,
        spans,
        picture,
        title=f"{worst.tenant} ({worst.tier}): one record, two clocks",
        threshold_ms=THRESHOLD_MS,
    )
    for split in splits:
        console.print(sentence(split), soft_wrap=True, highlight=False)
    if result.outcomes.get("lost"):
        raise MeshError(f"{result.outcomes['lost']} requests got no answer; see {data / 'logs'}")
    shown = _shown(data)
    console.print(f"\nrecord    {shown}/ledger")
    console.print(f"picture   {shown}/clocks.png")
    console.print(f"receipts  {shown}/receipts (what the producers hold)")
    binary = "waterclock" if _on_path() else ".venv/bin/waterclock"
    console.print(f"replay    {binary} replay --data {shown}", soft_wrap=True)
    console.print(f"verify    {binary} replay --data {shown} --check", soft_wrap=True)
    one = max(_completed(record), key=lambda s: s.total_us or 0)
    console.print(
        f"one life  {binary} replay --data {shown} --request {one.tenant}/{one.id}", soft_wrap=True
    )


def split_by_clock(record: Record, start_us: int, end_us: int) -> list[Split]:
    """P99 under both clocks of what arrived in ``[start_us, end_us)``, by tenant."""
    by_tenant: dict[tuple[str, str], list[Summary]] = {}
    for summary in _completed(record):
        if summary.arrival_us is not None and start_us <= summary.arrival_us < end_us:
            by_tenant.setdefault((summary.tenant, summary.tier), []).append(summary)
    return [
        Split(
            tenant,
            tier,
            len(found),
            nearest_rank(sorted(s.exec_us for s in found if s.exec_us is not None), 99),
            nearest_rank(sorted(s.total_us for s in found if s.total_us is not None), 99),
        )
        for (tenant, tier), found in sorted(by_tenant.items())
        if any(s.exec_us is not None for s in found)
    ]


def sentence(split: Split) -> str:
    """What the two clocks say of one tenant, in plain words."""
    kept_exec = split.exec_p99_us <= THRESHOLD_MS * 1000
    kept_queue = split.queue_p99_us <= THRESHOLD_MS * 1000
    if kept_exec == kept_queue:
        verdict = f"{THRESHOLD_MS} ms was {'kept' if kept_exec else 'missed'} under either clause"
    else:
        verdict = f"whether {THRESHOLD_MS} ms was kept depends on the clause"
    return (
        f"At the burst, tenant {split.tenant} ({split.tier}, {split.count} requests): P99 is"
        f" {_ms(split.exec_p99_us)} ms counted from execution and {_ms(split.queue_p99_us)} ms"
        f" counted from the queue; {verdict}."
    )


def _completed(record: Record) -> list[Summary]:
    return [s for tape in record.tapes for s in tape.summaries() if s.outcome == "completed"]


def _spans(begun_us: int, phases: Sequence[Phase]) -> list[PlotPhase]:
    spans: list[PlotPhase] = []
    for phase in phases:
        end_us = begun_us + phase.duration_ms * 1000
        spans.append(PlotPhase(phase.name, begun_us, end_us))
        begun_us = end_us
    return spans


def _ms(us: int) -> str:
    return f"{(us + 500) // 1000:,}"


def _shown(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _on_path() -> bool:
    import shutil

    return shutil.which("waterclock") is not None
