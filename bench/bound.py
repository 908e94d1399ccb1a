"""The bare bound: what this machine's bus and client can move with no logic at all.

One publisher process and one consumer process move a count of messages of a given size
through one stream, with the fastest calls of the runtime: numbered replies with a bounded
window on one side, a checked push consumer on the other. Every message is acknowledged and
every one is read. ``mesh.bound_ratio`` is the mesh's rate over what this would allow a request
of as many messages and bytes.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from nats.aio.msg import Msg

from waterclock.mesh import find_nats_server
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.logs import configure_logs
from waterclock_runtime.tape import TapeReader

WINDOW = 1_000
SUBJECT = "wc.event.writer_sealed._._"


async def _publish(url: str, count: int, size: int) -> None:
    bus = await _connect(url)
    inbox = bus.nc.new_inbox()
    acknowledged = 0
    room = asyncio.Event()
    payload = b"x" * size

    async def on_ack(_: Msg) -> None:
        nonlocal acknowledged
        acknowledged += 1
        room.set()

    await bus.nc.subscribe(f"{inbox}.*", cb=on_ack, pending_msgs_limit=0, pending_bytes_limit=0)
    for number in range(count):
        while number - acknowledged >= WINDOW:
            room.clear()
            await room.wait()
        bus.publish(SUBJECT, payload, reply=f"{inbox}.{number}")
        if number % 64 == 0:
            await asyncio.sleep(0)
    while acknowledged < count:
        room.clear()
        await room.wait()
    await bus.close()


async def _consume(url: str, count: int) -> None:
    bus = await _connect(url)
    reader = TapeReader(bus)
    seen = 0
    begun = None
    async for batch in reader:
        if batch and begun is None:
            begun = time.perf_counter_ns()
            print("first", flush=True)
        seen += len(batch)
        if not batch:
            print("ready", flush=True)
        if seen >= count:
            assert begun is not None
            print(json.dumps({"seen": seen, "ns": time.perf_counter_ns() - begun}), flush=True)
            break
    await bus.close()


async def _connect(url: str) -> Bus:
    log = configure_logs(service="bound", level="error", pretty=False)
    bus = await Bus.connect(BusSettings(url=url, events_bytes_max=-1), name="bound", log=log)
    await bus.provision()
    return bus


def measure_bound(count: int, size: int) -> int:
    """Messages a second that one publisher and one consumer move; every one is counted.

    Args:
        count: messages to move.
        size: bytes of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\n'
            f'jetstream {{ store_dir: "{folder}/store", sync_interval: 200ms,'
            " max_file_store: 20GB }\n"
        )
        server = subprocess.Popen(
            [find_nats_server(), "-c", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            url = _url(Path(folder))
            me = [sys.executable, __file__, "--url", url, "--count", str(count)]
            consumer = subprocess.Popen(
                [*me, "--role", "consume"], stdout=subprocess.PIPE, text=True
            )
            assert consumer.stdout is not None
            assert consumer.stdout.readline().strip() == "ready"
            publisher = subprocess.Popen([*me, "--role", "publish", "--size", str(size)])
            assert consumer.stdout.readline().strip() == "first"
            result = json.loads(consumer.stdout.readline())
            assert publisher.wait(timeout=60) == 0
            assert consumer.wait(timeout=60) == 0
            assert result["seen"] == count, result
            return count * 10**9 // int(result["ns"])
        finally:
            server.terminate()
            server.wait(timeout=10)


def _url(folder: Path) -> str:
    give_up_s = time.monotonic() + 10
    while time.monotonic() < give_up_s:
        for path in folder.glob("*.ports"):
            text = path.read_text()
            if text:
                return str(json.loads(text)["nats"][0])
        time.sleep(0.02)
    raise RuntimeError("nats-server did not say its port within 10 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("publish", "consume"))
    parser.add_argument("--url")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=800)
    given = parser.parse_args()
    if given.role == "publish":
        uvloop.run(_publish(given.url, given.count, given.size))
    elif given.role == "consume":
        uvloop.run(_consume(given.url, given.count))
    else:
        print(measure_bound(given.count, given.size), "messages/s")


if __name__ == "__main__":
    main()
