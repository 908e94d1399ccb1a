"""Events in, decisions out: reading the tape, being elected, and what a restart needs.

Three things move the scheduler: a batch of the tape, a beat of a worker, and a tick that looks
at deadlines, leases and the ladder when nothing else happens. Each ends in ``_pump``, which
decides and publishes without waiting. Nothing here waits on the hot path; bodies are read on
the side, and their requests enter a pool when they have come.

Until it is elected the scheduler only folds. It is elected when it reads its own
``scheduler_elected`` back as the first of the highest fence; when it reads a higher one it
stops at once, and the process ends with an error, so that whoever supervises it starts it
anew. Events that it published in between bear the lower fence, and count for nobody.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from waterclock_proto.envelope import EventRefused
from waterclock_proto.events import Dispatched, EventData, RungChanged, SchedulerElected
from waterclock_proto.requests import Beat
from waterclock_proto.subjects import (
    EVENTS,
    beat_subject,
    body_subject,
    event_filter,
    pulse_subject,
)
from waterclock_runtime.bodies import BodyCache, BodyFeed
from waterclock_runtime.errors import BusUnavailable, FenceLost, StreamRolledBack
from waterclock_runtime.service import ServiceContext
from waterclock_runtime.tape import TapeMessage, TapeReader
from waterclock_scheduler import limits, snapshot
from waterclock_scheduler.board import Board
from waterclock_scheduler.config import Settings
from waterclock_scheduler.core import decide
from waterclock_scheduler.features import read_features
from waterclock_scheduler.metrics import Metrics
from waterclock_scheduler.pulse import decode_pulse, encode_pulse, pulse_of
from waterclock_scheduler.state import READ_TYPES, Request, TapeState, apply

SNAPSHOT_NAME: Final = "scheduler.snapshot"
FILTERS: Final = tuple(event_filter(kind) for kind in READ_TYPES)
_MS: Final = 1_000_000
_BEAT_DECODER: Final = msgspec.json.Decoder(Beat)


class Scheduler:
    """One life of the scheduler. Make it with ``open``; ``run`` returns when it shall stop."""

    def __init__(
        self, context: ServiceContext, settings: Settings, state: TapeState, reader: TapeReader
    ) -> None:
        self._context = context
        self._settings = settings
        self._state = state
        self._reader = reader
        self._board = Board(settings, state)
        self._metrics = Metrics(context.registry, self._board)
        self._window = context.bus.settings.writer_window
        self._fence = 0
        """Under which it was elected, or wants to be."""
        self._name = ""
        """What its writer was called then."""
        self._leading = False
        self._last_payload = b""
        """Of the event at the state's position."""
        self._stored_position = state.position
        """Of the snapshot on the disk."""
        self._pulse_heard_ns = context.clock.mono_ns()
        """When another scheduler's pulse was last heard, or when this one began to listen."""
        self._ignored: dict[str, None] = {}
        self._kept = BodyCache()
        """Bodies that were pushed here, until their dispatch."""
        self._feed = BodyFeed(context.bus, self._kept)
        self._bodies: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception of a task that nobody waits for."""

    @property
    def _path(self) -> Path:
        return self._context.data_dir / SNAPSHOT_NAME

    @classmethod
    async def open(cls, context: ServiceContext, settings: Settings) -> "Scheduler":
        """A scheduler that begins where its snapshot ends, if there is one that fits the tape.

        Raises:
            BusUnavailable: the tape could not be asked.
        """
        path = context.data_dir / SNAPSHOT_NAME
        found = await asyncio.to_thread(snapshot.read, path)
        if isinstance(found, snapshot.Unusable):
            if not found.missing:
                context.log.warning("snapshot_discarded", reason=found.reason)
            return cls(context, settings, TapeState(), _reader(context, start=1))
        state = found.state
        first, last = await context.bus.stream_state(EVENTS.name)
        there = await context.bus.message(EVENTS.name, state.position) if state.position else None
        payload = None if there is None else there[1]
        reason = snapshot.why_not(found, first=first, last=last, payload=payload)
        if reason is not None:
            context.log.warning("snapshot_discarded", reason=reason, position=state.position)
            return cls(context, settings, TapeState(), _reader(context, start=1))
        context.log.info(
            "snapshot_used", position=state.position, open_requests=len(state.requests)
        )
        reader = _reader(context, start=state.position + 1)
        scheduler = cls(context, settings, state, reader)
        if there is not None:
            scheduler._last_payload = there[1]
            reader.remember(state.position, there[1], there[2])
        return scheduler

    async def run(self) -> None:
        """Fold, be elected, decide, until told to stop.

        Raises:
            FenceLost: another scheduler was elected.
            StreamRolledBack: the tape is not the one that was folded; the snapshot is gone.
        """
        context = self._context
        context.writer.reads_back(*READ_TYPES)
        self._feed.open()
        subscriptions = [
            context.bus.subscribe(beat_subject("*"), self._on_beat),
            context.bus.subscribe(pulse_subject("*"), self._on_pulse),
        ]
        work: list[asyncio.Future[None]] = [
            asyncio.create_task(self._read_tape(), name="scheduler-tape"),
            asyncio.create_task(self._tick_forever(), name="scheduler-tick"),
            asyncio.create_task(self._pulse_forever(), name="scheduler-pulse"),
            asyncio.create_task(self._snapshot_forever(), name="scheduler-snapshot"),
            self._broken,
        ]
        stopping = asyncio.create_task(context.stopping.wait(), name="scheduler-stopping")
        try:
            await asyncio.wait({*work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    await task
        except StreamRolledBack:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            self._lead(leading=False)
            for subscription in subscriptions:
                subscription.close()
            tasks: list[asyncio.Future[Any]] = [*work, stopping, *self._bodies]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._reader.close()
            await self._feed.close()
        await self._write_snapshot()

    # --- the tape

    async def _read_tape(self) -> None:
        """A full window is no reason to stop reading: what is read is what empties it."""
        async for batch in self._reader:
            self._fold(batch)
            self._check_fence()
            self._move()

    def _fold(self, batch: Sequence[TapeMessage]) -> None:
        state, board = self._state, self._board
        now_ns = self._context.clock.mono_ns()
        board.hear(now_ns)
        for message in batch:
            try:
                envelope = self._context.writer.decode(message.subject, message.payload)
            except EventRefused as refused:
                # Of a later version, or of nobody of ours: it cannot be for this scheduler.
                self._metrics.unreadable.labels("event").inc()
                self._context.log.warning(
                    "event_unreadable", sequence=message.sequence, reason=str(refused)
                )
                continue
            counted = apply(
                state, envelope, sequence=message.sequence, stored_us=message.stored_ns // 1000
            )
            if self._leading:
                board.follow(envelope, counted=counted, now_ns=now_ns)
            self._last_payload = message.payload
        if state.incarnation and state.incarnation != self._context.writer.incarnation:
            self._context.writer.incarnation = state.incarnation

    def _move(self) -> None:
        """Do whatever can be done now."""
        if self._leading:
            self._read_bodies()
            self._pump()
        elif not self._fence and self._reader.caught_up:
            self._context.health.ready = True
            if self._may_be_elected():
                self._stand_for_election()

    # --- leading

    def _may_be_elected(self) -> bool:
        if not self._settings.scheduler.standby:
            return True
        silent_ns = self._context.clock.mono_ns() - self._pulse_heard_ns
        return silent_ns >= self._settings.scheduler.takeover_ms * _MS

    def _stand_for_election(self) -> None:
        writer = self._context.writer
        self._fence = writer.fence = self._state.scheduler_fence + 1
        self._name = writer.name
        writer.emit(SchedulerElected(elected=self._context.clock.stamp("scheduler")))
        self._context.log.info("election_entered", fence=self._fence)

    def _check_fence(self) -> None:
        """Whether the tape says that this scheduler leads, or that it does not any more.

        Raises:
            FenceLost: another one was elected under the same fence before, or under a higher one.
        """
        state = self._state
        if not self._fence or state.scheduler_fence < self._fence:
            return
        if state.scheduler_fence == self._fence and state.leader == self._name:
            if not self._leading:
                self._lead(leading=True)
            return
        self._lead(leading=False)
        raise FenceLost(
            f"expected to lead under fence {self._fence} as {self._name}, found"
            f" {state.leader} elected under fence {state.scheduler_fence}"
        )

    def _lead(self, *, leading: bool) -> None:
        context = self._context
        self._metrics.leading.set(int(leading))
        context.health.facts["leading"] = leading
        if leading and not self._leading:
            # Only now, because until here the fold changed without the board.
            self._board.adopt(context.clock.mono_ns())
            context.log.info(
                "leading",
                fence=self._fence,
                open_requests=self._board.open_requests,
                workers=len(self._board.workers),
            )
        self._leading = leading

    def _pump(self) -> None:
        """Decide and publish, as much as the writer's window has room for."""
        context, board = self._context, self._board
        writer = context.writer
        if not self._leading or not context.bus.connected or writer.stalled:
            return
        room = self._window - writer.outstanding
        if room <= 0:
            return
        started_ns = time.perf_counter_ns()
        events = decide(board, context.clock.stamp("scheduler"), room=room)
        if not events:
            return
        for event in events:
            if isinstance(event, Dispatched):
                self._hand_on(event)
            counter = writer.emit(event)
            board.sent((writer.name, counter), event)
            self._note(event)
        self._metrics.decision_s.observe((time.perf_counter_ns() - started_ns) / 1e9)

    def _hand_on(self, event: Dispatched) -> None:
        """Give the worker the body, if it is here: it goes ahead of the dispatch."""
        body = self._kept.take(event.requests_sequence)
        if body is not None:
            self._context.bus.publish(body_subject(event.worker, event.requests_sequence), body)

    def _note(self, event: EventData) -> None:
        self._metrics.published(event)
        if isinstance(event, RungChanged):
            self._context.log.warning(
                "rung_changed",
                pool=event.pool,
                rung_from=event.rung_from,
                rung_to=event.rung_to,
                depth=event.depth,
                workers=event.workers,
            )

    # --- bodies

    def _read_bodies(self) -> None:
        while self._board.unread and len(self._bodies) < limits.BODIES_TASKS_MAX:
            requests = self._board.take_unread(limits.BODIES_AT_ONCE, limits.BODIES_BYTES_AT_ONCE)
            missing: list[Request] = []
            for request in requests:
                body = self._kept.get(request.admitted.requests_sequence)
                if body is None:
                    missing.append(request)
                else:
                    self._take_features(request, body)
            if not missing:
                continue
            task = asyncio.create_task(self._read_features(missing))
            self._bodies.add(task)
            task.add_done_callback(self._bodies_read)

    def _bodies_read(self, task: asyncio.Task[None]) -> None:
        self._bodies.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)
        # What waited for this task's place need not wait for the tape to move.
        self._wake.set()

    async def _read_features(self, requests: list[Request]) -> None:
        context, board = self._context, self._board
        sequences = [request.admitted.requests_sequence for request in requests]
        try:
            bodies = await context.bus.bodies(sequences)
        except BusUnavailable as error:
            self._metrics.bodies_failed.inc()
            context.log.warning("bodies_unavailable", count=len(requests), error=str(error))
            board.put_back(requests)
            return
        for request, body in zip(requests, bodies, strict=True):
            self._take_features(request, body)
        self._pump()

    def _take_features(self, request: Request, body: bytes | None) -> None:
        context = self._context
        features = read_features(
            request.admitted,
            body,
            mesh_key=context.mesh_key,
            permille_min=self._settings.scheduler.language_permille_min,
        )
        if features.reason == "unread":
            context.log.warning(
                "body_unread",
                tenant=request.admitted.tenant,
                id=request.admitted.id,
                requests_sequence=request.admitted.requests_sequence,
                missing=body is None,
            )
        self._board.put_features(request, features)

    # --- what workers and schedulers say

    def _on_beat(self, subject: str, payload: bytes) -> None:
        try:
            beat = _BEAT_DECODER.decode(payload)
        except msgspec.MsgspecError as error:
            self._metrics.unreadable.labels("beat").inc()
            self._ignore(subject, "beat_unreadable", str(error))
            return
        known = beat.worker in self._board.workers
        if not self._board.beat(beat, self._context.clock.mono_ns()):
            self._ignore(beat.worker, "beat_ignored", f"pool {beat.pool!r}")
            return
        if not known:
            self._context.log.info(
                "worker_heard", worker=beat.worker, pool=beat.pool, slots=beat.slots
            )
        # Not here: what a handler raises ends nothing.
        self._wake.set()

    def _on_pulse(self, subject: str, payload: bytes) -> None:
        del subject
        now_ns = self._context.clock.mono_ns()
        self._board.hear(now_ns)
        pulse = decode_pulse(payload)
        if pulse is not None and pulse.scheduler != self._context.writer.name:
            self._pulse_heard_ns = now_ns

    def _ignore(self, who: str, event: str, why: str) -> None:
        """Say it once for each sender: who beats wrongly does so four times a second."""
        if who in self._ignored or len(self._ignored) >= limits.LIVES_ENDED_MAX:
            return
        self._ignored[who] = None
        self._context.log.warning(event, sender=who, reason=why)

    # --- time

    async def _tick_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.TICK_MS / 1000):
                    await self._wake.wait()
            self._wake.clear()
            self._move()

    async def _pulse_forever(self) -> None:
        context = self._context
        while True:
            if self._leading:
                for pool in self._board.pools.values():
                    pulse = pulse_of(
                        self._board,
                        pool,
                        scheduler=context.writer.name,
                        fence=self._fence,
                        now_us=context.clock.now_us(),
                    )
                    context.bus.publish(pulse_subject(pool.name), encode_pulse(pulse))
            await asyncio.sleep(limits.PULSE_MS / 1000)

    # --- the snapshot

    async def _snapshot_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scheduler.snapshot_interval_s)
            await self._write_snapshot()

    async def _write_snapshot(self) -> None:
        """Write the fold as it stands now, if it has moved; a failure is logged and tried again."""
        position = self._state.position
        if position == self._stored_position:
            return
        # Encoded here and now: state, position and payload belong together.
        frozen = snapshot.freeze(self._state, self._last_payload)
        try:
            await asyncio.to_thread(snapshot.write, self._path, frozen)
        except OSError as error:
            self._context.log.error("snapshot_failed", path=str(self._path), error=str(error))
            return
        self._stored_position = position
        self._context.log.debug("snapshot_written", position=position, size=len(frozen))


def _reader(context: ServiceContext, *, start: int) -> TapeReader:
    return TapeReader(context.bus, filters=FILTERS, start=start)
