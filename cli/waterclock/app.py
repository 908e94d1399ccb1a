"""The command line: parses, calls, prints. What a command does stands in its own module."""

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Generator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.text import Text

from waterclock.load_result import render_load
from waterclock.mesh import EmbeddedMesh, MeshError, MeshOptions

DATA_DIR = Path("waterclock-data")

app = App(
    name="waterclock",
    help="LLM requests under latency contracts, with the evidence.",
    version_flags=["--version"],
)
console = Console()
errors = Console(stderr=True)

Data = Annotated[Path, Parameter(help="The mesh's data folder.")]
Tenant = Annotated[str, Parameter(help="A tenant of the configuration.")]
Port = Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))]


@app.command
def up(
    *,
    data: Data = DATA_DIR,
    config: Annotated[Path | None, Parameter(help="A configuration file of your own.")] = None,
    port: Annotated[Port, Parameter(help="Preferred port of the bus.")] = 4222,
    http_port: Annotated[Port, Parameter(help="Preferred port of the HTTP edge.")] = 8080,
    sync_interval: Annotated[
        str,
        Parameter(
            help="What a power cut may lose of the bus: a duration, or 'always' for nothing."
        ),
    ] = "200ms",
) -> None:
    """Start the whole mesh on this machine; Ctrl-C stops it, and the next start goes on."""
    from waterclock.up import run_up

    options = MeshOptions(
        data_dir=data,
        config=config,
        bus_port=port,
        http_port=http_port,
        sync_interval=sync_interval,
    )
    _run(run_up(options, console))


@app.command
def key(tenant: Tenant, /, *, data: Data = DATA_DIR) -> None:
    """Print a tenant's API key for the HTTP edge."""
    with _told():
        print(open_mesh(data).tenant_secret(tenant).api_key)


@app.command
def doctor(*, data: Data = DATA_DIR, config: Path | None = None) -> None:
    """Say what is in order on this machine and in the mesh, and what to do about the rest."""
    from waterclock.doctor import examine, show

    if not show(examine(data, config), console):
        sys.exit(1)


@app.command
def send(
    prompt: Annotated[
        str,
        # Without it, '-' is taken for an option.
        Parameter(help="What to ask; '-' reads standard input.", allow_leading_hyphen=True),
    ],
    /,
    *,
    data: Data = DATA_DIR,
    tenant: Tenant = "acme",
    model: Annotated[str | None, Parameter(help="A model of the configuration.")] = None,
    max_tokens: int | None = None,
    deadline_ms: Annotated[int | None, Parameter(help="Counted from arrival.")] = None,
    language: Literal["zh", "en", "other", "und"] | None = None,
    session: str | None = None,
    stream: bool = True,
) -> None:
    """Send one request over the bus, show the answer as it comes, and where its time went."""
    from waterclock.send import SendOptions, send_one
    from waterclock_producer import ProducerError

    with _told(ProducerError):
        mesh = open_mesh(data)
        mesh.expect_running()
        options = SendOptions(
            tenant=tenant,
            prompt=sys.stdin.read() if prompt == "-" else prompt,
            url=mesh.bus_url,
            user=tenant,
            password=mesh.tenant_secret(tenant).password,
            model=model,
            max_tokens=max_tokens,
            deadline_ms=deadline_ms,
            language=language,
            session=session,
            stream=stream,
        )
        result = asyncio.run(send_one(options, sys.stdout))
    if result.final.outcome != "completed":
        sys.exit(1)


