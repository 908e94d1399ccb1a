"""The reader of the tape against a bus in memory: the count is checked, and gaps are read again."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from fake_wire import FakeWire, turns
from waterclock_proto.subjects import EVENTS
from waterclock_runtime import limits
from waterclock_runtime.bus import parse_rfc3339_ns
from waterclock_runtime.errors import BusUnavailable, ConsumerTaken, StreamRolledBack
from waterclock_runtime.tape import (
    Delivery,
    PullReader,
    RequestMessage,
    TapeMessage,
    TapeReader,
    parse_delivery,
)

Batches = AsyncIterator[list[TapeMessage]]


class Tape:
    """A tape on a fake bus, and the consumers that are made on it."""

    def __init__(self, size: int) -> None:
        self.wire = FakeWire()
        self.consumers: list[dict[str, Any]] = []
        self.exists = True
        for number in range(1, size + 1):
            self.wire.tape.append((f"wc.event.x{number}._._", b"%d" % number))
        self.wire.api_answers = {
            f"STREAM.INFO.{EVENTS.name}": self._info,
            f"CONSUMER.CREATE.{EVENTS.name}": self._create,
        }
        self.sent = 0

    def _info(self, _: Mapping[str, Any]) -> dict[str, Any]:
        if not self.exists:
            return {"error": {"err_code": 10059, "description": "stream not found"}}
        return {"state": {"first_seq": 1, "last_seq": len(self.wire.tape)}}

    def _create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.consumers.append(request["config"])
        self.sent = 0
        return {"num_pending": max(0, len(self.wire.tape) + 1 - self.start)}

    @property
    def start(self) -> int:
        return self.consumers[-1]["opt_start_seq"]

    @property
    def inbox(self) -> str:
        return self.consumers[-1]["deliver_subject"]

    def send(self, *sequences: int, skip: int = 0) -> None:
        """The newest consumer delivers; ``skip`` deliveries were lost before these."""
        self.sent += skip
        for sequence in sequences:
            self.sent += 1
            subject, payload = self.wire.tape[sequence - 1]
            pending = len(self.wire.tape) - sequence
            stored_ns = self.wire.stored_ns + sequence
            reply = f"$JS.ACK.EVENTS.c.1.{sequence}.{self.sent}.{stored_ns}.{pending}"
            self.wire.deliver_to(self.inbox, subject, payload, reply=reply)

    def control(self, *, reply: str = "", status: str = "100", **headers: object) -> None:
        named = {key.replace("_", "-"): str(value) for key, value in headers.items()}
        self.wire.deliver_to(
            self.inbox, self.inbox, b"", reply=reply, headers={"Status": status, **named}
        )

    def heartbeat(self, last: int | None = None) -> None:
        self.control(Nats_Last_Consumer=self.sent if last is None else last)


async def started(batches: Batches) -> "asyncio.Future[list[TapeMessage]]":
    """The reader made its consumer and waits; what it hands over next is the task's result."""
    task = asyncio.ensure_future(anext(batches))
    await turns()
    return task


def sequences(batch: list[TapeMessage]) -> list[int]:
    return [message.sequence for message in batch]


async def test_messages_come_as_they_were_stored() -> None:
    tape = Tape(3)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.send(1, 2)
    assert await batch == [
        TapeMessage(1, tape.wire.stored_ns + 1, "wc.event.x1._._", b"1"),
        TapeMessage(2, tape.wire.stored_ns + 2, "wc.event.x2._._", b"2"),
    ]
    assert not reader.caught_up
    batch = await started(batches)
    tape.send(3)
    assert sequences(await batch) == [3]
    assert reader.caught_up
    assert tape.consumers[0]["opt_start_seq"] == 1
    assert "filter_subjects" not in tape.consumers[0]


async def test_a_gap_is_read_again_from_the_last_good_message() -> None:
    tape = Tape(6)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.send(1, 2)
    tape.send(5, skip=2)
    tape.send(6)
    assert sequences(await batch) == [1, 2]
    batch = await started(batches)
    assert len(tape.consumers) == 2
    assert tape.start == 3
    tape.send(3, 4, 5, 6)
    assert sequences(await batch) == [3, 4, 5, 6]
    assert reader.resets == 1


