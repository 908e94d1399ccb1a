"""What the tape says, as far as admission needs it: ``apply(event)``, again and again, in order.

Time here is the tape's: when the bus stored an event. So the same tape gives the same fold on
any machine, at once or after years, from its start or from a snapshot.

What is remembered, and for how long:

* open requests: all of them; admission lets no more in than ``OPEN_REQUESTS_MAX``.
* ended requests: for ``FORGET_AFTER_S``, and no more than a maximum; then the oldest are
  forgotten in slices. A forgotten id is a new id: sent again it would be admitted and run again.
* decided submissions and used numbers: as runs without holes.
"""

import hashlib
import struct
from typing import Literal

from msgspec import Struct

from waterclock_admission import limits
from waterclock_admission.core import COMMITMENT_BYTES, Known, Rung
from waterclock_admission.ranges import Ranges
from waterclock_proto.envelope import Envelope
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    AttemptLost,
    Cancelled,
    CancelRequested,
    Completed,
    ContractActivated,
    Delivered,
    Dispatched,
    EventData,
    Expired,
    Failed,
    LogOpened,
    PoolDegraded,
    Rejected,
    Resubmitted,
    RungChanged,
    SchedulerElected,
    TerminalData,
    WindowClosed,
)
from waterclock_proto.names import Outcome

READ_TYPES: tuple[type[EventData], ...] = (
    Admitted,
    AdmissionElected,
    AttemptLost,
    Cancelled,
    CancelRequested,
    Completed,
    ContractActivated,
    Delivered,
    Dispatched,
    Expired,
    Failed,
    LogOpened,
    PoolDegraded,
    Rejected,
    Resubmitted,
    RungChanged,
    SchedulerElected,
    WindowClosed,
)
"""What ``apply`` wants to see; everything else may be left out."""

ADMISSION = "/waterclock/admission"
SCHEDULER = "/waterclock/scheduler"


class OpenRequest(Struct, kw_only=True, gc=False, array_like=True):
    """Admitted and not ended."""

    tenant: str
    id: str
    commitment: bytes
    requests_sequence: int
    arrival_us: int
    deadline_us: int
    event_sequence: int
    """Where its ``admitted`` stands on the tape."""
    attempt: int = 0
    """The newest that was dispatched."""
    running: bool = False
    """Whether that attempt is still with its worker."""
    model: str = ""
    """What the newest dispatch named; before it, what was admitted."""
    cancelled: bool = False
    delivered: bool = False


class Window(Struct, kw_only=True, gc=False, array_like=True):
    """What one tenant's submissions became in one minute of the tape."""

    start_us: int
    number_first: int | None = None
    number_last: int | None = None
    admitted: int = 0
    rejected: int = 0
    resubmitted: int = 0


class Ended(Struct, frozen=True, kw_only=True):
    """A request has just ended; what admission may have to tell its producer."""

    request: OpenRequest
    end: TerminalData | Rejected


Effect = Literal["ignored", "counted"] | Ended


