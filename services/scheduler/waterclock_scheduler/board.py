"""The working view that decisions are made from: queues, workers, and what is on its way.

The board is kept in step with the fold of the tape, plus *intents*: what this scheduler has
published and not read back. An intent lets the next decision build on the last one without
waiting for its way over the bus. It holds until the event comes back from the tape; from then
on the tape's word about that request stands in the queues, whatever had been intended. The
board is never stored and never replayed: it can be made from a state and the workers' beats
at any time. No operation costs more than O(log n) of what waits.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, Literal, TypeAlias

from msgspec import Struct, field

from waterclock_proto.envelope import Envelope
from waterclock_proto.events import (
    AttemptLost,
    Dispatched,
    EventData,
    Rejected,
    RequestEventData,
    RungChanged,
    TerminalData,
)
from waterclock_proto.names import Language
from waterclock_proto.requests import Beat
from waterclock_scheduler.config import PoolSettings, Settings
from waterclock_scheduler.ladder import (
    RUNG_REFUSE,
    Drain,
    Ladder,
    batch_cap_of,
)
from waterclock_scheduler.limits import LIVES_ENDED_MAX
from waterclock_scheduler.line import Line
from waterclock_scheduler.policies import POLICIES, SortKey, Waiting, sort_key
from waterclock_scheduler.state import Key, Request, Slot, TapeState, occupied

_MS: Final = 1_000_000

Token: TypeAlias = tuple[str, int]
"""(writer, counter): one event that this process published."""
LanguageReason: TypeAlias = Literal["hint", "script", "default", "unread"]
LossReason: TypeAlias = Literal["lease", "restarted", "drained"]


class Place(IntEnum):
    """Where a request stands in the working view."""

    UNREAD = 0
    """Admitted; its features are not known yet."""
    READ = 1
    """Its features are known; no pool has it yet."""
    WAITING = 2
    """In a pool's line."""
    RUNNING = 3
    """A worker has it."""
    SETTLING = 4
    """Its end, or the loss of its attempt, is published and not read back. Until then nothing
    else is said about it: an end that overtook the loss before it would not count."""


class Features(Struct, frozen=True):
    """What was read out of a request's text. It stays in memory."""

    language: Language
    reason: LanguageReason
    permille: int
    prompt_tokens: int


class Entry(Struct):
    """One open request in the working view."""

    key: Key
    request: Request
    place: Place = Place.UNREAD
    features: Features | None = None
    pool: str = ""
    attempt: int = 0
    """The newest attempt, intended ones included. None of them is lost while it is RUNNING."""
    worker: str = ""
    service_us: int = 0
    sort_key: SortKey | None = None
    """While it stands in a line."""
    due: "Due | None" = None
    intent: Token | None = None
    """The last own event about it that has not been read back."""


Due: TypeAlias = tuple[int, str, str]
"""(Unix µs, tenant, id): when the request must be looked at."""
Free: TypeAlias = tuple[int, str]
"""(minus free slots, life): the worker with the most free slots comes first."""


class Worker(Struct):
    """One life of a worker that is heard, or that must be heard soon."""

    life: str
    name: str
    beat_ns: int
    """Monotonic, when it was last heard, or when its lease began anew."""
    pool: str = ""
    """Empty for a life that is known from the tape only."""
    models: tuple[str, ...] = ()
    slots: int = 0
    draining: bool = False
    listed: int = 0
    """The free slots under which it stands in its pool's tables; 0: it does not stand there."""
    taker: bool = False
    """Whether it counts among its pool's takers."""


class Pool(Struct):
    """Who waits for the same workers, and these workers."""

    name: str
    settings: PoolSettings
    tiers: tuple[str, ...]
    drain: Drain
    lines: dict[str, Line[SortKey]] = field(default_factory=dict[str, Line[SortKey]])
    """By model: a worker takes the first request that it can serve."""
    free: dict[str, Line[Free]] = field(default_factory=dict[str, Line[Free]])
    """By model: the workers with a free slot."""
    lives: set[str] = field(default_factory=set[str])
    takers: int = 0
    """Live workers that take new work."""
    waiting: int = 0
    running: int = 0
    ladder: Ladder = Ladder()
    intent: Token | None = None
    """The last own ``rung_changed`` that has not been read back."""