async def test_a_heartbeat_that_counts_more_than_came_is_a_gap() -> None:
    tape = Tape(3)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.send(1)
    assert sequences(await batch) == [1]
    batch = await started(batches)
    tape.heartbeat(last=3)
    await turns()
    assert tape.start == 2
    tape.send(2, 3)
    assert sequences(await batch) == [2, 3]


async def test_good_messages_before_a_bad_heartbeat_are_handed_over() -> None:
    tape = Tape(3)
    batches = aiter(TapeReader(tape.wire))
    batch = await started(batches)
    tape.send(1)
    tape.heartbeat(last=2)
    tape.send(3)
    assert sequences(await batch) == [1]
    batch = await started(batches)
    assert tape.start == 2
    tape.send(2, 3)
    assert sequences(await batch) == [2, 3]


async def test_silence_makes_a_new_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(2)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.send(1)
    assert sequences(await batch) == [1]
    monkeypatch.setattr(limits, "TAPE_SILENCE_S", 0.01)
    batch = asyncio.ensure_future(anext(batches))
    await turns(lambda: len(tape.consumers) > 1)
    monkeypatch.setattr(limits, "TAPE_SILENCE_S", 60)
    assert tape.start == 2
    tape.send(2)
    assert sequences(await batch) == [2]
    assert reader.resets == 1


async def test_a_reconnect_makes_a_new_consumer_at_once() -> None:
    tape = Tape(3)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.send(1)
    assert sequences(await batch) == [1]
    # What arrived before the break was good.
    tape.send(2)
    tape.wire.break_connection()
    tape.wire.reconnect()
    assert sequences(await anext(batches)) == [2]
    batch = await started(batches)
    assert tape.start == 3
    tape.send(3)
    assert sequences(await batch) == [3]
    await reader.close()
    tape.wire.break_connection()
    tape.wire.reconnect()


async def test_a_reader_that_is_not_taken_from_holds_the_flow_back() -> None:
    tape = Tape(4)
    batches = aiter(TapeReader(tape.wire))
    batch = await started(batches)
    tape.send(1)
    assert sequences(await batch) == [1]
    tape.send(2, 3)
    tape.control(reply="$JS.FC.EVENTS.c.x")
    assert tape.wire.core == []
    assert sequences(await anext(batches)) == [2, 3]
    assert [message.subject for message in tape.wire.core] == ["$JS.FC.EVENTS.c.x"]


async def test_a_stalled_consumer_is_answered_and_is_not_at_the_head() -> None:
    tape = Tape(4)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.control(Nats_Last_Consumer=0, Nats_Consumer_Stalled="$JS.FC.EVENTS.c.y")
    tape.send(1)
    assert sequences(await batch) == [1]
    assert [message.subject for message in tape.wire.core] == ["$JS.FC.EVENTS.c.y"]
    assert not reader.caught_up


async def test_an_empty_tape_gives_one_empty_batch() -> None:
    tape = Tape(0)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    assert await anext(batches) == []
    assert reader.caught_up
    batch = await started(batches)
    tape.heartbeat()
    tape.heartbeat()
    await turns()
    assert not batch.done()
    tape.wire.tape.append(("wc.event.x1._._", b"1"))
    tape.send(1)
    assert sequences(await batch) == [1]


async def test_a_heartbeat_says_that_the_head_is_reached_where_no_message_does() -> None:
    """What was pending when the consumer was made has been deleted meanwhile."""
    tape = Tape(3)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.heartbeat()
    assert await batch == []
    assert reader.caught_up
    batch = await started(batches)
    tape.heartbeat()
    await turns()
    assert not batch.done()
    batch.cancel()


async def test_a_new_consumer_does_not_take_caught_up_back() -> None:
    tape = Tape(1)
    reader = TapeReader(tape.wire)
    batches = aiter(reader)
    batch = await started(batches)
    tape.send(1)
    await batch
    assert reader.caught_up
    tape.wire.break_connection()
    tape.wire.reconnect()
    batch = await started(batches)
    tape.heartbeat()
    await turns()
    assert reader.caught_up
    assert not batch.done()
    batch.cancel()


