"""The runtime's own paths, one process against one bus: what a service can count on.

``python bench/runtime_paths.py`` prints them; ``--quick`` does little of each and asserts the
same. Every figure is of work whose result was checked: all events came back, each once and in
order; all bodies are the ones that were stored.

The client and the bus share the machine, and the client is what limits most of this: compare
figures within one run, and CPU microseconds between runs.
"""

import argparse
import asyncio
import json
import logging
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvloop

from waterclock.mesh import find_nats_server
from waterclock_proto.envelope import decode_event
from waterclock_proto.events import Started
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import EVENTS, event_filter, request_subject
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.clock import Clock
from waterclock_runtime.tape import PullReader, TapeReader
from waterclock_runtime.writer import EventWriter

MIB = 1024 * 1024
BODY = b"x" * 400
BURST = 64
"""Events or acknowledgements between two turns of the event loop, as a service has them."""


class Timed:
    """Wall and CPU time of what happens inside ``with``."""

    def __enter__(self) -> "Timed":
        self._began = (time.perf_counter_ns(), time.process_time_ns())
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_ns = time.perf_counter_ns() - self._began[0]
        self.cpu_ns = time.process_time_ns() - self._began[1]

    def figures(self, name: str, count: int) -> dict[str, float]:
        return {
            f"{name}_per_s": round(count * 10**9 / self.wall_ns),
            f"{name}_cpu_us": round(self.cpu_ns / count / 1000, 2),
        }


async def run(url: str, count: int) -> dict[str, float]:
    """All paths, ``count`` of each; figures by name."""
    bus = await Bus.connect(
        BusSettings(
            url=url,
            events_bytes_max=1024 * MIB,
            requests_bytes_max=256 * MIB,
            answers_bytes_max=64 * MIB,
        ),
        name="bench",
        log=structlog.get_logger(),
    )
    try:
        assert await bus.provision(), "a bus of its own expected, one with a tape found"
        return {
            **await emit_and_read_back(bus, count),
            **await catch_up(bus, count),
            **await take_and_acknowledge(bus, count),
            **await get_bodies(bus, count),
        }
    finally:
        await bus.close()


async def emit_and_read_back(bus: Bus, count: int) -> dict[str, float]:
    """One process seals and publishes events and reads them back, as the scheduler does."""
    writer = await EventWriter.open(bus, service="worker", clock=Clock(environ={}), key=b"k" * 32)
    reader = TapeReader(bus)
    expected = [f"r{number}" for number in range(count)]
    with Timed() as timed:
        reading = asyncio.create_task(_read(reader, count))
        stamp = Stamp(wall_us=1_700_000_000_000_000, source="worker")
        for number in range(count):
            writer.emit(
                Started(
                    tenant="acme",
                    id=expected[number],
                    attempt=1,
                    worker="w-1",
                    taken=stamp,
                    submitted=stamp,
                )
            )
            if number % BURST == 0:
                await writer.ready()
                await asyncio.sleep(0)
        payloads = await reading
    found = [decode_event(subject, payload).data for subject, payload in payloads]
    assert [data.id for data in found if isinstance(data, Started)] == expected
    assert writer.republished == 0
    assert await writer.drain(5)
    await reader.close()
    await writer.close()
    return timed.figures("event_emitted_and_read_back", count)


async def catch_up(bus: Bus, count: int) -> dict[str, float]:
    """A service that starts reads the whole tape."""
    _, last = await bus.stream_state(EVENTS.name)
    reader = TapeReader(bus)
    sequences: list[int] = []
    with Timed() as timed:
        async for batch in reader:
            sequences += [message.sequence for message in batch]
            if reader.caught_up:
                break
    assert sequences == list(range(1, last + 1))
    assert last >= count
    await reader.close()
    return timed.figures("event_read", last)


async def take_and_acknowledge(bus: Bus, count: int) -> dict[str, float]:
    """Admission's way: submissions stored, then read from the work queue and acknowledged."""
    with Timed() as storing:
        for number in range(count):
            bus.store_soon(request_subject("acme"), BODY)
            if number % BURST == 0:
                await _until(lambda: bus.storing < 1_000)
        await _until(lambda: bus.storing == 0)
    reader = PullReader(bus, consumer="bench", start=1)
    await reader.open()
    sequences: list[int] = []
    with Timed() as taking:
        async for batch in reader:
            for message in batch:
                assert message.payload == BODY
                sequences.append(message.sequence)
                reader.ack(message)
            if len(sequences) >= count:
                break
    assert sequences == list(range(1, count + 1))
    await reader.close()
    return storing.figures("submission_stored", count) | taking.figures("submission_taken", count)


async def get_bodies(bus: Bus, count: int) -> dict[str, float]:
    """Direct gets: many at once as the scheduler does, and one by one."""
    found: list[bytes | None] = []
    with Timed() as many:
        for first in range(1, count + 1, 512):
            found += await bus.bodies(range(first, min(first + 512, count + 1)))
    assert found == [BODY] * count
    ones = max(1, count // 50)
    with Timed() as one:
        for sequence in range(1, ones + 1):
            assert await bus.bodies([sequence]) == [BODY]
    return many.figures("body_got", count) | {"one_body_us": round(one.wall_ns / ones / 1000)}


async def _read(reader: TapeReader, count: int) -> list[tuple[str, bytes]]:
    """``count`` events of this benchmark's; decoding them is not what is measured."""
    prefix = event_filter(Started).partition("*")[0]
    found: list[tuple[str, bytes]] = []
    async for batch in reader:
        found += [(m.subject, m.payload) for m in batch if m.subject.startswith(prefix)]
        if len(found) >= count:
            break
    return found


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the answers themselves are what is waited for
        await asyncio.sleep(0.0005)


@contextmanager
def started_bus() -> Iterator[str]:
    """A bus of the benchmark's own; its address."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = Path(folder) / "nats.conf"
        config.write_text(
            json.dumps(
                {
                    "host": "127.0.0.1",
                    "port": port,
                    "jetstream": {"store_dir": f"{folder}/store", "sync_interval": "200ms"},
                }
            )
        )
        process = subprocess.Popen(
            [find_nats_server(), "--config", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the runtime's own paths can do.")
    parser.add_argument("--quick", action="store_true", help="little of each, to see that it works")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    count, rounds = (1_000, 1) if given.quick else (given.count, given.rounds)
    print(f"{count} of each, {os.cpu_count()} cores, best of {rounds}")
    best: dict[str, float] = {}
    for _ in range(rounds):
        with started_bus() as url:
            figures = uvloop.run(run(url, count))
        for name, value in figures.items():
            better = max if name.endswith("_per_s") else min
            best[name] = better(best.get(name, value), value)
    for name, value in best.items():
        print(f"{name:40} {value:>12,}")


if __name__ == "__main__":
    main()
