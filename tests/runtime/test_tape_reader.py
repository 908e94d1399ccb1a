"""The reader of the tape against the real bus: contiguous, caught up, and not to be deceived."""

import asyncio
import time

import pytest

from broker_process import BrokerProcess
from runtime_probe import Account, connected, event, read_until, until, writing
from waterclock_proto.events import Started, WriterSealed
from waterclock_proto.subjects import EVENTS, event_filter
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus
from waterclock_runtime.errors import StreamRolledBack
from waterclock_runtime.tape import TapeMessage, TapeReader


async def fill(bus: Bus, count: int, first: int = 0) -> None:
    async with writing(bus) as writer:
        for number in range(first, first + count):
            writer.emit(event(number))
            if number % 200 == 0:
                await writer.ready()


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed sooner; nothing else changes."""
    monkeypatch.setattr(limits, "TAPE_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(limits, "TAPE_SILENCE_S", 0.5)


async def next_batch(reader: TapeReader) -> list[TapeMessage]:
    async for batch in reader:
        return batch
    raise AssertionError("the reader ended")


@pytest.mark.parametrize("how", ["blocks the loop", "does other things"])
async def test_a_slow_reader_misses_nothing(broker: BrokerProcess, how: str) -> None:
    count = 60_000
    account = Account()
    async with connected(broker.url) as bus, connected(broker.url) as other:
        reader = TapeReader(bus)
        batches = aiter(reader)
        assert await anext(batches) == []
        feeding = asyncio.create_task(fill(other, count))
        slow = time.monotonic() + 3
        while account.last_id != f"r{count - 1}":
            account.take(await anext(batches))
            if time.monotonic() < slow:
                if how == "blocks the loop":
                    time.sleep(0.3)  # noqa: ASYNC251 - that is the fault
                else:
                    await asyncio.sleep(1.0)
            await asyncio.sleep(0)
        await feeding
        assert account.ids() == [f"r{number}" for number in range(count)]
        assert account.sequences == list(range(1, len(account.sequences) + 1))
        assert account.largest_batch <= limits.TAPE_BATCH_MAX
        await reader.close()


async def test_an_empty_tape_says_once_that_it_is_caught_up(broker: BrokerProcess) -> None:
    account = Account()
    async with connected(broker.url) as bus:
        reader = TapeReader(bus)
        assert await next_batch(reader) == []
        assert reader.caught_up
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        # Heartbeats come and go; they are no batches.
        await asyncio.sleep(3 * limits.TAPE_HEARTBEAT_S)
        assert account.empty_batches == 0
        await fill(bus, 10)
        await until(lambda: len(account.ids()) == 10)
        assert account.empty_batches == 0
        reading.cancel()
        await reader.close()


async def test_caught_up_comes_with_the_batch_that_reaches_the_head(broker: BrokerProcess) -> None:
    account = Account()
    async with connected(broker.url) as bus:
        await fill(bus, 2_000)
        reader = TapeReader(bus)
        _, head = await bus.stream_state(EVENTS.name)
        async for batch in reader:
            account.take(batch)
            assert reader.caught_up == (account.sequences[-1] == head)
            if reader.caught_up:
                break
        assert account.empty_batches == 0
        await reader.close()


async def test_a_filter_that_nothing_matches_is_caught_up_at_once(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        await fill(bus, 10)
        reader = TapeReader(bus, filters=[event_filter(Started, tenant="globex")])
        assert await next_batch(reader) == []
        assert reader.caught_up
        await reader.close()


async def test_filters_and_start_choose_what_comes(broker: BrokerProcess) -> None:
    account = Account()
    async with connected(broker.url) as bus:
        await fill(bus, 100)
        reader = TapeReader(
            bus, filters=[event_filter(Started), event_filter(WriterSealed)], start=50
        )
        await read_until(reader, account, lambda seen: reader.caught_up)
        assert account.sequences[0] >= 50
        assert account.ids()[-1] == "r99"
        await reader.close()


async def test_a_reader_whose_consumer_is_deleted_goes_on(broker: BrokerProcess) -> None:
    account = Account()
    async with connected(broker.url) as bus:
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        await fill(bus, 10)
        await until(lambda: len(account.ids()) == 10)
        (name,) = (await bus.api(f"CONSUMER.NAMES.{EVENTS.name}", {}))["consumers"]
        await bus.api(f"CONSUMER.DELETE.{EVENTS.name}.{name}", {})
        await fill(bus, 10, first=10)
        assert await until(lambda: len(account.ids()) == 20) < limits.TAPE_SILENCE_S + 1
        assert account.sequences == list(range(1, len(account.sequences) + 1))
        assert reader.resets == 1
        reading.cancel()
        await reader.close()
        await until_no_consumer(bus)


async def until_no_consumer(bus: Bus) -> None:
    """Closing takes the consumer away, so that the bus does not keep it for half a minute."""
    for _ in range(100):
        if (await bus.api(f"CONSUMER.NAMES.{EVENTS.name}", {}))["total"] == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the reader left its consumer behind")


@pytest.mark.parametrize("refill", [0, 5, 500], ids=["empty", "shorter", "longer"])
async def test_a_tape_that_was_made_anew_is_noticed(
    broker: BrokerProcess, refill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    account = Account()
    async with connected(broker.url) as bus:
        await fill(bus, 100)
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        await until(lambda: account.last_id == "r99")
        await bus.api(f"STREAM.DELETE.{EVENTS.name}", {})
        await bus.provision()
        await fill(bus, refill)
        with pytest.raises(StreamRolledBack, match=r"had been read|expected the payload"):
            await asyncio.wait_for(reading, 5)
        await reader.close()


async def test_a_tape_restored_from_an_older_copy_is_noticed(broker: BrokerProcess) -> None:
    account = Account()
    copy = broker.folder / "copy"
    async with connected(broker.url) as bus:
        await fill(bus, 100)
        await asyncio.to_thread(broker.stop)
        broker.copy_store(copy)
        await asyncio.to_thread(broker.start)
        await bus.wait_connected()
        await fill(bus, 100, first=100)
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        await until(lambda: account.last_id == "r199")
        await asyncio.to_thread(broker.kill)
        broker.restore_store(copy)
        await asyncio.to_thread(broker.start)
        with pytest.raises(StreamRolledBack, match=r"ends at \d+, but \d+ had been read"):
            await asyncio.wait_for(reading, 3)
        await reader.close()


async def test_a_reader_that_remembers_notices_a_rollback_at_its_start(
    broker: BrokerProcess,
) -> None:
    async with connected(broker.url) as bus:
        await fill(bus, 100)
        found = await bus.message(EVENTS.name, 50)
        assert found is not None
        good = TapeReader(bus, start=51)
        good.remember(50, found[1], found[2])
        assert (await next_batch(good))[0].sequence == 51
        for payload, stored_ns in ((b"other", None), (found[1], found[2] + 1)):
            bad = TapeReader(bus, start=51)
            bad.remember(50, payload, stored_ns)
            with pytest.raises(StreamRolledBack, match="at 50: expected the payload"):
                await next_batch(bad)
        with pytest.raises(StreamRolledBack, match="but 9999 had been read"):
            await next_batch(TapeReader(bus, start=10_000))
        await good.close()


async def test_a_tape_that_is_gone_is_noticed(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(limits, "TAPE_MISSING_S", 0.3)
    account = Account()
    async with connected(broker.url) as bus:
        await fill(bus, 10)
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda seen: False))
        await until(lambda: account.last_id == "r9")
        await bus.api(f"STREAM.DELETE.{EVENTS.name}", {})
        with pytest.raises(StreamRolledBack, match="does not exist any more"):
            await asyncio.wait_for(reading, 5)
        await reader.close()


async def test_the_head_is_reached_although_what_was_there_has_gone(broker: BrokerProcess) -> None:
    """Counted as pending when the consumer was made, deleted before it came: a heartbeat tells."""
    async with connected(broker.url) as bus:
        await fill(bus, 20_000)
        reader = TapeReader(bus)
        batches = aiter(reader)
        assert await anext(batches)
        await bus.api(f"STREAM.PURGE.{EVENTS.name}", {})
        while not reader.caught_up:
            await asyncio.wait_for(anext(batches), 5)
        await reader.close()
