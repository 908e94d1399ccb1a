"""A service process from its start to each of its ends, as an operator sees it."""

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import probe_service
from broker_process import BrokerProcess
from runtime_probe import MIB, Account, connected, read_until
from waterclock_proto.events import LogOpened, WriterSealed
from waterclock_runtime.tape import TapeReader


class Probe:
    """One process of the probe service."""

    def __init__(self, folder: Path, url: str) -> None:
        self.data_dir = folder / "data"
        self.environ = {
            "WATERCLOCK_BUS__URL": url,
            "WATERCLOCK_BUS__EVENTS_BYTES_MAX": str(256 * MIB),
            "WATERCLOCK_BUS__REQUESTS_BYTES_MAX": str(64 * MIB),
            "WATERCLOCK_BUS__ANSWERS_BYTES_MAX": str(64 * MIB),
            "WATERCLOCK_SERVICE__DATA_DIR": str(self.data_dir),
            "WATERCLOCK_SERVICE__MESH_KEY": secrets.token_hex(32),
        }
        self._stderr = folder / "stderr"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, behaviour: str = "", *, environ: Any = None, limits: Any = None) -> "Probe":
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WATERCLOCK_")}
        told = {"PROBE": behaviour, "PROBE_LIMITS": json.dumps(limits or {})}
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, probe_service.__file__],
                env={**kept, **self.environ, **told, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)

    def ended(self, wait_s: float = 15) -> int:
        """Its exit status."""
        return self.process.wait(wait_s)

    @property
    def said(self) -> str:
        return self._stderr.read_text()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Log lines of a name; every line must be one of the service's own form."""
        lines = [json.loads(line) for line in self.said.splitlines()]
        assert all(line["service"] == "probe" for line in lines)
        return [line for line in lines if line["event"] == event]

    @property
    def port(self) -> int:
        return int((self.data_dir / "probe" / "health-port").read_text())

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def health(self) -> dict[str, Any]:
        return json.loads(self.get("/healthz")[1])

    def metric(self, name: str) -> float:
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"waterclock_{name} "):
                return float(line.rpartition(" ")[2])
        raise LookupError(f"no metric waterclock_{name}")

    def wait(self, condition: Any, wait_s: float = 15) -> float:
        """Wait until ``condition`` holds, while the process lives; for how long that took."""
        begun = time.monotonic()
        while time.monotonic() - begun < wait_s:
            assert self.process.poll() is None, self.said
            with contextlib.suppress(OSError, ValueError, LookupError):
                if condition():
                    return time.monotonic() - begun
            time.sleep(0.02)
        raise AssertionError(f"it did not come about in time:\n{self.said}")

    def until_ready(self) -> "Probe":
        self.wait(lambda: self.get("/healthz")[0] == 200)
        return self


@pytest.fixture
def probe(tmp_path: Path, broker: BrokerProcess) -> Iterator[Probe]:
    made = Probe(tmp_path, broker.url)
    yield made
    if made._process is not None and made._process.poll() is None:
        made._process.kill()
        made._process.wait(10)


async def read_tape(url: str) -> Account:
    account = Account()
    async with connected(url, provision=False) as bus:
        reader = TapeReader(bus)
        await read_until(reader, account, lambda _: reader.caught_up)
        await reader.close()
    return account


def test_sigterm_drains_what_the_service_still_has_to_say(
    probe: Probe, broker: BrokerProcess
) -> None:
    probe.start("has much to say at the end").until_ready()
    probe.signal()
    assert probe.ended() == 0
    account = asyncio.run(read_tape(broker.url))
    assert account.ids() == [f"r{number}" for number in range(3_000)]
    assert isinstance(account.envelopes[0].data, LogOpened)
    seal = account.envelopes[-1].data
    assert isinstance(seal, WriterSealed)
    assert seal.last
    assert len(probe.lines("service_started")) == 1
    (end,) = probe.lines("service_ended")
    assert end["everything_stored"] is True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_either_signal_ends_it_well(probe: Probe, number: signal.Signals) -> None:
    probe.start().until_ready()
    probe.signal(number)
    assert probe.ended() == 0


