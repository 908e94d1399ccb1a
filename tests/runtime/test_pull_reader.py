"""The work queue against the real bus: each submission once, in order, whatever breaks."""

import asyncio

import pytest

from broker_process import BrokerProcess
from runtime_probe import LogBook, connected, until
from waterclock_proto.subjects import REQUESTS, request_subject
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus
from waterclock_runtime.errors import ConsumerTaken, StreamRolledBack
from waterclock_runtime.tape import PullReader, RequestMessage

SUBJECT = request_subject("acme")


async def submit(bus: Bus, count: int, first: int = 0, size: int = 0) -> None:
    """Store submissions in order, a few at a time."""
    for number in range(first, first + count):
        bus.store_soon(SUBJECT, f"{number}".encode().ljust(size, b" "))
        if number % 50 == 0:
            await until(lambda: bus.storing < 200)
    await until(lambda: bus.storing == 0)


class Queue:
    """Reads on a task of its own, and acknowledges what it was handed."""

    def __init__(self, bus: Bus, *, start: int = 1) -> None:
        self.reader = PullReader(bus, consumer="admission", start=start)
        self.got: list[RequestMessage] = []
        self.task: asyncio.Task[None] | None = None

    async def open(self) -> "Queue":
        await self.reader.open()
        self.task = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        async for batch in self.reader:
            assert batch
            self.got += batch
            for message in batch:
                self.reader.ack(message)

    @property
    def sequences(self) -> list[int]:
        return [message.sequence for message in self.got]

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
        await self.reader.close()


async def test_submissions_come_in_order_with_all_that_they_carry(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        queue = await Queue(bus).open()
        await submit(bus, 3_000)
        # A header of the producer's own that looks like the bus's must not be taken for it.
        await bus.store(SUBJECT, b"last", {"Status": "409", "Description": "Consumer Deleted"})
        await until(lambda: len(queue.got) == 3_001)
        assert queue.sequences == list(range(1, 3_002))
        last = queue.got[-1]
        assert (last.subject, last.payload) == (SUBJECT, b"last")
        assert last.headers == {"Status": "409", "Description": "Consumer Deleted"}
        found = await bus.message(REQUESTS.name, 3_001)
        assert found is not None
        assert found[2] == last.stored_ns
        info = await bus.api(f"CONSUMER.INFO.{REQUESTS.name}.admission", {})
        assert info["num_ack_pending"] == 0
        await queue.close()


async def test_a_broker_that_restarts_hands_out_every_submission_once(
    broker: BrokerProcess,
) -> None:
    async with connected(broker.url) as bus, connected(broker.url) as producer:
        queue = await Queue(bus).open()
        submitting = asyncio.create_task(submit(producer, 10_000))
        await until(lambda: len(queue.got) > 2_000)
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        seen = len(queue.got)
        assert await until(lambda: len(queue.got) > seen + 200) < 3.0
        await submitting
        _, last = await bus.stream_state(REQUESTS.name)
        await until(lambda: queue.sequences[-1] == last)
        assert queue.sequences == list(range(1, last + 1))
        # What the producer repeated stands there twice; nothing is missing.
        assert {message.payload for message in queue.got} == {b"%d" % n for n in range(10_000)}
        await queue.close()


async def test_an_idle_queue_flows_at_once_after_a_restart(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        queue = await Queue(bus).open()
        await submit(bus, 10)
        await until(lambda: len(queue.got) == 10)
        await asyncio.to_thread(broker.restart)
        await bus.wait_connected()
        await submit(bus, 10, first=10)
        assert await until(lambda: len(queue.got) == 20) < 1.0
        assert queue.sequences == list(range(1, 21))
        await queue.close()


async def test_whoever_is_elected_next_takes_the_queue_over(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus, connected(broker.url) as other:
        old = await Queue(bus).open()
        await submit(bus, 10)
        await until(lambda: len(old.got) == 10)
        new = await Queue(other, start=6).open()
        assert old.task is not None
        with pytest.raises(ConsumerTaken):
            await asyncio.wait_for(old.task, 2)
        await until(lambda: len(new.got) == 5)
        await submit(other, 5, first=10)
        await until(lambda: len(new.got) == 10)
        assert new.sequences == list(range(6, 16))
        assert len(old.got) == 10
        await old.close()
        await new.close()


async def test_a_takeover_during_a_break_is_noticed_after_it(broker: BrokerProcess) -> None:
    """The old reader must not take what the new one's consumer of the same name brings."""
    async with connected(broker.url) as bus, connected(broker.url) as other:
        old = await Queue(bus).open()
        await submit(bus, 10)
        await until(lambda: len(old.got) == 10)
        await bus.nc.force_reconnect()
        new = await Queue(other, start=6).open()
        assert old.task is not None
        with pytest.raises(ConsumerTaken):
            await asyncio.wait_for(old.task, limits.PULL_SILENCE_S + 2)
        await submit(other, 50, first=10)
        await until(lambda: len(new.got) == 55)
        assert new.sequences == list(range(6, 61))
        await old.close()
        await new.close()


async def test_a_queue_without_a_stream_ends(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_HEARTBEAT_S", 0.2)
    monkeypatch.setattr(limits, "PULL_SILENCE_S", 0.6)
    async with connected(broker.url) as bus:
        queue = await Queue(bus).open()
        await bus.api(f"STREAM.DELETE.{REQUESTS.name}", {})
        assert queue.task is not None
        with pytest.raises((ConsumerTaken, StreamRolledBack)):
            await asyncio.wait_for(queue.task, 5)
        await queue.close()


async def test_large_bodies_do_not_pile_up_in_memory(broker: BrokerProcess) -> None:
    count, size = 60, 900_000
    async with connected(broker.url) as bus, connected(broker.url) as producer:
        await submit(producer, count, size=size)
        reader = PullReader(bus, consumer="admission", start=1)
        await reader.open()
        got: list[RequestMessage] = []
        largest = 0
        async for batch in reader:
            await asyncio.sleep(0.1)
            largest = max(largest, sum(len(message.payload) for message in batch))
            got += batch
            for message in batch:
                reader.ack(message)
            if len(got) == count:
                break
        assert [message.sequence for message in got] == list(range(1, count + 1))
        assert largest <= limits.PULL_BYTES
        await reader.close()


async def test_undecided_submissions_are_bounded(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_ACK_PENDING_MAX", 100)
    book = LogBook()
    async with connected(broker.url, book) as bus:
        await submit(bus, 300)
        reader = PullReader(bus, consumer="admission", start=1)
        await reader.open()
        got: list[RequestMessage] = []

        async def read() -> None:
            async for batch in reader:
                got.extend(batch)

        task = asyncio.create_task(read())
        await until(lambda: len(got) == 100)
        await asyncio.sleep(limits.PULL_HEARTBEAT_S * 2)
        assert len(got) == 100
        for place in range(300):
            await until(lambda place=place: len(got) > place)
            reader.ack(got[place])
        assert [message.sequence for message in got] == list(range(1, 301))
        assert book.named("pull_refused") == []
        task.cancel()
        await reader.close()


async def test_what_is_not_acknowledged_comes_again(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_ACK_WAIT_S", 0.5)
    async with connected(broker.url) as bus:
        await submit(bus, 3)
        reader = PullReader(bus, consumer="admission", start=1)
        await reader.open()
        got: list[int] = []
        async for batch in reader:
            for message in batch:
                if message.sequence != 2 or got.count(2) == 1:
                    reader.ack(message)
                got.append(message.sequence)
            if len(got) == 4:
                break
        assert got == [1, 2, 3, 2]
        await reader.close()
