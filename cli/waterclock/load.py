"""Sends a load and measures what the client saw.

Open loop: each request has an intended time and is sent then, whatever happened to those before.
Latency counts from the intended time, so a sender that falls behind makes latencies longer and
never hides them; how late it was is reported beside them, and so is latency from the actual send.
Closed loop: so many requests are kept in flight, for benchmarks; then the send is the intention.

Durations are differences of this process's monotonic clock, in integer microseconds; percentiles
are nearest-rank, so each of them is a latency that somebody saw. A request without an end counts
as lost, after its outcome has been asked for once more.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final as Constant
from typing import Literal

import msgspec
from msgspec import Struct

from waterclock.arrivals import Planned
from waterclock.load_result import (
    LOST_NAMED_MAX,
    Group,
    LoadResult,
    problems_of,
    quantiles,
)
from waterclock_producer import (
    AnswerGone,
    Final,
    Handle,
    InvalidSubmission,
    NotStored,
    Producer,
    ProducerError,
    Restarted,
    Submission,
    Times,
)
from waterclock_producer.clock import Clock, SystemClock

SEND_BURST: Constant = 64
"""How many due requests are sent before answers are looked at again."""
LEAD_MS: Constant = 20
"""From the decision to start to the first intended time, so that the first is not late."""
LOOK_MS: Constant = 20
"""How often a wait looks whether it is over. Nothing is measured by it."""
RECEIPTS_WITHIN_S: Constant = 2
"""How long receipts are waited for once all requests have ended."""
_S: Constant = 1_000_000_000
_WITHOUT_RECEIPT: Constant = {"invalid", "not_stored", "error"}
"""Outcomes that no service of the mesh made, so that no receipt is missing."""

State = Literal["sending", "waiting for answers", "asking again"]


class Login(Struct, frozen=True, kw_only=True):
    """A tenant's user of the bus."""

    user: str
    password: str


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What to send, to where, and when to stop."""

    plan: Iterable[Planned]
    """In order of due times. Read as it is sent, so it may be long."""
    url: str = ""
    """Of the bus. Not used where ``run_load`` is given its own way to connect."""
    logins: Mapping[str, Login] = field(default_factory=dict[str, Login])
    """By tenant."""
    in_flight: int | None = None
    """Closed loop: keep so many in flight. None: open loop, by the plan's due times."""
    in_flight_max: int = 20_000
    """Open loop: with so many in flight the sender waits, and is late."""
    duration_s_max: int | None = None
    """After that nothing more is sent."""
    drain_s: int = 120
    """How long answers are waited for after the last send."""
    ask_again_s: int = 15
    """How long the outcome of what is then open is waited for, when asked for again."""
    progress_ms: int = 200
    run: str = ""
    """The beginning of all ids; random if empty.

    Two loads must not share it, because an id is one request."""
    receipts: str | None = None
    """A folder where all receipts are kept."""
    report_delivery: bool = False


class Progress(Struct, frozen=True, kw_only=True):
    """Where a load stands."""

    state: State
    elapsed_us: int
    sent: int
    open: int
    outcomes: dict[str, int]
    lateness_us_max: int


async def run_load(
    options: LoadOptions,
    progress: Callable[[Progress], None] | None = None,
    *,
    stop: asyncio.Event | None = None,
    connect: Callable[[str], Producer] | None = None,
    clock: Clock | None = None,
) -> LoadResult:
    """Send the plan, wait for the answers, and say what was seen.

    ``stop`` ends the sending early, not the waiting. ``connect`` makes the producer of a tenant.

    Raises:
        ValueError: a bound that cannot be, or the plan names a tenant without login.
        ProducerError: a connection cannot be made.
        TraceRefused, OSError: the plan cannot be read on.
    """
    if options.in_flight is not None and options.in_flight < 1:
        raise ValueError(f"at least one in flight expected, {options.in_flight} found")
    if options.in_flight_max < 1:
        raise ValueError(f"at least one in flight expected, {options.in_flight_max} found")
    async with AsyncExitStack() as stack:
        load = _Load(options, connect, clock or SystemClock(), stop, stack)
        # Connected before the clock starts, so that no first request is late for it.
        for tenant in options.logins:
            await load.producer(tenant)
        watching = asyncio.ensure_future(load.watch(progress))
        try:
            await load.run()
        finally:
            watching.cancel()
        if progress:
            progress(load.progress())
        return load.result()


