"""What became of each request: the fold of one tape, in its order.

The rules, which every reader of the tape follows:

* **source**: an event counts only if its service may say it; an end that names no worker is the
  scheduler's, one that names a worker is that worker's.
* **fence**: of scheduler and admission an event counts only if its fence is not below the highest
  that an event of that service had earlier on the tape.
* **repetition**: of two events with the same (tenant, id, type, attempt) the first counts.
* **end**: a worker's end counts iff its attempt is the current one, which is the newest
  dispatched, unless it or a newer one was declared lost; the scheduler's (no worker) counts iff
  there is no current attempt. Only the first that counts ends the request; what comes later
  stays on the tape, superseded.

``apply`` is pure in what it decides: the same events in the same order make the same lives.
It changes the ``Tape`` that it is given, and nothing else. Lives that ended are settled into
some 400 bytes once so much has been read after them that no writer repeats anything from
that time, so a long tape costs memory for its requests and not for their events.
"""

import struct
import sys
from collections import deque
from collections.abc import Iterator
from typing import Final, Literal

from msgspec import Struct

from waterclock_ledger.chains import Numbers
from waterclock_proto.envelope import Envelope
from waterclock_proto.events import (
    Admitted,
    AttemptLost,
    CancelRequested,
    Completed,
    Delivered,
    Dispatched,
    Enqueued,
    EventData,
    FirstToken,
    Rejected,
    RequestEventData,
    Resubmitted,
    Started,
    TerminalData,
)
from waterclock_proto.flows import EVENT_FLOWS
from waterclock_proto.names import Outcome
from waterclock_proto.segments import SEGMENTS, Measured, measure, measure_request

SETTLE_SEQUENCES: Final = 65_536
"""A life is settled when so many events stand behind its end. Within these a writer has
repeated whatever it had not seen acknowledged."""

UNKNOWN_TIER: Final = "-"
"""Of a submission that was refused before anybody knew its tier."""

LifeOutcome = Outcome | Literal["open"]

_SCHEDULER: Final = "/waterclock/scheduler"
_ADMISSION: Final = "/waterclock/admission"
_SOURCES: Final[dict[type[EventData], frozenset[str]]] = {
    flow.event: frozenset(f"/waterclock/{publisher}" for publisher in flow.publishers)
    for flow in EVENT_FLOWS
}
_UNFENCED_TYPES: Final = frozenset({"clock_reported", "writer_sealed", "log_opened"})


class Try(Struct):
    """One attempt, from its dispatch on."""

    number: int
    dispatched: Dispatched
    sequence: int
    started: Started | None = None
    first: FirstToken | None = None


class Life(Struct):
    """One request with its events, as far as they count; what does not count is in ``flags``."""

    tenant: str
    id: str
    admitted: Admitted | None = None
    admitted_sequence: int = 0
    enqueued: Enqueued | None = None
    enqueued_sequence: int = 0
    tries: list[Try] = []
    """In the order of their numbers."""
    losses: dict[int, AttemptLost] = {}
    """By number of the attempt."""
    end: TerminalData | Rejected | None = None
    end_sequence: int = 0
    superseded: list[tuple[int, TerminalData | Rejected]] = []
    """Ends that do not count, with their sequences."""
    cancel: CancelRequested | None = None
    delivered: Delivered | None = None
    resubmissions: int = 0
    flags: list[str] = []

    @property
    def current(self) -> Try | None:
        """The newest attempt, unless it or a newer one was declared lost."""
        if self.tries and self.tries[-1].number > max(self.losses, default=0):
            return self.tries[-1]
        return None

    @property
    def outcome(self) -> LifeOutcome:
        if self.end is None:
            return "open"
        return self.end.OUTCOME if isinstance(self.end, TerminalData) else "rejected"

    def measured(self) -> Measured | None:
        """Its segments and clocks; None while it is open, or if nobody recorded its arrival."""
        if self.admitted is None or self.end is None:
            return None
        dispatches = tuple(a_try.dispatched for a_try in self.tries)
        if isinstance(self.end, TerminalData):
            counted = self.counted_try()
            return measure_request(
                self.admitted,
                dispatches,
                counted.started if counted else None,
                counted.first if counted else None,
                self.end,
            )
        # Refused by the scheduler after admission: no engine ever had it.
        return measure(
            (
                ("edge_accepted", self.admitted.edge_accepted),
                ("arrival", self.admitted.arrival),
                ("received", self.admitted.received),
                ("decided", self.admitted.decided),
                ("lost", dispatches[0].dispatched if dispatches else None),
                ("ended", self.end.decided),
            )
        )

    def counted_try(self) -> Try | None:
        """The attempt that its end belongs to, if a worker ended it."""
        if not isinstance(self.end, TerminalData) or not self.end.worker:
            return None
        return self.try_(self.end.attempt)

    def try_(self, number: int) -> Try | None:
        """The attempt of that number, if it was dispatched."""
        for a_try in self.tries:
            if a_try.number == number:
                return a_try
        return None


