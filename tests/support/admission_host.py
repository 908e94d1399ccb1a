"""Admission as a process of its own, with its configuration written out, and a producer."""

import asyncio
import hashlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from waterclock_proto.envelope import Envelope, decode_event
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    EventData,
    Rejected,
    Resubmitted,
)
from waterclock_proto.requests import Receipt, Submission
from waterclock_proto.subjects import event_filter, receipt_subject, request_subject
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.tape import TapeReader

MESH_KEY = bytes(range(32))
API_KEYS = {"acme": "wc-key-of-acme", "globex": "wc-key-of-globex"}
MODEL = "sim-8b"


def config_text(
    bus_url: str,
    data_dir: Path,
    *,
    redis_url: str = "",
    tenants: dict[str, dict[str, Any]] | None = None,
    admission: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
) -> str:
    """The mesh's file, as far as admission reads it."""
    sections: dict[str, dict[str, Any]] = {
        "service": {
            "data_dir": str(data_dir),
            "mesh_key": MESH_KEY.hex(),
            "log_level": "warning",
        },
        "bus": {"url": bus_url, "connect_wait_s": 10.0},
        "admission": {"redis_url": redis_url, **(admission or {})},
        "http": {"port": 0, **(http or {})},
        f"models.{MODEL}": {"context_tokens": 4096, "output_tokens_max": 2048},
        "pools.main": {"models": [MODEL], "policy": "fcfs", "default": True},
    }
    for name, table in (tenants or {"acme": {"tier": "gold"}, "globex": {}}).items():
        digest = hashlib.sha256(API_KEYS.get(name, name).encode()).hexdigest()
        sections[f"tenants.{name}"] = {"api_key_sha256": [digest], **table}
    return "\n".join(
        f"[{name}]\n" + "\n".join(f"{key} = {_value(value)}" for key, value in table.items())
        for name, table in sections.items()
    )


def _value(value: object) -> str:
    return msgspec.json.encode(value).decode()


