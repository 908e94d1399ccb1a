"""``waterclock up``: the whole mesh on this machine until it is interrupted."""

import asyncio
import signal
from pathlib import Path

from rich.console import Console
from rich.table import Table

from waterclock.mesh import EmbeddedMesh, MeshError, MeshOptions

SETTLE_S = 0.2


async def run_up(options: MeshOptions, console: Console) -> None:
    """Start, say where everything is, supervise, stop cleanly on SIGINT or SIGTERM.

    Raises:
        MeshError: it could not be started.
    """
    mesh = EmbeddedMesh(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        with console.status("starting the mesh …") as status:
            await mesh.start(lambda text: status.update(f"{text} …"))
    except Exception as error:
        # A service names its own mistakes; whoever mends the file wants all of them.
        _refuse_configuration(mesh.config_file, error)
        raise
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        _show(mesh, console)
        said = 0
        while not stop.is_set():
            try:
                async with asyncio.timeout(SETTLE_S):
                    await stop.wait()
            except TimeoutError:
                for name in mesh.restarts[said:]:
                    console.print(f"[yellow]{name} ended and was started again[/]; see its log")
                said = len(mesh.restarts)
    finally:
        with console.status("stopping: services finish what they have …"):
            await mesh.stop()
    console.print("stopped; [bold]waterclock up[/] goes on where this ended")


def _refuse_configuration(path: Path, cause: Exception) -> None:
    """Raises MeshError with every mistake of the file, if that is what was wrong."""
    from waterclock.doctor import configuration

    finding = configuration(path)
    if not finding.ok:
        mistakes = "".join(f"\n  - {line}" for line in finding.found.splitlines())
        raise MeshError(f"configuration refused, {path}:{mistakes}") from cause


def _show(mesh: EmbeddedMesh, console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("HTTP edge (OpenAI-compatible)", f"{mesh.http_url}/v1")
    table.add_row("bus (NATS)", mesh.bus_url)
    table.add_row("data folder", str(mesh.data_dir))
    table.add_row("configuration", str(mesh.config_file))
    table.add_row("logs", str(mesh.data_dir / "logs"))
    table.add_row("processes", ", ".join(f"{name} ({c.pid})" for name, c in mesh.children.items()))
    console.print(table)
    tenant = next(iter(mesh.config.get("tenants", {})), "acme")
    model = next(iter(mesh.config.get("models", {})), "sim-8b")
    data = _shown(mesh.data_dir)
    console.print()
    console.print("Try, in another terminal:")
    console.print(f'  waterclock send --data {data} --tenant {tenant} "What is a water clock?"')
    console.print(
        f'  curl {mesh.http_url}/v1/chat/completions -H "Authorization: Bearer'
        f' $(waterclock key --data {data} {tenant})" -H "Content-Type: application/json"'
        f' -d \'{{"model":"{model}","messages":[{{"role":"user","content":"hello"}}]}}\'',
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    console.print(f"  waterclock replay --data {data}")
    console.print("\nCtrl-C stops it.")


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