class Fold:
    """The state. ``apply`` is its only way forward, but for what is not on the tape."""

    def __init__(self, *, ended_requests_max: int = limits.ENDED_REQUESTS_MAX) -> None:
        self.position = 0
        """The sequence of the last event applied."""
        self.now_us = 0
        """When it was stored."""
        self.incarnation = ""
        self.admission_fence = 0
        self.admission_writer = ""
        """Who won the highest fence."""
        self.scheduler_fence = 0
        self.numbers: dict[str, Ranges] = {}
        self.numbers_said_us: dict[str, int] = {}
        """When a tenant's last number was last on the tape."""
        self.decided = Ranges()
        self.recent: dict[int, tuple[int, int]] = {}
        """REQUESTS sequence → (stored, µs; sequence of its event), the newest decisions only."""
        self.open: dict[str, OpenRequest] = {}
        self.open_by_tenant: dict[str, int] = {}
        self.ended = EndedRequests(ended_requests_max)
        self.cancelled_early: dict[str, None] = {}
        self.rungs: dict[str, Rung] = {}
        self.contracts: dict[str, str] = {}
        self.windows: dict[str, dict[int, Window]] = {}
        self.rung_marks: dict[str, tuple[str, int]] = {}
        self.degrade_marks: dict[str, tuple[str, int]] = {}

    def apply(self, sequence: int, stored_ns: int, envelope: Envelope[EventData]) -> Effect:
        """Fold one event in. Repetitions, and what a lost election wrote, change nothing."""
        self.position = sequence
        stored_us = stored_ns // 1000
        # The bus's clock may step back; what was forgotten does not come back for that.
        self.now_us = max(self.now_us, stored_us)
        if envelope.source == ADMISSION:
            if envelope.fence < self.admission_fence:
                return "ignored"
            if envelope.fence > self.admission_fence:
                # Its election may have left the tape by age; whoever writes under it won it.
                self.admission_fence = envelope.fence
                self.admission_writer = envelope.writer
        elif envelope.source == SCHEDULER:
            if envelope.fence < self.scheduler_fence:
                return "ignored"
            self.scheduler_fence = envelope.fence
        match envelope.data:
            case Admitted() as data:
                return self._admitted(data, sequence)
            case Dispatched() as data:
                return self._dispatched(data)
            case Completed() | Failed() | Cancelled() | Expired() as data:
                return self._ended(data)
            case Rejected() as data:
                return self._rejected(data, sequence)
            case Resubmitted() as data:
                return self._resubmitted(data, sequence)
            case AttemptLost() as data:
                return self._attempt_lost(data)
            case CancelRequested() as data:
                return self._cancel_requested(data)
            case Delivered() as data:
                return self._delivered(data)
            case RungChanged() as data:
                return self._rung_changed(data, envelope)
            case PoolDegraded() as data:
                return self._pool_degraded(data, envelope)
            case ContractActivated() as data:
                self.contracts[data.tenant] = data.contract_sha256
                return "counted"
            case WindowClosed() as data:
                return self._window_closed(data)
            case LogOpened() as data:
                self.incarnation = data.incarnation
                return "counted"
            case AdmissionElected():
                return "counted" if envelope.writer == self.admission_writer else "ignored"
            case _:
                return "ignored"

    # What others ask.

    def known(self, tenant: str, request_id: str) -> Known | None:
        """The request, if it was admitted and is not forgotten."""
        request = self.open.get(f"{tenant}.{request_id}")
        if request is None:
            return self.ended.known(tenant, request_id)
        return Known(
            commitment=request.commitment,
            requests_sequence=request.requests_sequence,
            outcome=None,
            delivered=request.delivered,
        )

    def is_decided(self, requests_sequence: int, stored_us: int) -> bool:
        """Whether this submission was decided: its sequence, and not another one's before a loss.

        After a power cut REQUESTS may give a sequence out again; the newest decisions are told
        apart by when their submission was stored.
        """
        if requests_sequence not in self.decided:
            return False
        recent = self.recent.get(requests_sequence)
        return recent is None or recent[0] == stored_us

    def last_number(self, tenant: str) -> int:
        numbers = self.numbers.get(tenant)
        return numbers.largest if numbers is not None else 0

    def missing_numbers(self, tenant: str) -> list[int]:
        """Numbers below the last that no event has: of one whose event never reached the tape."""
        numbers = self.numbers.get(tenant)
        return numbers.missing() if numbers is not None else []

    # What is not on the tape.

    def forget_before(self, requests_sequence: int) -> None:
        """REQUESTS holds nothing before this sequence any more: nothing there is undecided."""
        if requests_sequence > 1:
            self.decided.add(1, requests_sequence - 1)

    def pass_over(self, requests_sequence: int) -> None:
        """About this submission no event can be written; it is not waited for."""
        self.decided.add(requests_sequence)

    def rewind(self, requests_sequence: int) -> None:
        """REQUESTS lost everything above this sequence: what comes there now is new."""
        self.decided.cut_above(requests_sequence)
        for sequence in [s for s in self.recent if s > requests_sequence]:
            del self.recent[sequence]

    # One event each.

    def _admitted(self, data: Admitted, sequence: int) -> Effect:
        if not self._decide(data.requests_sequence, data.arrival.wall_us, sequence):
            return "ignored"
        self._number(data.tenant, data.number).admitted += 1
        key = f"{data.tenant}.{data.id}"
        if key in self.open or self.ended.known(data.tenant, data.id) is not None:
            # Only after its first admission was forgotten by whoever wrote this, and not by us.
            return "counted"
        arrival = data.edge_accepted or data.arrival
        self.open[key] = OpenRequest(
            tenant=data.tenant,
            id=data.id,
            commitment=bytes.fromhex(data.body_commitment)[:COMMITMENT_BYTES],
            requests_sequence=data.requests_sequence,
            arrival_us=arrival.wall_us,
            deadline_us=data.deadline_us,
            event_sequence=sequence,
            model=data.model,
            cancelled=self.cancelled_early.pop(key, _ABSENT) is None,
        )
        self.open_by_tenant[data.tenant] = self.open_by_tenant.get(data.tenant, 0) + 1
        return "counted"

    def _rejected(self, data: Rejected, sequence: int) -> Effect:
        if data.number is None:
            return self._refused_later(data)
        last = data.requests_sequence_last or data.requests_sequence
        if not self._decide(data.requests_sequence, data.arrival.wall_us, sequence, last):
            return "ignored"
        window = self._number(data.tenant, data.number, data.number + data.count - 1)
        window.rejected += data.count
        return "counted"

    def _resubmitted(self, data: Resubmitted, sequence: int) -> Effect:
        if not self._decide(data.requests_sequence, data.arrival.wall_us, sequence):
            return "ignored"
        self._number(data.tenant, data.number).resubmitted += 1
        return "counted"

    def _dispatched(self, data: Dispatched) -> Effect:
        request = self.open.get(f"{data.tenant}.{data.id}")
        if request is None or data.attempt <= request.attempt:
            return "ignored"
        request.attempt = data.attempt
        request.running = True
        request.model = data.model
        return "counted"

    def _attempt_lost(self, data: AttemptLost) -> Effect:
        request = self.open.get(f"{data.tenant}.{data.id}")
        if request is None or data.attempt != request.attempt or not request.running:
            return "ignored"
        request.running = False
        return "counted"

    def _ended(self, data: TerminalData) -> Effect:
        """The first end of the newest attempt, if not lost; the scheduler's only with none out."""
        key = f"{data.tenant}.{data.id}"
        request = self.open.get(key)
        if request is None:
            return "ignored"
        counts = (
            not request.running
            if data.worker == ""
            else request.running and data.attempt == request.attempt
        )
        if not counts:
            return "ignored"
        return self._end(key, request, data, data.OUTCOME)

    def _refused_later(self, data: Rejected) -> Effect:
        """The scheduler refuses what admission let in: that is its end."""
        key = f"{data.tenant}.{data.id}"
        request = self.open.get(key)
        if request is None or request.running:
            return "ignored"
        return self._end(key, request, data, "rejected")

    def _end(
        self, key: str, request: OpenRequest, end: TerminalData | Rejected, outcome: Outcome
    ) -> Effect:
        del self.open[key]
        left = self.open_by_tenant[request.tenant] - 1
        if left:
            self.open_by_tenant[request.tenant] = left
        else:
            del self.open_by_tenant[request.tenant]
        self.ended.add(request, outcome, self.now_us)
        return Ended(request=request, end=end)

    def _cancel_requested(self, data: CancelRequested) -> Effect:
        key = f"{data.tenant}.{data.id}"
        request = self.open.get(key)
        if request is not None:
            request.cancelled = True
            return "counted"
        if self.ended.known(data.tenant, data.id) is not None or key in self.cancelled_early:
            return "ignored"
        if len(self.cancelled_early) >= limits.CANCELLED_EARLY_MAX:
            del self.cancelled_early[next(iter(self.cancelled_early))]
        self.cancelled_early[key] = None
        return "counted"

    def _delivered(self, data: Delivered) -> Effect:
        request = self.open.get(f"{data.tenant}.{data.id}")
        if request is not None:
            request.delivered = True
            return "counted"
        return "counted" if self.ended.mark_delivered(data.tenant, data.id) else "ignored"

    def _rung_changed(self, data: RungChanged, envelope: Envelope[EventData]) -> Effect:
        if _is_repetition(self.rung_marks, data.pool, envelope):
            return "ignored"
        before = self.rungs.get(data.pool, _GROUND)
        self.rungs[data.pool] = Rung(
            refuses="refuse" in data.actions,
            retry_after_ms=data.retry_after_ms,
            to_pool=before.to_pool,
        )
        return "counted"

    def _pool_degraded(self, data: PoolDegraded, envelope: Envelope[EventData]) -> Effect:
        if _is_repetition(self.degrade_marks, data.pool, envelope):
            return "ignored"
        before = self.rungs.get(data.pool, _GROUND)
        self.rungs[data.pool] = Rung(
            refuses=before.refuses, retry_after_ms=before.retry_after_ms, to_pool=data.to_pool
        )
        return "counted"

    def _window_closed(self, data: WindowClosed) -> Effect:
        if data.number_last is not None:
            # Also where the window counts nothing: then it only says the last number again.
            numbers = self.numbers.setdefault(data.tenant, Ranges())
            if data.number_last > numbers.largest:
                numbers.add(numbers.largest + 1, data.number_last)
            self.numbers_said_us[data.tenant] = self.now_us
        windows = self.windows.get(data.tenant)
        if windows is None or windows.pop(data.start_us, None) is None:
            return "ignored"
        if not windows:
            del self.windows[data.tenant]
        return "counted"

    # Numbering.

    def _decide(
        self, requests_sequence: int, stored_us: int, sequence: int, last: int | None = None
    ) -> bool:
        """Note a submission as decided; False if this event says so for the second time."""
        if self.is_decided(requests_sequence, stored_us):
            return False
        self.decided.add(requests_sequence, last)
        if len(self.decided) > limits.RANGES_MAX:
            first, _ = self.decided.runs()[1]
            self.decided.add(1, first)
        self.recent.pop(requests_sequence, None)
        self.recent[requests_sequence] = (stored_us, sequence)
        if len(self.recent) > limits.RECENT_DECISIONS:
            del self.recent[next(iter(self.recent))]
        return True

    def _number(self, tenant: str, first: int, last: int | None = None) -> Window:
        """Note a tenant's numbers as used; the window that they count in."""
        last = first if last is None else last
        numbers = self.numbers.get(tenant)
        if numbers is None:
            # The tape may begin in the middle; what was numbered before it is not missing.
            self.numbers[tenant] = Ranges([(1, last)])
        else:
            numbers.add(first, last)
        self.numbers_said_us[tenant] = self.now_us
        start_us = self.now_us // limits.WINDOW_US * limits.WINDOW_US
        windows = self.windows.setdefault(tenant, {})
        window = windows.get(start_us)
        if window is None:
            if len(windows) >= limits.WINDOWS_MAX:
                del windows[next(iter(windows))]
            window = windows[start_us] = Window(start_us=start_us)
        if window.number_first is None or first < window.number_first:
            window.number_first = first
        if window.number_last is None or last > window.number_last:
            window.number_last = last
        return window


