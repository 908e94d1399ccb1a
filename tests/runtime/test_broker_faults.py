"""The bus dies, stands still, or forgets, under a writer and a reader: nothing is lost."""

import asyncio
import gc
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from runtime_probe import Account, LogBook, connected, event, read_until, until, writing
from waterclock_runtime import limits
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


async def test_a_connection_given_up_for_dead_is_not_overtaken_by_its_successor(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus wakes up and reads what the old connection sent, beside what the new one sends."""
    monkeypatch.setattr(limits, "PING_INTERVAL_S", 1)
    monkeypatch.setattr(limits, "PINGS_OUTSTANDING_MAX", 1)
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
            if number % 100 == 0:
                await asyncio.sleep(0)
        await until(lambda: bus.breaks == 1)
        broker.resume()
        assert await until(lambda: bus.connected) < limits.CONNECT_TIMEOUT_S + 1
        await reading
        assert await writer.drain(5)
        check_all(account, writer, 6_000)
        assert account.repetitions() > 0
        await reader.close()


# The library leaves the socket of a refused try to the garbage collector.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
async def test_other_credentials_after_a_restart_are_said(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "broker", users={"ledger": "old"}).start()
    book = LogBook()
    try:
        async with connected(broker.url, book, user="ledger", password="old") as bus:
            broker.stop()
            changed = BrokerProcess(
                tmp_path / "changed",
                config={
                    "port": broker.port,
                    "authorization": {"users": [{"user": "ledger", "password": "new"}]},
                },
            ).start()
            try:
                await until(
                    lambda: any("Auth" in line["error"] for line in book.named("bus_still_away"))
                )
                # Said once, however often it is tried.
                await asyncio.sleep(1)
                said = [line["error"] for line in book.named("bus_still_away")]
                assert len(said) == len(set(said))
                assert not bus.closed.is_set()
            finally:
                changed.stop()
    finally:
        broker.stop()
        gc.collect()
