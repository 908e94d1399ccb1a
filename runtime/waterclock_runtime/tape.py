"""Reading streams: the tape in order, the work queue with acknowledgements.

The client library's ordered consumer drops messages when its reader is slow and does not
notice; here every delivery's consumer sequence is checked, and whatever breaks the count
(a gap, silence, a lost consumer, a broken connection) makes a new consumer after the last
message that was handed over.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from nats.aio.msg import Msg

from waterclock_proto.subjects import EVENTS, REQUESTS
from waterclock_runtime import limits
from waterclock_runtime.bus import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, Closable, Wire
from waterclock_runtime.errors import BusUnavailable, ConsumerTaken, StreamRolledBack


class TapeMessage(Struct, frozen=True):
    """One stored event, as it was stored."""

    sequence: int
    stored_ns: int
    subject: str
    payload: bytes


class RequestMessage(Struct, frozen=True):
    """One submission out of REQUESTS; ``reply`` is where it is acknowledged."""

    sequence: int
    stored_ns: int
    subject: str
    payload: bytes
    headers: dict[str, str] | None
    reply: str


class TapeReader:
    """All messages of EVENTS that match ``filters``, from ``start`` on, in batches, for ever.

    In the order of the tape, each once, none left out that still stands there. A batch has at
    most ``limits.TAPE_BATCH_MAX`` messages. What is not taken waits in the bus, which sends no
    more than 32 MiB ahead.

    An empty batch comes at most once, and only if the head of the tape is reached without a
    message to show for it: so whoever iterates learns of ``caught_up`` even from an empty tape.

    Raises (from iteration):
        StreamRolledBack: the tape ends before what was read, says something else there, or is
            gone.
        BusUnavailable: the connection has ended for good.
    """

    def __init__(
        self, bus: Wire, *, filters: Sequence[str] = ("wc.event.>",), start: int = 1
    ) -> None:
        self._bus = bus
        self._filters = list(filters)
        self._next = max(1, start)
        """Everything before it was handed over, or stands before ``start``."""
        self._arrived = asyncio.Event()
        self._buffer: list[Msg] = []
        self._expected = 1
        """The consumer sequence of the next delivery to be handed over."""
        self._broken = True
        self._subscription: Closable | None = None
        self._last: tuple[int, bytes, int | None] | None = None
        self._consumer = ""
        self._forget: Callable[[], None] | None = None
        self.caught_up = False
        """Whether the head of the tape, as it was when reading began, has been reached. Set
        before the batch is handed over that reaches it, and never taken back."""
        self.resets = 0
        """Consumers that had to be replaced."""

    def __aiter__(self) -> AsyncIterator[list[TapeMessage]]:
        return self._batches()

    def remember(self, sequence: int, payload: bytes, stored_ns: int | None = None) -> None:
        """Say what stood at the position before ``start``, so that a rollback is seen at once."""
        self._last = (sequence, payload, stored_ns)

    async def close(self) -> None:
        """Let the consumer go."""
        self._let_go()
        if self._forget is not None:
            self._forget()
            self._forget = None

    async def _batches(self) -> AsyncIterator[list[TapeMessage]]:
        if self._forget is None:
            self._forget = self._bus.on_reconnect(self._on_reconnect)
        while True:
            if not self._buffer:
                if not self._broken:
                    await self._listen()
                    continue
                at_head = await self._subscribe()
                if at_head and not self.caught_up:
                    self.caught_up = True
                    yield []
                continue
            messages = self._buffer[: limits.TAPE_BATCH_MAX]
            del self._buffer[: limits.TAPE_BATCH_MAX]
            was_caught_up = self.caught_up
            batch = self._take(messages)
            if batch or self.caught_up != was_caught_up:
                yield batch

    async def _listen(self) -> None:
        """Wait for a message or a heartbeat; silence breaks the consumer."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(limits.TAPE_SILENCE_S):
                await self._arrived.wait()
        except TimeoutError:
            self._break()

    def _take(self, messages: Sequence[Msg]) -> list[TapeMessage]:
        batch: list[TapeMessage] = []
        for message in messages:
            if message.headers is not None and not message.reply.startswith(ACK_PREFIX):
                if not self._answer_control(message, message.headers):
                    self._break()
                    break
                continue
            delivery = parse_delivery(message.reply)
            if delivery.consumer_sequence != self._expected:
                # Something between was lost: everything from here on is read again.
                self._break()
                break
            self._expected += 1
            batch.append(
                TapeMessage(
                    delivery.stream_sequence, delivery.stored_ns, message.subject, message.data
                )
            )
            if delivery.pending == 0:
                self.caught_up = True
        if batch:
            last = batch[-1]
            self._next = last.sequence + 1
            self._last = (last.sequence, last.payload, last.stored_ns)
        return batch

    def _answer_control(self, message: Msg, headers: Mapping[str, str]) -> bool:
        """Flow control and heartbeats. Whether the count still holds."""
        stalled = headers.get("Nats-Consumer-Stalled")
        if stalled:
            self._bus.publish(stalled, b"")
        if message.reply:
            # Flow control: answered only now, when all that came before it has been taken.
            self._bus.publish(message.reply, b"")
        last = headers.get("Nats-Last-Consumer")
        if headers.get("Status") != "100" or (last and int(last) != self._expected - 1):
            return False
        if last and not stalled:
            # The bus sends a heartbeat when it has nothing to send.
            self.caught_up = True
        return True

    def _break(self) -> None:
        """Nothing that this consumer still brings is of use."""
        self._broken = True
        self._buffer = []
        self.resets += 1

    def _on_reconnect(self) -> None:
        # The bus forgot the consumer, or what it sent while nobody was there. What has arrived
        # is good, and is handed over first.
        if not self._broken:
            self._broken = True
            self.resets += 1
        self._arrived.set()

    def _let_go(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
            if self._bus.connected:
                self._bus.publish(f"$JS.API.CONSUMER.DELETE.{EVENTS.name}.{self._consumer}", b"")

    async def _subscribe(self) -> bool:
        """A new consumer after the last good message. Returns whether that is the head already."""
        self._let_go()
        await self._bus.wait_connected()
        try:
            await self._verify()
            return await self._make_consumer()
        except BusUnavailable as error:
            self._bus.log.warning("tape_unavailable", error=str(error))
            await asyncio.sleep(limits.RECONNECT_WAIT_S)
            return False

    async def _make_consumer(self) -> bool:
        inbox = self._bus.new_inbox()
        self._buffer = []
        self._expected = 1
        self._consumer = f"tape-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_subject": inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "flow_control": True,
            "idle_heartbeat": int(limits.TAPE_HEARTBEAT_S * 10**9),
            "inactive_threshold": int(limits.TAPE_INACTIVE_S * 10**9),
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
            "replay_policy": "instant",
        }
        if self._filters != ["wc.event.>"]:
            config["filter_subjects"] = self._filters
        # Before the consumer is made: a break while it is being made must count.
        self._broken = False
        self._subscription = self._bus.listen(inbox, self._on_message)
        try:
            made = await self._bus.api(
                f"CONSUMER.CREATE.{EVENTS.name}.{self._consumer}",
                {"stream_name": EVENTS.name, "config": config, "action": "create"},
            )
        except BusUnavailable:
            self._broken = True
            raise
        if "error" in made:
            self._broken = True
            raise BusUnavailable(f"consumer of {EVENTS.name}: {made['error'].get('description')}")
        return int(made.get("num_pending", 0)) == 0 and not self._buffer

    async def _verify(self) -> None:
        """The tape still has, at the last position read, what was read there."""
        _, last_sequence = await self._head()
        if last_sequence < self._next - 1:
            raise StreamRolledBack(
                f"{EVENTS.name} ends at {last_sequence}, but {self._next - 1} had been read"
            )
        if self._last is None:
            return
        sequence, payload, stored_ns = self._last
        found = await self._bus.message(EVENTS.name, sequence)
        # None: deleted by age or by hand meanwhile, which is a hole and not another history.
        if found is None or (found[1] == payload and stored_ns in (None, found[2])):
            return
        raise StreamRolledBack(
            f"{EVENTS.name} at {sequence}: expected the payload with SHA-256"
            f" {hashlib.sha256(payload).hexdigest()}, stored at {stored_ns} ns; found"
            f" {hashlib.sha256(found[1]).hexdigest()}, stored at {found[2]} ns"
        )

    async def _head(self) -> tuple[int, int]:
        """First and last sequence of the tape.

        Raises:
            StreamRolledBack: it has not been there for a while.
        """
        give_up_s = asyncio.get_running_loop().time() + limits.TAPE_MISSING_S
        while True:
            info = await self._bus.api(f"STREAM.INFO.{EVENTS.name}", {})
            error = info.get("error")
            if error is None:
                return int(info["state"]["first_seq"]), int(info["state"]["last_seq"])
            if error.get("err_code") != STREAM_NOT_FOUND:
                raise BusUnavailable(f"stream {EVENTS.name}: {error.get('description')}")
            if asyncio.get_running_loop().time() >= give_up_s:
                raise StreamRolledBack(
                    f"{EVENTS.name} does not exist any more, but {self._next - 1} had been read"
                )
            await asyncio.sleep(limits.RECONNECT_WAIT_S)

    async def _on_message(self, message: Msg) -> None:
        self._buffer.append(message)
        self._arrived.set()