class Settled(Struct, gc=False):
    """What remains of a life that ended: integers, in one string of bytes."""

    tier: str
    outcome: Outcome
    tries: int
    lost: int
    superseded: int
    flags: tuple[str, ...]
    packed: bytes
    """``_NUMBERS``: arrival, total, queue, execution, and the segments in their order."""


class Summary(Struct, frozen=True, gc=False):
    """A life as reports see it, open or ended. Durations in microseconds, None = not known."""

    tenant: str
    id: str
    tier: str
    outcome: LifeOutcome
    arrival_us: int | None
    """None where the record has no ``admitted`` of it."""
    total_us: int | None
    queue_us: int | None
    exec_us: int | None
    segments: dict[str, int]
    tries: int
    lost: int
    """How many attempts were declared lost."""
    superseded: int
    flags: tuple[str, ...]


class Refusal(Struct, frozen=True, gc=False):
    """Submissions that admission refused, ``count`` of them in one event."""

    tenant: str
    tier: str
    reason: str
    arrival_us: int
    count: int


class Fence:
    """Whose events count for one elected service."""

    __slots__ = ("highest",)

    def __init__(self) -> None:
        self.highest = 0

    def counts(self, fence: int) -> bool:
        """Whether an event under this fence counts, which then is the highest seen.

        Its election may lie before the record, or in a hole: whoever writes under a fence won it.
        """
        if fence < self.highest:
            return False
        self.highest = fence
        return True


class Tape:
    """The state of one tape. Made empty, changed by ``apply`` alone.

    Args:
        open_start: The record begins in the middle of the tape.
        settle_after: See ``SETTLE_SEQUENCES``; None keeps every life whole.
    """

    def __init__(
        self, *, open_start: bool = False, settle_after: int | None = SETTLE_SEQUENCES
    ) -> None:
        self.lives: dict[str, dict[str, Life | Settled]] = {}
        """By tenant, then by id."""
        self.refusals: list[Refusal] = []
        self.numbers = Numbers(open_start=open_start)
        self.scheduler = Fence()
        self.admission = Fence()
        self.resubmitted = 0
        self.fenced_off = 0
        """Events of deposed writers, which do not count."""
        self.foreign = 0
        """Events of services that may not say them, which do not count either."""
        self._settle_after = settle_after
        self._ended: deque[tuple[int, str, str]] = deque()

    def find(self, tenant: str, request_id: str) -> Life | Settled | None:
        return self.lives.get(tenant, {}).get(request_id)

    def summaries(self, tenant: str | None = None) -> Iterator[Summary]:
        """Every life by tenant and id; refused submissions are not among them."""
        for name in sorted(self.lives) if tenant is None else [tenant]:
            lives = self.lives.get(name, {})
            for request_id in sorted(lives):
                yield _summary(name, request_id, lives[request_id])

    def life(self, tenant: str, request_id: str) -> Life | Settled:
        lives = self.lives.get(tenant)
        if lives is None:
            # Every decoded event has its own copy of a tenant's name; a tape needs one.
            lives = self.lives[sys.intern(tenant)] = {}
        life = lives.get(request_id)
        if life is None:
            life = lives[request_id] = Life(tenant=tenant, id=request_id)
        return life

    def ended(self, life: Life, sequence: int) -> None:
        if self._settle_after is not None:
            self._ended.append((sequence, life.tenant, life.id))

    def settle(self, sequence: int) -> None:
        """Shrink the lives that ended so long before ``sequence`` that nothing can change them."""
        if self._settle_after is None:
            return
        while self._ended and self._ended[0][0] + self._settle_after < sequence:
            _, tenant, request_id = self._ended.popleft()
            life = self.lives[tenant][request_id]
            assert isinstance(life, Life)
            if life.admitted is not None:
                self.lives[tenant][request_id] = _settled(life, life.admitted) or life


