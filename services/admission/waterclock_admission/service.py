"""Admission at work: submissions and the tape in, events, receipts and answers out.

The order, and what a crash at each place means:

1. Fold the tape to its head, from a snapshot if there is one. Nothing was said yet.
2. Write ``admission_elected`` with the next fence and read it back as the first of that fence.
   From here on every reader ignores what an earlier admission still writes.
3. Take the work queue over, from the first submission that the fold does not know as decided.
4. For each batch: read, decide, ask the budgets once, write the events. A crash loses what did not
   reach the tape; it comes again, undecided, and is charged no second time.
5. When an own event comes back from the tape: acknowledge its submission, send its receipt. A crash
   before that makes the bus bring the submission again, and the fold knows it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from waterclock_admission import limits
from waterclock_admission.budgets import Budgets
from waterclock_admission.clerk import (
    CancelReason,
    Clerk,
    Decided,
    Sheet,
    Written,
    budget_member,
    receipt,
)
from waterclock_admission.config import AdmissionConfig
from waterclock_admission.fold import READ_TYPES, Ended, Fold
from waterclock_admission.metrics import Metrics
from waterclock_admission.snapshot import Owed, SnapshotRefused, Snapshots
from waterclock_proto.envelope import Envelope, EventRefused, decode_event
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    ContractActivated,
    EventData,
    Failed,
    LogOpened,
    Rejected,
    Resubmitted,
    TerminalData,
)
from waterclock_proto.names import Outcome
from waterclock_proto.requests import Final, Timings
from waterclock_proto.segments import Measured, measure, measure_request
from waterclock_proto.subjects import (
    ANSWERS,
    EVENTS,
    REQUESTS,
    answer_subject,
    cancel_subject,
    delivered_subject,
    event_filter,
    final_subject,
    receipt_subject,
)
from waterclock_runtime.bus import Bus, Subscription
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable, FenceLost, StreamRolledBack
from waterclock_runtime.health import Health
from waterclock_runtime.tape import PullReader, RequestMessage, TapeMessage, TapeReader
from waterclock_runtime.writer import EventWriter

CONSUMER = "admission"
FILTERS = tuple(event_filter(kind) for kind in READ_TYPES)

Errand = Callable[[], Awaitable[None]]


class AdmissionService:
    """One admission process. ``run`` returns after ``stopping`` is set and all is put away."""

    def __init__(
        self,
        *,
        config: AdmissionConfig,
        bus: Bus,
        writer: EventWriter,
        clock: Clock,
        log: structlog.stdlib.BoundLogger,
        metrics: Metrics,
        health: Health,
        data_dir: Path,
        mesh_key: bytes,
        stopping: asyncio.Event,
    ) -> None:
        self._config = config
        self._bus = bus
        self._writer = writer
        self._clock = clock
        self._log = log
        self._metrics = metrics
        self._health = health
        self._mesh_key = mesh_key
        self._stopping = stopping
        self._snapshots = Snapshots(data_dir)
        self._fold = Fold(ended_requests_max=config.admission.ended_requests_max)
        self._last_payload = b""
        self._last_stored_ns = 0
        self._reader: TapeReader | None = None
        self._advanced = asyncio.Event()
        self._at_head = False
        self._reconnected = False
        self._leaving = False
        self._fence = 0
        self._elected_as = ""
        self._clerk: Clerk | None = None
        self._budgets: Budgets | None = None
        self._pull: PullReader | None = None
        self._subscriptions: list[Subscription] = []
        self._errands: asyncio.Queue[Errand] = asyncio.Queue()
        self._errand_done = asyncio.Event()
        self._errands_put_off = 0
        self._owed: dict[int, int] = {}
        """Ends whose final answer is not stored yet → where their ``admitted`` stands."""
        self._ends_seen: deque[tuple[Ended, int]] = deque(maxlen=limits.ERRANDS_MAX)
        """The scheduler's ends that were read before the election, the newest ones."""
        self.ready = asyncio.Event()
        """Set when it decides."""

    async def run(self) -> None:
        """Be elected, decide until told to stop, leave.

        Raises:
            FenceLost, ConsumerTaken: another admission was elected.
            StreamRolledBack: the tape is not the one that was folded.
            BusUnavailable: the bus does not answer.
        """
        tape = await self._fold_to_head()
        if tape is None:
            return
        tasks = {tape}
        try:
            await self._while_running(tasks, self._elect())
            if self._stopping.is_set():
                return
            await self._while_running(tasks, self._open())
            tasks.add(asyncio.create_task(self._pull_submissions(), name="admission-pull"))
            tasks.add(asyncio.create_task(self._tick(), name="admission-tick"))
            tasks |= {
                asyncio.create_task(self._run_errands(), name=f"admission-errands-{number}")
                for number in range(limits.ERRANDS_AT_ONCE)
            }
            self._health.ready = True
            self.ready.set()
            self._log.info("admission_ready", fence=self._fence, position=self._fold.position)
            await self._while_running(tasks, self._stopping.wait())
            await self._while_running(tasks, self._leave(tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for subscription in self._subscriptions:
                subscription.close()
            if self._budgets is not None:
                await self._budgets.close()
            with contextlib.suppress(BusUnavailable):
                if self._pull is not None:
                    await self._pull.close()
                if self._reader is not None:
                    await self._reader.close()

    def served_model(self, tenant: str, request_id: str) -> str | None:
        """The model that the newest dispatch of an open request named."""
        request = self._fold.open.get(f"{tenant}.{request_id}")
        return request.model if request is not None else None

    # Before it decides.

    async def _fold_to_head(self) -> "asyncio.Task[None] | None":
        """Read the tape to its present head; the task reads on. None when told to stop."""
        while True:
            await self._load()
            task = asyncio.create_task(self._read_tape(), name="admission-tape")
            try:
                await self._while_running({task}, self._caught_up())
            except StreamRolledBack as error:
                if self._fold.position == 0:
                    raise
                # The snapshot is of another tape, or of one that lost its end.
                self._log.warning("snapshot_of_another_tape", error=str(error))
                await asyncio.to_thread(self._snapshots.discard)
                continue
            if self._stopping.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            self._log.info(
                "tape_folded",
                position=self._fold.position,
                open_requests=len(self._fold.open),
                known_requests=len(self._fold.ended),
            )
            return task

    async def _load(self) -> None:
        maximum = self._config.admission.ended_requests_max
        self._fold = Fold(ended_requests_max=maximum)
        self._last_payload = b""
        self._at_head = False
        self._owed.clear()
        self._ends_seen.clear()
        try:
            restored = await asyncio.to_thread(self._snapshots.load, ended_requests_max=maximum)
        except SnapshotRefused as error:
            self._log.warning("snapshot_refused", error=str(error))
            restored = None
        if restored is not None:
            self._fold = restored.fold
            self._last_payload = restored.last_payload
            self._last_stored_ns = restored.last_stored_ns
            self._owed = {owed.end_sequence: owed.admitted_sequence for owed in restored.owed}
        position = self._fold.position
        first, _ = await self._bus.stream_state(EVENTS.name)
        if position and first > position + 1:
            # Whoever shortened the tape took decisions with it that nobody folded.
            self._log.error("tape_has_a_hole", expected=position + 1, found=first)
            self._health.facts["tape_hole"] = f"{position + 1} to {first - 1}"
        self._writer.reads_back(*READ_TYPES)
        self._reader = TapeReader(self._bus, filters=FILTERS, start=position + 1)
        if position:
            self._reader.remember(position, self._last_payload, self._last_stored_ns)

    async def _caught_up(self) -> None:
        while not self._at_head and not self._stopping.is_set():
            await self._next_advance()

    async def _next_advance(self) -> None:
        """Wait until more of the tape was read, or it is time to look around anyway."""
        self._advanced.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.TICK_S):
                await self._advanced.wait()

    async def _elect(self) -> None:
        """Become the one whose decisions count.

        Raises:
            FenceLost: somebody else wrote the same fence first, or a higher one.
        """
        self._fence = self._fold.admission_fence + 1
        self._writer.fence = self._fence
        self._writer.emit(AdmissionElected(elected=self._clock.stamp("admission")))
        self._elected_as = self._writer.name
        began_s = asyncio.get_running_loop().time()
        while self._fold.admission_fence < self._fence:
            if self._stopping.is_set():
                return
            await self._next_advance()
            waited_s = asyncio.get_running_loop().time() - began_s
            if waited_s > limits.ELECTION_WAIT_S:
                self._health.wrong("election", f"the tape has not taken it for {waited_s:.0f} s")
        self._health.right("election")
        self._check_fence()
        self._metrics.fence.set(self._fence)

    def _check_fence(self) -> None:
        fold = self._fold
        if fold.admission_fence != self._fence or fold.admission_writer != self._elected_as:
            raise FenceLost(
                f"own fence {self._fence} of {self._elected_as}, found fence"
                f" {fold.admission_fence} of {fold.admission_writer}"
            )

    async def _open(self) -> None:
        """Everything between being elected and deciding."""
        fold, settings = self._fold, self._config.admission
        good = await self._look_at_requests()
        if good is not None:
            self._log.error("requests_rolled_back", decided=fold.decided.largest, good=good)
            fold.rewind(good)
        self._clerk = Clerk(
            fold,
            self._config.terms,
            mesh_key=self._mesh_key,
            open_requests_max=settings.open_requests_max,
            malformed_events_per_s=settings.malformed_events_per_s,
        )
        for tenant, terms in self._config.terms.items():
            if fold.contracts.get(tenant) != terms.contract_sha256:
                stamp = self._clock.stamp("admission")
                self._writer.emit(
                    ContractActivated(
                        tenant=tenant,
                        contract_sha256=terms.contract_sha256,
                        valid_from_us=stamp.wall_us,
                        activated=stamp,
                    )
                )
        self._budgets = Budgets(
            self._config.terms,
            url=settings.redis_url,
            prefix=f"{settings.redis_prefix}:{fold.incarnation}",
            now_us=self._clock.now_us,
            log=self._log,
            observe=self._metrics.budget_seconds.observe,
        )
        self._budgets.on_degraded = self._on_budgets_degraded
        await self._budgets.open(
            (
                request.tenant,
                budget_member(request.requests_sequence, request.arrival_us),
                request.deadline_us + limits.OPEN_GRACE_S * 1_000_000,
            )
            for request in fold.open.values()
        )
        await self._catch_up_on_duties()
        self._subscriptions = [
            self._bus.subscribe(cancel_subject("*", "*"), self._on_cancel),
            self._bus.subscribe(delivered_subject("*"), self._on_delivered),
        ]
        self._bus.on_reconnect(self._on_reconnect)
        self._pull = PullReader(self._bus, consumer=CONSUMER, start=fold.decided.first_missing())
        await self._pull.open()

    async def _look_at_requests(self) -> int | None:
        """Learn what has left REQUESTS by age, and whether it lost its end.

        Returns None if it did not; else the last sequence at which it still holds what was
        decided there.
        """
        first, last = await self._bus.stream_state(REQUESTS.name)
        self._fold.forget_before(first)
        if not self._fold.decided.largest:
            return None
        lost = self._fold.decided.largest > last
        for sequence in sorted(self._fold.recent, reverse=True):
            if sequence > last:
                continue
            if sequence < first:
                break
            stored_us = self._fold.recent[sequence][0]
            found = await self._bus.message(REQUESTS.name, sequence)
            if found is None:
                continue  # deleted by hand: a hole, and no other history
            if found[2] // 1000 == stored_us:
                return sequence if lost else None
            lost = True
        return first - 1 if lost else None

    async def _catch_up_on_duties(self) -> None:
        """What the admission before may have left: receipts, and finals of the scheduler's ends."""
        info = await self._bus.api(f"CONSUMER.INFO.{REQUESTS.name}.{CONSUMER}", {})
        if "error" not in info:
            acknowledged = int(info["ack_floor"]["stream_seq"])
            # A broken connection moves the floor too, so the last seconds are said again anyway.
            lately_us = self._fold.now_us - limits.RECEIPTS_AGAIN_US
            for sequence, (stored_us, event_sequence) in self._fold.recent.items():
                if sequence > acknowledged or stored_us >= lately_us:
                    self._errands.put_nowait(self._receipt_errand(event_sequence))
        for end_sequence, admitted_sequence in self._owed.items():
            self._errands.put_nowait(self._announce_errand(end_sequence, admitted_sequence))
        kept_us = self._clock.now_us() - limits.FINAL_KEPT_S * 1_000_000
        for ended, sequence in self._ends_seen:
            stamp = ended.end.ended if isinstance(ended.end, TerminalData) else ended.end.decided
            if stamp.wall_us >= kept_us and sequence not in self._owed:
                self._owed[sequence] = ended.request.event_sequence
                self._errands.put_nowait(
                    self._announce_errand(sequence, ended.request.event_sequence)
                )
        self._ends_seen.clear()

    # The tape.

    async def _read_tape(self) -> None:
        assert self._reader is not None
        async for batch in self._reader:
            for place, message in enumerate(batch):
                self._fold_in(message)
                if place % limits.FOLD_BATCH_MAX == limits.FOLD_BATCH_MAX - 1:
                    await asyncio.sleep(0)
                while self._errands.qsize() >= limits.ERRANDS_MAX and self._clerk is not None:
                    self._errand_done.clear()
                    await self._errand_done.wait()
            # Only now, when the batch that reached it has been folded in.
            self._at_head = self._reader.caught_up
            self._advanced.set()

    def _fold_in(self, message: TapeMessage) -> None:
        try:
            envelope = self._writer.decode(message.subject, message.payload)
        except EventRefused as error:
            # Somebody wrote what no reader takes; the ledger keeps it, and nobody acts on it.
            self._metrics.poisoned.labels("tape").inc()
            self._log.error("event_refused", sequence=message.sequence, error=str(error))
            return
        effect = self._fold.apply(message.sequence, message.stored_ns, envelope)
        self._last_payload = message.payload
        self._last_stored_ns = message.stored_ns
        if isinstance(envelope.data, LogOpened):
            self._writer.incarnation = self._fold.incarnation
        clerk = self._clerk
        if clerk is None:
            if isinstance(effect, Ended) and _is_the_schedulers(effect.end):
                self._ends_seen.append((effect, message.sequence))
            return
        self._check_fence()
        written = clerk.read_back(envelope.writer, envelope.counter)
        if written is not None:
            self._done(written, message)
        if isinstance(effect, Ended):
            self._on_end(effect, message.sequence)

    def _done(self, written: Written, message: TapeMessage) -> None:
        """An own event stands on the tape: now the world may know."""
        for submission in written.messages:
            assert self._pull is not None
            self._pull.ack(submission)
        data = written.data
        if not isinstance(data, Decided):
            return
        self._send_receipt(data, message.payload, message.sequence, message.stored_ns)
        self._metrics.count(data)
        stored_us = written.messages[0].stored_ns // 1000
        self._metrics.decision_seconds.observe((self._clock.now_us() - stored_us) / 1e6)
        if isinstance(data, Resubmitted) and f"{data.tenant}.{data.id}" not in self._fold.open:
            # It may have been open when it was decided and ended since: then its final went out
            # before the producer that came back was listening.
            self._errands.put_nowait(self._answer_errand(data))

    def _send_receipt(self, data: Decided, payload: bytes, sequence: int, stored_ns: int) -> None:
        made = receipt(
            data,
            payload=payload,
            sequence=sequence,
            stored_ns=stored_ns,
            incarnation=self._fold.incarnation,
            mesh_key=self._mesh_key,
        )
        self._bus.publish(receipt_subject(data.tenant, data.id), _ENCODER.encode(made))

    def _on_end(self, ended: Ended, sequence: int) -> None:
        request = ended.request
        assert self._budgets is not None
        self._budgets.release(
            request.tenant, budget_member(request.requests_sequence, request.arrival_us)
        )
        if _is_the_schedulers(ended.end):
            self._owed[sequence] = request.event_sequence
            self._errands.put_nowait(self._announce_errand(sequence, request.event_sequence))

    # Submissions.

    async def _pull_submissions(self) -> None:
        assert self._pull is not None
        async for batch in self._pull:
            for chunk in _chunks(batch):
                # The client of the budgets can swallow the cancellation that ends this.
                if self._leaving:
                    return
                await self._writer.ready()
                await self._decide(chunk)

    async def _decide(self, batch: Sequence[RequestMessage]) -> None:
        clerk, budgets = self._clerk, self._budgets
        assert clerk is not None
        assert budgets is not None
        sheet = clerk.sort(batch, self._clock.stamp("admission"))
        self._pass_over(sheet)
        try:
            answers = await budgets.ask(sheet.asks)
        except BaseException:
            clerk.abandon(sheet)
            raise
        written, unused = clerk.conclude(sheet, answers, self._clock.stamp("admission"))
        for one in written:
            self._emit(one)
        for ask in unused:
            budgets.release(ask.tenant, ask.member)
        self._flush_floods()

    def _pass_over(self, sheet: Sheet) -> None:
        """What needs no decision: known already, or about nobody."""
        assert self._pull is not None
        for message in sheet.known_again:
            self._pull.ack(message)
            recent = self._fold.recent.get(message.sequence)
            if recent is not None:
                self._errands.put_nowait(self._receipt_errand(recent[1]))
        for message in sheet.poisoned:
            self._pull.ack(message)
            self._fold.pass_over(message.sequence)
            self._metrics.poisoned.labels("requests").inc()
            self._log.error("submission_of_nobody", sequence=message.sequence)

    def _emit(self, written: Written) -> None:
        clerk = self._clerk
        assert clerk is not None
        try:
            counter = self._writer.emit(written.data)
        except EventRefused as error:
            if not isinstance(written.data, Decided):
                raise
            # A value that passed every check and that no event can hold is a bug of ours; the
            # submission must not stop admission each time it is brought again.
            self._log.error("decision_not_writable", error=str(error))
            clerk.refuse_unwritable(written)
            counter = self._writer.emit(written.data)
        clerk.sent(written, self._writer.name, counter)

    def _flush_floods(self, *, force: bool = False) -> None:
        clerk = self._clerk
        assert clerk is not None
        if force or clerk.flush_due(self._clock.now_us()):
            for written in clerk.flush(self._clock.stamp("admission")):
                self._emit(written)
                data = written.data
                if isinstance(data, Rejected) and data.count > 1:
                    self._log.warning(
                        "malformed_folded",
                        tenant=data.tenant,
                        count=data.count,
                        number=data.number,
                        reason=data.reason,
                    )

    # What else producers say.

    def cancel(self, tenant: str, request_id: str, reason: CancelReason) -> None:
        """Ask for a request to be stopped; the edge does so for a client that went away."""
        if self._clerk is None:
            return
        written = self._clerk.cancel(tenant, request_id, reason, self._clock.stamp("admission"))
        if written is None:
            return
        try:
            self._emit(written)
        except BusUnavailable as error:
            self._log.warning("cancel_not_written", error=str(error))

    def _on_cancel(self, subject: str, _payload: bytes) -> None:
        parts = subject.split(".")
        if len(parts) == 4:
            self.cancel(parts[2], parts[3], "producer")

    def _on_delivered(self, subject: str, payload: bytes) -> None:
        clerk = self._clerk
        if clerk is None:
            return
        tenant = subject.rpartition(".")[2]
        written = clerk.claim(tenant, payload, self._clock.stamp("admission"))
        if written is not None:
            self._emit(written)

    # Errands: reads from streams that no decision waits for.

    async def _run_errands(self) -> None:
        while True:
            errand = await self._errands.get()
            try:
                await errand()
            except BusUnavailable as error:
                self._log.warning("errand_put_off", error=str(error))
                await asyncio.sleep(1.0)
                self._errands.put_nowait(errand)
            except EventRefused as error:
                self._log.error("errand_given_up", error=str(error))
            self._errand_done.set()

    def _receipt_errand(self, event_sequence: int) -> Errand:
        async def send() -> None:
            found = await self._event(event_sequence)
            if found is not None and isinstance(found[0].data, Decided):
                envelope, payload, stored_ns = found
                assert isinstance(envelope.data, Decided)
                self._send_receipt(envelope.data, payload, event_sequence, stored_ns)
                self._metrics.receipts_again.inc()

        return send

    def _announce_errand(self, end_sequence: int, admitted_sequence: int) -> Errand:
        """Tell a producer of an end that no worker will tell it of."""

        async def announce() -> None:
            ended, admitted = await asyncio.gather(
                self._event(end_sequence), self._event(admitted_sequence)
            )
            if ended is None or admitted is None:
                self._owed.pop(end_sequence, None)
                self._log.error("final_not_possible", sequence=end_sequence)
                return
            data, of = ended[0].data, admitted[0].data
            if not isinstance(data, (TerminalData, Rejected)) or not isinstance(of, Admitted):
                self._owed.pop(end_sequence, None)
                return
            self._bus.store_soon(
                final_subject(of.tenant, of.id),
                _ENCODER.encode(final_of(of, data)),
                lambda _sequence: self._paid(end_sequence),
            )

        return announce

    def _paid(self, end_sequence: int) -> None:
        if self._owed.pop(end_sequence, None) is not None:
            self._metrics.finals.labels("scheduler_end").inc()

    def _answer_errand(self, data: Resubmitted) -> Errand:
        """Say the final answer again to whoever asks again."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + limits.FINAL_LATE_S

        async def answer() -> None:
            kept = None
            if data.outcome != "gone":
                kept = await self._bus.final(data.tenant, data.id)
            if kept is not None:
                self._bus.publish(answer_subject(data.tenant, data.id), kept)
                self._metrics.finals.labels("resubmitted").inc()
                return
            if data.outcome != "gone" and loop.time() < give_up_s:
                # Its worker stores the answer only when it has read its own end back.
                self._put_off(answer, limits.FINAL_LOOK_AGAIN_S)
                return
            known = self._fold.known(data.tenant, data.id)
            outcome: Outcome = (known.outcome if known is not None else None) or "completed"
            why = (
                f"its answer was kept for {ANSWERS.max_age_s} s only"
                if data.outcome == "gone"
                else "its worker was lost before the answer was stored"
            )
            self._bus.publish(
                answer_subject(data.tenant, data.id),
                _ENCODER.encode(
                    Final(
                        tenant=data.tenant,
                        id=data.id,
                        outcome=outcome,
                        answer_kept=False,
                        detail=f"it ended, and {why}",
                    )
                ),
            )
            self._metrics.finals.labels("gone").inc()

        return answer

    def _put_off(self, errand: Errand, delay_s: float) -> None:
        """Run an errand later; leaving waits for it, within its bound."""
        self._errands_put_off += 1

        def come_back() -> None:
            self._errands_put_off -= 1
            self._errands.put_nowait(errand)

        asyncio.get_running_loop().call_later(delay_s, come_back)

    async def _event(self, sequence: int) -> tuple[Envelope[EventData], bytes, int] | None:
        found = await self._bus.message(EVENTS.name, sequence)
        if found is None:
            return None
        subject, payload, stored_ns = found
        return decode_event(subject, payload), payload, stored_ns

    # Now and then.

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        snapshot_s = looked_s = loop.time()
        ticks = 0
        while True:
            await asyncio.sleep(limits.TICK_S)
            self._flush_floods()
            ticks += 1
            if ticks % limits.TICKS_A_SECOND:
                continue
            self._close_windows()
            self._update_metrics()
            due = loop.time() - looked_s >= limits.REQUESTS_LOOKED_AT_S or self._reconnected
            if due and self._bus.connected:
                looked_s = loop.time()
                self._reconnected = False
                await self._check_requests()
            if loop.time() - snapshot_s >= self._config.admission.snapshot_s:
                snapshot_s = loop.time()
                await self._snapshot()

    async def _check_requests(self) -> None:
        """See to it that the queue is still the one that decisions were made of.

        Raises:
            StreamRolledBack: REQUESTS lost its end; started again, admission finds where to go on.
        """
        try:
            good = await self._look_at_requests()
        except BusUnavailable as error:
            self._log.warning("requests_not_looked_at", error=str(error))
            return
        if good is not None:
            raise StreamRolledBack(
                f"{REQUESTS.name}: decided up to {self._fold.decided.largest}, and it holds the"
                f" same only up to {good}"
            )

    def _on_reconnect(self) -> None:
        self._reconnected = True

    def _close_windows(self) -> None:
        clerk = self._clerk
        assert clerk is not None
        # Several times within the tape's age, so that one saying is always on it.
        say_again_s = min(
            limits.NUMBERS_SAID_AGAIN_S, max(60, self._bus.settings.events_age_s_max // 4)
        )
        for written in clerk.close_windows(self._clock.stamp("admission"), say_again_s=say_again_s):
            self._emit(written)

    async def _snapshot(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        prepared = self._snapshots.prepare(
            self._fold,
            last_payload=self._last_payload,
            last_stored_ns=self._last_stored_ns,
            owed=tuple(Owed(end, admitted) for end, admitted in self._owed.items()),
        )
        self._metrics.snapshot_seconds.observe(loop.time() - began_s)
        try:
            await asyncio.to_thread(self._snapshots.write, prepared)
            self._health.right("snapshot")
        except OSError as error:
            self._metrics.snapshot_failures.inc()
            self._health.wrong("snapshot", f"not written: {error.strerror}")
            self._log.error("snapshot_failed", error=repr(error))

    def _update_metrics(self) -> None:
        clerk, fold, metrics = self._clerk, self._fold, self._metrics
        assert clerk is not None
        for tenant in self._config.terms:
            metrics.open_requests.labels(tenant).set(fold.open_by_tenant.get(tenant, 0))
        metrics.known_requests.set(len(fold.ended))
        metrics.forgotten_early.set(fold.ended.forgotten_early)
        oldest_us = fold.ended.oldest_us()
        metrics.known_back_seconds.set(
            0 if oldest_us is None else (self._clock.now_us() - oldest_us) // 1_000_000
        )
        metrics.outstanding.set(clerk.outstanding)
        for why, count in clerk.take_dropped().items():
            metrics.dropped.labels(why).inc(count)
        folded, clerk.folded = clerk.folded, 0
        metrics.folded.inc(folded)

    def _on_budgets_degraded(self, degraded: bool) -> None:
        self._metrics.budgets_degraded.set(int(degraded))
        if degraded:
            self._health.facts["budgets"] = "kept in this process: Redis is away"
        else:
            self._health.facts.pop("budgets", None)

    # Leaving.

    async def _leave(self, tasks: set["asyncio.Task[None]"]) -> None:
        """Take nothing more, let what was written come back, write a snapshot."""
        self._health.ready = False
        pull = next(task for task in tasks if task.get_name() == "admission-pull")
        tasks.discard(pull)
        self._leaving = True
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        self._flush_floods(force=True)
        clerk = self._clerk
        assert clerk is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.READ_BACK_WAIT_S):
                while (
                    clerk.outstanding
                    or self._errands.qsize()
                    or self._errands_put_off
                    or self._bus.storing
                ):
                    await self._next_advance()
        await self._snapshot()
        self._log.info(
            "admission_left",
            position=self._fold.position,
            not_read_back=clerk.outstanding,
            owed=len(self._owed),
        )

    async def _while_running(
        self, tasks: "set[asyncio.Task[None]]", work: Awaitable[object]
    ) -> None:
        """Do ``work``; if one of ``tasks`` ends first, that is what went wrong."""
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait({doing, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await doing
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.gather(doing, return_exceptions=True)


def final_of(admitted: Admitted, end: TerminalData | Rejected) -> Final:
    """The final answer, without any text, of a request that the scheduler ended."""
    if isinstance(end, TerminalData):
        return Final(
            tenant=admitted.tenant,
            id=admitted.id,
            attempt=end.attempt,
            outcome=end.OUTCOME,
            fail_reason=end.reason if isinstance(end, Failed) else None,
            detail=end.detail if isinstance(end, Failed) else "",
            timings=_timings(measure_request(admitted, (), None, None, end)),
        )
    measured = measure(
        (
            ("edge_accepted", admitted.edge_accepted),
            ("arrival", admitted.arrival),
            ("received", admitted.received),
            ("decided", admitted.decided),
            ("ended", end.decided),
        )
    )
    return Final(
        tenant=admitted.tenant,
        id=admitted.id,
        outcome="rejected",
        reject_reason=end.reason,
        retry_after_ms=end.retry_after_ms,
        detail=end.detail,
        timings=_timings(measured),
    )


def _timings(measured: Measured) -> Timings:
    return Timings(
        arrival_us=measured.start_us,
        queue_us=measured.queue_us,
        exec_us=measured.exec_us,
        total_us=measured.total_us,
        segments=measured.segments,
    )


def _is_the_schedulers(end: TerminalData | Rejected) -> bool:
    """Whether no worker had the request, so that no worker tells its producer."""
    return isinstance(end, Rejected) or end.worker == ""


def _chunks(batch: list[RequestMessage]) -> list[list[RequestMessage]]:
    """The batch in parts of bounded count and size."""
    chunks: list[list[RequestMessage]] = [[]]
    size = 0
    for message in batch:
        size += len(message.payload)
        if chunks[-1] and (len(chunks[-1]) >= limits.BATCH_MAX or size > limits.BATCH_BYTES_MAX):
            chunks.append([])
            size = len(message.payload)
        chunks[-1].append(message)
    return chunks


_ENCODER = msgspec.json.Encoder()