class EndedRequests:
    """Requests that ended, in slices by time, so that the oldest are forgotten at no cost.

    One request is a key of 15 bytes (BLAKE2b of tenant and id) and a value of 28 bytes.
    """

    def __init__(self, requests_max: int) -> None:
        self._max = requests_max
        self._slice_max = max(1, requests_max // limits.GENERATIONS)
        self.slices: list[Slice] = []
        """Oldest first; only the last one still grows."""
        self._count = 0
        self._next_name = 0
        self.forgotten_early = 0
        """How many had to be forgotten before their time, for want of room."""

    def __len__(self) -> int:
        return self._count

    def add(self, request: OpenRequest, outcome: Outcome, ended_us: int) -> None:
        ended_s = ended_us // 1_000_000
        newest = self.slices[-1] if self.slices else None
        if (
            newest is None
            or len(newest.records) >= self._slice_max
            or ended_s - newest.first_s >= _SLICE_S
        ):
            newest = Slice(name=self._next_name, first_s=ended_s, last_s=ended_s, records={})
            self._next_name += 1
            self.slices.append(newest)
        flags = _OUTCOMES.index(outcome) | (_DELIVERED if request.delivered else 0)
        newest.records[ended_key(request.tenant, request.id)] = _RECORD.pack(
            flags, request.commitment, request.requests_sequence, ended_s
        )
        newest.last_s = ended_s
        newest.changed = True
        self._count += 1
        while self.slices and (
            self.slices[0].last_s + limits.FORGET_AFTER_S < ended_s or self._count > self._max
        ):
            oldest = self.slices.pop(0)
            self._count -= len(oldest.records)
            if oldest.last_s + limits.FORGET_AFTER_S >= ended_s:
                self.forgotten_early += len(oldest.records)

    def known(self, tenant: str, request_id: str) -> Known | None:
        key = ended_key(tenant, request_id)
        for part in reversed(self.slices):
            record = part.records.get(key)
            if record is not None:
                fields: tuple[int, bytes, int, int] = _RECORD.unpack(record)
                flags, commitment, requests_sequence, ended_s = fields
                return Known(
                    commitment=commitment,
                    requests_sequence=requests_sequence,
                    outcome=_OUTCOMES[flags & ~_DELIVERED],
                    ended_us=ended_s * 1_000_000,
                    delivered=bool(flags & _DELIVERED),
                )
        return None

    def mark_delivered(self, tenant: str, request_id: str) -> bool:
        """Whether the request is known and had not been marked."""
        key = ended_key(tenant, request_id)
        for part in reversed(self.slices):
            record = part.records.get(key)
            if record is not None:
                if record[0] & _DELIVERED:
                    return False
                part.records[key] = bytes([record[0] | _DELIVERED]) + record[1:]
                part.changed = True
                return True
        return False

    def oldest_us(self) -> int | None:
        """How far back ids are known."""
        return self.slices[0].first_s * 1_000_000 if self.slices else None

    def restore(self, slices: list["Slice"]) -> None:
        """Take over what a snapshot held."""
        self.slices = slices
        self._count = sum(len(part.records) for part in slices)
        self._next_name = max((part.name for part in slices), default=-1) + 1


class Slice(Struct, kw_only=True):
    """Requests that ended within one hour, or the next so many."""

    name: int
    first_s: int
    last_s: int
    records: dict[bytes, bytes]
    changed: bool = True
    """Since it was last written to a snapshot."""

    def packed(self) -> bytes:
        return b"".join(part for record in self.records.items() for part in record)

    @staticmethod
    def unpacked(packed: bytes) -> dict[bytes, bytes]:
        """The inverse of ``packed``.

        Raises:
            ValueError: not a whole number of records.
        """
        size = KEY_BYTES + _RECORD.size
        if len(packed) % size:
            raise ValueError(f"{len(packed)} bytes are no whole number of records of {size}")
        return {
            packed[at : at + KEY_BYTES]: packed[at + KEY_BYTES : at + size]
            for at in range(0, len(packed), size)
        }


KEY_BYTES = 15


def ended_key(tenant: str, request_id: str) -> bytes:
    return hashlib.blake2b(f"{tenant}.{request_id}".encode(), digest_size=KEY_BYTES).digest()


def _is_repetition(
    marks: dict[str, tuple[str, int]], pool: str, envelope: Envelope[EventData]
) -> bool:
    """Whether a writer's event about a pool came after a newer one of the same writer."""
    writer, counter = marks.get(pool, ("", -1))
    if writer == envelope.writer and envelope.counter <= counter:
        return True
    marks[pool] = (envelope.writer, envelope.counter)
    return False


_ABSENT = object()
_GROUND = Rung()
_SLICE_S = 3_600
_RECORD = struct.Struct(f">B{COMMITMENT_BYTES}sQI")
_DELIVERED = 0x80
_OUTCOMES: tuple[Outcome, ...] = ("completed", "failed", "cancelled", "expired", "rejected")
