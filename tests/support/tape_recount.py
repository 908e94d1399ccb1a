"""The tape read once more, by a second implementation: plain JSON, and the rules as written down.

Nothing of the services' folds is used. What must never stand on a tape is noted in ``faults``;
what may happen to a correct mesh (repetitions, fenced events, superseded ends) is only counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import msgspec

from mesh_watch import Stored

Event = dict[str, Any]
Key = tuple[str, str]

ENDS: Final = ("completed", "failed", "cancelled", "expired")
UNFENCED: Final = ("clock_reported", "writer_sealed", "log_opened")
POINTS: Final = (
    ("edge_accepted", "edge"),
    ("arrival", "bus"),
    ("received", "admission"),
    ("decided", "queue"),
    ("lost", "retry"),
    ("dispatched", "dispatch"),
    ("submitted", "engine_wait"),
    ("scheduled", "prefill"),
    ("first_token", "decode"),
    ("last_token", "delivery"),
    ("ended", ""),
)


@dataclass
class Request:
    """One admitted request, as far as what is said of it counts."""

    tenant: str
    id: str
    admitted: Event
    sequence: int
    attempts: dict[int, Event] = field(default_factory=dict[int, Event])
    """Dispatches by attempt."""
    lost: set[int] = field(default_factory=set[int])
    started: dict[int, Event] = field(default_factory=dict[int, Event])
    first: dict[int, Event] = field(default_factory=dict[int, Event])
    cancelled_at: int = 0
    """Where its first ``cancel_requested`` stands."""
    end: Event | None = None
    end_kind: str = ""
    end_sequence: int = 0
    end_ns: int = 0
    superseded: list[tuple[int, str, Event]] = field(default_factory=list[tuple[int, str, Event]])

    @property
    def current(self) -> int:
        """The newest attempt if it is not lost, else 0."""
        newest = max(self.attempts, default=0)
        return 0 if newest in self.lost else newest

    @property
    def outcome(self) -> str:
        return self.end_kind or "open"


@dataclass(frozen=True)
class Decision:
    """One event of admission about submissions; ``count`` of them within the two sequences."""

    kind: str
    tenant: str
    id: str
    first: int
    last: int
    number: int
    count: int
    sequence: int
    reason: str


@dataclass(frozen=True)
class Measure:
    """The segments of one request, in integer microseconds on its own axis."""

    segments: dict[str, int]
    total_us: int
    exec_us: int | None


class Recount:
    """Feed it the whole tape in order."""

    def __init__(self, slots: dict[str, int] | None = None) -> None:
        self.slots = slots or {}
        """By worker's name; a worker that is not named is not counted."""
        self.requests: dict[Key, Request] = {}
        self.decisions: list[Decision] = []
        self.faults: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.repeated = 0
        self.fenced = 0
        self.elections: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        """By service: (sequence, fence, writer) of every election that won."""
        self.rungs: list[tuple[int, Event]] = []
        self.lost_lives: dict[str, tuple[int, str]] = {}
        """By life: when its last attempt was declared lost (stored ns), and why."""
        self.dispatches: list[tuple[int, str, int, str]] = []
        """(monotonic ns of the decision, life, last loss of it as stored in ns or 0, why)."""
        self.busy: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
        self.busy_max: Counter[str] = Counter()
        self.writers: Counter[str] = Counter()
        self._said: dict[tuple[str, int], bytes] = {}
        self._fences: dict[str, tuple[int, str]] = {"admission": (0, ""), "scheduler": (0, "")}
        self._newest_life: dict[str, list[str]] = defaultdict(list)
        self._cancelled_early: dict[Key, int] = {}
        self._next = 0

    def take_all(self, tape: Iterable[Stored]) -> "Recount":
        for stored in tape:
            self.take(stored)
        return self

    def take(self, stored: Stored) -> None:
        if self._next and stored.sequence != self._next:
            self.faults.append(f"tape: sequence {self._next} expected, {stored.sequence} found")
        self._next = stored.sequence + 1
        try:
            envelope = msgspec.json.decode(stored.payload)
            data: Event = envelope["data"]
            kind = str(envelope["type"]).removeprefix("waterclock.").removesuffix(".v1")
            mark = (str(envelope["writer"]), int(envelope["counter"]))
            service = str(envelope["source"]).rpartition("/")[2]
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            self.faults.append(f"tape: {stored.sequence} is no event: {error!r}")
            return
        said = self._said.get(mark)
        if said is not None:
            self.repeated += 1
            if said != stored.payload:
                self.faults.append(
                    f"tape: {stored.sequence} says something else under {mark[0]}/{mark[1]}"
                )
            return
        self._said[mark] = stored.payload
        self.writers[mark[0]] += 1
        if not self._fence_holds(kind, service, int(envelope.get("fence", 0)), mark[0], stored):
            self.fenced += 1
            return
        self.kinds[kind] += 1
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(data, stored)

    def open(self) -> list[str]:
        """``tenant/id`` of what was admitted and has not ended."""
        return [f"{t}/{i}" for (t, i), request in self.requests.items() if request.end is None]

    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests.values())

    def reasons(self) -> Counter[str]:
        """Of what was refused, by admission or the scheduler, counted in submissions."""
        found: Counter[str] = Counter()
        for decision in self.decisions:
            if decision.kind == "rejected":
                found[decision.reason] += decision.count
        for request in self.requests.values():
            if request.end_kind == "rejected" and request.end is not None:
                found[str(request.end["reason"])] += 1
        return found

    # --- what counts

    def _fence_holds(
        self, kind: str, service: str, fence: int, writer: str, stored: Stored
    ) -> bool:
        if service not in self._fences or kind in UNFENCED:
            return True
        highest, leader = self._fences[service]
        if kind == f"{service}_elected":
            if fence <= highest:
                return False
            self._fences[service] = (fence, writer)
            self.elections[service].append((stored.sequence, fence, writer))
            return True
        return fence == highest and writer == leader

    # --- admission

    def _decision(self, kind: str, data: Event, stored: Stored) -> None:
        first = int(data["requests_sequence"])
        self.decisions.append(
            Decision(
                kind=kind,
                tenant=data["tenant"],
                id=data.get("id", ""),
                first=first,
                last=int(data.get("requests_sequence_last") or first),
                number=int(data["number"]),
                count=int(data.get("count", 1)),
                sequence=stored.sequence,
                reason=data.get("reason", ""),
            )
        )

    def _on_admitted(self, data: Event, stored: Stored) -> None:
        self._decision("admitted", data, stored)
        key = (data["tenant"], data["id"])
        if key in self.requests:
            self.faults.append(
                f"admitted twice: {key[0]}/{key[1]} at {self.requests[key].sequence}"
                f" and {stored.sequence}"
            )
            return
        self.requests[key] = Request(
            *key,
            admitted=data,
            sequence=stored.sequence,
            cancelled_at=self._cancelled_early.get(key, 0),
        )

    def _on_resubmitted(self, data: Event, stored: Stored) -> None:
        self._decision("resubmitted", data, stored)

    def _on_rejected(self, data: Event, stored: Stored) -> None:
        if data.get("number") is not None:
            self._decision("rejected", data, stored)
            return
        request = self._request(data, "rejected", stored)
        if request is not None:
            self._end(request, "rejected", data, stored)

    def _on_cancel_requested(self, data: Event, stored: Stored) -> None:
        key = (data["tenant"], data["id"])
        request = self.requests.get(key)
        if request is None:
            # A cancel may overtake its request.
            self._cancelled_early.setdefault(key, stored.sequence)
        elif not request.cancelled_at:
            request.cancelled_at = stored.sequence

    # --- scheduler

    def _on_dispatched(self, data: Event, stored: Stored) -> None:
        request = self._request(data, "dispatched", stored)
        if request is None:
            return
        name = f"{request.tenant}/{request.id}"
        attempt, life = int(data["attempt"]), str(data["worker"])
        if attempt in request.attempts:
            return
        if request.end is not None:
            self.faults.append(f"dispatched after its end: {name} at {stored.sequence}")
        if request.current:
            self.faults.append(
                f"two attempts at once: {name}, {request.current} and {attempt},"
                f" at {stored.sequence}"
            )
        if attempt != max(request.attempts, default=0) + 1:
            self.faults.append(f"attempt {attempt} without the one before: {name}")
        if data["dispatched"]["wall_us"] >= request.admitted["deadline_us"]:
            self.faults.append(f"dispatched after its deadline: {name} at {stored.sequence}")
        request.attempts[attempt] = data
        lost_ns, why = self.lost_lives.get(life, (0, ""))
        self.dispatches.append((int(data["dispatched"]["mono_ns"]), life, lost_ns, why))
        self._count_slot(request, attempt, life, stored)

    def _count_slot(self, request: Request, attempt: int, life: str, stored: Stored) -> None:
        worker = life.rpartition("-")[0]
        lives = self._newest_life[worker]
        if life not in lives:
            lives.append(life)
        elif lives[-1] != life:
            self.faults.append(f"dispatched to {life} after {lives[-1]}, at {stored.sequence}")
        busy = self.busy[life]
        busy.add((request.tenant, request.id, attempt))
        self.busy_max[worker] = max(self.busy_max[worker], len(busy))
        most = self.slots.get(worker)
        if most is not None and len(busy) > most:
            self.faults.append(
                f"too many at once: {len(busy)} on {life}, which has {most} slots,"
                f" at {stored.sequence}"
            )

    def _on_attempt_lost(self, data: Event, stored: Stored) -> None:
        attempt, life = int(data["attempt"]), str(data["worker"])
        self.lost_lives[life] = (stored.stored_ns, str(data["reason"]))
        self.busy[life].discard((data["tenant"], data["id"], attempt))
        request = self._request(data, "attempt_lost", stored)
        if request is None or request.end is not None:
            return
        if attempt not in request.attempts:
            self.faults.append(
                f"lost but never dispatched: {request.tenant}/{request.id} attempt {attempt}"
            )
        request.lost.add(attempt)

    def _on_rung_changed(self, data: Event, stored: Stored) -> None:
        self.rungs.append((stored.sequence, data))

    # --- worker

    def _on_started(self, data: Event, stored: Stored) -> None:
        request = self._request(data, "started", stored)
        if request is not None:
            self._check_worker(request, data, "started", stored)
            request.started.setdefault(int(data["attempt"]), data)

    def _on_first_token(self, data: Event, stored: Stored) -> None:
        request = self._request(data, "first_token", stored)
        if request is not None:
            self._check_worker(request, data, "first_token", stored)
            request.first.setdefault(int(data["attempt"]), data)

    def _on_completed(self, data: Event, stored: Stored) -> None:
        self._terminal("completed", data, stored)

    def _on_failed(self, data: Event, stored: Stored) -> None:
        self._terminal("failed", data, stored)

    def _on_cancelled(self, data: Event, stored: Stored) -> None:
        self._terminal("cancelled", data, stored)

    def _on_expired(self, data: Event, stored: Stored) -> None:
        self._terminal("expired", data, stored)

    def _terminal(self, kind: str, data: Event, stored: Stored) -> None:
        request = self._request(data, kind, stored)
        if request is None:
            return
        worker = str(data.get("worker", ""))
        if worker:
            self._check_worker(request, data, kind, stored)
            self.busy[worker].discard((request.tenant, request.id, int(data["attempt"])))
        name = f"{request.tenant}/{request.id}"
        unrun = data.get("phase") == "queued"
        if unrun and (data.get("output_tokens", 0) or int(data["attempt"]) in request.first):
            self.faults.append(f"{kind} while queued, and yet it made tokens: {name}")
        if kind == "cancelled" and not request.cancelled_at:
            self.faults.append(f"cancelled, and nobody asked for it: {name} at {stored.sequence}")
        if kind == "expired" and data["ended"]["wall_us"] < request.admitted["deadline_us"]:
            self.faults.append(f"expired before its deadline: {name} at {stored.sequence}")
        self._end(request, kind, data, stored)

    def _end(self, request: Request, kind: str, data: Event, stored: Stored) -> None:
        worker, attempt = str(data.get("worker", "")), int(data.get("attempt", 0))
        if request.end is not None:
            same_try = (worker, attempt) == (
                str(request.end.get("worker", "")),
                int(request.end.get("attempt", 0)),
            )
            if same_try:
                # Repetitions by (writer, counter) were dropped before: this is a second opinion.
                self.faults.append(
                    f"two ends of one attempt: {request.tenant}/{request.id} {request.end_kind}"
                    f" at {request.end_sequence} and {kind} at {stored.sequence}"
                )
            request.superseded.append((stored.sequence, kind, data))
            return
        counts = request.current == attempt if worker else request.current == 0
        if not counts:
            request.superseded.append((stored.sequence, kind, data))
            return
        request.end, request.end_kind = data, kind
        request.end_sequence, request.end_ns = stored.sequence, stored.stored_ns

    # --- the small ones

    def _request(self, data: Event, kind: str, stored: Stored) -> Request | None:
        request = self.requests.get((data["tenant"], data["id"]))
        if request is None:
            self.faults.append(
                f"{kind} of what was never admitted: {data['tenant']}/{data['id']}"
                f" at {stored.sequence}"
            )
        return request

    def _check_worker(self, request: Request, data: Event, kind: str, stored: Stored) -> None:
        dispatched = request.attempts.get(int(data["attempt"]))
        if dispatched is None or dispatched["worker"] != data["worker"]:
            self.faults.append(
                f"{kind} by a worker that was not given it: {request.tenant}/{request.id}"
                f" attempt {data['attempt']} at {stored.sequence}"
            )