class _Record:
    """One request of the load."""

    __slots__ = (
        "asked_again",
        "doubted",
        "handle",
        "id",
        "intended_ns",
        "outcome",
        "planned",
        "queue_us",
        "receipt",
        "times",
    )

    def __init__(self, planned: Planned, request_id: str, intended_ns: int) -> None:
        self.planned = planned
        self.id = request_id
        self.intended_ns = intended_ns
        self.times: Times | None = None
        """None if it was never sent."""
        self.handle: Handle | None = None
        """Until end and receipt are there. It holds the prompt, so it must not stay."""
        self.outcome = ""
        self.receipt = ""
        self.doubted = False
        self.queue_us: int | None = None
        self.asked_again = False

    def take_receipt(self) -> bool:
        """Note the receipt, if it is there; says whether the handle is no longer needed."""
        handle = self.handle
        if handle is not None and handle.receipts:
            self.receipt = handle.receipts[0].outcome
            self.doubted = bool(handle.receipt_doubt)
        return bool(self.receipt)


class _Load:
    """One run. Everything happens on one event loop; ends come as callbacks."""

    def __init__(
        self,
        options: LoadOptions,
        connect: Callable[[str], Producer] | None,
        clock: Clock,
        stop: asyncio.Event | None,
        stack: AsyncExitStack,
    ) -> None:
        self._options = options
        self._connect = connect or partial(_connect, options)
        self._clock = clock
        self._stop = stop or asyncio.Event()
        self._stack = stack
        self._producers: dict[str, Producer] = {}
        self._run = options.run or secrets.token_hex(4)
        self._state: State = "sending"
        self._stopped_by: Literal["end of plan", "duration", "request", "error"] = "end of plan"
        self._error = ""
        self._halted = False
        self._room = asyncio.Event()
        self._begun_us = clock.wall_us()
        self._start_ns = clock.mono_ns()
        self._last_end_ns = 0
        self._records: list[_Record] = []
        self._open: dict[str, _Record] = {}
        self._unsent = 0
        self._outcomes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._lateness_us_max = 0
        self._without_receipt: dict[str, _Record] = {}
        self._lost: tuple[_Record, ...] = ()
        self._execution_us: list[int] = []
        self._output_tokens = 0
        self._restarted = 0
        self._mended = 0
        self._deadlines_missed = 0

    async def producer(self, tenant: str) -> Producer:
        """The tenant's producer, connected at first use."""
        producer = self._producers.get(tenant)
        if producer is None:
            producer = await self._stack.enter_async_context(self._connect(tenant))
            self._producers[tenant] = producer
        return producer

    async def watch(self, progress: Callable[[Progress], None] | None) -> None:
        """Look after the bounds on sending, and tell how far it is."""
        told_ns = 0
        while True:
            await self._clock.sleep_ns(LOOK_MS * 1_000_000)
            now_ns = self._clock.mono_ns()
            if self._state == "sending" and not self._halted:
                duration_s = self._options.duration_s_max
                if self._stop.is_set():
                    self._halt("request")
                elif duration_s is not None and now_ns - self._start_ns >= duration_s * _S:
                    self._halt("duration")
            if progress and now_ns - told_ns >= self._options.progress_ms * 1_000_000:
                told_ns = now_ns
                progress(self.progress())

    async def run(self) -> None:
        """Send, wait, ask again for what is open, wait."""
        await self._send_all()
        self._state = "waiting for answers"
        await self._wait_for_ends(self._options.drain_s)
        self._state = "asking again"
        for record in tuple(self._open.values()):
            record.asked_again = True
            if record.handle is not None and record.handle.stored_sequence is not None:
                producer = await self.producer(record.planned.tenant)
                with suppress(ProducerError):
                    await producer.resume(record.id)
        await self._wait_for_ends(self._options.ask_again_s)
        await self._wait_for_receipts()
        for record in self._open.values():
            record.outcome = "lost"
            self._outcomes["lost"] += 1
        self._lost = tuple(self._open.values())
        self._open.clear()

    # --- sending

    async def _send_all(self) -> None:
        closed_loop = self._options.in_flight
        in_flight_max = closed_loop or self._options.in_flight_max
        end_us = None
        if closed_loop is None and self._options.duration_s_max is not None:
            end_us = self._options.duration_s_max * 1_000_000
        begin_ns = self._clock.mono_ns() + (0 if closed_loop else LEAD_MS * 1_000_000)
        self._start_ns = begin_ns
        burst = 0
        for number, planned in enumerate(self._options.plan):
            if end_us is not None and planned.at_us >= end_us and not self._halted:
                self._halt("duration")
            if self._halted:
                self._unsent += 1
                continue
            # The text and the connection first: they must not make the send late.
            record = _Record(planned, f"{self._run}-{number:06d}", 0)
            submission = planned.submission(record.id)
            producer = await self.producer(planned.tenant)
            if closed_loop is None:
                record.intended_ns = begin_ns + planned.at_us * 1000
                if await self._sleep_until(record.intended_ns):
                    burst = 0
            burst += 1
            if burst % SEND_BURST == 0:
                await self._clock.sleep_ns(0)
            while len(self._open) >= in_flight_max and not self._halted:
                self._room.clear()
                await self._room.wait()
            if self._halted:
                self._unsent += 1
                continue
            if closed_loop is not None:
                record.intended_ns = self._clock.mono_ns()
            self._send(producer, record, submission)

    async def _sleep_until(self, at_ns: int) -> bool:
        """Says whether there was anything to wait for."""
        waited = False
        while not self._halted and (gap_ns := at_ns - self._clock.mono_ns()) > 0:
            await self._clock.sleep_ns(min(gap_ns, LOOK_MS * 1_000_000))
            waited = True
        return waited

    def _send(self, producer: Producer, record: _Record, submission: Submission) -> None:
        try:
            handle = producer.send(submission, partial(self._ended, record))
        except InvalidSubmission:
            record.outcome = "invalid"
            self._outcomes["invalid"] += 1
            self._records.append(record)
            return
        except ProducerError as error:
            self._unsent += 1
            self._error = f"{type(error).__name__}: {error}"
            self._halt("error")
            return
        record.times = handle.times
        record.handle = handle
        self._records.append(record)
        self._open[record.id] = record
        lateness_us = (handle.times.sent_ns - record.intended_ns) // 1000
        self._lateness_us_max = max(self._lateness_us_max, lateness_us)

    def _halt(self, by: Literal["duration", "request", "error"]) -> None:
        self._halted = True
        self._stopped_by = by
        self._room.set()

    # --- ends

    def _ended(self, record: _Record, handle: Handle) -> None:
        if self._open.pop(record.id, None) is None:
            # Lost already, or closed after all was counted.
            return
        self._room.set()
        self._last_end_ns = self._clock.mono_ns()
        final = handle.final
        if final is None:
            match handle.error:
                case NotStored():
                    record.outcome = "not_stored"
                case AnswerGone():
                    record.outcome = "gone"
                case _:
                    record.outcome = "error"
        else:
            record.outcome = final.outcome
            reason = final.reject_reason or final.fail_reason
            if reason is not None:
                self._reasons[reason] += 1
            if final.outcome == "completed":
                self._completed(record, handle, final)
        self._outcomes[record.outcome] += 1
        self._restarted += any(isinstance(piece, Restarted) for piece in handle.pieces)
        self._mended += handle.mended
        if record.take_receipt() or final is None:
            record.handle = None
        else:
            self._without_receipt[record.id] = record

    def _completed(self, record: _Record, handle: Handle, final: Final) -> None:
        self._output_tokens += final.usage.completion_tokens
        if final.timings is not None:
            record.queue_us = final.timings.queue_us
            if final.timings.exec_us is not None:
                self._execution_us.append(final.timings.exec_us)
        deadline_ms = record.planned.deadline_ms
        seen_ns = (handle.times.final_ns or 0) - handle.times.sent_ns
        if deadline_ms is not None and seen_ns > deadline_ms * 1_000_000:
            self._deadlines_missed += 1

    async def _wait_for_ends(self, within_s: int) -> None:
        end_ns = self._clock.mono_ns() + within_s * _S
        while self._open and self._clock.mono_ns() < end_ns:
            await self._clock.sleep_ns(LOOK_MS * 1_000_000)

    async def _wait_for_receipts(self) -> None:
        """A receipt may come after the final; it is sent by another service."""
        end_ns = self._clock.mono_ns() + RECEIPTS_WITHIN_S * _S
        while True:
            missing = [one for one in self._without_receipt.values() if not one.take_receipt()]
            self._without_receipt = {record.id: record for record in missing}
            if not missing or self._clock.mono_ns() >= end_ns:
                break
            await self._clock.sleep_ns(LOOK_MS * 1_000_000)
        for record in self._open.values():
            record.take_receipt()

    # --- results

    def progress(self) -> Progress:
        return Progress(
            state=self._state,
            elapsed_us=max(self._clock.mono_ns() - self._start_ns, 0) // 1000,
            sent=len(self._records),
            open=len(self._open),
            outcomes=dict(self._outcomes),
            lateness_us_max=self._lateness_us_max,
        )

    def result(self) -> LoadResult:
        """Everything, once ``run`` has returned."""
        records = self._records
        assert sum(self._outcomes.values()) == len(records), "each request has exactly one outcome"
        sent_ns = [record.times.sent_ns for record in records if record.times]
        first_ns = min(sent_ns, default=0)
        sending_us = (max(sent_ns, default=0) - first_ns) // 1000
        duration_us = max(self._last_end_ns - first_ns, 0) // 1000
        counts = [producer.counts for producer in self._producers.values()]
        receipts = Counter(
            record.receipt or "missing"
            for record in records
            if record.receipt or record.outcome not in _WITHOUT_RECEIPT
        )
        result = LoadResult(
            mode="open" if self._options.in_flight is None else "closed",
            run=self._run,
            begun_us=self._begun_us,
            sending_us=sending_us,
            duration_us=duration_us,
            sent=len(sent_ns),
            unsent=self._unsent,
            stopped_by=self._stopped_by,
            error=self._error,
            outcomes=dict(sorted(self._outcomes.items())),
            reasons=dict(sorted(self._reasons.items())),
            lost=[f"{one.planned.tenant}/{one.id}" for one in self._lost[:LOST_NAMED_MAX]],
            recovered=sum(one.asked_again and one.outcome != "lost" for one in records),
            receipts=dict(sorted(receipts.items())),
            receipts_doubted=sum(record.doubted for record in records),
            restarted=self._restarted,
            mended=self._mended,
            prompts_cut=sum(record.planned.cut for record in records),
            resent=sum(count.resent for count in counts),
            gaps=sum(count.gaps for count in counts),
            finals_repeated=sum(count.finals_repeated for count in counts),
            deadlines_missed=self._deadlines_missed,
            output_tokens=self._output_tokens,
            sent_milli_per_s=_milli_per_s(len(sent_ns) - 1, sending_us),
            completed_milli_per_s=_milli_per_s(self._outcomes["completed"], duration_us),
            latency=quantiles(_latencies(records)),
            latency_from_send=quantiles(
                [
                    (times.final_ns - times.sent_ns) // 1000
                    for record in records
                    if record.outcome == "completed"
                    and (times := record.times)
                    and times.final_ns is not None
                ]
            ),
            first_token=quantiles(_first_tokens(records)),
            receipt=quantiles(
                [
                    (times.receipt_ns - times.sent_ns) // 1000
                    for record in records
                    if (times := record.times) and times.receipt_ns is not None
                ]
            ),
            lateness=quantiles(
                [
                    (record.times.sent_ns - record.intended_ns) // 1000
                    for record in records
                    if record.times
                ]
            ),
            queue=quantiles(_queues(records)),
            execution=quantiles(self._execution_us),
            groups=_groups(records),
            problems=[],
        )
        return msgspec.structs.replace(result, problems=problems_of(result))


