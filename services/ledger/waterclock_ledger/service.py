"""The tape in, leaves out: read every event in order and append it, and nothing else.

The ledger acknowledges nothing and holds nobody up. Where it stands is what its own files say;
what a crash takes from them it reads again.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Literal

import structlog
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from waterclock_ledger import core
from waterclock_ledger.files import LogWriter
from waterclock_ledger.tape import OPENING_SUBJECT, Tape
from waterclock_proto.envelope import EventRefused, decode_event
from waterclock_proto.events import EVENT_TYPE_BY_NAME, LogOpened
from waterclock_proto.leaves import Leaf, encode_leaf
from waterclock_proto.subjects import EVENT_PREFIX
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable, StreamRolledBack
from waterclock_runtime.health import Health
from waterclock_runtime.tape import TapeMessage

OPENING_WAIT_S = 5.0
"""How long an empty tape is given until whoever made it says so in its first message."""
OPENING_POLL_S = 0.1
WATCH_INTERVAL_S = 1.0
UNAVAILABLE_WAIT_S = 1.0
COMPARED_BACK_MAX = 8
"""If the message to compare was deleted, so many before it are tried."""

Emit = Callable[[LogOpened, Callable[[int], None]], object]
"""Publishes an event until the tape has it, and then says its sequence."""


class Metrics:
    """What operators watch; see the README."""

    def __init__(self, registry: CollectorRegistry, log: LogWriter) -> None:
        self.events = Counter(
            "waterclock_ledger_events_total", "Events appended", ["type"], registry=registry
        )
        self.holes = Counter(
            "waterclock_ledger_holes_total",
            "Sequences of which the tape had lost the event",
            registry=registry,
        )
        self.incarnations = Counter(
            "waterclock_ledger_incarnations_total",
            "Incarnations begun by this process",
            ["reason"],
            registry=registry,
        )
        self.lag = Gauge(
            "waterclock_ledger_lag_events",
            "Last sequence of the tape - appended",
            registry=registry,
        )
        self.sync_s = Histogram(
            "waterclock_ledger_sync_seconds",
            "Making the record durable",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
            registry=registry,
        )
        Gauge(
            "waterclock_ledger_sequence", "Last sequence appended", registry=registry
        ).set_function(lambda: _last_sequence(log, log.size))
        Gauge(
            "waterclock_ledger_synced_sequence", "Last sequence that is durable", registry=registry
        ).set_function(lambda: _last_sequence(log, log.synced_size))


class LedgerService:
    """Follows one tape into one record, until ``stopping`` is set.

    Owns ``log`` from the first call of ``run`` on, and closes it.
    """

    def __init__(
        self,
        *,
        tape: Tape,
        log: LogWriter,
        emit: Emit,
        clock: Clock,
        health: Health,
        registry: CollectorRegistry,
        logger: structlog.stdlib.BoundLogger,
        sync_interval_ms: int,
        on_incarnation: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tape = tape
        self._log = log
        self._emit = emit
        self._clock = clock
        self._health = health
        self._logger = logger
        self._sync_interval_ms = sync_interval_ms
        self._on_incarnation = on_incarnation
        self._metrics = Metrics(registry, log)
        self._holes = 0
        # Between appending and syncing: the files are not made for both at once.
        self._files = asyncio.Lock()

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow the tape.

        Raises:
            LogUnwritable: the disk refused; a process that starts again finds out what is there.
        """
        ended = asyncio.Event()
        following = asyncio.create_task(self._follow_forever(), name="ledger-follow")
        syncing = asyncio.create_task(self._sync_regularly(ended), name="ledger-sync")
        watching = asyncio.create_task(self._watch(), name="ledger-watch")
        stop = asyncio.create_task(stopping.wait(), name="ledger-stop")
        tasks = (following, syncing, watching, stop)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (following, watching, stop):
                task.cancel()
            # Never cancelled: a thread may be syncing a file that is about to be closed.
            ended.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._log.close()

    async def _follow_forever(self) -> None:
        if self._log.torn is not None:
            self._logger.warning("torn_end_cut", **_fields(self._log.torn))
        while True:
            try:
                start = await self._place()
                await self._follow(start)
            except StreamRolledBack as error:
                self._logger.warning("tape_rolled_back", error=str(error))
            except BusUnavailable as error:
                self._health.wrong("tape", str(error))
                self._logger.warning("tape_unavailable", error=str(error))
                await asyncio.sleep(UNAVAILABLE_WAIT_S)

    async def _follow(self, start: int) -> None:
        """Append from ``start`` on, until what is read says that something else must be read."""
        batches = self._tape.read(start, await self._leaf(start - 1))
        async with contextlib.aclosing(batches):
            async for batch in batches:
                self._health.ready = True
                self._health.right("tape")
                async with self._files:
                    again = self._take(batch)
                    if self._sync_interval_ms == 0:
                        await self._sync()
                if again:
                    return

    def _take(self, batch: list[TapeMessage]) -> bool:
        """Append a batch, holes included; whether the tape must be read again from elsewhere."""
        log = self._log
        leaves: list[bytes] = []
        counts: dict[str, int] = {}
        expected = log.next_sequence
        again = False
        for message in batch:
            if message.sequence != expected:
                self._append(leaves)
                leaves = []
                self._fill(message.sequence - 1)
            opened = _opening(message) if message.subject == OPENING_SUBJECT else None
            if opened is not None and self._reopened(opened, message.sequence, leaves):
                again = True
                break
            leaves.append(
                encode_leaf(
                    Leaf(
                        sequence=message.sequence,
                        stored_ns=message.stored_ns,
                        subject=message.subject,
                        payload=message.payload,
                    )
                )
            )
            kind = message.subject[len(EVENT_PREFIX) :].partition(".")[0]
            counts[kind] = counts.get(kind, 0) + 1
            expected = message.sequence + 1
        if not again:
            self._append(leaves)
        for kind, count in counts.items():
            # Anybody in the mesh can invent a type; the labels of a metric are few and fixed.
            label = kind if kind in EVENT_TYPE_BY_NAME else "unknown"
            self._metrics.events.labels(label).inc(count)
        return again

    def _append(self, leaves: list[bytes]) -> None:
        if leaves:
            self._log.append(leaves)

    def _fill(self, last_sequence: int) -> None:
        first = self._log.next_sequence
        count = self._log.append_holes(last_sequence)
        self._holes += count
        self._metrics.holes.inc(count)
        self._health.wrong(
            "holes", f"{self._holes} since it started, the last ones {first} to {last_sequence}"
        )
        self._logger.error("hole", first_sequence=first, last_sequence=last_sequence, count=count)

    def _reopened(self, opened: LogOpened, sequence: int, leaves: list[bytes]) -> bool:
        """Whether this ``log_opened`` begins another incarnation, which then has been begun."""
        log = self._log
        head = log.head
        assert head is not None
        if opened.incarnation == head.incarnation:
            log.announce(sequence)
            return False
        if core.reopens(
            opened, sequence=sequence, heads=log.heads, tape_first=log.tape_first_sequence
        ):
            self._append(leaves)
            self._begin(
                "rolled_back",
                first_sequence=opened.first_sequence,
                incarnation=opened.incarnation,
                announced_sequence=sequence,
            )
            return True
        self._logger.info(
            "log_opened_noted",
            incarnation=opened.incarnation,
            sequence=sequence,
            reason=opened.reason,
        )
        return False

    async def _place(self) -> int:
        """Where to read from; begins an incarnation if the tape is not the one that was read."""
        stream_first, stream_last = await self._tape.state()
        log = self._log
        if log.head is None:
            await self._begin_tape("created", stream_first, stream_last)
            return log.next_sequence
        both = core.overlap(
            stream_first=stream_first,
            stream_last=stream_last,
            tape_first=log.tape_first_sequence,
            next_sequence=log.next_sequence,
        )
        found = core.judge(
            both,
            differs_from=await self._first_difference(both),
            stream_first=stream_first,
            stream_last=stream_last,
            next_sequence=log.next_sequence,
        )
        match found:
            case core.Continue():
                self._go_on()
            case core.RolledBack(first_sequence):
                async with self._files:
                    self._begin("rolled_back", first_sequence=first_sequence)
            case core.Replaced():
                await self._begin_tape("replaced", stream_first, stream_last)
        return log.next_sequence

    def _go_on(self) -> None:
        head = self._log.head
        assert head is not None
        self._on_incarnation(head.incarnation)
        self._health.facts["incarnation"] = head.incarnation
        if head.announced_sequence is None:
            # It was begun, and then we died before the tape had it, or before we knew that.
            self._announce()
        self._logger.info(
            "record_continued", incarnation=head.incarnation, next_sequence=self._log.next_sequence
        )

    async def _first_difference(self, both: core.Overlap) -> int | None:
        """The first sequence at which tape and record differ; None if they do not.

        Histories part once, so it is found by halving.
        """
        newest = range(both.high, max(both.low, both.high - COMPARED_BACK_MAX) - 1, -1)
        for sequence in newest:
            differs = await self._differs(sequence)
            if differs is False:
                return None
            if differs is True:
                break
        else:
            # Nothing left to compare: all of it was deleted, which makes holes and no history.
            return None
        low, high = both.low, sequence
        while low < high:
            middle = (low + high) // 2
            if await self._differs(middle):
                high = middle
            else:
                low = middle + 1
        return low

    async def _differs(self, sequence: int) -> bool | None:
        """None: the tape has nothing there any more, so nobody can say."""
        found = await self._tape.message(sequence)
        return None if found is None else found != await self._leaf(sequence)

    async def _leaf(self, sequence: int) -> Leaf | None:
        async with self._files:
            return await asyncio.to_thread(self._log.leaf, sequence)

    async def _begin_tape(
        self, reason: Literal["created", "replaced"], stream_first: int, stream_last: int
    ) -> None:
        """Begin with a tape that the record has nothing of, under its own name if it has one."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + OPENING_WAIT_S
        while stream_last < stream_first and loop.time() < give_up_s:
            await asyncio.sleep(OPENING_POLL_S)
            stream_first, stream_last = await self._tape.state()
        opening = None
        if stream_last >= stream_first:
            opening = await self._tape.message(stream_first)
            if opening is None or opening.subject != OPENING_SUBJECT:
                opening = await self._tape.newest_opening()
        opened = None if opening is None else _opening(opening)
        async with self._files:
            if (
                opening is not None
                and opened is not None
                and core.governs(
                    opened,
                    first_sequence=stream_first,
                    known=[head.incarnation for head in self._log.heads],
                )
            ):
                self._begin(
                    reason,
                    first_sequence=opened.first_sequence,
                    incarnation=opened.incarnation,
                    announced_sequence=opening.sequence,
                )
            else:
                self._begin(reason, first_sequence=stream_first)

    def _begin(
        self,
        reason: Literal["created", "rolled_back", "replaced"],
        *,
        first_sequence: int,
        incarnation: str | None = None,
        announced_sequence: int | None = None,
    ) -> None:
        head = self._log.begin(
            incarnation=incarnation or f"i{secrets.token_hex(8)}",
            first_sequence=first_sequence,
            reason=reason,
            announced_sequence=announced_sequence,
        )
        self._metrics.incarnations.labels(reason).inc()
        self._health.facts["incarnation"] = head.incarnation
        self._on_incarnation(head.incarnation)
        say = self._logger.info if reason == "created" else self._logger.warning
        say(
            "incarnation_begun",
            incarnation=head.incarnation,
            reason=reason,
            first_sequence=first_sequence,
            previous_incarnation=head.previous_incarnation,
            previous_size=head.previous_size,
        )
        if announced_sequence is None:
            self._announce()

    def _announce(self) -> None:
        head = self._log.head
        assert head is not None

        def on_stored(sequence: int) -> None:
            self._logger.info("log_opened", incarnation=head.incarnation, sequence=sequence)

        # That it stands on the tape is noted when it is read there, like everything else.
        self._emit(
            LogOpened(
                incarnation=head.incarnation,
                first_sequence=head.first_sequence,
                reason=head.reason,
                previous_incarnation=head.previous_incarnation,
                previous_size=head.previous_size,
                opened=self._clock.stamp("ledger"),
            ),
            on_stored,
        )

    async def _sync_regularly(self, ended: asyncio.Event) -> None:
        interval_s = max(1, self._sync_interval_ms) / 1000
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s if self._sync_interval_ms else None):
                    await ended.wait()
            async with self._files:
                await self._sync()

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        if await asyncio.to_thread(self._log.sync):
            self._metrics.sync_s.observe(loop.time() - begun_s)

    async def _watch(self) -> None:
        """The lag, in metrics and health."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                _, stream_last = await self._tape.state()
            except BusUnavailable:
                continue
            appended = _last_sequence(self._log, self._log.size)
            self._metrics.lag.set(stream_last - appended)
            self._health.facts["sequence"] = appended
            self._health.facts["lag_events"] = stream_last - appended


def _last_sequence(log: LogWriter, size: int) -> int:
    head = log.head
    return 0 if head is None else head.first_sequence + size - 1


def _opening(message: TapeMessage | Leaf) -> LogOpened | None:
    """The event if it is one; what cannot be read is kept as a leaf, and opens nothing."""
    try:
        data = decode_event(message.subject, message.payload).data
    except EventRefused:
        return None
    return data if isinstance(data, LogOpened) else None


def _fields(found: Struct) -> dict[str, object]:
    return {
        name: str(value) if not isinstance(value, int) else value
        for name in found.__struct_fields__
        if (value := getattr(found, name)) is not None
    }
