"""A tape, a mesh around it and a scheduler on it, all moved by hand.

The model decides nothing by itself: a test says what happens next (an admission, a stored
event, a beat, a crash), and everything runs on the scheduler's real fold, board and decisions.
Own events lie in ``in_transit`` until a test stores them, in any order, any number of times.
"""

from dataclasses import dataclass, field
from typing import Any

from waterclock_proto.envelope import Envelope
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    AttemptLost,
    Cancelled,
    CancelRequested,
    Completed,
    Dispatched,
    EventData,
    Expired,
    Failed,
    SchedulerElected,
    TerminalData,
)
from waterclock_proto.requests import Beat
from waterclock_proto.stamps import Stamp
from waterclock_scheduler.board import Board, Features, Place
from waterclock_scheduler.config import (
    LadderSettings,
    PoolSettings,
    SchedulerSettings,
    Settings,
)
from waterclock_scheduler.core import decide
from waterclock_scheduler.snapshot import Snapshot, freeze, thaw
from waterclock_scheduler.state import TapeState, apply

EPOCH_US = 1_800_000_000_000_000
BOOT = "0123456789abcdef"
MODEL = "sim-8b"
SHA = "ab" * 32


def settings(
    pools: dict[str, PoolSettings] | None = None,
    ladder: LadderSettings | None = None,
    **scheduler: Any,
) -> Settings:
    return Settings(
        scheduler=SchedulerSettings(**scheduler),
        ladder=ladder or LadderSettings(),
        pools=pools or {"main": PoolSettings(default=True)},
    )


def envelope(
    data: EventData, *, source: str, writer: str, counter: int, fence: int = 0
) -> Envelope[EventData]:
    return Envelope(
        specversion="1.0",
        id=f"{writer}/{counter}",
        source=f"/waterclock/{source}",
        type=f"waterclock.{data.TYPE}.v1",
        tenant=getattr(data, "tenant", ""),
        writer=writer,
        counter=counter,
        nonce="00",
        fence=fence,
        data=data,
    )


@dataclass
class ModelWorker:
    life: str
    pool: str
    slots: int
    models: tuple[str, ...]
    alive: bool = True
    draining: bool = False
    counter: int = 0
    running: list[Dispatched] = field(default_factory=list[Dispatched])
    lost: list[Dispatched] = field(default_factory=list[Dispatched])
    """Declared lost, which a worker that was cut off learns late: its end may still come."""

    @property
    def name(self) -> str:
        return self.life.rpartition("-")[0]