def apply(tape: Tape, envelope: Envelope[EventData], sequence: int) -> None:
    """Fold one event in, in the order of the tape."""
    data = envelope.data
    if not _may_say(envelope.source, data):
        tape.foreign += 1
        return
    if not _fence_holds(tape, envelope):
        tape.fenced_off += 1
        return
    tape.settle(sequence)
    if isinstance(data, Rejected):
        _apply_rejected(tape, data, sequence)
        return
    if isinstance(data, Resubmitted):
        if not tape.numbers.observe(data.tenant, data.number):
            return
        tape.resubmitted += 1
    if isinstance(data, Admitted):
        tape.numbers.observe(data.tenant, data.number)
    if isinstance(data, RequestEventData):
        life = tape.life(data.tenant, data.id)
        if isinstance(life, Settled):
            _apply_late(life, data)
        else:
            _apply_to_life(tape, life, data, sequence)


def _may_say(source: str, data: EventData) -> bool:
    if isinstance(data, Rejected):
        return source == (_SCHEDULER if data.number is None else _ADMISSION)
    if isinstance(data, TerminalData) and (source == _SCHEDULER) == bool(data.worker):
        return False
    return source in _SOURCES[type(data)]


def _fence_holds(tape: Tape, envelope: Envelope[EventData]) -> bool:
    if envelope.data.TYPE in _UNFENCED_TYPES:
        return True
    if envelope.source == _SCHEDULER:
        return tape.scheduler.counts(envelope.fence)
    if envelope.source == _ADMISSION:
        return tape.admission.counts(envelope.fence)
    return True


def _apply_rejected(tape: Tape, data: Rejected, sequence: int) -> None:
    if data.number is None:
        # The scheduler refuses what admission had let in: the end of a life.
        life = tape.life(data.tenant, data.id)
        if isinstance(life, Settled):
            _apply_late(life, data)
        else:
            _apply_end(tape, life, data, sequence)
    elif tape.numbers.observe(data.tenant, data.number, data.count):
        tape.refusals.append(
            Refusal(
                tenant=sys.intern(data.tenant),
                tier=sys.intern(data.tier or UNKNOWN_TIER),
                reason=data.reason,
                arrival_us=data.arrival.wall_us,
                count=data.count,
            )
        )


