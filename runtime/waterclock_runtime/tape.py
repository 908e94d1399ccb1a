"""Reading streams: the tape in order, the work queue with acknowledgements.

The client library's ordered consumer drops messages when its reader is slow and does not
notice; here every delivery's consumer sequence is checked, and whatever breaks the count
(a gap, silence, a lost consumer, a restarted bus) makes a new consumer after the last
message that was read.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from waterclock_proto.subjects import EVENTS, REQUESTS
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus
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

    Yields an empty batch when it reaches the head of the tape without a message to show for
    it, so that whoever waits for ``caught_up`` learns it.

    Raises (from iteration):
        StreamRolledBack: the tape ends before what was read, or says something else there.
    """

    def __init__(
        self, bus: Bus, *, filters: Sequence[str] = ("wc.event.>",), start: int = 1
    ) -> None:
        self._bus = bus
        self._filters = list(filters)
        self._next = max(1, start)
        self._ready = asyncio.Event()
        self._buffer: list[Msg] = []
        self._expected = 1
        self._broken = True
        self._heard_s = 0.0
        self._subscription: NatsSubscription | None = None
        self._last: tuple[int, bytes] | None = None
        self._consumer = ""
        self.caught_up = False
        """Whether the head of the tape, as it was when reading began, has been reached."""
        self.resets = 0

    def __aiter__(self) -> AsyncIterator[list[TapeMessage]]:
        return self._batches()

    async def close(self) -> None:
        """Let the consumer go. The server forgets it after a while anyway."""
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            if self._bus.connected:
                await subscription.unsubscribe()

    async def _batches(self) -> AsyncIterator[list[TapeMessage]]:
        loop = asyncio.get_running_loop()
        while True:
            if self._broken:
                if await self._subscribe():
                    self.caught_up = True
                    yield []
                continue
            if not self._buffer:
                self._ready.clear()
                try:
                    async with asyncio.timeout(limits.TAPE_SILENCE_S):
                        await self._ready.wait()
                except TimeoutError:
                    self._broken = True
                    continue
            if loop.time() - self._heard_s > limits.TAPE_SILENCE_S:
                self._broken = not self._buffer
            messages, self._buffer = self._buffer, []
            batch = self._take(messages)
            if batch:
                yield batch
            elif self.caught_up and not self._said_caught_up:
                self._said_caught_up = True
                yield []

    _said_caught_up = False

    def _take(self, messages: list[Msg]) -> list[TapeMessage]:
        batch: list[TapeMessage] = []
        for message in messages:
            if message.headers is not None and message.headers.get("Status") == "100":
                self._answer_control(message)
                continue
            delivery = parse_delivery(message.reply)
            if delivery.consumer_sequence != self._expected:
                # Something between was lost: everything from here on is read again.
                self._broken = True
                self.resets += 1
                break
            self._expected += 1
            if delivery.stream_sequence < self._next:
                continue
            batch.append(
                TapeMessage(
                    delivery.stream_sequence, delivery.stored_ns, message.subject, message.data
                )
            )
            self._next = delivery.stream_sequence + 1
            if delivery.pending == 0:
                self.caught_up = True
        if batch:
            last = batch[-1]
            self._last = (last.sequence, last.payload)
            self._said_caught_up = self.caught_up
        return batch

    def _answer_control(self, message: Msg) -> None:
        headers = message.headers or {}
        stalled = headers.get("Nats-Consumer-Stalled")
        if stalled:
            self._bus.publish(stalled, b"")
        if message.reply:
            # Flow control: answered only now, when all that came before it has been taken.
            self._bus.publish(message.reply, b"")
        last = headers.get("Nats-Last-Consumer")
        if last is not None and int(last) != self._expected - 1:
            self._broken = True
            self.resets += 1

    async def _subscribe(self) -> bool:
        """A new consumer after the last good message. Returns whether the head is here already."""
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            if self._bus.connected:
                await subscription.unsubscribe()
            if self._consumer:
                self._bus.publish(f"$JS.API.CONSUMER.DELETE.{EVENTS.name}.{self._consumer}", b"")
        while not self._bus.connected:
            await asyncio.sleep(limits.RECONNECT_WAIT_S)
        try:
            await self._verify()
            inbox = self._bus.nc.new_inbox()
            self._buffer = []
            self._expected = 1
            self._consumer = f"tape-{secrets.token_hex(8)}"
            self._subscription = await self._bus.nc.subscribe(
                inbox, cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
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
            made = await self._bus.api(
                f"CONSUMER.CREATE.{EVENTS.name}.{self._consumer}",
                {"stream_name": EVENTS.name, "config": config, "action": "create"},
            )
        except BusUnavailable as error:
            self._bus.log.warning("tape_unavailable", error=str(error))
            return False
        if "error" in made:
            self._bus.log.warning("tape_refused", error=made["error"])
            await asyncio.sleep(0.5)
            return False
        self._broken = False
        self._heard_s = asyncio.get_running_loop().time()
        return int(made.get("num_pending", 0)) == 0 and not self._buffer

    async def _verify(self) -> None:
        """The tape still has, at the last position read, what was read there."""
        _, last_sequence = await self._bus.stream_state(EVENTS.name)
        if last_sequence < self._next - 1:
            raise StreamRolledBack(
                f"{EVENTS.name} ends at {last_sequence}, but {self._next - 1} had been read"
            )
        if self._last is None:
            return
        sequence, payload = self._last
        found = await self._bus.message(EVENTS.name, sequence)
        # None: deleted by age or by hand meanwhile, which is a hole and not another history.
        if found is not None and found[1] != payload:
            raise StreamRolledBack(
                f"{EVENTS.name} at {sequence}: expected the payload with SHA-256"
                f" {hashlib.sha256(payload).hexdigest()}, found {hashlib.sha256(found[1]).hexdigest()}"
            )

    def remember(self, sequence: int, payload: bytes) -> None:
        """Say what stood at the position before ``start``, so that a rollback is seen at once."""
        self._last = (sequence, payload)

    async def _on_message(self, message: Msg) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._buffer.append(message)
        self._ready.set()


class PullReader:
    """The work queue of REQUESTS: made anew by whoever was elected, acknowledged one by one.

    A pull request is kept open all the time and renewed at half, so that nothing ever waits
    for the next request.

    Raises (from iteration):
        ConsumerTaken: the consumer was deleted, which another admission does when elected.
    """

    def __init__(self, bus: Bus, *, consumer: str, start: int) -> None:
        self._bus = bus
        self._name = consumer
        self._next = max(1, start)
        self._ready = asyncio.Event()
        self._buffer: list[Msg] = []
        self._credit = 0
        self._inbox = bus.nc.new_inbox()
        self._gone = ""
        self._breaks = bus.breaks
        self._subscription: NatsSubscription | None = None

    async def open(self) -> None:
        """Take the consumer over; whoever read from it before learns that it is gone."""
        await self._bus.api(f"CONSUMER.DELETE.{REQUESTS.name}.{self._name}", {})
        made = await self._bus.api(
            f"CONSUMER.CREATE.{REQUESTS.name}.{self._name}",
            {
                "stream_name": REQUESTS.name,
                "config": {
                    "durable_name": self._name,
                    "name": self._name,
                    "ack_policy": "explicit",
                    "ack_wait": int(limits.PULL_ACK_WAIT_S * 10**9),
                    "max_ack_pending": limits.PULL_ACK_PENDING_MAX,
                    "max_deliver": -1,
                    "deliver_policy": "by_start_sequence",
                    "opt_start_seq": self._next,
                    "replay_policy": "instant",
                    "max_waiting": 64,
                },
            },
        )
        if "error" in made:
            raise BusUnavailable(f"consumer {self._name}: {made['error'].get('description')}")
        self._subscription = await self._bus.nc.subscribe(
            self._inbox, cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._ask()

    async def close(self) -> None:
        if self._subscription is not None and self._bus.connected:
            await self._subscription.unsubscribe()
            self._subscription = None

    def ack(self, message: RequestMessage) -> None:
        """Say that the submission is decided. May be lost; then it comes again and is known."""
        self._bus.publish(message.reply, b"+ACK")

    def __aiter__(self) -> AsyncIterator[list[RequestMessage]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[list[RequestMessage]]:
        while True:
            if not self._buffer:
                self._ready.clear()
                try:
                    async with asyncio.timeout(limits.PULL_SILENCE_S):
                        await self._ready.wait()
                except TimeoutError:
                    await self._look_after()
                    continue
            messages, self._buffer = self._buffer, []
            batch: list[RequestMessage] = []
            renew = False
            for message in messages:
                status = (message.headers or {}).get("Status")
                if status is None:
                    self._credit -= 1
                    delivery = parse_delivery(message.reply)
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
                elif status != "100":
                    renew = True
                    description = (message.headers or {}).get("Description", "")
                    if "Consumer Deleted" in description:
                        raise ConsumerTaken(f"consumer {self._name} was taken over")
            if renew:
                self._credit = 0
            if self._credit <= limits.PULL_BATCH // 2:
                self._ask()
            if batch:
                yield batch

    async def _look_after(self) -> None:
        """Silence longer than three heartbeats: the bus was away, or the consumer is gone."""
        while not self._bus.connected:
            await asyncio.sleep(limits.RECONNECT_WAIT_S)
        info = await self._bus.api(f"CONSUMER.INFO.{REQUESTS.name}.{self._name}", {})
        if info.get("error", {}).get("err_code") == 10014:
            raise ConsumerTaken(f"consumer {self._name} does not exist any more")
        self._credit = 0
        self._ask()

    def _ask(self) -> None:
        batch = limits.PULL_BATCH - max(0, self._credit)
        if batch <= 0:
            return
        self._credit = limits.PULL_BATCH
        self._bus.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{REQUESTS.name}.{self._name}",
            (
                f'{{"batch":{batch},"expires":{int(limits.PULL_EXPIRES_S * 10**9)},'
                f'"idle_heartbeat":{int(limits.PULL_HEARTBEAT_S * 10**9)}}}'
            ).encode(),
            reply=self._inbox,
        )

    async def _on_message(self, message: Msg) -> None:
        self._buffer.append(message)
        self._ready.set()


class Delivery(Struct, frozen=True):
    """What the acknowledgement subject of a delivered message says."""

    stream_sequence: int
    consumer_sequence: int
    stored_ns: int
    pending: int


def parse_delivery(reply: str) -> Delivery:
    """``$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>[.<token>]``.

    Integers all the way: the client library's own metadata goes through a float, and is
    wrong by a microsecond half of the time.
    """
    parts = reply.split(".")
    first = 5 if len(parts) == 9 else 7
    return Delivery(
        stream_sequence=int(parts[first]),
        consumer_sequence=int(parts[first + 1]),
        stored_ns=int(parts[first + 2]),
        pending=int(parts[first + 3]),
    )