async def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TAPE_BATCH_MAX", 10)
    tape = Tape(25)
    batches = aiter(TapeReader(tape.wire))
    batch = await started(batches)
    tape.send(*range(1, 26))
    sizes = [len(await batch), len(await anext(batches)), len(await anext(batches))]
    assert sizes == [10, 10, 5]


async def test_filters_and_start_reach_the_consumer() -> None:
    tape = Tape(9)
    batches = aiter(TapeReader(tape.wire, filters=["wc.event.a.>", "wc.event.b.>"], start=7))
    batch = await started(batches)
    assert tape.consumers[0]["filter_subjects"] == ["wc.event.a.>", "wc.event.b.>"]
    assert tape.start == 7
    tape.send(9)
    assert sequences(await batch) == [9]


async def test_a_shorter_tape_is_a_rollback() -> None:
    tape = Tape(3)
    batches = aiter(TapeReader(tape.wire))
    batch = await started(batches)
    tape.send(1, 2, 3)
    await batch
    del tape.wire.tape[1:]
    tape.wire.break_connection()
    tape.wire.reconnect()
    with pytest.raises(StreamRolledBack, match="ends at 1, but 3 had been read"):
        await anext(batches)


@pytest.mark.parametrize("what", ["payload", "stamp"])
async def test_another_message_at_the_last_position_is_a_rollback(what: str) -> None:
    tape = Tape(3)
    batches = aiter(TapeReader(tape.wire))
    batch = await started(batches)
    tape.send(1, 2, 3)
    await batch
    if what == "payload":
        tape.wire.tape[2] = ("wc.event.x3._._", b"other")
    else:
        tape.wire.stored_ns += 1
    tape.wire.break_connection()
    tape.wire.reconnect()
    with pytest.raises(StreamRolledBack, match="at 3: expected the payload with SHA-256"):
        await anext(batches)


async def test_a_tape_that_is_gone_is_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TAPE_MISSING_S", 0)
    tape = Tape(3)
    tape.exists = False
    with pytest.raises(StreamRolledBack, match="does not exist any more"):
        await anext(aiter(TapeReader(tape.wire)))


async def test_a_bus_that_cannot_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECONNECT_WAIT_S", 0)
    tape = Tape(1)
    answers = [
        {"error": {"code": 503, "err_code": 10074, "description": "consumer create failed"}},
        tape._create({"config": {"opt_start_seq": 1, "deliver_subject": ""}}),
    ]
    tape.consumers.clear()

    def create(request: Mapping[str, Any]) -> dict[str, Any]:
        tape.consumers.append(request["config"])
        return answers.pop(0)

    tape.wire.api_answers[f"CONSUMER.CREATE.{EVENTS.name}"] = create
    batches = aiter(TapeReader(tape.wire))
    batch = await started(batches)
    await turns(lambda: len(tape.consumers) > 1)
    await turns()
    tape.send(1)
    assert sequences(await batch) == [1]
    assert len(tape.wire.book.named("tape_unavailable")) == 1


# The work queue.


