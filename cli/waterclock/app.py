"""The command line: parses, calls, prints. What a command does stands in its own module."""

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console

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


@app.command
def up(
    *,
    data: Data = DATA_DIR,
    config: Annotated[Path | None, Parameter(help="A configuration file of your own.")] = None,
    port: Annotated[int, Parameter(help="Preferred port of the bus.")] = 4222,
    http_port: Annotated[int, Parameter(help="Preferred port of the HTTP edge.")] = 8080,
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
def _told() -> Any:
    """Errors that were made for people are shown as such, and end the command with status 1."""
    try:
        yield
    except MeshError as error:
        errors.print(f"[red]error:[/] {error}", highlight=False)
        sys.exit(1)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    with _told(), contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(work)
    return None