def _connect(options: LoadOptions, tenant: str) -> Producer:
    login = options.logins.get(tenant)
    if login is None:
        raise ValueError(
            f"a login of each planned tenant expected, none of {tenant} found; "
            f"there are {', '.join(options.logins) or 'none'}"
        )
    return Producer.connect(
        options.url,
        tenant=tenant,
        user=login.user,
        password=login.password,
        receipts=options.receipts,
        report_delivery=options.report_delivery,
    )


def _latencies(records: Iterable[_Record]) -> list[int]:
    return [
        (times.final_ns - record.intended_ns) // 1000
        for record in records
        if record.outcome == "completed" and (times := record.times) and times.final_ns is not None
    ]


def _first_tokens(records: Iterable[_Record]) -> list[int]:
    return [
        (times.first_token_ns - record.intended_ns) // 1000
        for record in records
        if record.outcome == "completed"
        and record.planned.stream
        and (times := record.times)
        and times.first_token_ns is not None
    ]


def _queues(records: Iterable[_Record]) -> list[int]:
    return [record.queue_us for record in records if record.queue_us is not None]


def _groups(records: Sequence[_Record]) -> dict[str, Group]:
    members: dict[str, dict[str, list[_Record]]] = {}
    for record in records:
        planned = record.planned
        for kind, name in (
            ("tenant", planned.tenant),
            ("tier", planned.tier),
            ("phase", planned.phase),
            ("language", planned.language),
        ):
            members.setdefault(kind, {}).setdefault(name or "none", []).append(record)
    return {
        f"{kind}:{name}": Group(
            sent=sum(record.times is not None for record in group),
            outcomes=dict(sorted(Counter(record.outcome for record in group).items())),
            latency=quantiles(_latencies(group)),
            first_token=quantiles(_first_tokens(group)),
            queue=quantiles(_queues(group)),
        )
        for kind, names in members.items()
        if len(names) > 1
        for name, group in names.items()
    }


def _milli_per_s(count: int, duration_us: int) -> int:
    return max(count, 0) * 1_000_000_000 // duration_us if duration_us > 0 else 0
