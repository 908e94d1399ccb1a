"""A service's pen: seals events into its chain and publishes each until the tape has it.

Nothing waits for an acknowledgement, and nothing is lost for want of one: an event stays in
the window until it is acknowledged, and is published again byte for byte after a break, a
refusal or a proven loss. It may then stand on the tape twice; every reader drops what it has
seen by (writer, counter).

When the tape refuses an event (it is full), the writer *stalls*: it tries that event alone
until it is taken, then sends the rest in order. ``window.py`` has the rules, and the one case
in which an event can still be overtaken.
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct
from nats.aio.msg import Msg

from waterclock_proto.envelope import COUNTER_MAX, Chain, Envelope, decode_event
from waterclock_proto.events import ClockReported, EventData, WriterSealed
from waterclock_proto.stamps import Source
from waterclock_proto.subjects import EVENTS
from waterclock_runtime import limits
from waterclock_runtime.bus import Closable, Wire, decode_puback
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable
from waterclock_runtime.window import Entry, Window

OnStored = Callable[[int], None]


class _Waiting(Struct):
    subject: str
    payload: bytes
    on_stored: OnStored | None


class TapeRoom(Struct, frozen=True):
    """How full the tape is. ``bytes_max`` of -1: without a bound."""

    bytes: int
    bytes_max: int


class EventWriter:
    """One process's events. Create with ``open``; ``emit`` never waits."""

    def __init__(
        self,
        bus: Wire,
        *,
        service: Source,
        clock: Clock,
        key: bytes,
        window: int = limits.WRITER_WINDOW,
        group_commit: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._service: Source = service
        self._key = key
        self._chain = self._new_chain()
        self._window: Window[_Waiting] = Window(window)
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inbox = bus.new_inbox()
        self._group_commit = group_commit
        self._groups: dict[int, list[int]] = {}
        """Numbers of the batches on their way, by the last of each."""
        self._stalled = ""
        self._probe_s = float("-inf")
        self._sealed_head = ""
        self._offsets: deque[tuple[float, int, int]] = deque()
        self._brackets: deque[tuple[int, int, int]] = deque(maxlen=4)
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Closable | None = None
        self._forget: list[Callable[[], None]] = []
        self._now_s = now_s
        self._own: dict[bytes, tuple[str, Envelope[EventData]]] = {}
        self._read_back: frozenset[str] = frozenset()
        self.fence = 0
        self.incarnation = ""
        self.republished = 0
        """Publishes beyond the first of each event."""
        self.refused = 0
        """Refusals by the tape; one event can be refused many times."""
        self.tape_room: TapeRoom | None = None
        """As looked at last; None before that."""

    @classmethod
    async def open(
        cls,
        bus: Wire,
        *,
        service: Source,
        clock: Clock,
        key: bytes,
        window: int = limits.WRITER_WINDOW,
        group_commit: bool = False,
    ) -> "EventWriter":
        writer = cls(
            bus, service=service, clock=clock, key=key, window=window, group_commit=group_commit
        )
        writer.attach()
        writer._tasks = [
            asyncio.create_task(writer._sweep_for_ever(), name="writer-sweeper"),
            asyncio.create_task(writer._seal_for_ever(), name="writer-sealer"),
            asyncio.create_task(writer._look_for_ever(), name="writer-looker"),
        ]
        for task in writer._tasks:
            task.add_done_callback(writer._on_task_ended)
        return writer

    def attach(self) -> None:
        """Listen to what the bus answers. Nothing moves by itself yet: ``open`` sees to that."""
        bus = self._bus
        self._subscription = bus.listen(f"{self._inbox}.*.*", self._on_answer)
        self._forget = [bus.on_break(self._on_break), bus.on_reconnect(self._pump)]

    @property
    def name(self) -> str:
        """The writer's name: one life of one service."""
        return self._chain.writer

    @property
    def outstanding(self) -> int:
        """Events that the tape has not acknowledged."""
        return len(self._window)

    @property
    def stalled(self) -> bool:
        """Whether the tape refuses events at present."""
        return bool(self._stalled)

    @property
    def stalled_why(self) -> str:
        """What the tape said when it refused; empty while it takes events."""
        return self._stalled

    @property
    def turned(self) -> int:
        """Events that the tape took before an elder one of this writer that it had refused."""
        return self._window.turned

    @property
    def clock_offset_us(self) -> tuple[int, int] | None:
        """The bus's clock minus this one, between which two; None before the first bracket.

        The first larger than the second: one of the clocks was stepped in the last minute.
        """
        if not self._offsets:
            return None
        return max(low for _, low, _ in self._offsets), min(high for _, _, high in self._offsets)

    def emit(self, data: EventData, on_stored: OnStored | None = None) -> int:
        """Seal and publish one event; its counter in the chain.

        ``on_stored`` is called once with its sequence, when the tape has it. The payload is
        fixed from here on: whatever is repeated is the same bytes.

        Raises:
            EventRefused: no reader would accept it; the chain has not moved.
            BusUnavailable: far too many wait already; the chain has not moved.
        """
        window = self._window
        if len(window) >= limits.WRITER_WAITING_MAX:
            raise BusUnavailable(
                f"{len(window)} events wait for the tape, at most {limits.WRITER_WAITING_MAX}"
                f" allowed; {self._stalled or 'the bus is away'}"
            )
        if self._chain.counter > COUNTER_MAX:
            self._chain = self._new_chain()
        chain = self._chain
        chain.fence = self.fence
        chain.incarnation = self.incarnation
        counter = chain.counter
        subject, payload = chain.seal(data)
        if data.TYPE in self._read_back:
            self._remember(subject, payload)
        window.add(_Waiting(subject, payload, on_stored))
        self._pump()
        self._empty.clear()
        if len(window) >= window.size_max:
            self._room.clear()
        return counter

    def reads_back(self, *kinds: type[EventData]) -> None:
        """Say which of its own events the service reads back, so that ``decode`` knows them."""
        self._read_back = frozenset(kind.TYPE for kind in kinds)

    def decode(self, subject: str, payload: bytes) -> Envelope[EventData]:
        """The event that stands under ``subject``, as ``decode_event`` would read it.

        An event of this writer was decoded when it was sealed. Byte for byte the same payload
        need not be decoded again, which for most services is every second event they read.

        Raises:
            EventRefused: see ``decode_event``.
        """
        own = self._own.pop(payload, None)
        if own is not None and own[0] == subject:
            return own[1]
        return decode_event(subject, payload)

    def _remember(self, subject: str, payload: bytes) -> None:
        sealed = self._chain.sealed
        assert sealed is not None
        self._own[payload] = (subject, sealed)
        if len(self._own) > limits.OWN_EVENTS_MAX:
            # It was never read back: overtaken by a break, or the reader is far behind.
            del self._own[next(iter(self._own))]

    async def ready(self) -> None:
        """Wait until the window has room. Call it between batches; the bus may be away for long."""
        await self._room.wait()

    async def drain(self, wait_s: float) -> bool:
        """Wait until the tape has everything, at most ``wait_s``; whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._empty.wait()
        return not self._window

    async def close(self, wait_s: float = limits.CLOSE_WAIT_S) -> bool:
        """Seal the chain for the last time and wait for the acknowledgements; whether all came."""
        sweeper, *others = self._tasks or [None]
        for task in others:
            await _ended(task)
        # Where too much waits already, the chain ends without a seal.
        with contextlib.suppress(BusUnavailable):
            if self._chain.counter:
                self._seal(last=True)
        # The sweeper goes on until the end: it is what tries again.
        stored = await self.drain(wait_s)
        await _ended(sweeper)
        for forget in self._forget:
            forget()
        if self._subscription is not None:
            self._subscription.close()
        self._tasks = []
        return stored

    def _new_chain(self) -> Chain:
        return Chain(
            service=self._service,
            writer=f"{self._service}-{secrets.token_hex(6)}",
            key=self._key,
        )

    def _on_task_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            # A writer that does not look after its events any more must not go on.
            self._bus.fail(error)

    # Sending.

    def _pump(self) -> None:
        """Send what may go now."""
        if not self._bus.connected:
            return
        now_s = self._now_s()
        window = self._window
        while True:
            if self._group_commit:
                if window.in_flight >= limits.GROUP_BEGINS:
                    # What comes meanwhile waits for the disk together, and goes together.
                    return
                if window.behind >= limits.GROUP_MIN:
                    if self._send_group(now_s):
                        continue
                    return
            entry = window.take(now_s)
            if entry is None or not self._send(entry, f"{self._inbox}.e.{entry.number}"):
                return

    def _send(self, entry: Entry[_Waiting], reply: str) -> bool:
        waiting = entry.item
        if not self._bus.publish(waiting.subject, waiting.payload, reply=reply):
            self._window.put_back(entry)
            return False
        if entry.tries > 1:
            self.republished += 1
        return True

    def _send_group(self, now_s: float) -> bool:
        """Several as one atomic batch, acknowledged together. Whether any went."""
        window = self._window
        entries: list[Entry[_Waiting]] = []
        while len(entries) < limits.GROUP_MAX and (entry := window.take(now_s)) is not None:
            entries.append(entry)
        if not entries:
            return False
        batch_id = f"{self._chain.writer}-{entries[0].number}-{entries[0].tries}"
        for place, entry in enumerate(entries, start=1):
            last = place == len(entries)
            headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(place)}
            if last:
                headers["Nats-Batch-Commit"] = "1"
            reply = f"{self._inbox}.b.{entry.number}" if last else ""
            if not self._bus.publish(entry.item.subject, entry.item.payload, headers, reply):
                # The bus forgets a batch that is never committed.
                for taken in reversed(entries):
                    window.put_back(taken)
                return False
            if entry.tries > 1:
                self.republished += 1
        self._groups[entries[-1].number] = [entry.number for entry in entries]
        return True

    async def _on_answer(self, message: Msg) -> None:
        _, kind, text = message.subject.rsplit(".", 2)
        number = int(text)
        answer = decode_puback(message)
        window = self._window
        group = self._groups.pop(number, None) if kind == "b" else None
        if kind == "b" and group is None:
            # Of before a break: all of it goes again, or has gone.
            return
        if answer.error is not None or not answer.stream:
            if window.refused(number if group is None else group[0]):
                self._stall(answer.error or {"description": "not an acknowledgement"})
            return
        if group is not None:
            # A batch stands on the tape without anything in between.
            for before, elder in enumerate(reversed(group[:-1]), start=1):
                stored = window.stored(elder)
                if stored is not None and stored.item.on_stored is not None:
                    stored.item.on_stored(answer.seq - before)
        entry = window.stored(number)
        if kind == "o" and window.lost_before(self._probe_s):
            # The bus answers in order, so what is older than this probe will not be answered.
            self._bus.log.warning("events_lost_on_the_way", waiting=len(window))
            window.restart()
        if entry is None:
            return
        if self._stalled and not window.held:
            self._stalled = ""
            self._bus.log.info("tape_takes_events_again", waiting=len(window))
        if window.unsent:
            self._pump()
        if not self._room.is_set() and len(window) < window.size_max:
            self._room.set()
        if not window:
            self._empty.set()
        if entry.item.on_stored is not None:
            entry.item.on_stored(answer.seq)

    def _stall(self, error: dict[str, object]) -> None:
        self.refused += 1
        if not self._stalled:
            self._bus.log.error("tape_refuses_events", error=error, waiting=len(self._window))
        self._stalled = f"the tape refuses events: {error.get('description')}"

    def _on_break(self) -> None:
        self._groups.clear()
        self._window.restart()

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(limits.WRITER_SWEEP_S)
            if self._bus.connected and self._window:
                self.sweep()

    def sweep(self) -> None:
        """Look after events that were refused, or not answered in time; done ten times a second."""
        window = self._window
        if window.held:
            window.release()
        self._pump()
        first = window.first()
        if first is None or not window.lost_before(self._now_s() - limits.WRITER_ACK_TIMEOUT_S):
            return
        if self._now_s() - self._probe_s < limits.WRITER_ACK_TIMEOUT_S:
            return
        # One probe asks what became of all: a bus that is merely slow answers them in order.
        if self._bus.publish(
            first.item.subject, first.item.payload, reply=f"{self._inbox}.o.{first.number}"
        ):
            self._probe_s = self._now_s()
            self.republished += 1

    # What the writer says of itself.

    def _seal(self, *, last: bool = False) -> None:
        chain = self._chain
        self.emit(
            WriterSealed(
                sealed_counter=chain.counter - 1,
                head_sha256=chain.head,
                algorithm="none",
                last=last,
                sealed=self._clock.stamp(self._service),
            ),
            self._bracketed(),
        )
        self._sealed_head = chain.head

    async def _seal_for_ever(self) -> None:
        reported_s = float("-inf")
        reported_samples = 0
        while True:
            # What it says of itself does not queue up behind what the service says.
            if self._bus.connected and not self._stalled and self._room.is_set():
                now_s = self._now_s()
                self._forget_old_brackets(now_s)
                news = reported_samples == 0 and len(self._offsets) > 0
                if news or now_s - reported_s >= limits.CLOCK_REPORT_INTERVAL_S:
                    reported_s, reported_samples = now_s, len(self._offsets)
                    self._report_clock()
                elif self._chain.head != self._sealed_head:
                    self._seal()
            await asyncio.sleep(limits.SEAL_INTERVAL_S)

    def _report_clock(self) -> None:
        """Publish what is known of the bus's clock, and bracket it once more with that publish."""
        offset = self.clock_offset_us
        self.emit(
            ClockReported(
                service=self._service,
                boot=self._clock.boot,
                samples=len(self._offsets),
                offset_us_min=None if offset is None else offset[0],
                offset_us_max=None if offset is None else offset[1],
                reported=self._clock.stamp(self._service),
            ),
            self._bracketed(),
        )

    def _bracketed(self) -> OnStored:
        sent_us = self._clock.now_us()

        def on_stored(sequence: int) -> None:
            self._brackets.append((sequence, sent_us, self._clock.now_us()))

        return on_stored

    async def _look_for_ever(self) -> None:
        """Look at the tape itself: when it stored the bracketed events, and how full it is."""
        while True:
            await asyncio.sleep(limits.TAPE_LOOK_INTERVAL_S)
            if not self._bus.connected:
                continue
            try:
                while self._brackets:
                    await self._close_bracket(*self._brackets.popleft())
                await self._look_at_room()
            except BusUnavailable as error:
                self._bus.log.warning("tape_not_looked_at", error=str(error))

    async def _close_bracket(self, sequence: int, sent_us: int, acknowledged_us: int) -> None:
        found = await self._bus.message(EVENTS.name, sequence)
        if found is None:
            return
        stored_us = found[2] // 1000
        # sent ≤ stored ≤ acknowledged, on the service's clock; so the bus is ahead of it by
        # between stored − acknowledged and stored − sent.
        self._offsets.append((self._now_s(), stored_us - acknowledged_us, stored_us - sent_us))

    def _forget_old_brackets(self, now_s: float) -> None:
        while self._offsets and now_s - self._offsets[0][0] > limits.CLOCK_SAMPLES_S:
            self._offsets.popleft()

    async def _look_at_room(self) -> None:
        info = await self._bus.api(f"STREAM.INFO.{EVENTS.name}", {})
        if "error" in info:
            return
        room = TapeRoom(int(info["state"]["bytes"]), int(info["config"]["max_bytes"]))
        self.tape_room = room
        reserve = min(limits.TAPE_ROOM_BYTES, room.bytes_max // 8)
        nearly_full = 0 < room.bytes_max < room.bytes + reserve
        self._window.narrow(1 if nearly_full else self._window.size_max)


async def _ended(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