def _apply_to_life(tape: Tape, life: Life, data: RequestEventData, sequence: int) -> None:
    match data:
        case TerminalData():
            _apply_end(tape, life, data, sequence)
        case Admitted():
            if life.admitted is not None:
                _flag(life, "duplicate:admitted")
                return
            life.admitted, life.admitted_sequence = data, sequence
        case Enqueued():
            if life.enqueued is not None:
                _flag(life, "duplicate:enqueued")
                return
            if life.end is not None:
                _flag(life, "after_end:enqueued")
            life.enqueued, life.enqueued_sequence = data, sequence
        case Dispatched():
            _apply_dispatched(life, data, sequence)
        case Started() | FirstToken():
            _apply_progress(life, data)
        case AttemptLost():
            _apply_lost(life, data)
        case CancelRequested():
            life.cancel = life.cancel or data
        case Delivered():
            if life.delivered is not None:
                _flag(life, "duplicate:delivered")
                return
            life.delivered = data
        case Resubmitted():
            life.resubmissions += 1
        case _:
            raise AssertionError(f"an event about a request that no rule is for: {data.TYPE}")


def _apply_dispatched(life: Life, data: Dispatched, sequence: int) -> None:
    if life.try_(data.attempt) is not None:
        _flag(life, "duplicate:dispatched")
        return
    if life.end is not None:
        _flag(life, "after_end:dispatched")
    # A writer's events may change places when the tape refuses one, so the newest attempt is told
    # by its number.
    life.tries.append(Try(number=data.attempt, dispatched=data, sequence=sequence))
    life.tries.sort(key=lambda a_try: a_try.number)


def _apply_progress(life: Life, data: Started | FirstToken) -> None:
    a_try = life.try_(data.attempt)
    if a_try is None:
        _flag(life, f"undispatched:{data.TYPE}")
        return
    if data.worker != a_try.dispatched.worker:
        _flag(life, f"other_worker:{data.TYPE}")
    if isinstance(data, Started):
        if a_try.started is not None:
            _flag(life, "duplicate:started")
            return
        a_try.started = data
    else:
        if a_try.first is not None:
            _flag(life, "duplicate:first_token")
            return
        a_try.first = data


def _apply_lost(life: Life, data: AttemptLost) -> None:
    if data.attempt in life.losses:
        _flag(life, "duplicate:attempt_lost")
    elif life.end is not None:
        _flag(life, "after_end:attempt_lost")
    else:
        life.losses[data.attempt] = data


def _apply_end(tape: Tape, life: Life, data: TerminalData | Rejected, sequence: int) -> None:
    if life.end is not None:
        life.superseded.append((sequence, data))
        _flag(life, _second_end_flag(life.end, data))
        return
    current = life.current
    worker = data.worker if isinstance(data, TerminalData) else ""
    if worker == "":
        valid = current is None
    else:
        assert isinstance(data, TerminalData)
        valid = current is not None and current.number == data.attempt
    if not valid:
        life.superseded.append((sequence, data))
        _flag(life, f"superseded:{data.TYPE}" if life.tries else f"undispatched:{data.TYPE}")
        return
    if current is not None and worker != current.dispatched.worker:
        _flag(life, f"other_worker:{data.TYPE}")
    life.end, life.end_sequence = data, sequence
    tape.ended(life, sequence)


def _second_end_flag(first: TerminalData | Rejected, second: TerminalData | Rejected) -> str:
    first_attempt = first.attempt if isinstance(first, TerminalData) else 0
    second_attempt = second.attempt if isinstance(second, TerminalData) else 0
    if first_attempt != second_attempt:
        return f"superseded:{second.TYPE}"
    return f"{'duplicate' if first.TYPE == second.TYPE else 'two_ends'}:{second.TYPE}"


def _apply_late(life: Settled, data: RequestEventData | Rejected) -> None:
    """An event about a request that was settled long ago: noted, and nothing else."""
    if isinstance(data, TerminalData | Rejected):
        life.superseded += 1
        flag = f"superseded:{data.TYPE}"
    elif isinstance(data, Resubmitted | Delivered | CancelRequested):
        # These may come at any time.
        return
    else:
        flag = f"late:{data.TYPE}"
    if flag not in life.flags:
        life.flags = (*life.flags, flag)


def _flag(life: Life, flag: str) -> None:
    if flag not in life.flags:
        life.flags.append(flag)


