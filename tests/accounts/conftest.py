"""Starts bus servers for these tests: the real one, on a port of the system's choosing."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

StartServer = Callable[[Callable[[Path], str]], str]
"""Takes a function from a fresh folder to a configuration; returns the server's address."""


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers that end with the module's tests. Each configuration must name the folder
    it is given as ``ports_file_dir``.
    """
    binary = Path(sys.executable).with_name("nats-server")
    processes: list[subprocess.Popen[bytes]] = []

    def start(configure: Callable[[Path], str]) -> str:
        folder = tmp_path_factory.mktemp("bus")
        config = folder / "bus.conf"
        config.write_text(configure(folder), encoding="utf-8")
        log = folder / "bus.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [binary, "--config", config], stdout=output, stderr=subprocess.STDOUT
            )
        processes.append(process)
        ports = folder / f"nats-server_{process.pid}.ports"
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up and process.poll() is None:
            # The server renames the file into place, but makes it before it listens to everybody.
            if ports.exists() and (text := ports.read_text()):
                return json.loads(text)["nats"][0]
            time.sleep(0.02)
        raise AssertionError(f"the bus server did not start:\n{log.read_text()}")

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(timeout=10)
