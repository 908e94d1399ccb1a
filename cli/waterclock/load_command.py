"""``waterclock load``: the plan, the progress bar and the run."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from waterclock.arrivals import Planned
from waterclock.load import LoadOptions, Login, run_load
from waterclock.load import Progress as LoadProgress
from waterclock.load_result import LoadResult
from waterclock.mesh import EmbeddedMesh
from waterclock.mix import DEFAULT_TENANTS, MixOptions, Phase, TenantShare, plan_mix
from waterclock.traces import TraceOptions, plan_trace, read_trace

DEFAULT_LANGUAGES: Mapping[str, int] = {"en": 2, "zh": 1}


class LoadCommand(Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    data: Path
    seconds: int
    rate: int
    burst: int
    trace: Path | None
    speed: Fraction
    limit: int | None
    minutes: int | None
    deadline_ms: int | None
    tenants: tuple[str, ...]
    in_flight: int | None
    seed: int


async def run_load_command(
    command: LoadCommand, mesh: EmbeddedMesh, console: Console
) -> LoadResult:
    """Run it against a mesh that runs already.

    Raises:
        MeshError: an unknown tenant.
        TraceRefused, ValueError, OSError: the plan cannot be made.
        ProducerError: the bus cannot be reached.
    """
    names = command.tenants or tuple(mesh.config.get("tenants", {}))
    logins = {name: Login(user=name, password=mesh.tenant_secret(name).password) for name in names}
    plan, total_us = _plan(command, names)
    bar = Progress(
        TextColumn("{task.fields[state]:>19}"),
        BarColumn(bar_width=28),
        TextColumn("sent {task.fields[sent]:>6}  open {task.fields[open]:>5}"),
        TextColumn("{task.fields[outcomes]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("load", total=total_us, state="sending", sent=0, open=0, outcomes="")

    def progress(now: LoadProgress) -> None:
        outcomes = "  ".join(f"{name} {count}" for name, count in sorted(now.outcomes.items()))
        bar.update(
            task,
            completed=min(now.elapsed_us, total_us),
            state=now.state,
            sent=now.sent,
            open=now.open,
            outcomes=outcomes,
        )

    options = LoadOptions(
        plan=plan,
        url=mesh.bus_url,
        logins=logins,
        in_flight=command.in_flight,
        receipts=str(mesh.data_dir / "receipts"),
    )
    with bar:
        return await run_load(options, progress)


def _plan(command: LoadCommand, names: tuple[str, ...]) -> tuple[Iterable[Planned], int]:
    """The requests in order, and how long sending them takes."""
    if command.trace is not None:
        options = TraceOptions(
            path=command.trace,
            speed=command.speed,
            limit=command.limit,
            minutes=command.minutes,
            tenants=dict.fromkeys(names, 1),
            languages=DEFAULT_LANGUAGES,
            deadline_ms=command.deadline_ms,
            seed=command.seed,
        )
        return plan_trace(options), _trace_us(command)
    known = {tenant.name: tenant for tenant in DEFAULT_TENANTS}
    part_ms = command.seconds * 1000 // 3
    phases = (Phase(name="steady", duration_ms=command.seconds * 1000),)
    if command.burst > 1:
        phases = (
            Phase(name="steady", duration_ms=part_ms),
            Phase(name="burst", duration_ms=part_ms, rate_permille=command.burst * 1000),
            Phase(name="recovery", duration_ms=part_ms),
        )
    mix = MixOptions(
        rate_milli=command.rate * 1000,
        tenants=[
            known.get(name) or TenantShare(name=name, languages=DEFAULT_LANGUAGES) for name in names
        ],
        phases=phases,
        seed=command.seed,
    )
    return plan_mix(mix), command.seconds * 1_000_000


def _trace_us(command: LoadCommand) -> int:
    """How long the trace, or the part that is asked for, takes at its speed."""
    assert command.trace is not None
    last_us = 0
    for number, arrival in enumerate(read_trace(command.trace)):
        if command.limit is not None and number >= command.limit:
            break
        if command.minutes is not None and arrival.at_us >= command.minutes * 60_000_000:
            break
        last_us = arrival.at_us
    return max(1, int(last_us / command.speed))
