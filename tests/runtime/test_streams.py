"""Provisioning: made once whoever comes first, verified afterwards, with a message that helps."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess
from runtime_probe import KEY, LogBook, connected
from waterclock_proto.envelope import decode_event
from waterclock_proto.events import LogOpened
from waterclock_proto.subjects import ANSWERS, EVENTS, REQUESTS
from waterclock_runtime import limits
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable, StreamMismatch
from waterclock_runtime.service import prepare_tape, read_incarnation


async def test_many_that_start_at_once_open_the_tape_once(broker: BrokerProcess) -> None:
    async def start() -> tuple[bool, str]:
        async with connected(broker.url, provision=False) as bus:
            made = await prepare_tape(bus, Clock(environ={}), "ledger", KEY)
            return made, await read_incarnation(bus)

    results = await asyncio.gather(*(start() for _ in range(8)))
    assert [made for made, _ in results].count(True) == 1
    (incarnation,) = {incarnation for _, incarnation in results}
    async with connected(broker.url) as bus:
        assert await bus.stream_state(EVENTS.name) == (1, 1)
        found = await bus.message(EVENTS.name, 1)
        assert found is not None
        opened = decode_event(found[0], found[1]).data
        assert isinstance(opened, LogOpened)
        assert (opened.incarnation, opened.first_sequence) == (incarnation, 1)


async def test_many_that_start_at_once_do_not_take_each_others_room(tmp_path: Path) -> None:
    """While a stream is made by several, the bus reserves its size for each of them."""
    store = {"store_dir": str(tmp_path / "store"), "max_file_store": 8_000_000_000}
    broker = BrokerProcess(tmp_path / "broker", config={"jetstream": store}).start()
    sizes: dict[str, Any] = {
        "events_bytes_max": 4_000_000_000,
        "requests_bytes_max": 2_000_000_000,
        "answers_bytes_max": 1_000_000_000,
    }

    async def start() -> None:
        async with connected(broker.url, provision=False, **sizes) as bus:
            await bus.provision()

    try:
        await asyncio.gather(*(start() for _ in range(8)))
    finally:
        broker.stop()


async def test_a_tape_that_was_made_but_never_opened_is_opened_by_the_next(
    broker: BrokerProcess,
) -> None:
    async with connected(broker.url) as bus:
        assert await bus.provision()
        assert await prepare_tape(bus, Clock(environ={}), "ledger", KEY)
        assert not await bus.provision()
        assert not await prepare_tape(bus, Clock(environ={}), "ledger", KEY)


async def test_streams_that_an_operator_resized_are_kept_as_they_are(
    broker: BrokerProcess,
) -> None:
    book = LogBook()
    async with connected(broker.url) as bus:
        info = await bus.api(f"STREAM.INFO.{EVENTS.name}", {})
        smaller = info["config"] | {"max_bytes": 1_000_000, "max_age": 3_600 * 10**9}
        assert "error" not in await bus.api(f"STREAM.UPDATE.{EVENTS.name}", smaller)
    async with connected(broker.url, book) as bus:
        info = await bus.api(f"STREAM.INFO.{EVENTS.name}", {})
        assert info["config"]["max_bytes"] == 1_000_000
    (line,) = book.named("stream_differs_from_configuration")
    assert line["stream"] == EVENTS.name
    assert line["found"] == {"max_age": 3_600 * 10**9, "max_bytes": 1_000_000}


@pytest.mark.parametrize(
    ("stream", "change", "message"),
    [
        pytest.param(EVENTS, {"discard": "old"}, "discard is 'old', expected 'new'", id="discard"),
        pytest.param(REQUESTS, {"storage": "memory"}, "storage is 'memory'", id="storage"),
        pytest.param(EVENTS, {"allow_direct": False}, "allow_direct is", id="no direct gets"),
        pytest.param(
            ANSWERS, {"max_msgs_per_subject": -1}, "max_msgs_per_subject is -1", id="all finals"
        ),
        pytest.param(
            REQUESTS,
            {"max_msg_size": 4096},
            "max_msg_size is 4096, expected at least 1008192",
            id="small messages",
        ),
        pytest.param(
            EVENTS,
            {"subjects": ["wc.event.>", "more"]},
            r"subjects is \['wc.event.>', 'more'\]",
            id="subjects",
        ),
        pytest.param(EVENTS, {"retention": "interest"}, "retention is 'interest'", id="retention"),
    ],
)
async def test_a_stream_with_another_meaning_is_refused(
    broker: BrokerProcess, stream: Any, change: dict[str, Any], message: str
) -> None:
    async with connected(broker.url, provision=False) as bus:
        config = bus.stream_config(stream) | change
        assert "error" not in await bus.api(f"STREAM.CREATE.{stream.name}", config)
        with pytest.raises(StreamMismatch, match=f"stream {stream.name}: {message}"):
            await bus.provision()


async def test_subjects_that_somebody_else_has_are_named(broker: BrokerProcess) -> None:
    async with connected(broker.url, provision=False) as bus:
        await bus.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["wc.event.x.>"]})
        with pytest.raises(StreamMismatch, match="another stream has its subjects"):
            await bus.provision()


async def test_a_disk_that_is_too_small_is_said_with_what_to_do(tmp_path: Path) -> None:
    store = {"store_dir": str(tmp_path / "store"), "max_file_store": 10_000_000}
    broker = BrokerProcess(tmp_path / "broker", config={"jetstream": store}).start()
    try:
        async with connected(broker.url, provision=False) as bus:
            with pytest.raises(StreamMismatch, match=r"lower \[bus\] requests_bytes_max, or give"):
                await bus.provision()
    finally:
        broker.stop()


async def test_a_bus_whose_messages_are_too_small_is_refused(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "broker", config={"max_payload": 65_536}).start()
    try:
        async with connected(broker.url, provision=False) as bus:
            with pytest.raises(StreamMismatch, match=r"65536 bytes, expected at least 1008192: ra"):
                await bus.provision()
    finally:
        broker.stop()


async def test_a_bus_without_jetstream_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ANSWER_WAIT_S", 1.0)
    text = f'{{"host": "127.0.0.1", "port": -1, "ports_file_dir": "{tmp_path / "broker"}"}}'
    broker = BrokerProcess(tmp_path / "broker", config_text=text).start()
    try:
        async with connected(broker.url, provision=False) as bus:
            begun = asyncio.get_running_loop().time()
            with pytest.raises(BusUnavailable, match=r"given up after 1 s.*JetStream"):
                await bus.provision()
            assert asyncio.get_running_loop().time() - begun < 2.0
    finally:
        broker.stop()
