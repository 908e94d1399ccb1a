"""Every event of the tape, version 1.

Events are commands and evidence at once: a service acts on what it reads here, and an
auditor replays the same bytes. Integers and strings only; no prompt and no answer text.
Readers ignore unknown fields. A new optional field keeps the version; a changed meaning is
a new version with a new class.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from waterclock_proto.names import (
    Attempt,
    Count,
    Counter,
    Detail,
    DurationUs,
    FailReason,
    FinishReason,
    Hex,
    Label,
    Language,
    Name,
    OptionalName,
    Outcome,
    RejectReason,
    RequestId,
    Sequence,
    Sha256,
    Tenant,
    TokenCount,
    UnixUs,
)
from waterclock_proto.stamps import Boot, Source, Stamp

EVENT_BYTES_MAX = 32_768
"""Of one event's payload. Larger ones are refused by the stream and by every writer."""

Scope = Literal["", "pool", "worker"]


class EventData(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every event's ``data`` has in common: nothing but how it is addressed."""

    TYPE: ClassVar[str] = ""
    """The middle part of the CloudEvents type and the third token of the subject."""
    SCOPE: ClassVar[Scope] = ""
    """Which field, if any, is the last token of the subject."""


class RequestEventData(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """An event about one request; (tenant, id) is its identity."""

    tenant: Tenant
    id: RequestId


class Admitted(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """A request was let in. Published by admission; read by scheduler, ledger."""

    TYPE: ClassVar[str] = "admitted"

    tier: Label
    requests_sequence: Sequence
    number: Sequence
    """The tenant's own number of this submission: 1, 2, 3, … without a hole."""
    contract_sha256: Sha256
    model: Label
    stream: bool = False
    arrival: Stamp
    """When the bus stored the submission. Deadlines and the queue clock run from here."""
    edge_accepted: Stamp | None = None
    """When the HTTP edge accepted it; then this is the arrival that the buyer saw."""
    received: Stamp
    decided: Stamp
    sent_us: UnixUs | None = None
    """What the producer says it sent: a claim, never on the axis."""
    deadline_us: UnixUs
    """Unix time after which the answer is worthless."""
    body_bytes: Count
    prompt_tokens_estimate: TokenCount
    output_tokens_max: TokenCount
    body_commitment: Sha256
    language_hint: Language | None = None
    session_fingerprint: Hex = ""


class Rejected(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """A submission was refused.

    Published by admission, scheduler; read by admission, ledger.

    A flood of malformed submissions is folded into one event a tenant and second: it then
    stands for ``count`` submissions, numbered ``number`` to ``number + count - 1``.
    """

    TYPE: ClassVar[str] = "rejected"

    tenant: Tenant
    id: OptionalName = ""
    """Empty where the submission did not say an id that could be read."""
    requests_sequence: Sequence
    requests_sequence_last: Sequence | None = None
    number: Sequence | None = None
    """Absent where the scheduler refuses what admission had already numbered."""
    count: Annotated[int, Meta(ge=1, le=10**9)] = 1
    reason: RejectReason
    detail: Detail = ""
    retry_after_ms: Count | None = None
    tier: Label | None = None
    pool: OptionalName = ""
    arrival: Stamp
    edge_accepted: Stamp | None = None
    decided: Stamp


class Resubmitted(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """A known request came again; nothing runs twice.

    Published by admission; read by admission, ledger.
    """

    TYPE: ClassVar[str] = "resubmitted"

    requests_sequence: Sequence
    number: Sequence
    first_requests_sequence: Sequence
    outcome: Outcome | Literal["open", "gone"]
    """``open``: still on its way. ``gone``: it ended, and its answer is no longer kept."""
    arrival: Stamp
    decided: Stamp


class CancelRequested(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody who may do so wants the request to stop.

    Published by admission; read by scheduler, worker, ledger.
    """

    TYPE: ClassVar[str] = "cancel_requested"

    reason: Literal["producer", "disconnect"]
    requested: Stamp


class Enqueued(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """The scheduler fixed pool, language and estimate. Published by scheduler; read by ledger.

    Order can be replayed from these fields without any text.
    """

    TYPE: ClassVar[str] = "enqueued"
    SCOPE: ClassVar[Scope] = "pool"

    pool: Name
    language: Language
    language_reason: Literal["hint", "script", "default", "unread"]
    """``unread``: the body could not be read, so the default pool took it."""
    language_permille: Annotated[int, Meta(ge=0, le=1000)]
    prompt_tokens: TokenCount
    output_tokens_predicted: TokenCount
    service_predicted_us: Count
    """Predicted execution time; what ``sjf`` sorts by."""
    predictor: Label
    enqueued: Stamp


class Dispatched(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """A free slot was given to the request. Published by scheduler; read by worker, ledger."""

    TYPE: ClassVar[str] = "dispatched"
    SCOPE: ClassVar[Scope] = "worker"

    attempt: Attempt
    worker: Name
    pool: Name
    policy: Label
    place: Count
    """How many requests the policy put before this one when it was taken; 0 is the head."""
    depth: Count
    """How many were waiting in the pool when it was taken, this one included."""
    requests_sequence: Sequence
    body_commitment: Sha256
    model: Label
    tier: Label
    stream: bool = False
    output_tokens_max: TokenCount
    deadline_us: UnixUs
    arrival: Stamp
    edge_accepted: Stamp | None = None
    received: Stamp
    decided: Stamp
    dispatched: Stamp


class Started(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """The worker handed the attempt to its engine. Published by worker; read by ledger.

    ``submitted`` is a provisional execution start; ``FirstToken.scheduled`` is the real one.
    """

    TYPE: ClassVar[str] = "started"
    SCOPE: ClassVar[Scope] = "worker"

    attempt: Attempt
    worker: Name
    taken: Stamp
    """When the worker read the dispatch."""
    submitted: Stamp


class FirstToken(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """The engine made the first token. Published by worker; read by ledger.

    ``scheduled`` is the execution start. An engine that cannot say it leaves it out, and
    the two bounds say between which moments it must lie.
    """

    TYPE: ClassVar[str] = "first_token"
    SCOPE: ClassVar[Scope] = "worker"

    attempt: Attempt
    worker: Name
    queued: Stamp | None = None
    scheduled: Stamp | None = None
    scheduled_not_before: Stamp | None = None
    scheduled_not_after: Stamp | None = None
    first_token: Stamp | None = None


class TerminalData(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """What the four ends of a request have in common.

    Exactly one counts per admitted request: the first on the tape for the newest attempt
    that has not been declared lost.
    """

    SCOPE: ClassVar[Scope] = "worker"
    OUTCOME: ClassVar[Outcome] = "completed"

    attempt: Attempt
    worker: OptionalName = ""
    """Empty where the request ended before any worker had it."""
    prompt_tokens: TokenCount = 0
    output_tokens: TokenCount = 0
    cached_tokens: TokenCount = 0
    preemptions: Count = 0
    model_served: Annotated[str, Meta(max_length=200)] = ""
    submitted: Stamp | None = None
    queued: Stamp | None = None
    scheduled: Stamp | None = None
    first_token: Stamp | None = None
    last_token: Stamp | None = None
    ended: Stamp


class Completed(TerminalData, frozen=True, kw_only=True, omit_defaults=True):
    """The answer is whole. Published by worker; read by scheduler, admission, ledger."""

    TYPE: ClassVar[str] = "completed"
    OUTCOME: ClassVar[Outcome] = "completed"

    finish_reason: FinishReason


class Failed(TerminalData, frozen=True, kw_only=True, omit_defaults=True):
    """The work could not be done.

    Published by worker, scheduler; read by scheduler, admission, ledger.
    """

    TYPE: ClassVar[str] = "failed"
    OUTCOME: ClassVar[Outcome] = "failed"

    reason: FailReason
    detail: Detail = ""


class Cancelled(TerminalData, frozen=True, kw_only=True, omit_defaults=True):
    """It was stopped because somebody asked.

    Published by worker, scheduler; read by scheduler, admission, ledger.
    """

    TYPE: ClassVar[str] = "cancelled"
    OUTCOME: ClassVar[Outcome] = "cancelled"

    phase: Literal["queued", "running"]


class Expired(TerminalData, frozen=True, kw_only=True, omit_defaults=True):
    """Its deadline passed first.

    Published by worker, scheduler; read by scheduler, admission, ledger.
    """

    TYPE: ClassVar[str] = "expired"
    OUTCOME: ClassVar[Outcome] = "expired"

    phase: Literal["queued", "running"]


class AttemptLost(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's lease ran out with this attempt on it.

    Published by scheduler; read by worker, ledger.
    """

    TYPE: ClassVar[str] = "attempt_lost"
    SCOPE: ClassVar[Scope] = "worker"

    attempt: Attempt
    worker: Name
    pool: Name
    reason: Literal["lease", "restarted", "drained"]
    lost: Stamp


class RungChanged(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """The ladder of load shedding moved.

    Published by scheduler; read by admission, worker, ledger.
    """

    TYPE: ClassVar[str] = "rung_changed"
    SCOPE: ClassVar[Scope] = "pool"

    pool: Name
    rung_from: Count
    rung_to: Count
    """0 is the ground. Higher rungs shed more."""
    actions: tuple[Literal["batch_cap", "speculation_off", "refuse"], ...]
    """What holds from now on: the actions of this rung and of all below it."""
    batch_cap: Count | None = None
    retry_after_ms: Count | None = None
    depth: Count
    workers: Count
    in_flight: Count
    changed: Stamp


class PoolDegraded(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """A pool sends its new requests to another one, or takes them back.

    Published by scheduler; read by admission, worker, ledger.
    """

    TYPE: ClassVar[str] = "pool_degraded"
    SCOPE: ClassVar[Scope] = "pool"

    pool: Name
    to_pool: OptionalName = ""
    """Empty when the pool recovered."""
    reason: Literal["no_workers", "burn_rate", "operator", "recovered"]
    changed: Stamp


class SchedulerElected(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """From here on this writer's scheduler events count, and none of a lower fence.

    Published by scheduler; read by every service.

    The first of a fence on the tape wins; the fence stands in the envelope.
    """

    TYPE: ClassVar[str] = "scheduler_elected"

    elected: Stamp


class AdmissionElected(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """The same for the writer that numbers submissions.

    Published by admission; read by every service.
    """

    TYPE: ClassVar[str] = "admission_elected"

    elected: Stamp


class Delivered(RequestEventData, frozen=True, kw_only=True, omit_defaults=True):
    """The producer's own stamps, quoted: a claim. Published by admission; read by ledger."""

    TYPE: ClassVar[str] = "delivered"

    sent_us: UnixUs | None = None
    receipt_us: UnixUs | None = None
    first_token_us: UnixUs | None = None
    last_token_us: UnixUs | None = None
    quoted: Stamp


class ContractActivated(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """A version of a tenant's contract holds from a moment on.

    Published by admission; read by ledger.
    """

    TYPE: ClassVar[str] = "contract_activated"

    tenant: Tenant
    contract_sha256: Sha256
    valid_from_us: UnixUs
    valid_to_us: UnixUs | None = None
    activated: Stamp


class ClockReported(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """How a service's clock stands against the bus's. Published by every service; read by ledger.

    Bracketed by the service's own publishes: sent ≤ stored ≤ acknowledged, so
    ``offset_us_min`` ≤ bus − service ≤ ``offset_us_max`` over the samples named. An empty
    interval (min > max) is not repaired: it says that one of the clocks was stepped.
    """

    TYPE: ClassVar[str] = "clock_reported"

    service: Source
    boot: Boot
    samples: Count
    offset_us_min: DurationUs | None = None
    offset_us_max: DurationUs | None = None
    reported: Stamp


class WriterSealed(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """A writer states the head of its own chain. Published by every service; read by ledger."""

    TYPE: ClassVar[str] = "writer_sealed"

    sealed_counter: Counter
    """The last event that the seal covers."""
    head_sha256: Sha256
    algorithm: Literal["none", "ed25519"]
    signature: Hex = ""
    last: bool = False
    """The writer says that nothing follows this seal."""
    sealed: Stamp


class WindowClosed(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of one tenant in one window of time. Published by admission; read by ledger."""

    TYPE: ClassVar[str] = "window_closed"

    tenant: Tenant
    start_us: UnixUs
    end_us: UnixUs
    number_first: Sequence | None = None
    number_last: Sequence | None = None
    admitted: Count = 0
    rejected: Count = 0
    resubmitted: Count = 0
    closed: Stamp


class LogOpened(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """A new incarnation of the tape begins.

    Published by every service (whichever made the stream, or the ledger); read by every service.
    """

    TYPE: ClassVar[str] = "log_opened"

    incarnation: Name
    first_sequence: Sequence
    """Leaf index = sequence − ``first_sequence``."""
    reason: Literal["created", "rolled_back", "replaced"]
    previous_incarnation: OptionalName = ""
    previous_size: Count = 0
    opened: Stamp


EVENT_TYPES: tuple[type[EventData], ...] = (
    Admitted,
    Rejected,
    Resubmitted,
    CancelRequested,
    Enqueued,
    Dispatched,
    Started,
    FirstToken,
    Completed,
    Failed,
    Cancelled,
    Expired,
    AttemptLost,
    RungChanged,
    PoolDegraded,
    SchedulerElected,
    AdmissionElected,
    Delivered,
    ContractActivated,
    ClockReported,
    WriterSealed,
    WindowClosed,
    LogOpened,
)
EVENT_TYPE_BY_NAME: dict[str, type[EventData]] = {kind.TYPE: kind for kind in EVENT_TYPES}

Terminal = Completed | Failed | Cancelled | Expired
TERMINAL_TYPES: tuple[type[TerminalData], ...] = (Completed, Failed, Cancelled, Expired)