class PullReader:
    """The work queue of REQUESTS: made anew by whoever was elected, acknowledged one by one.

    Pull requests are kept open all the time and renewed at half, so that nothing ever waits
    for the next one. After a break the consumer is made anew after the last submission that was
    handed over: what was on its way at the break would else come back only after the
    acknowledgement wait. So nothing here depends on acknowledgements having arrived; they bound
    how many undecided submissions this reader is sent. One that was not acknowledged in time
    comes again.

    Raises (from iteration):
        ConsumerTaken: the consumer was deleted, which another admission does when elected.
        StreamRolledBack: REQUESTS does not exist any more.
        BusUnavailable: the connection has ended for good.
    """

    def __init__(self, bus: Wire, *, consumer: str, start: int) -> None:
        self._bus = bus
        self._name = consumer
        self._next = max(1, start)
        self._arrived = asyncio.Event()
        self._buffer: list[Msg] = []
        self._expected = 1
        self._broken = False
        self._making = False
        """The consumer was deleted from here, and not yet known to be made."""
        self._recovered_s = float("-inf")
        self._credit = 0
        """Messages that the open pull requests may still bring."""
        self._inbox = ""
        self._owner = secrets.token_hex(8)
        """Written into the consumer, so that another one's of the same name is told apart."""
        self._subscription: Closable | None = None
        self._forget: Callable[[], None] | None = None
        self.resets = 0
        """Times the consumer was made anew."""

    async def open(self) -> None:
        """Take the consumer over; whoever read from it before learns that it is gone.

        Raises:
            BusUnavailable: it could not be made.
        """
        if self._forget is None:
            self._forget = self._bus.on_reconnect(self._break)
        await self._make_consumer()

    async def close(self) -> None:
        """Stop reading. The consumer stays for whoever is elected next."""
        if self._forget is not None:
            self._forget()
            self._forget = None
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def ack(self, message: RequestMessage) -> None:
        """Say that the submission is decided. May be lost; then it comes again and is known."""
        self._bus.publish(message.reply, b"+ACK")

    def __aiter__(self) -> AsyncIterator[list[RequestMessage]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[list[RequestMessage]]:
        while True:
            if self._broken:
                await self._recover()
                continue
            if not self._buffer:
                await self._listen()
                continue
            messages, self._buffer = self._buffer, []
            batch = self._take(messages)
            if not self._broken and self._credit <= limits.PULL_BATCH // 2:
                self._ask()
            if batch:
                yield batch

    async def _listen(self) -> None:
        """Wait for a message or a heartbeat; silence breaks the consumer."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(limits.PULL_SILENCE_S):
                await self._arrived.wait()
        except TimeoutError:
            self._break()

    def _take(self, messages: Sequence[Msg]) -> list[RequestMessage]:
        batch: list[RequestMessage] = []
        for message in messages:
            # Told by the reply subject, since a producer's own headers may say anything.
            if not message.reply.startswith(ACK_PREFIX):
                if (message.headers or {}).get("Status") != "100":
                    self._end_request(message)
                continue
            delivery = parse_delivery(message.reply)
            if delivery.consumer_sequence != self._expected:
                self._break()
                break
            self._expected += 1
            self._credit -= 1
            batch.append(
                RequestMessage(
                    delivery.stream_sequence,
                    delivery.stored_ns,
                    message.subject,
                    message.data,
                    message.headers,
                    message.reply,
                )
            )
            # A repetition does not move it back.
            self._next = max(self._next, delivery.stream_sequence + 1)
        return batch

    def _end_request(self, message: Msg) -> None:
        """A pull request is over: filled, expired, or refused."""
        headers = message.headers or {}
        description = headers.get("Description", "")
        if "Consumer Deleted" in description:
            raise ConsumerTaken(f"consumer {self._name} was taken over")
        unused = headers.get("Nats-Pending-Messages")
        if unused is None:
            # Refused as a whole, or by a bus without a stream: looked into before the next.
            self._bus.log.warning("pull_refused", status=headers.get("Status"), why=description)
            self._break()
            return
        self._credit -= int(unused)

    def _break(self) -> None:
        """What has not been handed over is read again from a new consumer."""
        if not self._broken:
            self._broken = True
            self.resets += 1
        self._buffer = []
        self._arrived.set()

    async def _recover(self) -> None:
        """A new consumer after the last good message, if the old one is still this reader's."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._recovered_s < limits.PULL_HEARTBEAT_S:
            await asyncio.sleep(limits.RECONNECT_WAIT_S)
        self._recovered_s = now_s
        await self._bus.wait_connected()
        try:
            await self._check_owner()
            await self._make_consumer()
        except BusUnavailable as error:
            self._bus.log.warning("queue_unavailable", error=str(error))
            await asyncio.sleep(limits.RECONNECT_WAIT_S)

    async def _check_owner(self) -> None:
        info = await self._bus.api(f"CONSUMER.INFO.{REQUESTS.name}.{self._name}", {})
        error = info.get("error")
        if error is None:
            owner = info["config"].get("metadata", {}).get(_OWNER)
            if owner != self._owner:
                raise ConsumerTaken(f"consumer {self._name} was taken over by {owner}")
        elif error.get("err_code") == STREAM_NOT_FOUND:
            raise StreamRolledBack(f"{REQUESTS.name} does not exist any more")
        elif error.get("err_code") != CONSUMER_NOT_FOUND:
            raise BusUnavailable(f"consumer {self._name}: {error.get('description')}")
        elif not self._making:
            raise ConsumerTaken(f"consumer {self._name} does not exist any more")

    async def _make_consumer(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
        self._inbox = self._bus.new_inbox()
        self._buffer = []
        self._expected = 1
        self._credit = 0
        # Before the consumer is made: a break while it is being made must count.
        self._broken = False
        self._subscription = self._bus.listen(self._inbox, self._on_message)
        self._making = True
        try:
            await self._bus.api(f"CONSUMER.DELETE.{REQUESTS.name}.{self._name}", {})
            made = await self._bus.api(
                f"CONSUMER.CREATE.{REQUESTS.name}.{self._name}",
                {"stream_name": REQUESTS.name, "config": self._config(), "action": "create"},
            )
        except BusUnavailable:
            self._broken = True
            raise
        if "error" in made:
            self._broken = True
            raise BusUnavailable(f"consumer {self._name}: {made['error'].get('description')}")
        self._making = False
        self._ask()

    def _config(self) -> dict[str, Any]:
        return {
            "durable_name": self._name,
            "name": self._name,
            "metadata": {_OWNER: self._owner},
            "ack_policy": "explicit",
            "ack_wait": int(limits.PULL_ACK_WAIT_S * 10**9),
            "max_ack_pending": limits.PULL_ACK_PENDING_MAX,
            "max_deliver": -1,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
            "replay_policy": "instant",
            "max_waiting": 64,
        }

    def _ask(self) -> None:
        batch = limits.PULL_BATCH - self._credit
        self._credit += batch
        self._bus.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{REQUESTS.name}.{self._name}",
            (
                f'{{"batch":{batch},"max_bytes":{limits.PULL_BYTES}'
                f',"expires":{int(limits.PULL_EXPIRES_S * 10**9)}'
                f',"idle_heartbeat":{int(limits.PULL_HEARTBEAT_S * 10**9)}}}'
            ).encode(),
            reply=self._inbox,
        )

    async def _on_message(self, message: Msg) -> None:
        self._buffer.append(message)
        self._arrived.set()


class Delivery(Struct, frozen=True):
    """What the acknowledgement subject of a delivered message says."""

    stream_sequence: int
    consumer_sequence: int
    stored_ns: int
    pending: int


def parse_delivery(reply: str) -> Delivery:
    """Read ``$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<delivered>.<stream sequence>``
    ``.<consumer sequence>.<ns>.<pending>[.<token>]``.

    Integers all the way: the client library's own metadata goes through a float, and is
    wrong by a microsecond half of the time.

    Raises:
        ValueError: it is no such subject.
    """
    parts = reply.split(".")
    if len(parts) == 9:
        first = 5
    elif len(parts) >= 11:
        first = 7
    else:
        raise ValueError(f"expected an acknowledgement subject of 9 or 11 tokens, found {reply!r}")
    return Delivery(
        stream_sequence=int(parts[first]),
        consumer_sequence=int(parts[first + 1]),
        stored_ns=int(parts[first + 2]),
        pending=int(parts[first + 3]),
    )


ACK_PREFIX = "$JS.ACK."
_OWNER = "waterclock-owner"