class AdmissionHost:
    """One admission process; use with ``with``. A test may kill it and start it again."""

    def __init__(self, folder: Path, bus_url: str, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.data_dir = folder / "data" / "admission"
        self.file = folder / "waterclock.toml"
        self.file.write_text(config_text(bus_url, folder / "data", **options), encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "AdmissionHost":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it decides and listens."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it and wait for nothing."""
        (self.data_dir / "http-port").unlink(missing_ok=True)
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("WATERCLOCK_")
        }
        with (self.folder / "admission.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waterclock_admission"],
                env=environ | {"WATERCLOCK_CONFIG": str(self.file)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def wait_ready(self, wait_s: float = 30.0) -> None:
        assert self.process is not None
        port_file = self.data_dir / "http-port"
        give_up_s = time.monotonic() + wait_s
        while not port_file.exists() or not port_file.read_text():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < give_up_s, self.log()
            time.sleep(0.01)

    def log(self) -> str:
        return (self.folder / "admission.log").read_text(errors="replace")

    def kill(self) -> None:
        """kill −9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=20)

    @property
    def http_port(self) -> int:
        return int((self.data_dir / "http-port").read_text())

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def metric(self, line: str) -> float:
        """The value of the metric whose line begins so; 0 if there is none."""
        for found in (await self._health("/metrics")).splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        return 0.0

    async def health(self) -> dict[str, Any]:
        return msgspec.json.decode(await self._health("/healthz"))

    async def _health(self, path: str) -> str:
        port = int((self.data_dir / "health-port").read_text())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer.decode().partition("\r\n\r\n")[2]


class TestProducer:
    """Publishes submissions of one tenant and collects its receipts and answers."""

    __test__ = False

    def __init__(self, url: str, tenant: str = "acme") -> None:
        self._url = url
        self.tenant = tenant
        self.receipts: list[Receipt] = []
        self.answers: list[tuple[str, bytes]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "TestProducer":
        self.bus = await Bus.connect(
            BusSettings(url=self._url), name="producer", log=structlog.get_logger()
        )
        self.bus.subscribe(receipt_subject(self.tenant, "*"), self._on_receipt)
        self.bus.subscribe(f"wc.answer.{self.tenant}.*", self._on_answer)
        self.bus.subscribe(f"wc.final.{self.tenant}.*", self._on_answer)
        await self.bus.nc.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()

    async def submit(self, request_id: str, **fields: Any) -> Receipt:
        """Publish one submission; its receipt."""
        return await self.submit_bytes(body(request_id, **fields))

    async def submit_bytes(self, payload: bytes) -> Receipt:
        sequence = await self.bus.store(request_subject(self.tenant), payload)
        return await self.receipt(sequence)

    async def receipt(self, requests_sequence: int, wait_s: float = 10.0) -> Receipt:
        async with asyncio.timeout(wait_s):
            while True:
                for receipt in self.receipts:
                    if receipt.requests_sequence == requests_sequence:
                        return receipt
                await self.change()

    async def change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _on_receipt(self, _subject: str, payload: bytes) -> None:
        self.receipts.append(msgspec.json.decode(payload, type=Receipt))
        self._changed.set()

    def _on_answer(self, subject: str, payload: bytes) -> None:
        self.answers.append((subject, payload))
        self._changed.set()


def body(request_id: str, **fields: Any) -> bytes:
    """The bytes of a submission; a prompt and a bound unless said otherwise."""
    values: dict[str, Any] = {"id": request_id, "prompt": "tell me", "max_tokens": 16, **fields}
    return msgspec.json.encode(Submission(**values))


async def eventually(check: Callable[[], Awaitable[object] | object], wait_s: float = 10.0) -> None:
    """Wait until ``check`` says something true."""
    async with asyncio.timeout(wait_s):
        while True:
            found = check()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)


async def read_events(bus: Bus, *kinds: type[EventData]) -> list[Envelope[EventData]]:
    """Every event of some types up to the present head of the tape, in its order."""
    reader = TapeReader(bus, filters=[event_filter(kind) for kind in kinds])
    found: list[Envelope[EventData]] = []
    async for batch in reader:
        found += [decode_event(message.subject, message.payload) for message in batch]
        if reader.caught_up:
            break
    await reader.close()
    return found


async def check_decisions(bus: Bus) -> dict[str, int]:
    """What must hold of every tape: one valid decision for each submission, numbers without a hole.

    Returns how many submissions each tenant has.
    """
    fence = 0
    seen: set[tuple[str, int]] = set()
    decided: dict[tuple[int, int], str] = {}
    numbers: dict[str, list[int]] = {}
    admitted: set[tuple[str, str]] = set()
    kinds = (AdmissionElected, Admitted, Rejected, Resubmitted)
    for envelope in await read_events(bus, *kinds):
        data = envelope.data
        if envelope.source != "/waterclock/admission" or envelope.fence < fence:
            continue
        if (envelope.writer, envelope.counter) in seen:
            continue
        seen.add((envelope.writer, envelope.counter))
        fence = envelope.fence
        if isinstance(data, AdmissionElected):
            continue
        assert isinstance(data, Admitted | Rejected | Resubmitted)
        assert data.number is not None
        count = data.count if isinstance(data, Rejected) else 1
        numbers.setdefault(data.tenant, []).extend(range(data.number, data.number + count))
        key = (data.requests_sequence, data.arrival.wall_us)
        assert key not in decided, f"{key} was decided twice: {decided[key]} and {data}"
        decided[key] = str(data)
        if isinstance(data, Admitted):
            assert (data.tenant, data.id) not in admitted, f"{data.id} was admitted twice"
            admitted.add((data.tenant, data.id))
    for tenant, used in numbers.items():
        assert sorted(used) == list(range(1, len(used) + 1)), f"numbers of {tenant}"
    return {tenant: len(used) for tenant, used in numbers.items()}
