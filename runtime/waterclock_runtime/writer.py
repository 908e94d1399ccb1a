"""A service's pen: seals events into its chain and publishes each until the tape has it.

Nothing waits for an acknowledgement, and nothing is lost for want of one: an event stays in
the window until it is acknowledged, and is published again byte for byte after a break or a
silence. It may then stand on the tape twice; every reader drops what it has seen by (writer,
counter).

When the tape refuses an event (it is full), the writer *stalls*: it tries that event alone
until it is taken, then sends the rest in order, so that a refusal cannot turn the order round.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable

from msgspec import Struct
from nats.aio.msg import Msg

from waterclock_proto.envelope import COUNTER_MAX, Chain
from waterclock_proto.events import ClockReported, EventData, WriterSealed
from waterclock_proto.stamps import Source
from waterclock_proto.subjects import EVENTS
from waterclock_runtime import limits
from waterclock_runtime.bus import Bus, decode_puback
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable

OnStored = Callable[[int], None]


class _Waiting(Struct):
    subject: str
    payload: bytes
    sent_s: float
    on_stored: OnStored | None
    sent_us: int


class EventWriter:
    """One process's events. Create with ``open``; ``emit`` never waits."""

    def __init__(self, bus: Bus, *, service: Source, clock: Clock, key: bytes) -> None:
        self._bus = bus
        self._clock = clock
        self._service: Source = service
        self._key = key
        self._chain = self._new_chain()
        self._waiting: dict[int, _Waiting] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._inbox = bus.nc.new_inbox()
        self._stalled = False
        self._number = 0
        self._sealed_head = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._window = bus.settings.writer_window
        self._offsets: list[tuple[int, int]] = []
        self.fence = 0
        self.incarnation = ""
        self.republished = 0
        self.refused = 0

    @classmethod
    async def open(cls, bus: Bus, *, service: Source, clock: Clock, key: bytes) -> "EventWriter":
        writer = cls(bus, service=service, clock=clock, key=key)
        await bus.nc.subscribe(
            f"{writer._inbox}.*", cb=writer._on_ack, pending_msgs_limit=0, pending_bytes_limit=0
        )
        bus.on_reconnect(writer._publish_all)
        writer._tasks = [
            asyncio.create_task(writer._sweep(), name="writer-sweeper"),
            asyncio.create_task(writer._seal_and_report(), name="writer-sealer"),
        ]
        return writer

    @property
    def name(self) -> str:
        """The writer's name: one life of one service."""
        return self._chain.writer

    @property
    def outstanding(self) -> int:
        """Events that the tape has not acknowledged."""
        return len(self._waiting)

    @property
    def stalled(self) -> bool:
        """Whether the tape refuses events at present."""
        return self._stalled

    def emit(self, data: EventData, on_stored: OnStored | None = None) -> int:
        """Seal and publish one event; its counter in the chain.

        ``on_stored`` is called once with its sequence, when the tape has it. The payload is
        fixed from here on: whatever is repeated is the same bytes.

        Raises:
            EventRefused: larger than the tape takes; the chain has not moved.
        """
        if self._chain.counter > COUNTER_MAX:
            self._chain = self._new_chain()
        chain = self._chain
        chain.fence = self.fence
        chain.incarnation = self.incarnation
        counter = chain.counter
        subject, payload = chain.seal(data)
        self._number += 1
        number = self._number
        self._waiting[number] = _Waiting(
            subject=subject,
            payload=payload,
            sent_s=asyncio.get_running_loop().time(),
            on_stored=on_stored,
            sent_us=self._clock.now_us(),
        )
        if not self._stalled and self._bus.connected:
            self._bus.publish(subject, payload, reply=f"{self._inbox}.{number}")
        if len(self._waiting) >= self._window:
            self._room.clear()
        return counter

    async def ready(self) -> None:
        """Wait until the window has room. Call it between batches; the bus may be away for long."""
        await self._room.wait()

    async def drain(self, wait_s: float) -> bool:
        """Wait until the tape has everything, at most ``wait_s``; whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._waiting:
                    await asyncio.sleep(0.005)
        return not self._waiting

    async def close(self, wait_s: float = 3.0) -> bool:
        """Seal the chain for the last time and wait for the acknowledgements; whether all came."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._chain.counter:
            self._seal(last=True)
        return await self.drain(wait_s)

    def _new_chain(self) -> Chain:
        return Chain(
            service=self._service,
            writer=f"{self._service}-{secrets.token_hex(6)}",
            key=self._key,
        )

    async def _on_ack(self, message: Msg) -> None:
        number = int(message.subject.rsplit(".", 1)[1])
        waiting = self._waiting.get(number)
        if waiting is None:
            return
        acknowledgement = decode_puback(message)
        if acknowledgement.error is not None or not acknowledgement.stream:
            self.refused += 1
            if not self._stalled:
                self._stalled = True
                self._bus.log.error(
                    "tape_refuses_events",
                    subject=waiting.subject,
                    error=acknowledgement.error,
                    waiting=len(self._waiting),
                )
            return
        del self._waiting[number]
        if self._stalled:
            self._stalled = False
            self._bus.log.info("tape_takes_events_again", waiting=len(self._waiting))
            self._publish_all()
        if not self._room.is_set() and len(self._waiting) < self._window:
            self._room.set()
        if waiting.on_stored is not None:
            waiting.on_stored(acknowledgement.seq)

    def _publish_all(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for number, waiting in list(self._waiting.items()):
            self._publish_again(number, waiting, now_s)

    def _publish_again(self, number: int, waiting: _Waiting, now_s: float) -> None:
        waiting.sent_s = now_s
        self.republished += 1
        self._bus.publish(waiting.subject, waiting.payload, reply=f"{self._inbox}.{number}")

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limits.WRITER_SWEEP_S)
            if not self._bus.connected or not self._waiting:
                continue
            now_s = loop.time()
            if self._stalled:
                number, waiting = next(iter(self._waiting.items()))
                self._publish_again(number, waiting, now_s)
                continue
            for number, waiting in list(self._waiting.items())[: limits.WRITER_BURST]:
                if now_s - waiting.sent_s < limits.WRITER_ACK_TIMEOUT_S:
                    break
                self._publish_again(number, waiting, now_s)

    def _seal(self, *, last: bool = False) -> None:
        chain = self._chain
        self.emit(
            WriterSealed(
                sealed_counter=chain.counter - 1,
                head_sha256=chain.head,
                algorithm="none",
                last=last,
                sealed=self._clock.stamp(self._service),
            )
        )
        self._sealed_head = chain.head

    async def _seal_and_report(self) -> None:
        reported_s = -limits.CLOCK_REPORT_INTERVAL_S
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limits.SEAL_INTERVAL_S)
            if not self._bus.connected or self._stalled:
                continue
            if loop.time() - reported_s >= limits.CLOCK_REPORT_INTERVAL_S:
                reported_s = loop.time()
                await self._report_clock()
            if self._chain.counter and self._chain.head != self._sealed_head:
                self._seal()

    async def _report_clock(self) -> None:
        """Publish what is known of the bus's clock, and bracket it once more with that publish."""
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        low = max((offset[0] for offset in self._offsets), default=None)
        high = min((offset[1] for offset in self._offsets), default=None)
        sent_us = self._clock.now_us()

        def on_stored(sequence: int) -> None:
            if not stored.done():
                stored.set_result(sequence)

        self.emit(
            ClockReported(
                service=self._service,
                boot=self._clock.boot,
                samples=len(self._offsets),
                offset_us_min=low,
                offset_us_max=high,
                reported=self._clock.stamp(self._service),
            ),
            on_stored,
        )
        try:
            async with asyncio.timeout(limits.WRITER_ACK_TIMEOUT_S):
                sequence = await stored
            acknowledged_us = self._clock.now_us()
            found = await self._bus.message(EVENTS.name, sequence)
        except (TimeoutError, BusUnavailable):
            return
        if found is None:
            return
        stored_us = found[2] // 1000
        # sent ≤ stored ≤ acknowledged, on the service's clock; so the bus is ahead of it by
        # between stored − acknowledged and stored − sent. Only a few samples count, so that a
        # stepped clock is forgotten within a minute.
        self._offsets = [*self._offsets[-4:], (stored_us - acknowledged_us, stored_us - sent_us)]
