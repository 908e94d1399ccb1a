"""The tape is full: writers stall, say so once, lose nothing and turn nothing round."""

import asyncio

import pytest

from broker_process import BrokerProcess
from runtime_probe import MIB, Account, LogBook, connected, event, read_until, until, writing
from waterclock_proto.events import Failed
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import EVENTS
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus
from waterclock_runtime.errors import BusUnavailable
from waterclock_runtime.tape import TapeReader

SMALL = MIB


LARGE_BYTES_MIN = 900
"""A large one of these needs more than that of the tape, a small one much less."""


def sized(number: int) -> Failed:
    """Events of two sizes: where a large one does not fit any more, a small one does."""
    return Failed(
        tenant="acme",
        id=f"r{number}",
        attempt=1,
        worker="w-1",
        reason="engine_error",
        detail="x" * (500 if number % 2 else 0),
        ended=Stamp(wall_us=1_700_000_000_000_000 + number, source="worker"),
    )


async def update(bus: Bus, *, max_bytes: int) -> None:
    info = await bus.api(f"STREAM.INFO.{EVENTS.name}", {})
    answer = await bus.api(
        f"STREAM.UPDATE.{EVENTS.name}", info["config"] | {"max_bytes": max_bytes}
    )
    assert "error" not in answer


async def make_room(bus: Bus, how: str) -> None:
    """What an operator does about it."""
    if how == "raise":
        await update(bus, max_bytes=64 * MIB)
    else:
        answer = await bus.api(f"STREAM.PURGE.{EVENTS.name}", {})
        assert "error" not in answer


@pytest.mark.parametrize("how", ["raise", "purge"])
async def test_a_full_tape_stalls_its_writer_until_there_is_room(
    broker: BrokerProcess, how: str
) -> None:
    book = LogBook()
    account = Account()
    async with (
        connected(broker.url, book, events_bytes_max=SMALL) as bus,
        writing(bus) as writer,
    ):
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        count = 0
        while not writer.stalled:
            writer.emit(event(count))
            count += 1
            if count % 20 == 0:
                await asyncio.sleep(0.001)
        for _ in range(500):
            writer.emit(event(count))
            count += 1
        assert "maximum bytes exceeded" in writer.stalled_why
        # It keeps trying, and says so once.
        refused = writer.refused
        await until(lambda: writer.refused > refused + 3)
        assert len(book.named("tape_refuses_events")) == 1
        assert writer.outstanding >= 500

        await make_room(bus, how)
        assert await until(lambda: not writer.stalled) < 1.0
        assert await writer.drain(5)
        await until(lambda: account.last_id == f"r{count - 1}")
        assert account.ids() == [f"r{number}" for number in range(count)]
        assert len(book.named("tape_takes_events_again")) == 1
        assert writer.turned == 0
        reading.cancel()
        await reader.close()


async def test_near_the_end_of_the_tape_no_event_overtakes_a_refused_one(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several on their way, a small one would slip in behind a large one that is refused."""
    # So that nothing else takes the room that is measured out here.
    monkeypatch.setattr(limits, "SEAL_INTERVAL_S", 1_000)
    account = Account()
    async with connected(broker.url) as bus, writing(bus) as writer:
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        for number in range(1_000):
            writer.emit(sized(number))
        assert await writer.drain(5)
        info = await bus.api(f"STREAM.INFO.{EVENTS.name}", {})
        bytes_max = info["state"]["bytes"] + LARGE_BYTES_MIN
        await update(bus, max_bytes=bytes_max)
        await until(lambda: writer.tape_room is not None and writer.tape_room.bytes_max < MIB)
        for number in range(1_001, 1_201):
            writer.emit(sized(number))
        await until(lambda: writer.stalled)
        await asyncio.sleep(3 * limits.WRITER_SWEEP_S)
        await update(bus, max_bytes=64 * MIB)
        assert await writer.drain(10)
        assert writer.turned == 0
        counters = account.first_counters(writer.name)
        assert counters == list(range(len(counters)))
        reading.cancel()
        await reader.close()


async def test_a_writer_that_nobody_waits_for_is_bounded(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(broker.url) as bus, writing(bus, window=1) as writer:
        counter = writer.emit(event(0))
        assert await writer.drain(5)
        broker.pause()
        monkeypatch.setattr(limits, "WRITER_WAITING_MAX", 50)
        for number in range(1, 51):
            counter = writer.emit(event(number))
        with pytest.raises(BusUnavailable, match="50 events wait for the tape, at most 50 allowed"):
            writer.emit(event(51))
        broker.resume()
        assert await writer.drain(5)
        # The refused one left no hole in the chain.
        assert writer.emit(event(51)) == counter + 1
