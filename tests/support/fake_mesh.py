"""FakeMesh: a scripted responder that stands in for scheduler and worker.

It reads ``admitted`` and ``cancel_requested`` from the tape and writes what the two services would
write, as each test's plan says. It checks the contract while it serves: no request is admitted
twice, numbers have no holes, and every body matches its commitment.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import structlog

from waterclock_proto.envelope import decode_event
from waterclock_proto.events import (
    Admitted,
    AttemptLost,
    Cancelled,
    CancelRequested,
    Completed,
    Dispatched,
    Enqueued,
    Expired,
    Failed,
    FirstToken,
    Rejected,
    RungChanged,
    SchedulerElected,
    Started,
)
from waterclock_proto.names import RejectReason
from waterclock_proto.requests import (
    Delta,
    Final,
    Restarted,
    Submission,
    Timings,
    Usage,
    body_commitment,
    body_salt,
)
from waterclock_proto.subjects import answer_subject, event_filter, final_subject
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.clock import Clock
from waterclock_runtime.tape import TapeReader
from waterclock_runtime.writer import EventWriter

End = Literal["completed", "failed", "expired", "rejected", "silent"]


@dataclass
class Plan:
    """What becomes of one request."""

    pieces: tuple[str, ...] = ("Hello", ", ", "world")
    end: End = "completed"
    piece_delay_s: float = 0.0
    before_first: asyncio.Event | None = None
    """Nothing is sent until it is set."""
    before_end: asyncio.Event | None = None
    """All pieces are sent, and the end waits until it is set."""
    finish_reason: Literal["stop", "length"] = "stop"
    reject_reason: RejectReason = "load_shed"
    retry_after_ms: int | None = None
    detail: str = ""
    restart_after: int | None = None
    """After so many pieces the attempt is lost, and another one begins."""
    lose_pieces: tuple[int, ...] = ()
    """Indices of deltas that never arrive."""


@dataclass
class Seen:
    """What FakeMesh was told."""

    admitted: list[Admitted] = field(default_factory=list)
    bodies: dict[str, Submission] = field(default_factory=dict)
    cancels: list[CancelRequested] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.admitted]


class FakeMesh:
    """Use with ``async with``; ``plan`` may be replaced at any time."""

    def __init__(self, url: str, mesh_key: bytes, *, pool: str = "main") -> None:
        self._url = url
        self._mesh_key = mesh_key
        self._pool = pool
        self.plan: Callable[[Admitted, Submission], Plan] = lambda _admitted, _body: Plan()
        self.seen = Seen()
        self.problems: list[str] = []
        """Broken contracts; empty at the end of every test."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._numbers: dict[str, int] = {}

    async def __aenter__(self) -> "FakeMesh":
        log = structlog.get_logger()
        self.bus = await Bus.connect(BusSettings(url=self._url), name="fake-mesh", log=log)
        self.clock = Clock()
        key = b"f" * 32
        self.scheduler = await EventWriter.open(
            self.bus, service="scheduler", clock=self.clock, key=key
        )
        self.worker = await EventWriter.open(self.bus, service="worker", clock=self.clock, key=key)
        self.scheduler.fence = 1
        self.scheduler.emit(SchedulerElected(elected=self.clock.stamp("scheduler")))
        _, last = await self.bus.stream_state("EVENTS")
        self._reader = TapeReader(
            self.bus,
            filters=[event_filter(Admitted), event_filter(CancelRequested)],
            start=last + 1,
        )
        self._reading = asyncio.create_task(self._read())
        await self._caught_up.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(self._reading, *self._tasks.values(), return_exceptions=True)
        await self._reader.close()
        await self.scheduler.close()
        await self.worker.close()
        await self.bus.close()
        assert self.problems == []

    async def until(self, condition: Callable[[Seen], Any], wait_s: float = 10.0) -> None:
        """Wait until what was seen fulfils ``condition``."""
        async with asyncio.timeout(wait_s):
            while not condition(self.seen):
                self._changed.clear()
                await self._changed.wait()

    def set_rung(
        self, *, refuse: bool, retry_after_ms: int | None = None, pool: str | None = None
    ) -> None:
        """Move the ladder of a pool."""
        self.scheduler.emit(
            RungChanged(
                pool=pool or self._pool,
                rung_from=0 if refuse else 3,
                rung_to=3 if refuse else 0,
                actions=("refuse",) if refuse else (),
                retry_after_ms=retry_after_ms,
                depth=20,
                workers=1,
                in_flight=1,
                changed=self.clock.stamp("scheduler"),
            )
        )

    async def _read(self) -> None:
        async for batch in self._reader:
            for message in batch:
                data = decode_event(message.subject, message.payload).data
                if isinstance(data, Admitted):
                    await self._on_admitted(data)
                elif isinstance(data, CancelRequested):
                    self._on_cancel(data)
            self._changed.set()
            if self._reader.caught_up:
                self._caught_up.set()

    async def _on_admitted(self, admitted: Admitted) -> None:
        key = f"{admitted.tenant}.{admitted.id}"
        if key in self._tasks:
            self.problems.append(f"{key} was admitted twice")
            return
        (body,) = await self.bus.bodies([admitted.requests_sequence])
        if body is None:
            self.problems.append(f"{key}: no body at {admitted.requests_sequence}")
            return
        salt = body_salt(self._mesh_key, admitted.tenant, admitted.id)
        if body_commitment(salt, body) != admitted.body_commitment:
            self.problems.append(f"{key}: the body is not the one that was committed to")
        submission = msgspec.json.decode(body, type=Submission)
        self.seen.admitted.append(admitted)
        self.seen.bodies[admitted.id] = submission
        self._tasks[key] = asyncio.create_task(
            self._serve(admitted, submission, self.plan(admitted, submission))
        )

    def _on_cancel(self, cancel: CancelRequested) -> None:
        self.seen.cancels.append(cancel)
        task = self._tasks.get(f"{cancel.tenant}.{cancel.id}")
        if task is not None:
            task.cancel()

    async def _serve(self, admitted: Admitted, submission: Submission, plan: Plan) -> None:
        scheduler, clock = self.scheduler, self.clock
        scheduler.emit(
            Enqueued(
                tenant=admitted.tenant,
                id=admitted.id,
                pool=self._pool,
                language="en",
                language_reason="default",
                language_permille=0,
                prompt_tokens=1,
                output_tokens_predicted=1,
                service_predicted_us=1,
                predictor="fake",
                enqueued=clock.stamp("scheduler"),
            )
        )
        attempt = 0
        try:
            if plan.end == "rejected":
                self._reject(admitted, plan)
                return
            attempt = 1
            self._dispatch(admitted, attempt)
            if plan.before_first is not None:
                await plan.before_first.wait()
            if plan.end == "silent":
                await asyncio.Event().wait()
            self._begin(admitted, attempt)
            if plan.restart_after is not None:
                await self._say(admitted, plan, attempt, plan.pieces[: plan.restart_after])
                self._lose(admitted, attempt)
                attempt = 2
                self._dispatch(admitted, attempt)
                self._begin(admitted, attempt)
                if plan.restart_after:
                    self._publish_answer(admitted, Restarted(id=admitted.id, attempt=attempt))
            await self._say(admitted, plan, attempt, plan.pieces)
            if plan.before_end is not None:
                await plan.before_end.wait()
            await self._end(admitted, plan, attempt)
        except asyncio.CancelledError:
            if self._reading.done():
                return
            with contextlib.suppress(asyncio.CancelledError):
                await self._end_cancelled(admitted, attempt)

    def _dispatch(self, admitted: Admitted, attempt: int) -> None:
        self.scheduler.emit(
            Dispatched(
                tenant=admitted.tenant,
                id=admitted.id,
                attempt=attempt,
                worker="fake-worker",
                pool=self._pool,
                policy="fcfs",
                place=0,
                depth=1,
                requests_sequence=admitted.requests_sequence,
                body_commitment=admitted.body_commitment,
                model=admitted.model,
                tier=admitted.tier,
                output_tokens_max=admitted.output_tokens_max,
                deadline_us=admitted.deadline_us,
                arrival=admitted.arrival,
                edge_accepted=admitted.edge_accepted,
                received=admitted.received,
                decided=admitted.decided,
                dispatched=self.clock.stamp("scheduler"),
            )
        )

    def _begin(self, admitted: Admitted, attempt: int) -> None:
        stamp = self.clock.stamp("worker")
        identity: dict[str, Any] = {
            "tenant": admitted.tenant,
            "id": admitted.id,
            "attempt": attempt,
            "worker": "fake-worker",
        }
        self.worker.emit(Started(**identity, taken=stamp, submitted=stamp))
        self.worker.emit(FirstToken(**identity, scheduled=stamp, first_token=stamp))

    def _lose(self, admitted: Admitted, attempt: int) -> None:
        self.scheduler.emit(
            AttemptLost(
                tenant=admitted.tenant,
                id=admitted.id,
                attempt=attempt,
                worker="fake-worker",
                pool=self._pool,
                reason="lease",
                lost=self.clock.stamp("scheduler"),
            )
        )

    async def _say(
        self, admitted: Admitted, plan: Plan, attempt: int, pieces: tuple[str, ...]
    ) -> None:
        if not admitted.stream:
            return
        for index, text in enumerate(pieces):
            if index not in plan.lose_pieces:
                self._publish_answer(
                    admitted,
                    Delta(
                        id=admitted.id,
                        attempt=attempt,
                        index=index,
                        text=text,
                        tokens=1,
                        queue_us=12_345 if index == 0 else None,
                    ),
                )
            if plan.piece_delay_s:
                await asyncio.sleep(plan.piece_delay_s)

    def _publish_answer(self, admitted: Admitted, message: Delta | Restarted) -> None:
        self.bus.publish(answer_subject(admitted.tenant, admitted.id), msgspec.json.encode(message))

    async def _end(self, admitted: Admitted, plan: Plan, attempt: int) -> None:
        identity: dict[str, Any] = {
            "tenant": admitted.tenant,
            "id": admitted.id,
            "attempt": attempt,
            "ended": self.clock.stamp("worker"),
        }
        arrival = admitted.edge_accepted or admitted.arrival
        final = Final(
            tenant=admitted.tenant,
            id=admitted.id,
            attempt=attempt,
            outcome="completed",
            finish_reason=plan.finish_reason,
            text="".join(plan.pieces),
            model_served=admitted.model,
            usage=Usage(prompt_tokens=7, completion_tokens=len(plan.pieces), cached_tokens=2),
            timings=Timings(
                arrival_us=arrival.wall_us,
                queue_us=12_345,
                exec_us=67_890,
                total_us=80_235,
                segments={"queue": 12_345, "prefill": 60_000, "decode": 7_890},
            ),
        )
        match plan.end:
            case "completed":
                await self._stored(
                    Completed(**identity, worker="fake-worker", finish_reason=plan.finish_reason)
                )
            case "failed":
                await self._stored(Failed(**identity, worker="fake-worker", reason="engine_error"))
                final = Final(
                    tenant=admitted.tenant,
                    id=admitted.id,
                    attempt=attempt,
                    outcome="failed",
                    fail_reason="engine_error",
                    detail=plan.detail,
                )
            case "expired":
                # The scheduler's own end: admission has to tell the producer.
                self._lose(admitted, attempt)
                identity["attempt"] = 0
                identity["ended"] = self.clock.stamp("scheduler")
                self.scheduler.emit(Expired(**identity, phase="queued"))
                return
            case _:
                return
        self.bus.store_soon(final_subject(admitted.tenant, admitted.id), msgspec.json.encode(final))

    async def _end_cancelled(self, admitted: Admitted, attempt: int) -> None:
        identity: dict[str, Any] = {"tenant": admitted.tenant, "id": admitted.id}
        if not attempt:
            self.scheduler.emit(
                Cancelled(
                    **identity, attempt=0, phase="queued", ended=self.clock.stamp("scheduler")
                )
            )
            return
        await self._stored(
            Cancelled(
                **identity,
                attempt=attempt,
                worker="fake-worker",
                phase="running",
                ended=self.clock.stamp("worker"),
            )
        )
        self.bus.store_soon(
            final_subject(admitted.tenant, admitted.id),
            msgspec.json.encode(
                Final(tenant=admitted.tenant, id=admitted.id, attempt=attempt, outcome="cancelled")
            ),
        )

    async def _stored(self, data: Any) -> None:
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.worker.emit(data, stored.set_result)
        await stored

    def _reject(self, admitted: Admitted, plan: Plan) -> None:
        self.scheduler.emit(
            Rejected(
                tenant=admitted.tenant,
                id=admitted.id,
                requests_sequence=admitted.requests_sequence,
                reason=plan.reject_reason,
                detail=plan.detail,
                retry_after_ms=plan.retry_after_ms,
                arrival=admitted.arrival,
                decided=self.clock.stamp("scheduler"),
            )
        )
