"""The life of a service process: settings, logs, bus, streams, health, and a clean end.

``run_service`` owns the process. It connects within bounds, makes or verifies the streams,
serves ``/metrics`` and ``/healthz``, runs the service's own ``main`` until SIGTERM or SIGINT
sets ``stopping``, then lets it finish, drains the writer and leaves.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
import uvloop
from msgspec import Struct
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from waterclock_proto.envelope import Chain, decode_event
from waterclock_proto.events import LogOpened
from waterclock_proto.stamps import Source
from waterclock_proto.subjects import EVENTS, event_filter
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.clock import Clock
from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.errors import ConfigRefused, WaterclockError
from waterclock_runtime.logs import LogLevel, configure_logs
from waterclock_runtime.writer import EventWriter

T = TypeVar("T")


class ServiceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[service]``: what every process of the mesh has."""

    data_dir: str = "waterclock-data"
    """Each service keeps its own folder under it."""
    mesh_key: str | None = None
    """Hex, 32 bytes or more: body commitments and session fingerprints. Same for all services."""
    mesh_key_file: str | None = None
    log_level: LogLevel = "info"
    log_pretty: bool = False
    health_host: str = "127.0.0.1"
    health_port: int = 0
    """0: any free port, written to ``<data_dir>/<service>/health-port``."""
    clock_error_us: int | None = None
    """How far this host's wall clock may be from UTC. Leave it out when nobody knows."""


class Health:
    """What ``/healthz`` says: healthy while nothing is wrong."""

    def __init__(self) -> None:
        self._wrong: dict[str, str] = {}
        self.ready = False
        self.facts: dict[str, Any] = {}

    def wrong(self, what: str, why: str) -> None:
        """Note a trouble; ``right`` takes it back."""
        self._wrong[what] = why

    def right(self, what: str) -> None:
        self._wrong.pop(what, None)

    def report(self) -> tuple[bool, dict[str, Any]]:
        healthy = self.ready and not self._wrong
        return healthy, {
            "healthy": healthy,
            "ready": self.ready,
            "wrong": dict(self._wrong),
            **self.facts,
        }


class ServiceContext:
    """What a service's ``main`` gets."""

    def __init__(
        self,
        *,
        name: str,
        instance: str,
        clock: Clock,
        bus: Bus,
        writer: EventWriter,
        log: structlog.stdlib.BoundLogger,
        loader: SettingsLoader,
        registry: CollectorRegistry,
        health: Health,
        data_dir: Path,
        mesh_key: bytes,
        made_tape: bool,
    ) -> None:
        self.name = name
        self.instance = instance
        self.clock = clock
        self.bus = bus
        self.writer = writer
        self.log = log
        self.loader = loader
        self.registry = registry
        self.health = health
        self.data_dir = data_dir
        self.mesh_key = mesh_key
        self.made_tape = made_tape
        self.stopping = asyncio.Event()

    def settings(self, section: str, kind: type[T]) -> T:
        """One more section.

        Raises:
            ConfigRefused: with every mistake found so far.
        """
        found = self.loader.section(section, kind)
        self.loader.finish()
        assert found is not None
        return found


Main = Callable[[ServiceContext], Awaitable[None]]
Check = Callable[[SettingsLoader], None]


def run_service(
    name: Source, main: Main, *, instance: str = "", check: Check | None = None
) -> None:
    """Run a service until it is told to stop; exits the process.

    ``check`` reads the service's own sections once before anything is connected, so that
    their mistakes are reported together with everybody else's. Exit status: 0 after a clean
    stop, 2 for refused configuration, 1 for anything else.
    """
    loader = SettingsLoader()
    service = loader.section("service", ServiceSettings)
    bus = loader.section("bus", BusSettings)
    if check is not None:
        check(loader)
    mesh_key = b""
    if service is not None:
        mesh_key = _read_mesh_key(service, loader)
    try:
        loader.finish()
    except ConfigRefused as refused:
        print(refused, file=sys.stderr)
        sys.exit(2)
    assert service is not None
    assert bus is not None
    log = configure_logs(
        service=instance or name, level=service.log_level, pretty=service.log_pretty
    )
    try:
        uvloop.run(_run(name, main, instance or name, service, bus, loader, mesh_key, log))
    except WaterclockError as error:
        log.error("service_stopped", error=str(error), kind=type(error).__name__)
        sys.exit(1)


async def _run(
    name: Source,
    main: Main,
    instance: str,
    settings: ServiceSettings,
    bus_settings: BusSettings,
    loader: SettingsLoader,
    mesh_key: bytes,
    log: structlog.stdlib.BoundLogger,
) -> None:
    clock = Clock(error_us=settings.clock_error_us)
    data_dir = Path(settings.data_dir) / instance
    data_dir.mkdir(parents=True, exist_ok=True)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    health = Health()
    server = _HealthServer(settings, registry, health)
    (data_dir / "health-port").write_text(str(server.port))
    bus = await Bus.connect(bus_settings, name=f"waterclock-{instance}", log=log)
    try:
        made = await bus.provision()
        key = _writer_key(data_dir)
        if made:
            await _open_log(bus, clock, name, key)
        writer = await EventWriter.open(bus, service=name, clock=clock, key=key)
        writer.incarnation = await read_incarnation(bus)
        context = ServiceContext(
            name=name,
            instance=instance,
            clock=clock,
            bus=bus,
            writer=writer,
            log=log.bind(writer=writer.name),
            loader=loader,
            registry=registry,
            health=health,
            data_dir=data_dir,
            mesh_key=mesh_key,
            made_tape=made,
        )
        _runtime_metrics(context)
        await _until_stopped(context, main)
    finally:
        await bus.close()
        server.close()