def missing_flags(life: Life) -> list[str]:
    """Events that a life of this outcome must have had, and the record does not have.

    Only asked at the end, because events may change places.
    """
    missing: list[str] = []
    if _overlapping(life):
        missing.append("overlapping_attempts")
    if life.admitted is None:
        missing.append("missing:admitted")
    if life.tries and life.enqueued is None:
        missing.append("missing:enqueued")
    if isinstance(life.end, Completed):
        counted = life.counted_try()
        if counted is None or counted.started is None:
            missing.append("missing:started")
        if life.end.output_tokens and (counted is None or counted.first is None):
            missing.append("missing:first_token")
    return missing


def _overlapping(life: Life) -> bool:
    """Whether an attempt was made while another one had neither ended nor been given up."""
    counted = life.counted_try()
    if life.end is None or counted is not None:
        newest = counted or (life.tries[-1] if life.tries else None)
        before = [a_try for a_try in life.tries if newest and a_try.number < newest.number]
    else:
        before = [a_try for a_try in life.tries if a_try.sequence < life.end_sequence]
    return any(a_try.number not in life.losses for a_try in before)


_ABSENT: Final = -(2**63)
_NUMBERS: Final = struct.Struct(f">{4 + len(SEGMENTS)}q")


def _settled(life: Life, admitted: Admitted) -> Settled | None:
    """The life in small, or None if its stamps lie so far apart that 64 bits do not hold them."""
    measured = life.measured()
    assert measured is not None, "only lives that were admitted and ended are settled"
    outcome = life.outcome
    assert outcome != "open"
    numbers = (
        admitted.arrival.wall_us,
        measured.total_us,
        measured.queue_us,
        measured.exec_us,
        *(measured.segments.get(segment) for segment in SEGMENTS),
    )
    try:
        packed = _NUMBERS.pack(*(_ABSENT if number is None else number for number in numbers))
    except struct.error:
        return None
    return Settled(
        tier=sys.intern(admitted.tier),
        outcome=outcome,
        tries=len(life.tries),
        lost=len(life.losses),
        superseded=len(life.superseded),
        flags=tuple(
            sys.intern(flag) for flag in (*life.flags, *missing_flags(life), *measured.flags)
        ),
        packed=packed,
    )


def _summary(tenant: str, request_id: str, life: Life | Settled) -> Summary:
    if isinstance(life, Settled):
        numbers = [None if number == _ABSENT else number for number in _NUMBERS.unpack(life.packed)]
        return Summary(
            tenant=tenant,
            id=request_id,
            tier=life.tier,
            outcome=life.outcome,
            arrival_us=numbers[0],
            total_us=numbers[1],
            queue_us=numbers[2],
            exec_us=numbers[3],
            segments={
                segment: number
                for segment, number in zip(SEGMENTS, numbers[4:], strict=True)
                if number is not None
            },
            tries=life.tries,
            lost=life.lost,
            superseded=life.superseded,
            flags=life.flags,
        )
    measured = life.measured()
    return Summary(
        tenant=tenant,
        id=request_id,
        tier=life.admitted.tier if life.admitted else UNKNOWN_TIER,
        outcome=life.outcome,
        arrival_us=life.admitted.arrival.wall_us if life.admitted else None,
        total_us=measured.total_us if measured else None,
        queue_us=measured.queue_us if measured else None,
        exec_us=measured.exec_us if measured else None,
        segments=measured.segments if measured else {},
        tries=len(life.tries),
        lost=len(life.losses),
        superseded=len(life.superseded),
        flags=(
            *life.flags,
            *(missing_flags(life) if _is_request(life) else ()),
            *(measured.flags if measured else ()),
        ),
    )


def _is_request(life: Life) -> bool:
    """Whether anything was done with it; a cancel of an unknown id makes no request of it."""
    return bool(life.admitted or life.enqueued or life.tries or life.end or life.superseded)