class Outstanding(Struct, frozen=True):
    """What an own event that has not been read back is about."""

    key: Key | None = None
    pool: str = ""
    """Whose rung it moves."""
    flight: Slot | None = None
    """What it dispatches, to ``life``."""
    life: str = ""
    loss: Slot | None = None
    """What it declares lost."""


class Loss(Struct, frozen=True):
    """An attempt that must be declared lost."""

    life: str
    pool: str
    reason: LossReason


class Board:
    """The working view. One for each scheduler process; see the module's first lines."""

    def __init__(self, settings: Settings, state: TapeState) -> None:
        self.settings = settings
        self.state = state
        self.pools = {
            name: Pool(
                name=name,
                settings=pool,
                tiers=settings.scheduler.tiers if pool.tiers_first else (),
                drain=Drain(settings.ladder.drain_window_ms),
            )
            for name, pool in settings.pools.items()
        }
        self.entries: dict[Key, Entry] = {}
        self.unread: dict[Key, None] = {}
        """Requests whose bodies nobody is reading yet, in the order of their admission."""
        self.read: dict[Key, None] = {}
        self.stops: dict[Key, None] = {}
        """Requests that wait and must not: cancelled, or lost too often."""
        self.due: Line[Due] = Line()
        self.workers: dict[str, Worker] = {}
        self.ended_lives: dict[str, None] = {}
        self.losses: dict[Slot, Loss] = {}
        """Attempts that must be declared lost."""
        self.declared: dict[Slot, None] = {}
        """Attempts that were declared lost in an event that has not been read back."""
        self.outstanding: dict[Token, Outstanding] = {}
        self.flights: dict[str, dict[Slot, str]] = {}
        """By life: dispatches that were published and not read back, with their pools."""
        self.looked_ns: int | None = None
        """When a decision was last made."""
        self.heard_ns = 0
        """When anything was last heard from the bus."""
        self.lease_due_ns = 0
        """No lease runs out before."""

    # --- from the tape

    def adopt(self, now_ns: int) -> None:
        """Make the view from the state as it stands: this scheduler leads from here on.

        Lives that the tape knows and nobody has heard get a lease that begins now. Those that
        were heard once and fell silent since are forgotten: a standby hears for days.
        """
        for pool in self.pools.values():
            pool.ladder = Ladder(rung=self._tape_rung(pool.name))
        for key in self.state.requests:
            self._sync(key)
        self.losses.clear()
        lease_ns = self.settings.scheduler.lease_ms * _MS
        for worker in list(self.workers.values()):
            if now_ns - worker.beat_ns >= lease_ns:
                self.unlist_worker(worker)
                del self.workers[worker.life]
        heard = {worker.name for worker in self.workers.values()}
        for life in list(self.state.running):
            if life in self.workers:
                continue
            if life in self.ended_lives or _name_of(life) in heard:
                self.lose(life, "restarted")
            else:
                self.workers[life] = Worker(life=life, name=_name_of(life), beat_ns=now_ns)
        for worker in self.workers.values():
            self.list_worker(worker)
        self.hear(now_ns)
        self.pardon(now_ns)
        self.looked_ns = now_ns

    def follow(self, envelope: Envelope[EventData], *, counted: bool, now_ns: int) -> None:
        """Bring the view in line after ``apply`` folded the event; ``counted`` is its answer."""
        self.heard_ns = now_ns
        data = envelope.data
        known = self.outstanding.pop((envelope.writer, envelope.counter), None)
        if known is not None:
            self._read_back((envelope.writer, envelope.counter), known)
        if isinstance(data, RungChanged):
            pool = self.pools.get(data.pool)
            if pool is not None and pool.intent is None:
                rung = self._tape_rung(pool.name)
                if rung != pool.ladder.rung:
                    self.set_ladder(pool, Ladder(rung=rung))
            return
        if isinstance(data, TerminalData) and data.worker and counted:
            entry = self.entries.get((data.tenant, data.id))
            pool = self.pools.get(entry.pool) if entry is not None else None
            if pool is not None:
                pool.drain.count(now_ns)
        if isinstance(data, RequestEventData | Rejected) and data.id:
            self._sync((data.tenant, data.id))
        if isinstance(data, TerminalData | AttemptLost | Dispatched):
            self._list_life(data.worker)

    def sent(self, token: Token, event: EventData) -> None:
        """Note that ``event``, which ``decide`` returned, was published as ``token``."""
        if isinstance(event, RungChanged):
            self.outstanding[token] = Outstanding(pool=event.pool)
            self.pools[event.pool].intent = token
            return
        assert isinstance(event, RequestEventData | Rejected)
        key = (event.tenant, event.id)
        if isinstance(event, Dispatched):
            self.outstanding[token] = Outstanding(
                key=key, flight=(event.tenant, event.id, event.attempt), life=event.worker
            )
        elif isinstance(event, AttemptLost):
            self.outstanding[token] = Outstanding(
                key=key, loss=(event.tenant, event.id, event.attempt)
            )
        else:
            self.outstanding[token] = Outstanding(key=key)
        entry = self.entries.get(key)
        if entry is not None:
            entry.intent = token

    # --- from the workers

    def beat(self, beat: Beat, now_ns: int) -> bool:
        """Take a worker's beat in; whether it counts.

        It does not if the life was ended by a newer one of the same name, or if it names a
        pool that is not configured. The first beat of a new life ends the older ones.
        """
        self.heard_ns = now_ns
        life = beat.worker
        if not life or life in self.ended_lives or beat.pool not in self.pools:
            return False
        worker = self.workers.get(life)
        if worker is None or not worker.pool:
            self._end_older_lives(life, beat.name)
            if worker is None:
                worker = self.workers[life] = Worker(life=life, name=beat.name, beat_ns=now_ns)
        worker.beat_ns = now_ns
        told = (beat.name, beat.pool, beat.models, beat.slots, beat.draining)
        known = (worker.name, worker.pool, worker.models, worker.slots, worker.draining)
        if told != known:
            self.unlist_worker(worker)
            worker.name, worker.pool, worker.models, worker.slots, worker.draining = told
            self.list_worker(worker)
        return True

    def hear(self, now_ns: int) -> None:
        """Note that something came over the bus: silence, from now on, is the workers' own."""
        self.heard_ns = now_ns

    def pardon(self, now_ns: int) -> None:
        """Begin all leases anew: it was this scheduler that could not hear."""
        for worker in self.workers.values():
            worker.beat_ns = now_ns
        self.lease_due_ns = now_ns + self.settings.scheduler.lease_ms * _MS

    def lose(self, life: str, reason: LossReason) -> None:
        """Note that all attempts of a life are lost.

        Those on their way to it are lost when they are read back, if it has not come back by
        then: a loss that overtook its dispatch would not count.
        """
        for slot, pool in self.state.running.get(life, {}).items():
            if slot not in self.declared:
                self.losses.setdefault(slot, Loss(life, pool, reason))

    # --- from whoever reads bodies

    def take_unread(self, count_max: int, bytes_max: int) -> list[Request]:
        """The next requests whose bodies should be read, at least one if there is any.

        Give every one of them back by ``put_features`` or ``put_back``.
        """
        taken: list[Request] = []
        body_bytes = 0
        for key in self.unread:
            request = self.entries[key].request
            body_bytes += request.admitted.body_bytes
            if taken and (len(taken) == count_max or body_bytes > bytes_max):
                break
            taken.append(request)
        for request in taken:
            del self.unread[(request.admitted.tenant, request.admitted.id)]
        return taken

    def put_back(self, requests: Iterable[Request]) -> None:
        """The bodies could not be read now."""
        for request in requests:
            key = (request.admitted.tenant, request.admitted.id)
            entry = self.entries.get(key)
            if entry is not None and entry.place is Place.UNREAD:
                self.unread[key] = None

    def put_features(self, request: Request, features: Features) -> None:
        key = (request.admitted.tenant, request.admitted.id)
        entry = self.entries.get(key)
        if entry is None or entry.request is not request:
            return
        entry.features = features
        if entry.place is Place.UNREAD:
            self.put(entry, Place.READ)

    # --- numbers

    @property
    def open_requests(self) -> int:
        return len(self.entries)

    # --- how it is kept

    def _tape_rung(self, pool: str) -> int:
        rung = self.state.rungs.get(pool)
        return 0 if rung is None else min(rung.rung, RUNG_REFUSE)

    def _read_back(self, token: Token, known: Outstanding) -> None:
        if known.flight is not None:
            flights = self.flights[known.life]
            flights.pop(known.flight, None)
            if not flights:
                del self.flights[known.life]
            if known.life not in self.workers:
                self.lose(known.life, "restarted" if known.life in self.ended_lives else "lease")
        if known.loss is not None:
            self.declared.pop(known.loss, None)
        if known.pool:
            pool = self.pools[known.pool]
            if pool.intent == token:
                pool.intent = None
        if known.key is not None:
            entry = self.entries.get(known.key)
            if entry is not None and entry.intent == token:
                entry.intent = None

    def _sync(self, key: Key) -> None:
        """Put the request where the tape says it is, unless an intent says otherwise still."""
        request = self.state.requests.get(key)
        entry = self.entries.get(key)
        if request is None:
            if entry is not None:
                self.leave(entry)
                self.unread.pop(key, None)
                del self.entries[key]
            return
        if entry is None or entry.request is not request:
            if entry is not None:
                self.leave(entry)
            entry = self.entries[key] = Entry(key=key, request=request)
            admitted = request.admitted
            if admitted.language_hint is not None:
                entry.features = Features(
                    admitted.language_hint, "hint", 1000, admitted.prompt_tokens_estimate
                )
            self._put_as_on_tape(entry)
            return
        if entry.intent is not None:
            if request.cancel and entry.place in (Place.UNREAD, Place.READ, Place.WAITING):
                self.stops[key] = None
            return
        self._put_as_on_tape(entry)

    def _put_as_on_tape(self, entry: Entry) -> None:
        request = entry.request
        if request.running:
            if (entry.place, entry.attempt) != (Place.RUNNING, request.attempt):
                self.leave(entry)
                entry.attempt = request.attempt
                entry.worker = request.worker
                entry.pool = request.pool
                self.put(entry, Place.RUNNING)
            return
        attempt = max(request.attempt, request.lost)
        if request.pool or attempt:
            if (entry.place, entry.attempt, entry.pool) != (Place.WAITING, attempt, request.pool):
                self.leave(entry)
                entry.attempt = attempt
                entry.pool = request.pool
                self.put(entry, Place.WAITING)
        elif entry.place not in (Place.UNREAD, Place.READ) or entry.due is None:
            self.leave(entry)
            self.put(entry, Place.UNREAD if entry.features is None else Place.READ)
        if request.cancel:
            self.stops[entry.key] = None

    def put(self, entry: Entry, place: Place) -> None:
        """Move the entry to a place, and into the tables that belong to it."""
        self.leave(entry)
        entry.place = place
        admitted = entry.request.admitted
        match place:
            case Place.UNREAD:
                self.unread[entry.key] = None
            case Place.READ:
                self.read[entry.key] = None
            case Place.WAITING:
                self._stand_in_line(entry)
            case Place.RUNNING:
                pool = self.pools.get(entry.pool)
                if pool is not None:
                    pool.running += 1
            case Place.SETTLING:
                return
        if place is not Place.RUNNING and (
            entry.request.cancel or entry.attempt >= self.settings.scheduler.attempts_max
        ):
            self.stops[entry.key] = None
        grace_us = self.settings.scheduler.overdue_grace_ms * 1000
        due_us = admitted.deadline_us + (grace_us if place is Place.RUNNING else 0)
        entry.due = (due_us, *entry.key)
        self.due.add(entry.due)

    def postpone(self, entry: Entry, due_us: int) -> None:
        """Look at the entry again at ``due_us``, and leave it where it stands until then."""
        assert entry.due is not None
        self.due.remove(entry.due)
        entry.due = (due_us, *entry.key)
        self.due.add(entry.due)

    def leave(self, entry: Entry) -> None:
        """Take the entry out of the tables of its place."""
        if entry.due is None:
            return
        self.due.remove(entry.due)
        entry.due = None
        match entry.place:
            case Place.UNREAD:
                self.unread.pop(entry.key, None)
            case Place.READ:
                self.read.pop(entry.key, None)
            case Place.WAITING:
                pool = self.pools[entry.pool]
                assert entry.sort_key is not None
                model = entry.request.admitted.model
                line = pool.lines[model]
                line.remove(entry.sort_key)
                if not line:
                    del pool.lines[model]
                entry.sort_key = None
                pool.waiting -= 1
            case Place.RUNNING:
                pool = self.pools.get(entry.pool)
                if pool is not None:
                    pool.running -= 1
            case Place.SETTLING:
                raise AssertionError("what settles is in no table")
        self.stops.pop(entry.key, None)

    def _stand_in_line(self, entry: Entry) -> None:
        admitted = entry.request.admitted
        enqueued = entry.request.enqueued
        if entry.pool not in self.pools:
            # The configuration changed under a request that had been enqueued.
            language = "und" if enqueued is None else enqueued.language
            pool_name = route(self.settings.pools, admitted.model, language)
            entry.pool = pool_name if pool_name is not None else next(iter(self.pools))
        if enqueued is not None:
            entry.service_us = enqueued.service_predicted_us
        pool = self.pools[entry.pool]
        entry.sort_key = sort_key(
            Waiting(
                tenant=admitted.tenant,
                id=admitted.id,
                tier=admitted.tier,
                arrival_us=admitted.arrival.wall_us,
                deadline_us=admitted.deadline_us,
                service_us=entry.service_us,
            ),
            POLICIES[pool.settings.policy],
            pool.tiers,
        )
        line = pool.lines.get(admitted.model)
        if line is None:
            line = pool.lines[admitted.model] = Line()
        line.add(entry.sort_key)
        pool.waiting += 1

    def _end_older_lives(self, life: str, name: str) -> None:
        for other in list(self.workers.values()):
            if other.name == name and other.life != life:
                self.unlist_worker(other)
                del self.workers[other.life]
                self.lose(other.life, "restarted")
                self.ended_lives[other.life] = None
        while len(self.ended_lives) > LIVES_ENDED_MAX:
            del self.ended_lives[next(iter(self.ended_lives))]

    def _list_life(self, life: str) -> None:
        worker = self.workers.get(life)
        if worker is not None:
            self.list_worker(worker)

    def list_worker(self, worker: Worker) -> None:
        """Put the worker into its pool's tables with as many free slots as it has."""
        pool = self.pools.get(worker.pool)
        if pool is None:
            return
        pool.lives.add(worker.life)
        if worker.taker is worker.draining:
            worker.taker = not worker.draining
            pool.takers += 1 if worker.taker else -1
        free = 0
        if not worker.draining:
            cap = batch_cap_of(self.settings.ladder, pool.ladder.rung)
            slots = worker.slots if cap is None else min(worker.slots, cap)
            taken = occupied(self.state, worker.life) + len(self.flights.get(worker.life, ()))
            free = max(0, slots - taken)
        if free == worker.listed:
            return
        for model in worker.models:
            line = pool.free.get(model)
            if line is None:
                line = pool.free[model] = Line()
            if worker.listed:
                line.remove((-worker.listed, worker.life))
            if free:
                line.add((-free, worker.life))
        worker.listed = free

    def unlist_worker(self, worker: Worker) -> None:
        pool = self.pools.get(worker.pool)
        if pool is None:
            return
        pool.lives.discard(worker.life)
        pool.takers -= worker.taker
        worker.taker = False
        if worker.listed:
            for model in worker.models:
                pool.free[model].remove((-worker.listed, worker.life))
            worker.listed = 0

    def set_ladder(self, pool: Pool, ladder: Ladder) -> None:
        pool.ladder = ladder
        for life in pool.lives:
            self.list_worker(self.workers[life])


def route(pools: dict[str, PoolSettings], model: str, language: str) -> str | None:
    """The pool for a model and a language: the first that is for both; else the model's default
    pool; else one that is for any language; else none."""
    for name, pool in pools.items():
        if language in pool.languages and _serves(pool, model):
            return name
    for name, pool in pools.items():
        if pool.default and _serves(pool, model):
            return name
    for name, pool in pools.items():
        if not pool.languages and _serves(pool, model):
            return name
    return None


def _serves(pool: PoolSettings, model: str) -> bool:
    return not pool.models or model in pool.models


def _name_of(life: str) -> str:
    """A life is called ``<name>-<random>``."""
    return life.rpartition("-")[0] or life
