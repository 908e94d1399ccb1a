"""What the tape says, and nothing else: the fold that a scheduler's decisions rest on.

``apply`` is the only way in. It depends on the events and on their places on the tape, never
on a clock, so every process that folds the same tape, from its beginning or from a snapshot,
holds the same state. Rules:

1. Of repetitions, by (writer, counter) or by (tenant, id, type, attempt), the first counts.
2. An event of admission or of a scheduler counts only if its fence is not below the highest
   fence of that service seen earlier on the tape. The first ``scheduler_elected`` of a fence
   names the leader; a second one of the same fence has lost.
3. A request's current attempt is the newest dispatched one, unless that was declared lost.
   A worker's terminal event counts if it is of the current attempt, a scheduler's (which names
   no worker) if there is no current attempt. The first that counts ends the request.
4. A slot of a worker is taken by a ``dispatched`` and freed by the attempt's terminal event or
   loss, whether or not these count for the request: a superseded attempt runs all the same.
5. Events of a scheduler may change places when the bus breaks: a later attempt before an
   earlier one, a dispatch before its ``enqueued``, a loss before its dispatch. What is the
   newest is told by attempt numbers.
"""

from collections.abc import Callable
from itertools import islice
from typing import Final, TypeAlias, TypeVar, cast

from msgspec import Struct, field

from waterclock_proto.envelope import Envelope
from waterclock_proto.events import (
    TERMINAL_TYPES,
    AdmissionElected,
    Admitted,
    AttemptLost,
    CancelRequested,
    Completed,
    Dispatched,
    Enqueued,
    EventData,
    LogOpened,
    Rejected,
    RungChanged,
    SchedulerElected,
    TerminalData,
)
from waterclock_scheduler.estimate import Outputs, learn
from waterclock_scheduler.limits import (
    CANCEL_KEPT_US,
    CANCELS_MAX,
    COUNTERS_REMEMBERED,
    ENDED_MAX,
    OUTPUT_PAIRS_MAX,
    WRITERS_MAX,
)

Key: TypeAlias = tuple[str, str]
"""(tenant, id): the identity of a request."""
Slot: TypeAlias = tuple[str, str, int]
"""(tenant, id, attempt): what a worker is busy with."""

SOURCE_SCHEDULER: Final = "/waterclock/scheduler"
SOURCE_ADMISSION: Final = "/waterclock/admission"

READ_TYPES: Final[tuple[type[EventData], ...]] = (
    Admitted,
    Rejected,
    CancelRequested,
    Enqueued,
    Dispatched,
    *TERMINAL_TYPES,
    AttemptLost,
    RungChanged,
    SchedulerElected,
    AdmissionElected,
    LogOpened,
)
"""The event types that the fold reads; the others are filtered out by the bus."""


class Request(Struct):
    """An open request, as far as the tape tells."""

    admitted: Admitted
    pool: str = ""
    enqueued: Enqueued | None = None
    attempt: int = 0
    """The newest dispatched attempt."""
    worker: str = ""
    """Its worker."""
    lost: int = 0
    """The newest attempt that was declared lost."""
    cancel: bool = False

    @property
    def running(self) -> bool:
        """Whether it has a current attempt."""
        return self.attempt > self.lost


class Ended(Struct):
    """What is remembered of a request that has ended."""

    attempt: int
    lost: int


class Rung(Struct, frozen=True):
    """Where a pool's ladder stands."""

    rung: int = 0
    batch_cap: int | None = None
    refuse: bool = False


class Seen(Struct):
    """Which counters of a writer have been read."""

    newest: int
    mask: int
    """Bit i: ``newest - i`` has been read."""
    position: int
    """Where on the tape the writer was read last."""


class TapeState(Struct):
    """The fold. Make it empty, and change it with ``apply`` only."""

    position: int = 0
    """The sequence of the last event read."""
    stored_us: int = 0
    """The bus's stamp of that event."""
    incarnation: str = ""
    scheduler_fence: int = 0
    leader: str = ""
    """The writer that won the election of ``scheduler_fence``."""
    admission_fence: int = 0
    requests: dict[Key, Request] = field(default_factory=dict[Key, Request])
    running: dict[str, dict[Slot, str]] = field(default_factory=dict[str, dict[Slot, str]])
    """By life of a worker: what it is busy with, and for which pool. No life without a slot
    taken."""
    ended: dict[Key, Ended] = field(default_factory=dict[Key, Ended])
    cancels: dict[Key, int] = field(default_factory=dict[Key, int])
    """Cancels that came before their requests, with the bus's stamp in microseconds."""
    rungs: dict[str, Rung] = field(default_factory=dict[str, Rung])
    outputs: dict[tuple[str, str], Outputs] = field(default_factory=dict[tuple[str, str], Outputs])
    """By (model, tenant)."""
    writers: dict[str, Seen] = field(default_factory=dict[str, Seen])