@pytest.mark.parametrize(
    ("behaviour", "status", "line", "text"),
    [
        ("loses its fence", 1, "service_stopped", "FenceLost"),
        ("has a bug", 1, "service_failed", "ZeroDivisionError: a bug"),
        ("has a bug in a callback", 1, "service_failed", "ZeroDivisionError"),
        ("wants another section", 2, "configuration_refused", "[scheduler] slots: missing"),
    ],
)
def test_what_ends_a_service_is_said_in_its_log_and_its_status(
    probe: Probe, behaviour: str, status: int, line: str, text: str
) -> None:
    probe.start(behaviour)
    assert probe.ended() == status
    (said,) = probe.lines(line)
    assert text in json.dumps(said)


def test_all_mistakes_of_the_configuration_are_said_at_once(probe: Probe, tmp_path: Path) -> None:
    config = tmp_path / "waterclock.toml"
    config.write_text(
        "[service]\nlog_level = 'loud'\nhealth_prot = 1\n[bus]\nreplicas = 'three'\n[tenant]\n"
    )
    probe.start(environ={"WATERCLOCK_CONFIG": str(config), "WATERCLOCK_SERVICE__MESH_KEY": "abc"})
    assert probe.ended() == 2
    for text in (
        "[service] log_level: ",
        "[service] health_prot: unknown setting; did you mean 'health_port'?",
        "[bus] replicas: expected `int`, found 'three'",
        "[tenant]: unknown section; did you mean [tenants]?",
    ):
        assert text in probe.said
    assert "abc" not in probe.said


def test_a_mesh_key_that_is_none_is_said_and_not_shown(probe: Probe) -> None:
    probe.start(environ={"WATERCLOCK_SERVICE__MESH_KEY": "secret-but-short"})
    assert probe.ended() == 2
    assert "[service] mesh_key: expected at least 64 hex digits, found 16 characters" in probe.said
    assert "secret-but-short" not in probe.said


def test_a_bus_that_is_not_there_is_waited_for_and_then_said(
    probe: Probe, broker: BrokerProcess
) -> None:
    broker.stop()
    probe.start(environ={"WATERCLOCK_BUS__CONNECT_WAIT_S": "1"})
    assert probe.ended() == 1
    (said,) = probe.lines("service_stopped")
    assert said["kind"] == "BusUnavailable"
    assert "within 1 s" in said["error"]


def test_sigterm_while_connecting_ends_it_at_once(probe: Probe, broker: BrokerProcess) -> None:
    broker.stop()
    probe.start()
    probe.wait(lambda: probe.lines("bus_unreachable"))
    status, body = probe.get("/healthz")
    assert (status, json.loads(body)["ready"]) == (503, False)
    assert probe.get("/livez")[0] == 200
    begun = time.monotonic()
    probe.signal()
    assert probe.ended() == 0
    assert time.monotonic() - begun < 2


def test_a_service_that_does_not_stop_is_cancelled_after_its_grace(probe: Probe) -> None:
    probe.start("does not stop", limits={"STOP_GRACE_S": 1.0}).until_ready()
    begun = time.monotonic()
    probe.signal()
    probe.wait(lambda: probe.get("/healthz")[0] == 503, wait_s=1)
    assert probe.ended() == 0
    assert 0.9 < time.monotonic() - begun < 4
    assert len(probe.lines("service_cancelled")) == 1


def test_a_second_signal_does_not_wait_for_the_grace(probe: Probe) -> None:
    probe.start("does not stop").until_ready()
    begun = time.monotonic()
    probe.signal()
    time.sleep(0.2)
    probe.signal()
    assert probe.ended() == 0
    assert time.monotonic() - begun < 5


def test_health_and_metrics_answer_while_clients_hang(probe: Probe) -> None:
    probe.start().until_ready()
    with contextlib.ExitStack() as hanging:
        for _ in range(5):
            client = hanging.enter_context(socket.create_connection(("127.0.0.1", probe.port)))
            client.sendall(b"GET /healthz HTT")
        begun = time.monotonic()
        assert probe.health() == {"healthy": True, "ready": True, "wrong": {}}
        assert probe.get("/livez")[0] == 200
        assert probe.get("/")[0] == 404
        assert probe.metric("bus_connected") == 1
        assert probe.metric("writer_stalled") == 0
        assert probe.metric("bus_breaks_total") == 0
        assert time.monotonic() - begun < 2
    probe.wait(lambda: probe.metric("tape_bytes_max") == 256 * MIB)


