"""A real nats-server that a test starts, kills, pauses and starts again.

It listens on loopback, on a port of the system's choosing that stays the same over restarts, and
keeps its streams in a folder of the test's own. It is ended by its process id.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_WAIT_S = 20.0


def nats_server_binary() -> Path:
    """The server that belongs to this environment."""
    beside = Path(sys.executable).with_name("nats-server")
    found = beside if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("no nats-server beside python nor in PATH; run `make env`")
    return Path(found)


class BrokerProcess:
    """One nats-server with JetStream.

    Args:
        folder: its own; holds the configuration, the log and ``store``.
        users: password by user; None lets everybody in.
        config: more of the server's configuration (JSON form), laid over the generated one.
        config_text: a whole configuration instead; it must name ``folder`` as
            ``ports_file_dir``, and a port of -1 or a fixed one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        users: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        config_text: str | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store_dir = folder / "store"
        self.log_file = folder / "nats.log"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        if config_text is None:
            made: dict[str, Any] = {
                "host": "127.0.0.1",
                "port": -1,
                "ports_file_dir": str(folder),
                "jetstream": {"store_dir": str(self.store_dir), "sync_interval": "200ms"},
            }
            if users is not None:
                made["authorization"] = {
                    "users": [{"user": u, "password": p} for u, p in users.items()]
                }
            config_text = json.dumps(made | dict(config or {}))
        self._config_file = folder / "nats.conf"
        self._config_file.write_text(config_text, encoding="utf-8")

    @property
    def url(self) -> str:
        """Where it listens; known after the first start."""
        assert self.port, "the broker was never started"
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the broker was never started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> "BrokerProcess":
        """Start it and wait until it listens. After the first time the port stays the same."""
        assert not self.running, "the broker runs already"
        arguments = [str(nats_server_binary()), "--config", str(self._config_file)]
        if self.port:
            arguments += ["--port", str(self.port)]
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        ports = self.folder / f"nats-server_{self.pid}.ports"
        give_up_s = time.monotonic() + START_WAIT_S
        while time.monotonic() < give_up_s and self.process.poll() is None:
            # Renamed into place, but made before the server listens to everybody.
            if ports.exists() and (text := ports.read_text()):
                self.port = int(json.loads(text)["nats"][0].rpartition(":")[2])
                return self
            time.sleep(0.01)
        self.stop()
        raise AssertionError(f"nats-server did not start:\n{self.log()}")

    def kill(self) -> None:
        """kill −9, as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as an orderly stop does; may be called twice."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill −9 and start again on the same port and store."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop it in its tracks: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def copy_store(self, to: Path) -> None:
        """Copy the stored streams, as a backup does. Stop or kill the server first."""
        assert not self.running, "a running server changes its files while they are copied"
        shutil.copytree(self.store_dir, to)

    def restore_store(self, copy: Path) -> None:
        """Put a copy in the place of what is stored. Stop or kill the server first."""
        assert not self.running, "a running server would not notice"
        shutil.rmtree(self.store_dir)
        shutil.copytree(copy, self.store_dir)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def _end(self, number: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.kill(self.process.pid, number)
        if number != signal.SIGKILL:
            # A paused process takes no SIGTERM until it goes on.
            os.kill(self.process.pid, signal.SIGCONT)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
