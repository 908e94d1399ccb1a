"""Admission and workers played by the test, around a real scheduler process on a real bus.

The admission admits whatever it is told to; a worker runs what it is given for as long as the
test wants. Both publish through the runtime's own writer, so what the scheduler reads is what
it would read from the real ones.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from broker_process import BrokerProcess
from waterclock_proto.envelope import Envelope, decode_event
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    AttemptLost,
    CancelRequested,
    Completed,
    Dispatched,
    EventData,
    Rejected,
    TerminalData,
)
from waterclock_proto.requests import Beat, Submission, body_commitment, body_salt
from waterclock_proto.stamps import bus_stamp
from waterclock_proto.subjects import beat_subject, request_subject
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.clock import Clock
from waterclock_runtime.tape import TapeReader
from waterclock_runtime.writer import EventWriter

MESH_KEY = bytes.fromhex("ab" * 32)
MODEL = "sim-8b"
WAIT_S = 20.0

POOLS = f"""
[pools.zh]
languages = ["zh"]
models = ["{MODEL}"]
policy = "edf"

[pools.main]
models = ["{MODEL}"]
default = true
"""


class SchedulerProcess:
    """``python -m waterclock_scheduler`` in a folder of its own."""

    def __init__(
        self, folder: Path, broker: BrokerProcess, *, name: str = "one", config: str = POOLS
    ) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.config = self.folder / "waterclock.toml"
        self.config.write_text(
            f'[bus]\nurl = "{broker.url}"\n'
            f'[service]\ndata_dir = "{self.folder}"\nmesh_key = "{MESH_KEY.hex()}"\n{config}'
        )
        self.log_file = self.folder / "scheduler.log"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "waterclock_scheduler",
                env=os.environ | {"WATERCLOCK_CONFIG": str(self.config)},
                stderr=output,
            )

    async def ended(self) -> int:
        """Wait until it ends by itself."""
        assert self.process is not None
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.ended()

    async def says(self, event: str, count: int = 1) -> None:
        """Wait until its log has an event so often."""
        await until(lambda: self.log().count(f'"{event}"') >= count, self.log)

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""


class Mesh:
    """The rest of the mesh, in the test's process."""

    def __init__(self, bus: Bus, clock: Clock, admission: EventWriter, worker: EventWriter) -> None:
        self.bus = bus
        self.clock = clock
        self.admission = admission
        self.worker = worker
        self.tape: list[Envelope[EventData]] = []
        self.lives: dict[str, Beat] = {}
        self.finish_at_once = True
        self.held: list[Dispatched] = []
        """Dispatches that wait for the test to end them."""
        self._numbers = 0
        self._fence = 0
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, broker: BrokerProcess) -> AsyncIterator["Mesh"]:
        clock = Clock()
        log: Any = structlog.get_logger()
        bus = await Bus.connect(BusSettings(url=broker.url), name="test-mesh", log=log)
        await bus.provision()
        admission = await EventWriter.open(bus, service="admission", clock=clock, key=b"k" * 32)
        worker = await EventWriter.open(bus, service="worker", clock=clock, key=b"k" * 32)
        mesh = cls(bus, clock, admission, worker)
        admission.fence = 1
        admission.emit(AdmissionElected(elected=clock.stamp("admission")))
        mesh._tasks = [
            asyncio.create_task(mesh._read()),
            asyncio.create_task(mesh._beat_for_ever()),
        ]
        try:
            yield mesh
        finally:
            for task in mesh._tasks:
                task.cancel()
            await asyncio.gather(*mesh._tasks, return_exceptions=True)
            await admission.close()
            await worker.close()
            await bus.close()

    # --- admission

    async def admit(
        self, request_id: str, text: str = "What is it?", *, deadline_ms: int = 60_000
    ) -> None:
        submission = Submission(id=request_id, model=MODEL, prompt=text, max_tokens=8)
        body = msgspec.json.encode(submission)
        sequence = await self.bus.store(request_subject("acme"), body)
        self.admit_stored(request_id, body, sequence, deadline_ms=deadline_ms)

    def admit_stored(
        self, request_id: str, body: bytes, sequence: int, *, deadline_ms: int = 60_000
    ) -> None:
        self._numbers += 1
        now = self.clock.stamp("admission")
        self.admission.emit(
            Admitted(
                tenant="acme",
                id=request_id,
                tier="gold",
                requests_sequence=sequence,
                number=self._numbers,
                contract_sha256="0" * 64,
                model=MODEL,
                arrival=bus_stamp(now.wall_us * 1000),
                received=now,
                decided=now,
                deadline_us=now.wall_us + deadline_ms * 1000,
                body_bytes=len(body),
                prompt_tokens_estimate=4,
                output_tokens_max=8,
                body_commitment=body_commitment(body_salt(MESH_KEY, "acme", request_id), body),
            )
        )

    def cancel(self, request_id: str) -> None:
        self.admission.emit(
            CancelRequested(
                tenant="acme",
                id=request_id,
                reason="producer",
                requested=self.clock.stamp("admission"),
            )
        )

    # --- workers

    def start_worker(self, name: str = "w", *, pool: str = "main", slots: int = 4) -> str:
        life = f"{name}-{secrets.token_hex(3)}"
        self.lives[life] = Beat(
            worker=life,
            name=name,
            pool=pool,
            models=(MODEL,),
            slots=slots,
            beat=self.clock.stamp("worker"),
        )
        self._beat(life)
        return life

    def finish(self, dispatched: Dispatched) -> None:
        self.worker.emit(
            Completed(
                tenant=dispatched.tenant,
                id=dispatched.id,
                attempt=dispatched.attempt,
                worker=dispatched.worker,
                output_tokens=8,
                finish_reason="stop",
                ended=self.clock.stamp("worker"),
            )
        )

    def finish_held(self) -> None:
        held, self.held = self.held, []
        for dispatched in held:
            self.finish(dispatched)

    def _beat(self, life: str) -> None:
        self.bus.publish(beat_subject(life), msgspec.json.encode(self.lives[life]))

    async def _beat_for_ever(self) -> None:
        while True:
            for life in self.lives:
                self._beat(life)
            await asyncio.sleep(0.25)

    # --- the tape

    async def _read(self) -> None:
        seen: set[tuple[str, int]] = set()
        async for batch in TapeReader(self.bus):
            for message in batch:
                event = decode_event(message.subject, message.payload)
                if (event.writer, event.counter) in seen:
                    continue
                seen.add((event.writer, event.counter))
                if event.source == "/waterclock/scheduler":
                    if event.fence < self._fence:
                        continue
                    self._fence = event.fence
                self.tape.append(event)
                data = event.data
                if isinstance(data, Dispatched) and data.worker in self.lives:
                    if self.finish_at_once:
                        self.finish(data)
                    else:
                        self.held.append(data)

    def events(self, kind: type[Any]) -> list[Any]:
        return [event.data for event in self.tape if isinstance(event.data, kind)]

    def ends(self) -> Counter[str]:
        """How often each request ended, by the rules of the tape."""
        current: dict[str, int] = {}
        lost: Counter[str] = Counter()
        ends: Counter[str] = Counter()
        for event in self.tape:
            match event.data:
                case Dispatched() as data:
                    current[data.id] = max(current.get(data.id, 0), data.attempt)
                case AttemptLost() as data:
                    lost[data.id] = max(lost[data.id], data.attempt)
                case TerminalData() | Rejected() as data:
                    newest = current.get(data.id, 0)
                    attempt = data.attempt if isinstance(data, TerminalData) and data.worker else 0
                    if attempt == (newest if newest > lost[data.id] else 0):
                        ends[data.id] += 1
                case _:
                    pass
        return ends

    async def until_ended(self, *request_ids: str) -> None:
        await until(lambda: set(request_ids) <= set(self.ends()), lambda: f"{self.ends()}")


async def until(condition: Callable[[], bool], report: Callable[[], str]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s, report()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(*schedulers: SchedulerProcess) -> AsyncIterator[None]:
    """End the processes when the test has ended, however it did."""
    try:
        yield
    finally:
        for scheduler in schedulers:
            if scheduler.process is not None and scheduler.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    scheduler.process.send_signal(signal.SIGCONT)
                    scheduler.process.kill()
                await scheduler.process.wait()