def measure(request: Request) -> Measure | None:
    """The segments of a request that ended, from its raw stamps alone; None while it is open."""
    end = request.end
    if end is None:
        return None
    admitted, attempts = request.admitted, request.attempts
    numbers = sorted(attempts)
    counted = attempts.get(int(end.get("attempt", 0))) if end.get("worker") else None
    lost = attempts[numbers[0]] if numbers and attempts[numbers[0]] is not counted else None
    stamps: dict[str, Any] = {
        "edge_accepted": admitted.get("edge_accepted"),
        "arrival": admitted["arrival"],
        "received": admitted["received"],
        "decided": admitted["decided"],
        "lost": lost["dispatched"] if lost else None,
    }
    if request.end_kind == "rejected":
        stamps["ended"] = end["decided"]
    else:
        attempt = int(end["attempt"])
        started = request.started.get(attempt, {}) if counted else {}
        first = request.first.get(attempt, {}) if counted else {}
        stamps |= {
            "dispatched": counted["dispatched"] if counted else None,
            "submitted": end.get("submitted") or started.get("submitted"),
            "scheduled": end.get("scheduled") or first.get("scheduled"),
            "first_token": end.get("first_token") or first.get("first_token"),
            "last_token": end.get("last_token"),
            "ended": end["ended"],
        }
    anchors: dict[str, tuple[int, int]] = {}
    known: list[tuple[str, int]] = []
    for point, _ in POINTS:
        stamp = stamps.get(point)
        if stamp is None:
            continue
        at_us = int(stamp["wall_us"])
        if stamp.get("boot") is not None and stamp.get("mono_ns") is not None:
            wall_us, mono_ns = anchors.setdefault(stamp["boot"], (at_us, int(stamp["mono_ns"])))
            at_us = wall_us + (int(stamp["mono_ns"]) - mono_ns) // 1000
        known.append((point, at_us))
    names = dict(POINTS)
    places = dict(known)
    return Measure(
        segments={
            names[point]: after_us - at_us for (point, at_us), (_, after_us) in pairwise(known)
        },
        total_us=known[-1][1] - known[0][1],
        exec_us=known[-1][1] - places["scheduled"] if "scheduled" in places else None,
    )
