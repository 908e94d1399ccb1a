"""One connection to the bus: what it promises when all is well, and when it is not."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from runtime_probe import LogBook, connected, until
from waterclock_proto.subjects import (
    EVENTS,
    REQUESTS,
    answer_subject,
    cancel_subject,
    final_subject,
    request_subject,
)
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.errors import BusUnavailable, PoisonMessage

ANSWER = answer_subject("acme", "r1")


async def connect(url: str, **settings: object) -> Bus:
    return await Bus.connect(
        BusSettings(url=url, **settings),  # pyright: ignore[reportArgumentType] - settings by name
        name="probe",
        log=LogBook().log,
    )


# Connecting.


async def test_refused_credentials_are_said_at_once(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "broker", users={"ledger": "right"}).start()
    try:
        begun = time.monotonic()
        with pytest.raises(
            BusUnavailable, match=r"refused user 'ledger': check \[bus\] user and password"
        ) as refused:
            await connect(broker.url, user="ledger", password="wrong-secret")
        assert time.monotonic() - begun < 5
        assert "wrong-secret" not in str(refused.value)
        bus = await connect(broker.url, user="ledger", password="right")
        assert bus.connected
        await bus.close()
    finally:
        broker.stop()


async def test_an_absent_bus_is_waited_for_within_the_bound(broker: BrokerProcess) -> None:
    broker.stop()
    begun = time.monotonic()
    address = broker.url.replace("nats://", "nats://somebody:secret@")
    with pytest.raises(BusUnavailable, match=r"no bus at nats://127.*within 1\.5 s") as absent:
        await connect(address, connect_wait_s=1.5)
    assert 1.4 < time.monotonic() - begun < 2.5
    assert "secret" not in str(absent.value)


async def test_a_bus_that_accepts_and_says_nothing_is_given_up(tmp_path: Path) -> None:
    silent: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: silent.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(BusUnavailable, match=r"within 1 s"):
            await connect(f"nats://127.0.0.1:{port}", connect_wait_s=1)
    finally:
        for writer in silent:
            writer.close()
        server.close()


async def test_a_bus_that_comes_late_is_found(broker: BrokerProcess) -> None:
    broker.stop()
    connecting = asyncio.create_task(connect(broker.url))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(broker.start)
    bus = await asyncio.wait_for(connecting, 2)
    assert bus.connected
    await bus.close()


@pytest.mark.parametrize("url", ["", "nats://", "nats://127.0.0.1:port", "nats://:1"])
async def test_an_address_that_is_none_is_said(url: str) -> None:
    with pytest.raises(BusUnavailable, match=r"\[bus\] url|no bus at"):
        await connect(url, connect_wait_s=0.5)


# Core messages.


async def test_a_handler_that_fails_is_said_and_the_next_message_comes(
    broker: BrokerProcess,
) -> None:
    book = LogBook()
    got: list[bytes] = []

    def handle(subject: str, payload: bytes) -> None:
        if payload == b"bad":
            raise ValueError("unreadable")
        got.append(payload)

    async with connected(broker.url, book) as bus:
        subscription = bus.subscribe(cancel_subject("acme", "*"), handle)
        for payload in (b"1", b"bad", b"2"):
            bus.publish(cancel_subject("acme", "r1"), payload)
        await until(lambda: got == [b"1", b"2"])
        assert bus.handler_failures == 1
        assert len(book.named("handler_failed")) == 1
        assert not bus.closed.is_set()
        subscription.close()
        subscription.close()
        bus.publish(cancel_subject("acme", "r1"), b"3")
        await bus.nc.flush()
        assert got == [b"1", b"2"]


async def test_a_subscription_outlives_a_break(broker: BrokerProcess) -> None:
    got: list[bytes] = []
    async with connected(broker.url) as bus:
        bus.subscribe(ANSWER, lambda _, payload: got.append(payload))
        await asyncio.to_thread(broker.restart)
        await bus.wait_connected()
        bus.publish(ANSWER, b"after")
        await until(lambda: got == [b"after"])


async def test_what_a_standing_bus_is_sent_is_bounded(broker: BrokerProcess) -> None:
    book = LogBook()
    async with connected(broker.url, book) as bus:
        broker.pause()
        message = b"x" * 100_000
        sent = 0
        for _ in range(1_000):
            sent += bus.publish(ANSWER, message)
            await asyncio.sleep(0)
        assert bus.dropped == 1_000 - sent > 0
        assert bus.nc.pending_data_size <= limits.PENDING_BYTES_MAX + 2 * len(message)
        (line,) = book.named("messages_dropped")
        assert "the buffer is full" in line["why"]
        # Subscribing does not wait either, however often.
        for number in range(2_000):
            bus.subscribe(f"wc.answer.acme.x{number}", lambda *_: None).close()
        broker.resume()
        await bus.nc.flush()
        assert bus.publish(ANSWER, message)


async def test_what_an_absent_bus_is_sent_is_bounded(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        await asyncio.to_thread(broker.kill)
        await until(lambda: not bus.connected)
        sent = sum(bus.publish(ANSWER, b"x" * 100_000) for _ in range(1_000))
        assert 0 < sent * 100_000 <= limits.PENDING_BYTES_MAX + 100_000
        assert bus.dropped == 1_000 - sent
        await asyncio.to_thread(broker.start)
        await bus.wait_connected()


async def test_a_message_that_is_too_large_is_said_with_what_to_do(broker: BrokerProcess) -> None:
    book = LogBook()
    large = b"x" * 2_000_000
    async with connected(broker.url, book) as bus:
        assert not bus.publish(ANSWER, large)
        (line,) = book.named("messages_dropped")
        assert line["why"] == "the bus takes 1048576 bytes at most: raise its max_payload"
        assert line["bytes"] == len(large)
        with pytest.raises(PoisonMessage, match="2000000 bytes"):
            bus.store_soon(final_subject("acme", "r1"), large)
        assert bus.storing == 0


async def test_a_subject_that_is_not_allowed_is_said(tmp_path: Path) -> None:
    users = [{"user": "a", "password": "b", "permissions": {"publish": {"deny": ["wc.answer.>"]}}}]
    broker = BrokerProcess(tmp_path / "broker", config={"authorization": {"users": users}}).start()
    book = LogBook()
    try:
        async with connected(broker.url, book, user="a", password="b") as bus:
            bus.publish(ANSWER, b"x")
            await until(lambda: book.named("bus_refuses_subject") != [])
            assert not bus.closed.is_set()
    finally:
        broker.stop()


async def test_a_bus_that_ends_the_connection_for_good_is_noticed(broker: BrokerProcess) -> None:
    """The client does not come back after an error of the protocol; the service must end."""
    async with connected(broker.url) as bus:
        transport = bus.nc._transport
        assert transport is not None
        transport.write(b"NONSENSE\r\n")
        await asyncio.wait_for(bus.closed.wait(), 5)
        assert isinstance(bus.failure, BusUnavailable)
        with pytest.raises(BusUnavailable):
            await bus.wait_connected()
        with pytest.raises(BusUnavailable):
            await bus.api("INFO", {})


# Storing.


async def test_stored_is_stored_over_a_break(broker: BrokerProcess) -> None:
    stored: list[int] = []
    async with connected(broker.url) as bus:
        assert await bus.store(final_subject("acme", "r0"), b"0") == 1
        await asyncio.to_thread(broker.kill)
        await until(lambda: not bus.connected)
        for number in range(1, 100):
            bus.store_soon(final_subject("acme", f"r{number}"), b"%d" % number, stored.append)
        await asyncio.to_thread(broker.start)
        await until(lambda: bus.storing == 0)
        assert sorted(stored) == list(range(2, 101))
        assert await bus.final("acme", "r42") == b"42"
        assert await bus.final("acme", "r100") is None


async def test_what_was_given_up_is_not_stored_later(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        await asyncio.to_thread(broker.kill)
        await until(lambda: not bus.connected)
        with pytest.raises(BusUnavailable, match="not stored within"):
            await bus.store(request_subject("acme"), b"late", wait_s=0.2)
        assert bus.storing == 0
        await asyncio.to_thread(broker.start)
        await bus.wait_connected()
        assert await bus.store(request_subject("acme"), b"in time") == 1


async def test_a_full_stream_says_why_it_does_not_store(broker: BrokerProcess) -> None:
    async with connected(broker.url, requests_bytes_max=2_000) as bus:
        assert await bus.store(request_subject("acme"), b"x" * 1_500) == 1
        with pytest.raises(BusUnavailable, match="maximum bytes exceeded"):
            await bus.store(request_subject("acme"), b"x" * 1_500, wait_s=0.3)


async def test_what_waits_to_be_stored_is_bounded(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORING_BYTES_MAX", 1_000)
    async with connected(broker.url) as bus:
        broker.pause()
        bus.store_soon(final_subject("acme", "r1"), b"x" * 900)
        with pytest.raises(BusUnavailable, match="at most 1000 bytes allowed"):
            bus.store_soon(final_subject("acme", "r2"), b"x" * 900)
        broker.resume()
        await until(lambda: bus.storing == 0)
        await bus.store(final_subject("acme", "r2"), b"x" * 900)


# Reading.


async def test_bodies_come_in_order_and_what_is_missing_is_none(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        for number in range(1, 301):
            bus.store_soon(request_subject("acme"), b"%d" % number)
        await until(lambda: bus.storing == 0)
        found = await bus.bodies([300, 301, *range(1, 201), 9_999])
        assert found == [b"300", None, *(b"%d" % number for number in range(1, 201)), None]
        assert await bus.bodies([]) == []


@pytest.mark.parametrize("status", ["404", "503", "100"])
async def test_a_header_of_the_producers_is_not_taken_for_the_bus_speaking(
    broker: BrokerProcess, status: str
) -> None:
    async with connected(broker.url) as bus:
        sequence = await bus.store(request_subject("acme"), b"body", {"Status": status})
        assert await asyncio.wait_for(bus.bodies([sequence]), 2) == [b"body"]


async def test_what_was_asked_during_a_break_is_answered_after_it(broker: BrokerProcess) -> None:
    async with connected(broker.url) as bus:
        for number in range(200):
            bus.store_soon(request_subject("acme"), b"%d" % number)
        await until(lambda: bus.storing == 0)
        broker.pause()
        asked = asyncio.gather(bus.bodies(range(1, 201)), bus.stream_state(REQUESTS.name))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(broker.kill)
        await until(lambda: not bus.connected)
        await asyncio.to_thread(broker.start)
        await bus.wait_connected()
        bodies, state = await asyncio.wait_for(asked, 1.0)
        assert bodies == [b"%d" % number for number in range(200)]
        assert state == (1, 200)


async def test_asking_an_absent_bus_is_given_up_in_time(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_WAIT_S", 0.5)
    async with connected(broker.url) as bus:
        await asyncio.to_thread(broker.kill)
        begun = time.monotonic()
        with pytest.raises(BusUnavailable, match=r"given up after 0\.5 s: the bus is away"):
            await bus.bodies([1, 2, 3])
        assert time.monotonic() - begun < 1.0


async def test_a_message_is_read_with_the_stamp_of_the_bus_to_the_nanosecond(
    broker: BrokerProcess,
) -> None:
    async with connected(broker.url) as bus:
        before_ns = time.time_ns()
        sequence = await bus.store(request_subject("acme"), b"body")
        after_ns = time.time_ns()
        found = await bus.message(REQUESTS.name, sequence)
        assert found is not None
        assert found[:2] == (request_subject("acme"), b"body")
        assert before_ns <= found[2] <= after_ns
        assert await bus.message(EVENTS.name, 1) is None
        assert await bus.last(REQUESTS.name, request_subject("acme")) == (b"body", sequence)
        assert await bus.last(REQUESTS.name, request_subject("globex")) is None
        api = await bus.api(f"STREAM.MSG.GET.{REQUESTS.name}", {"seq": sequence})
        assert json.dumps(api)