class Model:
    """One mesh. ``store`` puts an event on the tape; ``read`` lets the scheduler fold it."""

    def __init__(self, given: Settings | None = None) -> None:
        self.settings = given or settings()
        self.now_us = EPOCH_US
        self.mono_ns = 1_000_000_000
        self.tape: list[Envelope[EventData]] = []
        self.stamps_us: list[int] = []
        self.workers: dict[str, ModelWorker] = {}
        self.in_transit: list[tuple[int, EventData]] = []
        self.own_stored: list[Envelope[EventData]] = []
        self.emitted: list[EventData] = []
        self.admitted: list[Admitted] = []
        self.lives = 0
        self._admission_counter = 0
        self._requests_sequence = 0
        self.schedulers = 0
        self.state = TapeState()
        self.store_admission(AdmissionElected(elected=self.stamp("admission")))
        self.start_scheduler(TapeState())

    # --- time and stamps

    def stamp(self, source: Any = "scheduler") -> Stamp:
        return Stamp(wall_us=self.now_us, source=source, boot=BOOT, mono_ns=self.mono_ns)

    def wait(self, ms: int) -> None:
        self.now_us += ms * 1000
        self.mono_ns += ms * 1_000_000

    # --- the tape

    def store(self, event: Envelope[EventData]) -> None:
        self.tape.append(event)
        self.stamps_us.append(self.now_us)
        data = event.data
        if isinstance(data, Dispatched) and event.fence == self.fence:
            worker = self.workers.get(data.worker)
            known = [(d.tenant, d.id, d.attempt) for d in worker.running] if worker else []
            if worker and worker.alive and (data.tenant, data.id, data.attempt) not in known:
                worker.running.append(data)
        if isinstance(data, AttemptLost) and data.worker in self.workers:
            worker = self.workers[data.worker]
            lost = (data.tenant, data.id, data.attempt)
            for dispatched in list(worker.running):
                if (dispatched.tenant, dispatched.id, dispatched.attempt) == lost:
                    worker.running.remove(dispatched)
                    worker.lost.append(dispatched)

    def store_admission(self, data: EventData, *, fence: int = 1, writer: str = "adm") -> None:
        self.store(
            envelope(
                data,
                source="admission",
                writer=writer,
                counter=self._admission_counter,
                fence=fence,
            )
        )
        self._admission_counter += 1

    def admit(
        self,
        name: str,
        *,
        tenant: str = "acme",
        tier: str = "standard",
        model: str = MODEL,
        deadline_ms: int = 60_000,
        output_tokens_max: int = 100,
        body_bytes: int = 100,
        hint: Any = None,
    ) -> Admitted:
        self._requests_sequence += 1
        data = Admitted(
            tenant=tenant,
            id=name,
            tier=tier,
            requests_sequence=self._requests_sequence,
            number=self._requests_sequence,
            contract_sha256=SHA,
            model=model,
            arrival=Stamp(wall_us=self.now_us, source="bus"),
            received=self.stamp("admission"),
            decided=self.stamp("admission"),
            deadline_us=self.now_us + deadline_ms * 1000,
            body_bytes=body_bytes,
            prompt_tokens_estimate=10,
            output_tokens_max=output_tokens_max,
            body_commitment=SHA,
            language_hint=hint,
        )
        self.admitted.append(data)
        self.store_admission(data)
        return data

    def cancel(self, name: str, *, tenant: str = "acme") -> None:
        self.store_admission(
            CancelRequested(
                tenant=tenant, id=name, reason="producer", requested=self.stamp("admission")
            )
        )

    # --- the scheduler

    def start_scheduler(self, state: TapeState) -> None:
        """A new process: what the old one had published and not stored is lost with it."""
        self.in_transit.clear()
        self.schedulers += 1
        self.writer = f"scheduler-{self.schedulers}"
        self.counter = 0
        self.said: set[object] = set()
        """What this process published: the same about the same attempt only once."""
        self.state = state
        self.board = Board(self.settings, state)
        self.leading = False
        self.read()
        self.fence = self.state.scheduler_fence + 1
        self.store(
            envelope(
                SchedulerElected(elected=self.stamp()),
                source="scheduler",
                writer=self.writer,
                counter=self._count(),
                fence=self.fence,
            )
        )
        self.read()
        assert self.state.leader == self.writer
        self.board.adopt(self.mono_ns)
        self.leading = True

    def read(self, count: int | None = None) -> int:
        """Fold the next events of the tape; returns how many terminal events counted."""
        end = len(self.tape) if count is None else min(len(self.tape), self.state.position + count)
        ends = 0
        for place in range(self.state.position, end):
            event = self.tape[place]
            counted = apply(self.state, event, sequence=place + 1, stored_us=self.stamps_us[place])
            ends += counted and isinstance(event.data, TerminalData)
            if self.leading:
                self.board.follow(event, counted=counted, now_ns=self.mono_ns)
        return ends

    def give_features(self, language: Any = "en") -> None:
        """Whoever reads bodies is quick and always succeeds."""
        while requests := self.board.take_unread(64, 1 << 20):
            for request in requests:
                self.board.put_features(request, Features(language, "script", 900, 10))

    def decide(self, room: int = 1000) -> list[EventData]:
        events = decide(self.board, self.stamp(), room=room)
        for event in events:
            about = (getattr(event, "id", ""), event.TYPE, getattr(event, "attempt", 0))
            assert not about[0] or about not in self.said, f"said twice: {about}"
            self.said.add(about)
            if isinstance(event, Dispatched):
                request = self.state.requests[event.tenant, event.id]
                assert not request.cancel, "what was known to be cancelled was dispatched"
            counter = self._count()
            self.board.sent((self.writer, counter), event)
            self.in_transit.append((counter, event))
        self.emitted += events
        return events

    def deliver(self, place: int = 0) -> None:
        """Store one of the own events that are on their way."""
        if self.in_transit:
            counter, data = self.in_transit.pop(place % len(self.in_transit))
            self._store_own(counter, data)

    def store_dispatch(self, name: str, *, attempt: int, worker: ModelWorker) -> None:
        """A dispatch by the present leader that its board knows nothing of."""
        admitted = self.state.requests["acme", name].admitted
        self._store_own(
            self._count(),
            Dispatched(
                tenant="acme",
                id=name,
                attempt=attempt,
                worker=worker.life,
                pool=worker.pool,
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
                received=admitted.received,
                decided=admitted.decided,
                dispatched=self.stamp(),
            ),
        )

    def repeat(self, place: int) -> None:
        """Store once more what was stored already, byte for byte."""
        if self.own_stored:
            self.store(self.own_stored[place % len(self.own_stored)])

    def turn(self, language: Any = "en") -> list[EventData]:
        """Read, decide, store, read back, until there is nothing left to decide."""
        events: list[EventData] = []
        while True:
            while self.in_transit:
                self.deliver()
            self.read()
            self.give_features(language)
            decided = self.decide()
            if not decided:
                return events
            events += decided

    # --- the workers

    def start_worker(
        self,
        name: str = "w",
        *,
        pool: str = "main",
        slots: int = 2,
        models: tuple[str, ...] = (MODEL,),
    ) -> ModelWorker:
        self.lives += 1
        worker = ModelWorker(life=f"{name}-{self.lives:06x}", pool=pool, slots=slots, models=models)
        self.workers[worker.life] = worker
        self.beat(worker)
        return worker

    def beat(self, worker: ModelWorker) -> bool:
        if not worker.alive:
            return False
        return self.board.beat(
            Beat(
                worker=worker.life,
                name=worker.name,
                pool=worker.pool,
                models=worker.models,
                slots=worker.slots,
                draining=worker.draining,
                in_flight=len(worker.running),
                beat=self.stamp("worker"),
            ),
            self.mono_ns,
        )

    def beat_all(self) -> None:
        for worker in self.workers.values():
            self.beat(worker)

    def finish(
        self,
        worker: ModelWorker,
        place: int = 0,
        *,
        kind: type[TerminalData] = Completed,
        output_tokens: int = 7,
        finish_reason: str = "stop",
    ) -> None:
        """The worker ends one of its attempts, however dead the others think it is."""
        attempts = [*worker.running, *worker.lost]
        if not attempts:
            return
        dispatched = attempts[place % len(attempts)]
        (worker.running if dispatched in worker.running else worker.lost).remove(dispatched)
        said: dict[str, Any] = {
            Completed: {"finish_reason": finish_reason},
            Failed: {"reason": "engine_error"},
            Cancelled: {"phase": "running"},
            Expired: {"phase": "running"},
        }[kind]
        data = kind(
            tenant=dispatched.tenant,
            id=dispatched.id,
            attempt=dispatched.attempt,
            worker=worker.life,
            output_tokens=output_tokens,
            ended=self.stamp("worker"),
            **said,
        )
        self.store(
            envelope(data, source="worker", writer=f"worker-{worker.life}", counter=worker.counter)
        )
        worker.counter += 1

    # --- what must hold

    def settle(self) -> None:
        """Let everything that is on its way arrive, and live workers finish what they have."""
        for _ in range(200):
            self.wait(100)
            self.board.hear(self.mono_ns)
            self.beat_all()
            self.turn()
            for worker in self.workers.values():
                while worker.alive and worker.running:
                    self.finish(worker)
            self.read()
            if not self.state.requests and not self.in_transit:
                return
        raise AssertionError(f"still open: {list(self.state.requests)}")

    def check_board(self) -> None:
        """The board's tables are what its entries say, and its entries are the open requests."""
        board = self.board
        assert set(board.entries) == set(self.state.requests)
        by_place: dict[Place, set[tuple[str, str]]] = {place: set() for place in Place}
        for key, entry in board.entries.items():
            assert entry.request is self.state.requests[key]
            by_place[entry.place].add(key)
            assert (entry.due is None) == (entry.place is Place.SETTLING)
        assert set(board.unread) <= by_place[Place.UNREAD]
        assert set(board.read) == by_place[Place.READ]
        assert set(board.stops) <= set.union(
            by_place[Place.UNREAD], by_place[Place.READ], by_place[Place.WAITING]
        )
        assert len(board.due) == len(board.entries) - len(by_place[Place.SETTLING])
        in_line = {
            item[3:]
            for pool in board.pools.values()
            for line in pool.lines.values()
            for item in line
        }
        assert in_line == by_place[Place.WAITING]
        for pool in board.pools.values():
            assert all(pool.lines.values())
            assert pool.waiting == sum(len(line) for line in pool.lines.values())
            assert pool.running == sum(
                board.entries[key].pool == pool.name for key in by_place[Place.RUNNING]
            )
            assert pool.lives == {w.life for w in board.workers.values() if w.pool == pool.name}
            assert pool.takers == sum(not board.workers[life].draining for life in pool.lives)
            for line in pool.free.values():
                for free, life in line:
                    worker = board.workers[life]
                    assert worker.listed == -free
        for life, flights in board.flights.items():
            assert flights
            assert len(flights) == sum(o.life == life for o in board.outstanding.values())

    def check_nothing_intended(self) -> None:
        """Everything was stored and read: the board is what a new one would be."""
        assert not self.in_transit
        board = self.board
        assert (board.outstanding, board.flights, board.declared) == ({}, {}, {})
        fresh = Board(self.settings, self.state)
        fresh.adopt(self.mono_ns)
        for key, entry in board.entries.items():
            assert entry.intent is None
            twin = fresh.entries[key]
            # Features are not on the tape: a new board has to read the body again.
            read = {Place.READ: Place.UNREAD}
            assert read.get(entry.place, entry.place) == twin.place
            assert (entry.attempt, entry.pool, entry.sort_key) == (
                twin.attempt,
                twin.pool,
                twin.sort_key,
            )
            if entry.place is Place.RUNNING:
                assert entry.worker == twin.worker
                # Looking after an attempt whose dispatch had not come back may be put off.
                assert entry.due is not None
                assert twin.due is not None
                assert entry.due >= twin.due
            else:
                assert entry.due == twin.due
        for name, pool in board.pools.items():
            assert pool.intent is None
            assert pool.ladder.rung == fresh.pools[name].ladder.rung

    def snapshot(self) -> bytes:
        return freeze(self.state, b"")

    def _count(self) -> int:
        self.counter += 1
        return self.counter - 1

    def _store_own(self, counter: int, data: EventData) -> None:
        event = envelope(
            data, source="scheduler", writer=self.writer, counter=counter, fence=self.fence
        )
        self.own_stored.append(event)
        self.store(event)


def fold(model: Model, *, begin: bytes | None = None, end: int | None = None) -> TapeState:
    """The tape's fold, from a snapshot on if one is given."""
    state = TapeState()
    if begin is not None:
        snapshot = thaw(begin)
        assert isinstance(snapshot, Snapshot)
        state = snapshot.state
    for place in range(state.position, len(model.tape) if end is None else end):
        apply(state, model.tape[place], sequence=place + 1, stored_us=model.stamps_us[place])
    return state
