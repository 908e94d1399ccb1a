"""The bus dies, stands still, or forgets, under a writer and a reader: nothing is lost."""

import asyncio

import pytest

from broker_process import BrokerProcess
from runtime_probe import Account, connected, event, read_until, until, writing
from waterclock_runtime.tape import TapeReader
from waterclock_runtime.writer import EventWriter


async def write(writer: EventWriter, count: int, first: int = 0, burst: int = 50) -> None:
    """Emit as fast as the window allows, letting others run between bursts."""
    for number in range(first, first + count):
        if number % burst == 0:
            await writer.ready()
            await asyncio.sleep(0)
        writer.emit(event(number))


def check_all(account: Account, writer: EventWriter, count: int) -> None:
    assert account.ids() == [f"r{number}" for number in range(count)]
    counters = account.first_counters(writer.name)
    assert counters == list(range(len(counters)))
    assert account.sequences == list(
        range(account.sequences[0], account.sequences[0] + len(account.sequences))
    )


@pytest.mark.parametrize("signal", ["kill", "stop"])
async def test_a_broker_that_restarts_under_load_loses_nothing(
    broker: BrokerProcess, signal: str
) -> None:
    count = 20_000
    account = Account()
    async with connected(broker.url) as bus, writing(bus) as writer:
        reader = TapeReader(bus)
        reading = asyncio.create_task(
            read_until(reader, account, lambda seen: seen.last_id == f"r{count - 1}")
        )
        writing_all = asyncio.create_task(write(writer, count))
        for at in (4_000, 12_000):
            await until(lambda at=at: len(account.messages) > at)
            await asyncio.to_thread(getattr(broker, signal))
            await asyncio.to_thread(broker.start)
            seen = len(account.messages)
            flowing_s = await until(lambda seen=seen: len(account.messages) > seen + 1_000)
            assert flowing_s < 3.0
        await writing_all
        await reading
        assert await writer.drain(5)
        assert bus.breaks == 2
        check_all(account, writer, count)
        await reader.close()


async def test_a_broker_that_stands_still_for_seconds_loses_nothing(broker: BrokerProcess) -> None:
    count = 20_000
    account = Account()
    async with connected(broker.url) as bus, writing(bus) as writer:
        reader = TapeReader(bus)
        reading = asyncio.create_task(
            read_until(reader, account, lambda seen: seen.last_id == f"r{count - 1}")
        )
        writing_all = asyncio.create_task(write(writer, count))
        await until(lambda: len(account.messages) > 4_000)
        broker.pause()
        await asyncio.sleep(5)
        broker.resume()
        seen = len(account.messages)
        assert await until(lambda: len(account.messages) > seen + 1_000) < 3.0
        await writing_all
        await reading
        assert bus.breaks == 0
        assert writer.republished <= 5
        check_all(account, writer, count)
        await reader.close()


async def test_a_cut_connection_loses_nothing_and_turns_nothing_round(
    broker: BrokerProcess,
) -> None:
    """The bus stands still while much waits to be sent, and dies before it has read it."""
    account = Account()
    async with connected(broker.url) as bus, writing(bus) as writer:
        reader = TapeReader(bus)
        reading = asyncio.create_task(
            read_until(reader, account, lambda seen: seen.last_id == "r5999")
        )
        await write(writer, 2_000)
        await until(lambda: writer.outstanding == 0)
        broker.pause()
        for number in range(2_000, 6_000):
            writer.emit(event(number))
            bus.publish("wc.answer.acme.r", b"x" * 2_000)
            if number % 100 == 0:
                await asyncio.sleep(0)
        # More than the sockets hold, so that some of it is still in the client's own buffer.
        assert bus.nc.pending_data_size > 0
        await asyncio.to_thread(broker.restart)
        await reading
        assert await writer.drain(5)
        check_all(account, writer, 6_000)
        await reader.close()
