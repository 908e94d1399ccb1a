"""The life of a service process: settings, logs, bus, streams, health, and a clean end.

``run_service`` owns the process. It connects within bounds, makes or verifies the streams,
serves ``/metrics`` and ``/healthz``, runs the service's own ``main`` until SIGTERM or SIGINT
sets ``stopping``, then lets it finish, drains the writer and leaves.
"""

import asyncio
import gc
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import structlog
import uvloop
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from waterclock_proto.envelope import Chain, decode_event
from waterclock_proto.events import LogOpened
from waterclock_proto.stamps import Source
from waterclock_proto.subjects import EVENTS, event_filter
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.clock import Clock
from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.errors import BusUnavailable, ConfigRefused, WaterclockError
from waterclock_runtime.health import Health, HealthServer
from waterclock_runtime.logs import LogLevel, configure_logs
from waterclock_runtime.writer import EventWriter

__all__ = [
    "Health",
    "ServiceContext",
    "ServiceSettings",
    "prepare_tape",
    "read_incarnation",
    "run_service",
]

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
        stopping: asyncio.Event | None = None,
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
        """Whether this process opened the tape: its first message is this one's."""
        self.stopping = asyncio.Event() if stopping is None else stopping
        """Set by the first SIGTERM or SIGINT, and when ``main`` is to end for another reason."""

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
    stop, 2 for refused configuration, 1 for anything else, such as events that the tape had
    not taken at the end.
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
        sys.stderr.write(f"{refused}\n")
        sys.exit(2)
    assert service is not None
    assert bus is not None
    log = configure_logs(
        service=instance or name, level=service.log_level, pretty=service.log_pretty
    )
    # Events are short-lived and point at nothing that points back: looking for cycles after every
    # 700 new objects, as Python does by default, finds none and takes a tenth of the time.
    gc.set_threshold(50_000, 20, 50)
    try:
        stored = uvloop.run(_run(name, main, instance or name, service, bus, loader, mesh_key, log))
    except ConfigRefused as refused:
        log.error("configuration_refused", mistakes=refused.mistakes)
        sys.exit(2)
    except WaterclockError as error:
        log.error("service_stopped", error=str(error), kind=type(error).__name__)
        sys.exit(1)
    except Exception:
        # A bug: whoever restarts this process gets the whole story.
        log.exception("service_failed")
        sys.exit(1)
    sys.exit(0 if stored else 1)


async def _run(
    name: Source,
    main: Main,
    instance: str,
    settings: ServiceSettings,
    bus_settings: BusSettings,
    loader: SettingsLoader,
    mesh_key: bytes,
    log: structlog.stdlib.BoundLogger,
) -> bool:
    """The process's life; whether everything it wrote is stored."""
    stop = _Stop()
    clock = Clock(error_us=settings.clock_error_us)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    health = Health()
    data_dir = Path(settings.data_dir) / instance
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        key = _writer_key(data_dir)
        server = HealthServer(settings.health_host, settings.health_port, registry, health)
        _write_whole(data_dir / "health-port", str(server.port).encode(), mode=0o644)
    except OSError as error:
        raise WaterclockError(
            f"{error.filename or f'{settings.health_host}:{settings.health_port}'}:"
            f" {error.strerror}; correct [service] data_dir, health_host or health_port"
        ) from error
    beating = asyncio.create_task(_beat_for_ever(health), name="loop-beat")
    bus: Bus | None = None
    try:
        # What a signal must be able to end at once: nothing is promised to anybody yet.
        bus = await stop.unless(Bus.connect(bus_settings, name=f"waterclock-{instance}", log=log))
        if bus is None:
            return True
        made = await stop.unless(prepare_tape(bus, clock, name, key))
        if made is None:
            return True
        writer = await EventWriter.open(
            bus,
            service=name,
            clock=clock,
            key=key,
            window=bus_settings.writer_window,
            group_commit=bus_settings.group_commit,
        )
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
            stopping=stop.asked,
        )
        registry.register(_RuntimeCollector(bus, writer))
        health.watch("bus", lambda: "" if bus.connected else "away")
        health.watch("writer", lambda: writer.stalled_why)
        return await _until_stopped(context, main, stop)
    finally:
        health.ready = False
        if bus is not None:
            await bus.close()
        beating.cancel()
        server.close()


class _Stop:
    """SIGTERM and SIGINT: the first asks for an orderly end, the next one insists."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``work``; None if it was cut short because the process is to stop."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        finally:
            await _cancelled(task, asked)


async def _until_stopped(context: ServiceContext, main: Main, stop: _Stop) -> bool:
    context.log.info("service_started", boot=context.clock.boot, pid=os.getpid())
    work = asyncio.ensure_future(main(context))
    ends = {
        asyncio.create_task(context.stopping.wait()),
        asyncio.create_task(context.bus.closed.wait()),
    }
    insisted = asyncio.create_task(stop.insisted.wait())
    try:
        await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
        context.stopping.set()
        context.health.ready = False
        if context.bus.failure is None:
            await asyncio.wait(
                {work, insisted},
                timeout=limits.STOP_GRACE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if not work.done():
            context.log.warning("service_cancelled", grace_s=limits.STOP_GRACE_S)
        await _cancelled(work)
    finally:
        await _cancelled(insisted, *ends)
        stored = await context.writer.close(
            0 if context.bus.closed.is_set() else limits.CLOSE_WAIT_S
        )
        if not stored:
            context.log.error("events_not_stored", outstanding=context.writer.outstanding)
        context.log.info("service_ended", everything_stored=stored)
    if not work.cancelled():
        work.result()
    if context.bus.failure is not None:
        raise context.bus.failure
    return stored


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks and wait until they have ended; their results are somebody else's."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _beat_for_ever(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(limits.LOOP_BEAT_S)


# The tape.


async def read_incarnation(bus: Bus) -> str:
    """The name of the tape's present incarnation, or nothing if its event is not kept any more."""
    subject = event_filter(LogOpened, tenant="_", scope="_")
    found = await bus.last(EVENTS.name, subject)
    if found is None:
        return ""
    opened = decode_event(subject, found[0]).data
    return opened.incarnation if isinstance(opened, LogOpened) else ""