@app.command
def load(
    *,
    data: Data = DATA_DIR,
    seconds: Annotated[int, Parameter(help="Of the synthetic mix.")] = 30,
    rate: Annotated[int, Parameter(help="Requests a second, all tenants together.")] = 8,
    burst: Annotated[
        int, Parameter(help="A burst of so many times the rate in the middle; 1 for none.")
    ] = 1,
    trace: Annotated[
        Path | None, Parameter(help="Azure CSV or Mooncake JSONL, gzipped or not, instead.")
    ] = None,
    speed: Annotated[
        Decimal, Parameter(help="How many times denser than recorded; deadlines shrink with it.")
    ] = Decimal(1),
    limit: Annotated[int | None, Parameter(help="At most so many requests of the trace.")] = None,
    minutes: Annotated[int | None, Parameter(help="The trace's first minutes only.")] = None,
    deadline_ms: Annotated[int | None, Parameter(help="Of each request, before --speed.")] = None,
    tenants: Annotated[
        list[str] | None,
        Parameter(help="Who sends; default: all of the configuration.", negative=""),
    ] = None,
    in_flight: Annotated[
        int | None, Parameter(help="Closed loop of so many, instead of intended send times.")
    ] = None,
    seed: int = 0,
    json: Annotated[bool, Parameter(help="The result as JSON.", negative="")] = False,
) -> None:
    """Load the mesh with a synthetic mix or a recorded trace, and say what was seen from here.

    Open loop: every request has an intended send time, and latency counts from it, so that no
    waiting hides in the sender. Exit status 1 if an answer is missing.
    """
    from waterclock.load_command import LoadCommand, run_load_command
    from waterclock.traces import TraceRefused
    from waterclock_producer import ProducerError

    command = LoadCommand(
        data=data,
        seconds=seconds,
        rate=rate,
        burst=burst,
        trace=trace,
        speed=Fraction(speed),
        limit=limit,
        minutes=minutes,
        deadline_ms=deadline_ms,
        tenants=tuple(tenants or ()),
        in_flight=in_flight,
        seed=seed,
    )
    with _told(ProducerError, TraceRefused, ValueError, OSError):
        mesh = open_mesh(data)
        mesh.expect_running()
        result = asyncio.run(run_load_command(command, mesh, errors))
        print(result.to_json().decode() if json else render_load(result))
    if result.problems:
        sys.exit(1)


@app.command
def demo(
    *,
    data: Annotated[Path, Parameter(help="A new folder is made in it.")] = Path("waterclock-demo"),
) -> None:
    """A mesh, a load with a burst in it, and what the record says about it; about a minute."""
    from waterclock.demo import run_demo

    _run(run_demo(data, console))


@app.command
def replay(
    *,
    data: Data = DATA_DIR,
    clock: Annotated[
        Literal["queue", "exec"], Parameter(help="Which clock the first table is about.")
    ] = "queue",
    tenant: Annotated[str | None, Parameter(help="This tenant alone.")] = None,
    since: Annotated[
        str | None,
        Parameter(help="Leave out what arrived before: UTC such as 2026-01-31T08:00, or Unix µs."),
    ] = None,
    request: Annotated[str | None, Parameter(help="One life, as TENANT/ID.")] = None,
    json: Annotated[bool, Parameter(help="The same as JSON.", negative="")] = False,
    check: Annotated[
        bool, Parameter(help="Verify the record instead; exit status 1 if it does not hold.")
    ] = False,
) -> None:
    """Read the ledger's files and say what they show. Nothing has to run, nothing is written."""
    from waterclock.replay import run_replay

    with _told():
        sys.exit(
            run_replay(
                data,
                clock=clock,
                tenant=tenant,
                since=since,
                request=request,
                as_json=json,
                verify=check,
                out=sys.stdout,
                width=console.width,
            )
        )


def open_mesh(data: Path) -> EmbeddedMesh:
    """A mesh that somebody else started, for its addresses and secrets.

    Raises:
        MeshError: there is none in the folder.
    """
    mesh = EmbeddedMesh(MeshOptions(data_dir=data))
    mesh.attach()
    return mesh


@contextlib.contextmanager
def _told(*kinds: type[Exception]) -> Generator[None]:
    """Errors that were made for people are shown as such, and end the command with status 1."""
    try:
        yield
    except (MeshError, *kinds) as error:
        # As Text: brackets in a message are no markup, and ":x:" is no picture.
        errors.print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)
        sys.exit(1)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    with _told(OSError), contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(work)
    return None
