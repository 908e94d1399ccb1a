"""Dispatches in, engine output through, evidence and answers out."""

import asyncio
import contextlib
import heapq
import secrets
from collections.abc import Sequence
from typing import get_args

import msgspec
from prometheus_client import Counter, Gauge, Histogram

from waterclock_proto.envelope import Envelope, EventRefused, decode_event
from waterclock_proto.events import (
    AttemptLost,
    Cancelled,
    CancelRequested,
    Completed,
    Dispatched,
    EventData,
    Expired,
    Failed,
    RungChanged,
    SchedulerElected,
    Terminal,
    TerminalData,
)
from waterclock_proto.names import Outcome
from waterclock_proto.requests import (
    Beat,
    Delta,
    Restarted,
    Submission,
    body_commitment,
    body_salt,
    cache_salt,
    estimate_prompt_tokens,
    prompt_text,
)
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import (
    BODY_BYTES_MAX,
    EVENTS,
    answer_subject,
    beat_subject,
    body_subject,
    event_filter,
    final_subject,
)
from waterclock_runtime import limits
from waterclock_runtime.bodies import BodyCache
from waterclock_runtime.errors import BusUnavailable, WaterclockError
from waterclock_runtime.service import ServiceContext
from waterclock_runtime.tape import TapeMessage, TapeReader
from waterclock_worker import core
from waterclock_worker.config import WorkerSettings
from waterclock_worker.core import Attempt, CannotRun, EngineTimes, Key
from waterclock_worker.engine import Engine, EngineJob, EngineOutput, EngineStamps, PushEngine

EXPIRY_TICK_S = 0.01
"""How late a running request may be stopped after its deadline, at most, plus an engine step."""
MODEL_LENGTH_MAX = 200
HANDED_MAX = 1_024
"""Bodies whose dispatch has not been read yet; it follows within milliseconds, or never."""
CANCELS_REMEMBERED_MAX = 10_000
"""Cancels that may overtake their dispatch. Older ones belong to requests that never come here."""


class EngineDied(WaterclockError):
    """The engine will not come back; the process ends, and its work goes to another worker."""