class Queue:
    """REQUESTS on a fake bus."""

    def __init__(self) -> None:
        self.wire = FakeWire()
        self.configs: list[dict[str, Any]] = []
        self.owner: str | None = None
        self.error: dict[str, Any] | None = None
        self.wire.api_answers = {
            "CONSUMER.DELETE.REQUESTS.admission": lambda _: {"success": True},
            "CONSUMER.CREATE.REQUESTS.admission": self._create,
            "CONSUMER.INFO.REQUESTS.admission": self._info,
        }
        self.sent = 0

    def _create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.configs.append(request["config"])
        self.sent = 0
        return {"num_pending": 0}

    def _info(self, _: Mapping[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        metadata = self.configs[-1]["metadata"]
        return {"config": {"metadata": metadata if self.owner is None else {"x": self.owner}}}

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [
            json.loads(message.payload)
            for message in self.wire.core
            if message.subject == "$JS.API.CONSUMER.MSG.NEXT.REQUESTS.admission"
        ]

    @property
    def inbox(self) -> str:
        return [m.reply for m in self.wire.core if "MSG.NEXT" in m.subject][-1]

    def send(self, *numbers: int, skip: int = 0, headers: Any = None) -> None:
        self.sent += skip
        for number in numbers:
            self.sent += 1
            reply = f"$JS.ACK.REQUESTS.admission.1.{number}.{self.sent}.{1_000 + number}.0"
            self.wire.deliver_to(
                self.inbox, "wc.request.acme", b"%d" % number, reply=reply, headers=headers
            )

    def status(self, status: str, description: str, pending: int | None = None) -> None:
        headers = {"Status": status, "Description": description}
        if pending is not None:
            headers["Nats-Pending-Messages"] = str(pending)
        self.wire.deliver_to(self.inbox, self.inbox, b"", reply="", headers=headers)


async def opened() -> tuple[Queue, PullReader, AsyncIterator[list[RequestMessage]]]:
    queue = Queue()
    reader = PullReader(queue.wire, consumer="admission", start=5)
    await reader.open()
    return queue, reader, aiter(reader)


async def next_requests(
    batches: AsyncIterator[list[RequestMessage]],
) -> "asyncio.Future[list[RequestMessage]]":
    task = asyncio.ensure_future(anext(batches))
    await turns()
    return task


async def test_submissions_come_with_all_that_admission_needs() -> None:
    queue, reader, batches = await opened()
    assert queue.configs[0]["opt_start_seq"] == 5
    queue.send(5, 6, headers={"Status": "100", "X": "y"})
    batch = await anext(batches)
    assert [message.sequence for message in batch] == [5, 6]
    assert batch[0] == RequestMessage(
        5, 1_005, "wc.request.acme", b"5", {"Status": "100", "X": "y"}, batch[0].reply
    )
    reader.ack(batch[0])
    assert (queue.wire.core[-1].subject, queue.wire.core[-1].payload) == (batch[0].reply, b"+ACK")


async def test_the_next_pull_request_goes_out_before_the_last_one_is_used_up() -> None:
    queue, _, batches = await opened()
    assert [asked["batch"] for asked in queue.asked] == [limits.PULL_BATCH]
    queue.send(*range(5, 5 + limits.PULL_BATCH // 2 - 1))
    await anext(batches)
    assert len(queue.asked) == 1
    queue.send(1_000)
    await anext(batches)
    assert [asked["batch"] for asked in queue.asked] == [limits.PULL_BATCH, limits.PULL_BATCH // 2]


async def test_an_expired_pull_request_is_renewed_by_what_it_did_not_bring() -> None:
    queue, _, batches = await opened()
    queue.send(5)
    await anext(batches)
    task = await next_requests(batches)
    queue.status("408", "Request Timeout", pending=limits.PULL_BATCH - 1)
    await turns()
    assert [asked["batch"] for asked in queue.asked] == [limits.PULL_BATCH, limits.PULL_BATCH]
    assert len(queue.configs) == 1
    task.cancel()


async def test_a_reconnect_takes_the_queue_up_after_what_was_handed_over() -> None:
    queue, reader, batches = await opened()
    queue.send(5, 6)
    assert len(await anext(batches)) == 2
    queue.send(7)
    queue.wire.break_connection()
    queue.wire.reconnect()
    task = await next_requests(batches)
    assert [config["opt_start_seq"] for config in queue.configs] == [5, 7]
    queue.send(7, 8)
    assert [message.sequence for message in await task] == [7, 8]
    assert reader.resets == 1


async def test_a_lost_delivery_is_read_again() -> None:
    queue, _, batches = await opened()
    queue.send(5)
    queue.send(7, skip=1)
    assert [message.sequence for message in await anext(batches)] == [5]
    task = await next_requests(batches)
    assert queue.configs[-1]["opt_start_seq"] == 6
    queue.send(6, 7)
    assert [message.sequence for message in await task] == [6, 7]


async def test_a_repetition_comes_again_and_moves_nothing() -> None:
    queue, _, batches = await opened()
    queue.send(5, 6, 5)
    assert [message.sequence for message in await anext(batches)] == [5, 6, 5]
    queue.wire.break_connection()
    queue.wire.reconnect()
    task = await next_requests(batches)
    assert queue.configs[-1]["opt_start_seq"] == 7
    task.cancel()


async def test_a_deleted_consumer_was_taken_over() -> None:
    queue, _, batches = await opened()
    queue.status("409", "Consumer Deleted")
    with pytest.raises(ConsumerTaken):
        await anext(batches)


@pytest.mark.parametrize(
    ("owner", "error", "raised"),
    [
        ("other", None, ConsumerTaken),
        (None, {"err_code": 10014, "description": "consumer not found"}, ConsumerTaken),
        (None, {"err_code": 10059, "description": "stream not found"}, StreamRolledBack),
    ],
)
async def test_who_reads_is_looked_at_after_a_break(
    owner: str | None, error: dict[str, Any] | None, raised: type[Exception]
) -> None:
    queue, _, batches = await opened()
    queue.wire.break_connection()
    queue.owner, queue.error = owner, error
    queue.wire.reconnect()
    with pytest.raises(raised):
        await anext(batches)
    # The other one's consumer was left alone.
    assert queue.wire.api_calls.count("CONSUMER.DELETE.REQUESTS.admission") == 1


async def test_a_break_between_delete_and_create_is_no_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RECONNECT_WAIT_S", 0)
    queue, _, batches = await opened()
    create = queue.wire.api_answers["CONSUMER.CREATE.REQUESTS.admission"]

    def fail(_: Mapping[str, Any]) -> dict[str, Any]:
        raise BusUnavailable("away")

    queue.wire.api_answers["CONSUMER.CREATE.REQUESTS.admission"] = fail
    queue.wire.break_connection()
    queue.wire.reconnect()
    task = await next_requests(batches)
    queue.error = {"err_code": 10014, "description": "consumer not found"}
    queue.wire.api_answers["CONSUMER.CREATE.REQUESTS.admission"] = create
    await turns(lambda: len(queue.configs) > 1)
    await turns()
    queue.send(5)
    assert [message.sequence for message in await task] == [5]


# What the bus writes into subjects and headers.


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param("$JS.ACK.EVENTS.c.1.77.5.1700000000123456789.9", id="9 tokens"),
        pytest.param("$JS.ACK._.ACC.EVENTS.c.1.77.5.1700000000123456789.9", id="11 tokens"),
        pytest.param("$JS.ACK.hub.ACC.EVENTS.c.1.77.5.1700000000123456789.9.tok", id="12 tokens"),
    ],
)
def test_a_delivery_is_read_from_its_reply_subject(reply: str) -> None:
    assert parse_delivery(reply) == Delivery(77, 5, 1_700_000_000_123_456_789, 9)


@pytest.mark.parametrize("reply", ["", "$JS.ACK.EVENTS.c.1.77.5.17", "a.b.c.d.e.f.g.h.i.j"])
def test_what_is_no_delivery_is_refused(reply: str) -> None:
    with pytest.raises(ValueError, match="expected an acknowledgement subject"):
        parse_delivery(reply)


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000_123_456_789),
        ("2023-11-14T22:13:20.1Z", 1_700_000_000_100_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000_000),
        ("1970-01-01T00:00:00.000000001Z", 1),
        ("2106-02-07T06:28:16.999999999Z", 4_294_967_296_999_999_999),
        ("", 0),
    ],
)
def test_a_stamp_of_the_bus_is_read_to_the_nanosecond(text: str, expected_ns: int) -> None:
    assert parse_rfc3339_ns(text) == expected_ns


@pytest.mark.parametrize("text", ["2023-11-14T22:13:20+02:00", "yesterday", "2023-11-14T25:00:00Z"])
def test_a_stamp_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever part of it is wrong
        parse_rfc3339_ns(text)
