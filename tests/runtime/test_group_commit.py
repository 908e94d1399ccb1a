"""Group commit: events that wait together stand on the tape together, once, in order."""

import asyncio
from functools import partial

from broker_process import BrokerProcess
from runtime_probe import KEY, connected, event
from waterclock_proto.envelope import decode_event
from waterclock_proto.subjects import EVENTS
from waterclock_runtime.bus import Bus
from waterclock_runtime.clock import Clock
from waterclock_runtime.writer import EventWriter

COUNT = 3_000


async def counters(bus: Bus, writer: EventWriter) -> list[int]:
    """The writer's counters as they stand on the tape."""
    first, last = await bus.stream_state(EVENTS.name)
    found: list[int] = []
    for sequence in range(first, last + 1):
        message = await bus.message(EVENTS.name, sequence)
        assert message is not None
        envelope = decode_event(message[0], message[1])
        if envelope.writer == writer.name:
            found.append(envelope.counter)
    return found


async def test_batches_keep_the_order_and_name_each_sequence(broker: BrokerProcess) -> None:
    stored: dict[int, int] = {}
    async with connected(broker.url) as bus:
        writer = EventWriter(
            bus, service="worker", clock=Clock(environ={}), key=KEY, group_commit=True
        )
        writer.attach()
        for number in range(COUNT):
            writer.emit(event(number), partial(stored.__setitem__, number))
            if number % 300 == 0:
                await asyncio.sleep(0)
            await writer.ready()
        assert await writer.drain(30)
        assert await counters(bus, writer) == list(range(COUNT))
        first, _ = await bus.stream_state(EVENTS.name)
        sequences = [stored[number] for number in range(COUNT)]
        assert sequences == list(range(sequences[0], sequences[0] + COUNT))
        assert sequences[0] >= first
        info = await bus.api(f"STREAM.INFO.{EVENTS.name}", {})
        assert info["config"]["allow_atomic"] is True
        await writer.close()


async def test_a_bus_that_is_killed_under_batches_loses_none(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        writer = await EventWriter.open(
            bus, service="worker", clock=Clock(environ={}), key=KEY, group_commit=True
        )
        for number in range(COUNT):
            writer.emit(event(number))
            if number == COUNT // 2:
                await asyncio.sleep(0.01)
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
            await writer.ready()
        assert await writer.drain(30)
        found = await counters(bus, writer)
        # What was stored just before the kill may stand there twice; readers know it again.
        assert list(dict.fromkeys(found))[:COUNT] == list(range(COUNT))
        await writer.close()