def test_more_clients_than_there_are_places_are_turned_away_for_a_while(probe: Probe) -> None:
    probe.start(limits={"HEALTH_CLIENTS_MAX": 4}).until_ready()
    with contextlib.ExitStack() as hanging:
        for _ in range(4):
            hanging.enter_context(socket.create_connection(("127.0.0.1", probe.port)))
        time.sleep(0.2)
        with pytest.raises((OSError, http.client.HTTPException)):
            probe.get("/healthz")
    probe.until_ready()


def test_a_stuck_event_loop_is_said_by_livez(probe: Probe) -> None:
    probe.start("is stuck", limits={"LOOP_STUCK_S": 1.0})
    probe.wait(lambda: probe.get("/livez")[0] == 503)
    assert "has not turned for" in probe.health()["wrong"]["loop"]
    probe.wait(lambda: probe.get("/livez")[0] == 200)
    probe.until_ready()


def test_a_bus_that_goes_and_comes_back_does_not_end_the_service(
    probe: Probe, broker: BrokerProcess
) -> None:
    probe.start().until_ready()
    broker.kill()
    probe.wait(lambda: probe.health()["wrong"] == {"bus": "away"})
    assert probe.get("/livez")[0] == 200
    assert probe.metric("bus_connected") == 0
    broker.start()
    assert probe.wait(lambda: probe.get("/healthz")[0] == 200) < 3
    assert probe.metric("bus_breaks_total") == 1
    probe.signal()
    assert probe.ended() == 0
    assert len(probe.lines("bus_lost")) == len(probe.lines("bus_found_again")) == 1


def test_a_full_tape_is_seen_in_health_and_metrics_and_at_the_end(probe: Probe) -> None:
    probe.start("fills the tape", environ={"WATERCLOCK_BUS__EVENTS_BYTES_MAX": str(MIB)})
    probe.wait(lambda: "writer" in probe.health()["wrong"])
    why = "the tape refuses events: maximum bytes exceeded"
    assert probe.health()["wrong"] == {"writer": why}
    assert probe.metric("writer_stalled") == 1
    assert probe.metric("writer_outstanding") > 1_000
    probe.wait(lambda: probe.metric("tape_bytes") > 0.9 * MIB)
    probe.signal()
    # Evidence is missing from the tape, and so the end is not a clean one.
    assert probe.ended() == 1
    (said,) = probe.lines("events_not_stored")
    assert said["outstanding"] > 1_000
    assert len(probe.lines("tape_refuses_events")) == 1


def test_the_writer_key_is_kept_and_private(probe: Probe) -> None:
    probe.start().until_ready()
    key = probe.data_dir / "probe" / "writer-key"
    content = key.read_bytes()
    assert len(content) == 32
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    probe.signal()
    assert probe.ended() == 0
    assert probe.lines("probe_ready")[0]["made_tape"] is True
    probe.start().until_ready()
    assert key.read_bytes() == content
    probe.signal()
    assert probe.ended() == 0
    assert probe.lines("probe_ready")[0]["made_tape"] is False
    assert [path.name for path in key.parent.iterdir() if path.name.startswith(".")] == []


def test_half_a_writer_key_is_refused(probe: Probe) -> None:
    key = probe.data_dir / "probe" / "writer-key"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"half")
    probe.start()
    assert probe.ended() == 1
    (said,) = probe.lines("service_stopped")
    assert "writer-key: expected 32 bytes, found 4" in said["error"]


def test_a_port_that_is_taken_is_said(probe: Probe) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        probe.start(environ={"WATERCLOCK_SERVICE__HEALTH_PORT": str(port)})
        assert probe.ended() == 1
    (said,) = probe.lines("service_stopped")
    assert f"127.0.0.1:{port}" in said["error"]