class WorkerService:
    """One worker's life. ``run`` returns when the context is stopping and the work is done."""

    def __init__(
        self, context: ServiceContext, settings: WorkerSettings, engine: Engine, *, name: str
    ) -> None:
        self._ctx = context
        self._settings = settings
        self._engine = engine
        # Asked once: a check against a protocol looks at every one of its members.
        self._pushes = engine if isinstance(engine, PushEngine) else None
        self.name = name
        """Who it is over all its lives; unique in the mesh."""
        self.life = f"{name[:57]}-{secrets.token_hex(3)}"
        self._attempts: dict[Key, Attempt] = {}
        self._ended: dict[Key, tuple[Attempt, Terminal, int]] = {}
        """Terminal events on their way to the tape: the answer follows when they come back."""
        self._cancelled: dict[Key, None] = {}
        self._deadlines: list[tuple[int, Key, int]] = []
        self._handed = BodyCache(count_max=HANDED_MAX)
        self._readers: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()
        self._fence = 0
        self._heard = core.Heard()
        self._draining = False
        self._batch_cap: int | None = None
        self._dead = ""
        self._submission = msgspec.json.Decoder(Submission)
        self._encoder = msgspec.json.Encoder()
        registry = context.registry
        Gauge("waterclock_worker_in_flight", "Attempts held", registry=registry).set_function(
            lambda: len(self._attempts)
        )
        ends = Counter(
            "waterclock_worker_ends_total", "Attempts ended", ["outcome"], registry=registry
        )
        self._ends = {outcome: ends.labels(outcome) for outcome in get_args(Outcome)}
        bodies = Counter(
            "waterclock_worker_bodies_total", "Bodies of attempts", ["how"], registry=registry
        )
        self._bodies_handed, self._bodies_read = bodies.labels("handed"), bodies.labels("read")
        self._tokens = Counter(
            "waterclock_worker_output_tokens_total", "Tokens made", registry=registry
        )
        buckets = (
            0.001,
            0.0025,
            0.005,
            0.01,
            0.025,
            0.05,
            0.1,
            0.2,
            0.3,
            0.5,
            1,
            2.5,
            5,
            10,
            30,
            60,
        )
        self._queue_s = Histogram(
            "waterclock_queue_seconds",
            "Arrival to execution start",
            buckets=buckets,
            registry=registry,
        )
        self._exec_s = Histogram(
            "waterclock_execution_seconds",
            "Execution start to end",
            buckets=buckets,
            registry=registry,
        )

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            EngineDied: the engine gave up.
        """
        context = self._ctx
        context.writer.reads_back(Completed, Failed, Cancelled, Expired)
        await self._engine.start()
        _, head = await context.bus.stream_state(EVENTS.name)
        elected = await context.bus.last(
            EVENTS.name, event_filter(SchedulerElected, tenant="_", scope="_")
        )
        if elected is not None:
            subject = event_filter(SchedulerElected, tenant="_", scope="_")
            self._fence = decode_event(subject, elected[0]).fence
        life = self.life
        reader = TapeReader(
            context.bus,
            filters=[
                event_filter(Dispatched, scope=life),
                event_filter(AttemptLost, scope=life),
                event_filter(CancelRequested),
                event_filter(RungChanged, scope=self._settings.pool),
                event_filter(SchedulerElected),
                *(
                    event_filter(kind, scope=life)
                    for kind in (Completed, Failed, Cancelled, Expired)
                ),
            ],
            start=head + 1,
        )
        await self._read_rung()
        handed = context.bus.subscribe(body_subject(life, "*"), self._on_body)
        tasks = [
            asyncio.create_task(self._read_tape(reader), name="tape"),
            asyncio.create_task(self._beat_for_ever(reader), name="beat"),
            asyncio.create_task(self._expire_for_ever(), name="expiry"),
        ]
        stop = asyncio.create_task(context.stopping.wait())
        try:
            await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    await task
            await self._drain()
        finally:
            for task in [*tasks, stop, *self._readers, *self._streams]:
                task.cancel()
            for task in [*tasks, stop]:
                with contextlib.suppress(asyncio.CancelledError, WaterclockError):
                    await task
            await self._engine.stop()
            await reader.close()
            handed.close()

    # What comes in.

    async def _read_tape(self, reader: TapeReader) -> None:
        async for batch in reader:
            if reader.caught_up and not self._ctx.health.ready:
                self._ctx.health.ready = True
                self._beat()
            taken: list[Attempt] = []
            for message in batch:
                self._take(message, taken)
            if taken:
                self._start_or_read(taken)
            if self._dead:
                raise EngineDied(self._dead)
            await self._ctx.writer.ready()

    def _take(self, message: TapeMessage, taken: list[Attempt]) -> None:
        try:
            envelope = self._ctx.writer.decode(message.subject, message.payload)
        except EventRefused as refused:
            self._ctx.log.error("event_unreadable", sequence=message.sequence, why=str(refused))
            return
        data = envelope.data
        if isinstance(data, TerminalData):
            self._read_back(envelope)
        elif isinstance(data, CancelRequested):
            self._cancel((data.tenant, data.id))
        elif isinstance(data, SchedulerElected):
            self._fence = max(self._fence, envelope.fence)
        elif envelope.fence < self._fence:
            # Of a scheduler that was replaced: what it says does not count any more.
            return
        elif not self._heard.first_time(envelope.writer, envelope.counter):
            # A dispatch that is said again after its attempt has ended must not run again.
            return
        elif isinstance(data, Dispatched):
            attempt = self._dispatch(data)
            if attempt is not None:
                taken.append(attempt)
        elif isinstance(data, AttemptLost):
            attempt = self._attempts.get((data.tenant, data.id))
            if attempt is not None and attempt.dispatched.attempt == data.attempt:
                self._stop(attempt, "lost")
            ended = self._ended.get((data.tenant, data.id))
            if ended is not None and ended[0].dispatched.attempt == data.attempt:
                # Declared lost before its end came: the answer belongs to the next attempt.
                del self._ended[(data.tenant, data.id)]
        elif isinstance(data, RungChanged):
            self._obey(data)

    def _dispatch(self, data: Dispatched) -> Attempt | None:
        key = (data.tenant, data.id)
        known = self._attempts.get(key)
        if known is not None:
            if known.dispatched.attempt >= data.attempt:
                return None
            self._stop(known, "lost")
        attempt = Attempt(dispatched=data, taken=self._ctx.clock.stamp("worker"), texts=[])
        self._attempts[key] = attempt
        heapq.heappush(self._deadlines, (data.deadline_us, key, data.attempt))
        if key in self._cancelled:
            del self._cancelled[key]
            attempt.why = "cancel"
        return attempt

    def _cancel(self, key: Key) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None:
            self._stop(attempt, "cancel")
            return
        self._cancelled[key] = None
        if len(self._cancelled) > CANCELS_REMEMBERED_MAX:
            del self._cancelled[next(iter(self._cancelled))]

    def _obey(self, data: RungChanged) -> None:
        cap = data.batch_cap
        self._batch_cap = cap
        slots = self._settings.slots if cap is None else max(1, min(cap, self._settings.slots))
        self._engine.set_in_flight_max(slots)
        self._engine.set_speculation("speculation_off" not in data.actions)
        self._ctx.log.info("rung_obeyed", rung=data.rung_to, slots=slots, depth=data.depth)

    async def _read_rung(self) -> None:
        """The rung that the pool stands on, for a worker that comes up in the middle."""
        self._engine.set_in_flight_max(self._settings.slots)
        subject = event_filter(RungChanged, tenant="_", scope=self._settings.pool)
        found = await self._ctx.bus.last(EVENTS.name, subject)
        if found is not None:
            data = decode_event(subject, found[0]).data
            if isinstance(data, RungChanged):
                self._obey(data)

    # Running.

    async def _start(self, attempts: Sequence[Attempt]) -> None:
        """Read the bodies of what was dispatched together, and hand the attempts to the engine."""
        sequences = [attempt.dispatched.requests_sequence for attempt in attempts]
        while True:
            try:
                bodies = await self._ctx.bus.bodies(sequences)
                break
            except BusUnavailable as error:
                # The bus is away, so nobody could be told either. The attempts keep their slots
                # until it is back; those whose deadline passes meanwhile expire then.
                self._ctx.log.error("bodies_unavailable", attempts=len(attempts), error=str(error))
        for attempt, body in zip(attempts, bodies, strict=True):
            self._start_one(attempt, body)

    def _start_or_read(self, attempts: Sequence[Attempt]) -> None:
        """Start at once what the scheduler handed a body on for; read the others."""
        missing: list[Attempt] = []
        for attempt in attempts:
            body = self._handed.take(attempt.dispatched.requests_sequence)
            if body is None or not self._is_the_body(attempt, body):
                missing.append(attempt)
            else:
                self._bodies_handed.inc()
                self._start_one(attempt, body, checked=True)
        if missing:
            self._bodies_read.inc(len(missing))
            task = asyncio.create_task(self._start(missing))
            self._readers.add(task)
            task.add_done_callback(self._readers.discard)

    def _on_body(self, subject: str, payload: bytes) -> None:
        self._handed.put(int(subject.rpartition(".")[2]), payload)

    def _start_one(self, attempt: Attempt, body: bytes | None, *, checked: bool = False) -> None:
        clock, writer = self._ctx.clock, self._ctx.writer
        if attempt.phase == "over" or attempt.why == "lost":
            self._forget(attempt)
            return
        now = clock.stamp("worker")
        if attempt.why == "" and now.wall_us >= attempt.dispatched.deadline_us:
            attempt.why = "deadline"
        if attempt.why in ("cancel", "deadline", "drain"):
            self._end(attempt, core.ending(attempt, "abort", "", ended=now, worker=self.life))
            return
        try:
            submission = self._open(attempt, body, checked=checked)
        except CannotRun as refused:
            self._end(
                attempt,
                core.failing(attempt, refused.reason, refused.detail, ended=now, worker=self.life),
            )
            return
        job = core.make_job(
            attempt,
            submission,
            salt=cache_salt(self._ctx.mesh_key, attempt.dispatched.tenant),
            tokens_estimate=estimate_prompt_tokens(prompt_text(submission)),
        )
        writer.emit(core.started(attempt, clock.stamp("worker"), self.life))
        if attempt.dispatched.attempt > 1 and attempt.dispatched.stream:
            self._publish_answer(
                attempt, Restarted(id=attempt.dispatched.id, attempt=attempt.dispatched.attempt)
            )
        if self._pushes is not None:
            self._pushes.submit(job, lambda output: self._take_output(attempt, output))
            return
        task = asyncio.create_task(self._stream(attempt, job))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    def _open(self, attempt: Attempt, body: bytes | None, *, checked: bool) -> Submission:
        """The submission in the body, which must be the one that was admitted."""
        d = attempt.dispatched
        if body is None:
            raise CannotRun(
                "body_missing", f"REQUESTS has no message at sequence {d.requests_sequence}"
            )
        if not checked and not self._is_the_body(attempt, body):
            raise CannotRun(
                "body_changed",
                f"the body at sequence {d.requests_sequence} is not the one that was admitted",
            )
        try:
            return self._submission.decode(body)
        except msgspec.MsgspecError as error:
            # Admission read it before; only another version of the format can bring this here.
            raise CannotRun(
                "body_changed", f"the body cannot be read: {type(error).__name__}"
            ) from error

    def _is_the_body(self, attempt: Attempt, body: bytes) -> bool:
        d = attempt.dispatched
        salt = body_salt(self._ctx.mesh_key, d.tenant, d.id)
        return body_commitment(salt, body) == d.body_commitment

    async def _stream(self, attempt: Attempt, job: EngineJob) -> None:
        try:
            async with contextlib.aclosing(self._engine.generate(job)) as stream:
                async for output in stream:
                    self._take_output(attempt, output)
        finally:
            await self._engine.abort(attempt.job_id)

    def _take_output(self, attempt: Attempt, output: EngineOutput) -> None:
        if attempt.phase == "over":
            return
        attempt.times = self._times(attempt.times, output.stamps)
        attempt.prompt_tokens = output.prompt_tokens or attempt.prompt_tokens
        attempt.cached_tokens = output.cached_tokens
        attempt.preemptions = output.preemptions
        attempt.model_served = output.model_served[:MODEL_LENGTH_MAX] or attempt.model_served
        attempt.output_tokens += output.tokens
        if attempt.why != "lost":
            event = core.first_token(attempt, self.life)
            if event is not None:
                self._ctx.writer.emit(event)
            if output.text:
                attempt.texts.append(output.text)
                if attempt.dispatched.stream:
                    self._send_delta(attempt, output)
        if output.finish is not None:
            if output.failure == "engine_dead":
                self._dead = output.detail or "the engine is dead"
            ended = self._ctx.clock.stamp("worker")
            self._end(
                attempt,
                core.ending(attempt, output.finish, output.detail, ended=ended, worker=self.life),
            )

    def _times(self, known: EngineTimes, stamps: EngineStamps) -> EngineTimes:
        """Stamps as they become known; what was stamped once is not read from a clock again."""

        def stamp(before: Stamp | None, mono_ns: int | None) -> Stamp | None:
            if before is not None or mono_ns is None:
                return before
            return self._ctx.clock.stamp_at("engine", mono_ns, stamps.error_us or None)

        newest = known.last_token
        if stamps.last_token_ns is not None and (
            newest is None or newest.mono_ns != stamps.last_token_ns
        ):
            newest = stamp(None, stamps.last_token_ns)
        return EngineTimes(
            queued=stamp(known.queued, stamps.queued_ns),
            scheduled=stamp(known.scheduled, stamps.scheduled_ns),
            first_token=stamp(known.first_token, stamps.first_token_ns),
            last_token=newest,
        )

    # What goes out.

    def _send_delta(self, attempt: Attempt, output: EngineOutput) -> None:
        delta = Delta(
            id=attempt.dispatched.id,
            attempt=attempt.dispatched.attempt,
            index=attempt.deltas,
            text=output.text,
            tokens=output.tokens,
            queue_us=core.queue_us(attempt) if attempt.deltas == 0 else None,
        )
        attempt.deltas += 1
        self._publish_answer(attempt, delta)

    def _publish_answer(self, attempt: Attempt, message: Delta | Restarted) -> None:
        d = attempt.dispatched
        self._ctx.bus.publish(answer_subject(d.tenant, d.id), self._encoder.encode(message))

    def _end(self, attempt: Attempt, terminal: Terminal | None) -> None:
        self._forget(attempt)
        if terminal is None:
            return
        counter = self._ctx.writer.emit(terminal)
        self._ended[attempt.key] = (attempt, terminal, counter)
        self._ends[terminal.OUTCOME].inc()
        self._tokens.inc(attempt.output_tokens)

    def _read_back(self, envelope: Envelope[EventData]) -> None:
        """Our own end is on the tape, and no loss before it: now the producer gets its answer."""
        data = envelope.data
        assert isinstance(data, TerminalData)
        ended = self._ended.get((data.tenant, data.id))
        if (
            ended is None
            or envelope.writer != self._ctx.writer.name
            or envelope.counter != ended[2]
        ):
            return
        del self._ended[(data.tenant, data.id)]
        attempt, terminal, _ = ended
        final = core.final(attempt, terminal)
        encoded = self._encoder.encode(final)
        if len(encoded) > BODY_BYTES_MAX:
            final = msgspec.structs.replace(
                final,
                text="",
                answer_kept=False,
                detail=f"the answer has {len(encoded)} bytes, at most {BODY_BYTES_MAX} can be kept",
            )
            encoded = self._encoder.encode(final)
        self._ctx.bus.store_soon(final_subject(data.tenant, data.id), encoded)
        timings = final.timings
        if timings is not None and timings.queue_us is not None and timings.exec_us is not None:
            self._queue_s.observe(timings.queue_us / 1_000_000)
            self._exec_s.observe(timings.exec_us / 1_000_000)

    def _forget(self, attempt: Attempt) -> None:
        attempt.phase = "over"
        if self._attempts.get(attempt.key) is attempt:
            del self._attempts[attempt.key]
        if self._draining:
            self._beat()

    def _stop(self, attempt: Attempt, why: core.Why) -> None:
        """Tell the engine to stop; its last word then ends the attempt."""
        if attempt.phase == "over" or attempt.why == "lost":
            return
        if attempt.why == "" or why == "lost":
            attempt.why = why
        if attempt.phase == "running":
            abort = asyncio.ensure_future(self._engine.abort(attempt.job_id))
            self._streams.add(abort)
            abort.add_done_callback(self._streams.discard)

    # Time.

    def _beat(self) -> None:
        settings = self._settings
        beat = Beat(
            worker=self.life,
            name=self.name,
            pool=settings.pool,
            models=settings.models or self._engine.capabilities.models,
            slots=min(settings.slots, self._engine.capabilities.in_flight_max),
            draining=self._draining,
            in_flight=len(self._attempts),
            beat=self._ctx.clock.stamp("worker"),
        )
        self._ctx.bus.publish(beat_subject(self.life), self._encoder.encode(beat))

    async def _beat_for_ever(self, reader: TapeReader) -> None:
        while True:
            # Before the reader stands, a dispatch would be answered late: nobody is told yet.
            if reader.caught_up and self._ctx.bus.connected and not self._ctx.writer.stalled:
                health = await self._engine.health()
                if health.status == "dead":
                    raise EngineDied(health.detail or "the engine is dead")
                if health.status == "stalled":
                    self._ctx.health.wrong("engine", f"stalled: {health.detail}")
                else:
                    self._ctx.health.right("engine")
                    self._beat()
            await asyncio.sleep(limits.BEAT_INTERVAL_MS / 1000)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_TICK_S)
            now_us = self._ctx.clock.now_us()
            while self._deadlines and self._deadlines[0][0] <= now_us:
                _, key, number = heapq.heappop(self._deadlines)
                attempt = self._attempts.get(key)
                if attempt is not None and attempt.dispatched.attempt == number:
                    self._stop(attempt, "deadline")

    async def _drain(self) -> None:
        """Finish what runs within the bound; what is left then goes to another worker."""
        self._draining = True
        self._ctx.health.ready = False
        self._beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while self._attempts or self._ended or self._readers:  # noqa: ASYNC110 - ends are many
                    await asyncio.sleep(0.02)
        for attempt in list(self._attempts.values()):
            self._stop(attempt, "drain")
        if self._attempts:
            self._ctx.log.warning("attempts_left", count=len(self._attempts))