async def _until_stopped(context: ServiceContext, main: Main) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.stopping.set)
    context.log.info("service_started", boot=context.clock.boot, pid=os.getpid())
    work = asyncio.ensure_future(main(context))
    stopping = asyncio.create_task(context.stopping.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    context.stopping.set()
    context.health.ready = False
    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        async with asyncio.timeout(limits.STOP_GRACE_S):
            await asyncio.wait({work})
    if not work.done():
        context.log.warning("service_cancelled", grace_s=limits.STOP_GRACE_S)
        work.cancel()
    stopping.cancel()
    stored = await context.writer.close()
    context.log.info(
        "service_ended", everything_stored=stored, outstanding=context.writer.outstanding
    )
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def read_incarnation(bus: Bus) -> str:
    """The name of the tape's present incarnation, or nothing if it has not been opened yet."""
    found = await bus.last(EVENTS.name, event_filter(LogOpened, tenant="_", scope="_"))
    if found is None:
        return ""
    opened = decode_event(event_filter(LogOpened, tenant="_", scope="_"), found[0]).data
    return opened.incarnation if isinstance(opened, LogOpened) else ""


async def _open_log(bus: Bus, clock: Clock, name: Source, key: bytes) -> None:
    """Name the new tape in its first message. Whoever comes second is refused and need not care."""
    incarnation = f"i{secrets.token_hex(8)}"
    chain = Chain(service=name, writer=f"{name}-{secrets.token_hex(6)}", key=key)
    chain.incarnation = incarnation
    subject, payload = chain.seal(
        LogOpened(
            incarnation=incarnation, first_sequence=1, reason="created", opened=clock.stamp(name)
        )
    )
    await bus.nc.request(
        subject,
        payload,
        timeout=limits.REQUEST_TIMEOUT_S,
        headers={"Nats-Expected-Last-Sequence": "0"},
    )


def _writer_key(data_dir: Path) -> bytes:
    """This service's nonce key; made on the first start and kept readable to its owner alone."""
    path = data_dir / "writer-key"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
    return path.read_bytes()


def _read_mesh_key(settings: ServiceSettings, loader: SettingsLoader) -> bytes:
    text = settings.mesh_key
    if text is None and settings.mesh_key_file is not None:
        try:
            text = Path(settings.mesh_key_file).read_text().strip()
        except OSError as error:
            loader.mistake(f"[service] mesh_key_file {settings.mesh_key_file}: {error.strerror}")
            return b""
    try:
        key = bytes.fromhex(text or "")
    except ValueError:
        key = b""
    if len(key) < 32:
        loader.mistake(
            "[service] mesh_key: expected at least 64 hex digits, found"
            f" {len(text or '')} characters; make one with: openssl rand -hex 32"
        )
    return key


def _runtime_metrics(context: ServiceContext) -> None:
    bus, writer = context.bus, context.writer
    for metric, text, read in (
        ("waterclock_bus_connected", "1 while the bus is there", lambda: int(bus.connected)),
        ("waterclock_bus_breaks", "Times the connection was lost", lambda: bus.breaks),
        (
            "waterclock_bus_dropped",
            "Core messages dropped, the bus being away",
            lambda: bus.dropped,
        ),
        ("waterclock_writer_outstanding", "Events not yet on the tape", lambda: writer.outstanding),
        ("waterclock_writer_republished", "Events published again", lambda: writer.republished),
        ("waterclock_writer_refused", "Events the tape refused", lambda: writer.refused),
    ):
        Gauge(metric, text, registry=context.registry).set_function(read)


class _HealthServer:
    """``/metrics`` and ``/healthz`` on a thread of its own: they answer even if the loop is stuck."""

    def __init__(
        self, settings: ServiceSettings, registry: CollectorRegistry, health: Health
    ) -> None:
        metrics = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            if environ.get("PATH_INFO") == "/healthz":
                healthy, report = health.report()
                status = "200 OK" if healthy else "503 Service Unavailable"
                start(status, [("Content-Type", "application/json")])
                return [json.dumps(report).encode()]
            if environ.get("PATH_INFO") == "/metrics":
                return metrics(environ, start)
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"expected /metrics or /healthz\n"]

        self._server = make_server(
            settings.health_host,
            settings.health_port,
            app,  # pyright: ignore[reportArgumentType] - wsgiref's stub wants its own protocol class
            server_class=WSGIServer,
            handler_class=_QuietHandler,
        )
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Scrapes are not news."""