async def prepare_tape(bus: Bus, clock: Clock, name: Source, key: bytes) -> bool:
    """Make the streams, and see to it that the tape's first message opens it.

    Several processes may do so at once. Nobody publishes an event before the tape is opened:
    so the first message of every tape is its opening. Returns whether it was opened here.
    """
    if not await bus.provision():
        return False
    incarnation = f"i{secrets.token_hex(8)}"
    chain = Chain(service=name, writer=f"{name}-{secrets.token_hex(6)}", key=key)
    chain.incarnation = incarnation
    subject, payload = chain.seal(
        LogOpened(
            incarnation=incarnation, first_sequence=1, reason="created", opened=clock.stamp(name)
        )
    )
    # Whoever comes second is refused and need not care, the repetition of an unanswered
    # publish included.
    answer = await bus.ask(subject, payload, {"Nats-Expected-Last-Sequence": "0"})
    if answer.error is None:
        return True
    if answer.error.get("err_code") == _WRONG_LAST_SEQUENCE:
        return await read_incarnation(bus) == incarnation
    raise BusUnavailable(f"the tape cannot be opened: {answer.error.get('description')}")


# Keys.


def _writer_key(data_dir: Path) -> bytes:
    """This service's nonce key; made on the first start and kept readable to its owner alone.

    Raises:
        WaterclockError: what is kept there is not a key.
    """
    path = data_dir / "writer-key"
    if not path.exists():
        _write_whole(path, secrets.token_bytes(_WRITER_KEY_BYTES), mode=0o600, replace=False)
    key = path.read_bytes()
    if len(key) != _WRITER_KEY_BYTES:
        raise WaterclockError(
            f"{path}: expected {_WRITER_KEY_BYTES} bytes, found {len(key)}; restore the file, or"
            " delete it and a new one is made"
        )
    return key


def _write_whole(path: Path, content: bytes, *, mode: int, replace: bool = True) -> None:
    """Write a file that is there as a whole or not at all, after a power cut too.

    With ``replace=False`` a file that is already there stays: another process was first.
    """
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            try:
                path.hardlink_to(draft)
            except FileExistsError:
                pass
            except OSError:
                # A file system without hard links; there two first starts at once can collide.
                if not path.exists():
                    draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_mesh_key(settings: ServiceSettings, loader: SettingsLoader) -> bytes:
    text = settings.mesh_key
    if text is None and settings.mesh_key_file is not None:
        try:
            text = Path(settings.mesh_key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            loader.mistake(f"[service] mesh_key_file {settings.mesh_key_file}: {why}")
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


# Metrics.


class _RuntimeCollector(Collector):
    """What the runtime counts, read when somebody scrapes."""

    def __init__(self, bus: Bus, writer: EventWriter) -> None:
        self._bus = bus
        self._writer = writer

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        bus, writer = self._bus, self._writer
        for name, text, value in (
            ("bus_breaks", "Times the connection to the bus was lost", bus.breaks),
            ("bus_dropped", "Core messages dropped: bus away and buffer full", bus.dropped),
            ("bus_handler_failures", "Core messages whose handler failed", bus.handler_failures),
            ("writer_republished", "Publishes beyond the first of each event", writer.republished),
            ("writer_refused", "Refusals of an event by the tape", writer.refused),
            ("writer_turned", "Events taken before an elder, refused one", writer.turned),
        ):
            yield CounterMetricFamily(f"waterclock_{name}", text, value=value)
        gauges: list[tuple[str, str, float]] = [
            ("bus_connected", "1 while the bus is there", int(bus.connected)),
            ("bus_storing", "Answers and submissions not yet stored", bus.storing),
            ("writer_outstanding", "Events not yet on the tape", writer.outstanding),
            ("writer_stalled", "1 while the tape refuses events", int(writer.stalled)),
        ]
        room, offset = writer.tape_room, writer.clock_offset_us
        if room is not None:
            gauges += [
                ("tape_bytes", "What the tape holds", room.bytes),
                ("tape_bytes_max", "What it may hold; -1 without a bound", room.bytes_max),
            ]
        if offset is not None:
            gauges += [
                ("clock_offset_us_min", "Bus's clock minus this one, at least", offset[0]),
                ("clock_offset_us_max", "Bus's clock minus this one, at most", offset[1]),
            ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"waterclock_{name}", text, value=value)


_WRITER_KEY_BYTES = 32
_WRONG_LAST_SEQUENCE = 10071