def apply(
    state: TapeState, envelope: Envelope[EventData], *, sequence: int, stored_us: int
) -> bool:
    """Fold one event of the tape into ``state``; whether it counted.

    Events come in the order of the tape; one that lies at or before ``state.position`` has
    been folded already and changes nothing. ``stored_us`` is the bus's stamp.
    """
    if sequence <= state.position:
        return False
    state.position = sequence
    state.stored_us = stored_us
    if not _first_time(state, envelope.writer, envelope.counter):
        return False
    if not _fence_holds(state, envelope):
        return False
    data = envelope.data
    kind = type(data)
    if _SOURCES.get(kind, envelope.source) != envelope.source:
        return False
    if isinstance(data, TerminalData) and (envelope.source == SOURCE_SCHEDULER) is bool(
        data.worker
    ):
        return False
    handler = _HANDLERS.get(kind)
    return handler is not None and handler(state, data)


def occupied(state: TapeState, life: str) -> int:
    """How many slots of a life are taken."""
    slots = state.running.get(life)
    return 0 if slots is None else len(slots)


# --- what may be read at all


def _first_time(state: TapeState, writer: str, counter: int) -> bool:
    seen = state.writers.get(writer)
    if seen is None:
        if len(state.writers) >= WRITERS_MAX:
            # By the last position, not by the first: a writer that lives long must stay.
            by_age = sorted(state.writers.items(), key=lambda item: item[1].position)
            for name, _ in by_age[: WRITERS_MAX // 2]:
                del state.writers[name]
        state.writers[writer] = Seen(newest=counter, mask=1, position=state.position)
        return True
    ahead = counter - seen.newest
    if ahead > 0:
        seen.mask = ((seen.mask << ahead) | 1) & _MASK if ahead < COUNTERS_REMEMBERED else 1
        seen.newest = counter
    else:
        if -ahead >= COUNTERS_REMEMBERED:
            return False
        bit = 1 << -ahead
        if seen.mask & bit:
            return False
        seen.mask |= bit
    seen.position = state.position
    return True


def _fence_holds(state: TapeState, envelope: Envelope[EventData]) -> bool:
    if envelope.source == SOURCE_SCHEDULER:
        if envelope.fence > state.scheduler_fence:
            state.scheduler_fence = envelope.fence
            state.leader = envelope.writer
            return True
        return envelope.fence == state.scheduler_fence
    if envelope.source == SOURCE_ADMISSION:
        if envelope.fence > state.admission_fence:
            state.admission_fence = envelope.fence
        return envelope.fence == state.admission_fence
    return True


# --- one function for each type


def _admitted(state: TapeState, data: Admitted) -> bool:
    key = (data.tenant, data.id)
    if key in state.requests or key in state.ended:
        return False
    cancelled_us = state.cancels.pop(key, None)
    state.requests[key] = Request(
        admitted=data,
        cancel=cancelled_us is not None and state.stored_us - cancelled_us <= CANCEL_KEPT_US,
    )
    return True


def _rejected(state: TapeState, data: Rejected) -> bool:
    key = (data.tenant, data.id)
    request = state.requests.get(key)
    if request is None or request.running:
        return False
    if request.admitted.requests_sequence != data.requests_sequence:
        return False
    _end(state, key, request)
    return True


def _cancel_requested(state: TapeState, data: CancelRequested) -> bool:
    key = (data.tenant, data.id)
    request = state.requests.get(key)
    if request is not None:
        request.cancel = True
        return True
    if key in state.ended or key in state.cancels:
        return False
    _forget_older_half(state.cancels, CANCELS_MAX)
    state.cancels[key] = state.stored_us
    return True


def _enqueued(state: TapeState, data: Enqueued) -> bool:
    request = state.requests.get((data.tenant, data.id))
    if request is None or request.enqueued is not None:
        return False
    request.enqueued = data
    if not request.pool:
        request.pool = data.pool
    return True


def _dispatched(state: TapeState, data: Dispatched) -> bool:
    key = (data.tenant, data.id)
    request = state.requests.get(key)
    if request is None:
        ended = state.ended.get(key)
        if ended is not None:
            if data.attempt <= max(ended.attempt, ended.lost):
                return False
            ended.attempt = data.attempt
        # Nobody waits for it any more, but its worker will run it.
        _occupy(state, data)
        return False
    if data.attempt <= request.lost or data.attempt == request.attempt:
        return False
    _occupy(state, data)
    if data.attempt < request.attempt:
        return False
    request.attempt = data.attempt
    request.worker = data.worker
    if not request.pool:
        request.pool = data.pool
    return True


def _attempt_lost(state: TapeState, data: AttemptLost) -> bool:
    key = (data.tenant, data.id)
    _free(state, data.worker, (data.tenant, data.id, data.attempt))
    request = state.requests.get(key)
    if request is None:
        ended = state.ended.get(key)
        if ended is not None:
            ended.lost = max(ended.lost, data.attempt)
        return False
    if data.attempt <= request.lost:
        return False
    request.lost = data.attempt
    return True


def _terminal(state: TapeState, data: TerminalData) -> bool:
    key = (data.tenant, data.id)
    if data.worker:
        _free(state, data.worker, (data.tenant, data.id, data.attempt))
    request = state.requests.get(key)
    if request is None:
        return False
    if data.worker:
        if not request.running or data.attempt != request.attempt:
            return False
    elif request.running:
        return False
    if isinstance(data, Completed):
        _learn(state, request.admitted, data)
    _end(state, key, request)
    return True


def _rung_changed(state: TapeState, data: RungChanged) -> bool:
    state.rungs[data.pool] = Rung(
        rung=data.rung_to, batch_cap=data.batch_cap, refuse="refuse" in data.actions
    )
    return True


def _elected(state: TapeState, data: EventData) -> bool:
    """The envelope's fence has said it already."""
    del state, data
    return True


def _log_opened(state: TapeState, data: LogOpened) -> bool:
    state.incarnation = data.incarnation
    return True


_SOURCES: Final[dict[type[EventData], str]] = {
    Admitted: SOURCE_ADMISSION,
    CancelRequested: SOURCE_ADMISSION,
    AdmissionElected: SOURCE_ADMISSION,
    # Admission's own refusals are about submissions that were never admitted; one of them may
    # bear the id of an open request (the same id with another body).
    Rejected: SOURCE_SCHEDULER,
    Enqueued: SOURCE_SCHEDULER,
    Dispatched: SOURCE_SCHEDULER,
    AttemptLost: SOURCE_SCHEDULER,
    RungChanged: SOURCE_SCHEDULER,
    SchedulerElected: SOURCE_SCHEDULER,
}
"""Who may say what. A terminal event is the scheduler's where it names no worker."""
Handler: TypeAlias = Callable[[TapeState, EventData], bool]
_HANDLERS: Final[dict[type[EventData], Handler]] = cast(
    "dict[type[EventData], Handler]",
    {
        Admitted: _admitted,
        Rejected: _rejected,
        CancelRequested: _cancel_requested,
        Enqueued: _enqueued,
        Dispatched: _dispatched,
        AttemptLost: _attempt_lost,
        RungChanged: _rung_changed,
        SchedulerElected: _elected,
        AdmissionElected: _elected,
        LogOpened: _log_opened,
        **dict.fromkeys(TERMINAL_TYPES, _terminal),
    },
)
_MASK: Final = (1 << COUNTERS_REMEMBERED) - 1


# --- the small ones


def _occupy(state: TapeState, data: Dispatched) -> None:
    state.running.setdefault(data.worker, {})[(data.tenant, data.id, data.attempt)] = data.pool


def _free(state: TapeState, life: str, slot: Slot) -> None:
    slots = state.running.get(life)
    if slots is not None and slot in slots:
        del slots[slot]
        if not slots:
            del state.running[life]


def _end(state: TapeState, key: Key, request: Request) -> None:
    del state.requests[key]
    _forget_older_half(state.ended, ENDED_MAX)
    state.ended[key] = Ended(attempt=request.attempt, lost=request.lost)


def _learn(state: TapeState, admitted: Admitted, data: Completed) -> None:
    pair = (admitted.model, admitted.tenant)
    # Out and in again: the pair that learned last stands last.
    outputs = state.outputs.pop(pair, None) or Outputs(recent=[])
    learn(outputs, data.output_tokens, cut=data.finish_reason == "length")
    _forget_older_half(state.outputs, OUTPUT_PAIRS_MAX)
    state.outputs[pair] = outputs


ItemKey = TypeVar("ItemKey")
Item = TypeVar("Item")


def _forget_older_half(items: dict[ItemKey, Item], size_max: int) -> None:
    """Make room in a full memory. Half at once, so that it costs nothing on the average."""
    if len(items) >= size_max:
        for key in list(islice(items, size_max // 2)):
            del items[key]
