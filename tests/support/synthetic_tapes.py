"""A simulated mesh that writes a tape: every event is made by the real codec, no clock runs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from waterclock_ledger.files import LogWriter
from waterclock_proto.envelope import Chain
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    AttemptLost,
    Cancelled,
    CancelRequested,
    Completed,
    Dispatched,
    Enqueued,
    EventData,
    Expired,
    Failed,
    FirstToken,
    LogOpened,
    Rejected,
    Resubmitted,
    SchedulerElected,
    Started,
    WriterSealed,
)
from waterclock_proto.leaves import Leaf, encode_leaf
from waterclock_proto.stamps import Source, Stamp

START_US = 1_760_000_000_000_000
BOOT = "0123456789abcdef"
COMMITMENT = "c" * 64


def stamp(at_us: int, source: Source = "worker", *, boot: str | None = BOOT) -> Stamp:
    """A stamp ``at_us`` after the tape began, of the one host that this mesh has."""
    if source == "bus":
        return Stamp(wall_us=START_US + at_us, source="bus")
    return Stamp(
        wall_us=START_US + at_us,
        source=source,
        boot=boot,
        mono_ns=10**12 + at_us * 1000,
        error_us=250,
    )


class SyntheticTape:
    """Appends events of several writers and keeps the leaves that a ledger would keep."""

    def __init__(self, *, first_sequence: int = 1) -> None:
        self.first_sequence = first_sequence
        self.leaves: list[bytes] = []
        self.now_us = 0
        self.chains: dict[str, Chain] = {}
        self.numbers: dict[str, int] = {}
        self.requests_sequence = 0

    @property
    def next_sequence(self) -> int:
        return self.first_sequence + len(self.leaves)

    def chain(self, service: str, name: str = "", fence: int = 0) -> Chain:
        writer = name or f"{service}-0001"
        chain = self.chains.get(writer)
        if chain is None:
            chain = self.chains[writer] = Chain(service=service, writer=writer, key=b"test")
            chain.fence = fence
        return chain

    def store(self, subject: str, payload: bytes) -> int:
        """One message as the bus stores it; returns its sequence."""
        sequence = self.next_sequence
        self.leaves.append(
            encode_leaf(
                Leaf(
                    sequence=sequence,
                    stored_ns=(START_US + self.now_us) * 1000,
                    subject=subject,
                    payload=payload,
                )
            )
        )
        self.now_us += 10
        return sequence

    def hole(self) -> int:
        sequence = self.next_sequence
        self.leaves.append(encode_leaf(Leaf(sequence=sequence, hole=True)))
        return sequence

    def emit(self, chain: Chain, data: EventData) -> int:
        return self.store(*chain.seal(data))

    def open(self, incarnation: str = "i0") -> None:
        """What the first service of a mesh does, and then the elections."""
        opener = self.chain("ledger", "ledger-0000")
        opener.incarnation = incarnation
        self.emit(
            opener,
            LogOpened(
                incarnation=incarnation,
                first_sequence=self.first_sequence,
                reason="created",
                opened=stamp(self.now_us, "ledger"),
            ),
        )
        self.elect()

    def elect(self, fence: int = 1, suffix: str = "0001") -> None:
        self.emit(
            self.chain("admission", f"admission-{suffix}", fence),
            AdmissionElected(elected=stamp(self.now_us, "admission")),
        )
        self.emit(
            self.chain("scheduler", f"scheduler-{suffix}", fence),
            SchedulerElected(elected=stamp(self.now_us, "scheduler")),
        )

    def number(self, tenant: str) -> int:
        self.numbers[tenant] = self.numbers.get(tenant, 0) + 1
        self.requests_sequence += 1
        return self.numbers[tenant]

    def seal(self, chain: Chain) -> int:
        return self.emit(
            chain,
            WriterSealed(
                sealed_counter=chain.counter - 1,
                head_sha256=chain.head,
                algorithm="none",
                sealed=stamp(self.now_us, "ledger"),
            ),
        )

    # Each makes one event of a request; times are microseconds since the tape began.

    def admitted(
        self, request_id: str, at_us: int, tenant: str = "acme", **fields: Any
    ) -> Admitted:
        number = self.number(tenant)
        return Admitted(
            **{
                "tenant": tenant,
                "id": request_id,
                "tier": "gold",
                "requests_sequence": self.requests_sequence,
                "number": number,
                "contract_sha256": "0" * 64,
                "model": "sim-8b",
                "arrival": stamp(at_us, "bus"),
                "received": stamp(at_us + 400, "admission"),
                "decided": stamp(at_us + 600, "admission"),
                "deadline_us": START_US + at_us + 10_000_000,
                "body_bytes": 900,
                "prompt_tokens_estimate": 200,
                "output_tokens_max": 128,
                "body_commitment": COMMITMENT,
                "session_fingerprint": "ab" * 16,
            }
            | fields
        )

    def run(
        self,
        request_id: str,
        at_us: int,
        *,
        tenant: str = "acme",
        tier: str = "gold",
        queue_us: int = 5_000,
        exec_us: int = 80_000,
        outcome: str = "completed",
        lost_attempts: int = 0,
        worker: str = "w1-aaaaaa",
    ) -> None:
        """A whole life: the six or more events of one request, in the order of a healthy mesh.

        ``outcome`` also takes ``open`` and, for what never had a worker, ``rejected``,
        ``queued_cancelled`` and ``queued_expired``.
        """
        admission = self.chain("admission")
        scheduler = self.chain("scheduler")
        pen = self.chain("worker", f"worker-{worker}")
        admitted = self.admitted(request_id, at_us, tenant, tier=tier)
        self.emit(admission, admitted)
        self.emit(scheduler, enqueued(request_id, at_us + 700, tenant))
        at_us += 600 + queue_us
        for attempt in range(1, lost_attempts + 1):
            self.emit(scheduler, dispatched(admitted, attempt, at_us, worker="w0-dead00"))
            at_us += 1_000_000
            self.emit(
                scheduler,
                AttemptLost(
                    tenant=tenant,
                    id=request_id,
                    attempt=attempt,
                    worker="w0-dead00",
                    pool="main",
                    reason="lease",
                    lost=stamp(at_us, "scheduler"),
                ),
            )
        if outcome in ("rejected", "queued_cancelled", "queued_expired"):
            self.emit(scheduler, queued_end(admitted, outcome, at_us))
            return
        attempt = lost_attempts + 1
        self.emit(scheduler, dispatched(admitted, attempt, at_us, worker=worker))
        if outcome == "open":
            return
        self.emit(pen, started(request_id, attempt, at_us + 300, tenant, worker=worker))
        if outcome == "completed":
            self.emit(pen, first_token(request_id, attempt, at_us + 500, tenant, worker=worker))
        if outcome == "cancelled":
            self.emit(
                admission,
                CancelRequested(
                    tenant=tenant,
                    id=request_id,
                    reason="producer",
                    requested=stamp(at_us + exec_us, "admission"),
                ),
            )
        self.emit(
            pen,
            worker_end(request_id, attempt, at_us + 500, exec_us, outcome, tenant, worker=worker),
        )

    def refuse(
        self, tenant: str, at_us: int, *, count: int = 1, reason: str = "requests_per_minute"
    ) -> None:
        number = self.number(tenant)
        self.numbers[tenant] += count - 1
        self.emit(
            self.chain("admission"),
            Rejected(
                tenant=tenant,
                id="" if count > 1 else f"no-{number}",
                requests_sequence=self.requests_sequence,
                number=number,
                count=count,
                reason=reason,  # pyright: ignore[reportArgumentType] - a test names it
                tier="gold",
                arrival=stamp(at_us, "bus"),
                decided=stamp(at_us + 500, "admission"),
            ),
        )

    def submit_again(self, request_id: str, at_us: int, tenant: str = "acme") -> None:
        number = self.number(tenant)
        self.emit(
            self.chain("admission"),
            Resubmitted(
                tenant=tenant,
                id=request_id,
                requests_sequence=self.requests_sequence,
                number=number,
                first_requests_sequence=1,
                outcome="completed",
                arrival=stamp(at_us, "bus"),
                decided=stamp(at_us + 500, "admission"),
            ),
        )

    def write(self, data_dir: Path, incarnation: str = "i0") -> None:
        """The record that a ledger would have made of it."""
        writer = LogWriter(data_dir)
        writer.begin(incarnation=incarnation, first_sequence=self.first_sequence, reason="created")
        for part in _parts(self.leaves, 5_000):
            writer.append(part)
        writer.close()


def enqueued(request_id: str, at_us: int, tenant: str = "acme") -> Enqueued:
    return Enqueued(
        tenant=tenant,
        id=request_id,
        pool="main",
        language="en",
        language_reason="script",
        language_permille=990,
        prompt_tokens=210,
        output_tokens_predicted=96,
        service_predicted_us=90_000,
        predictor="length-v1",
        enqueued=stamp(at_us, "scheduler"),
    )


def dispatched(
    admitted: Admitted, attempt: int, at_us: int, *, worker: str = "w1-aaaaaa"
) -> Dispatched:
    return Dispatched(
        tenant=admitted.tenant,
        id=admitted.id,
        attempt=attempt,
        worker=worker,
        pool="main",
        policy="fcfs",
        place=0,
        depth=3,
        requests_sequence=admitted.requests_sequence,
        body_commitment=COMMITMENT,
        model=admitted.model,
        tier=admitted.tier,
        output_tokens_max=128,
        deadline_us=admitted.deadline_us,
        arrival=admitted.arrival,
        received=admitted.received,
        decided=admitted.decided,
        dispatched=stamp(at_us, "scheduler"),
    )


def started(
    request_id: str, attempt: int, at_us: int, tenant: str = "acme", *, worker: str = "w1-aaaaaa"
) -> Started:
    return Started(
        tenant=tenant,
        id=request_id,
        attempt=attempt,
        worker=worker,
        taken=stamp(at_us - 50),
        submitted=stamp(at_us),
    )


def first_token(
    request_id: str, attempt: int, at_us: int, tenant: str = "acme", *, worker: str = "w1-aaaaaa"
) -> FirstToken:
    return FirstToken(
        tenant=tenant,
        id=request_id,
        attempt=attempt,
        worker=worker,
        queued=stamp(at_us - 100, "engine"),
        scheduled=stamp(at_us, "engine"),
        first_token=stamp(at_us + 9_000, "engine"),
    )


def worker_end(
    request_id: str,
    attempt: int,
    at_us: int,
    exec_us: int,
    outcome: str,
    tenant: str = "acme",
    *,
    worker: str = "w1-aaaaaa",
) -> Completed | Failed | Cancelled | Expired:
    """The end of an attempt whose execution began at ``at_us`` and took ``exec_us``."""
    fields: dict[str, Any] = {
        "tenant": tenant,
        "id": request_id,
        "attempt": attempt,
        "worker": worker,
        "prompt_tokens": 210,
        "submitted": stamp(at_us - 200),
        "queued": stamp(at_us - 100, "engine"),
        "scheduled": stamp(at_us, "engine"),
        "ended": stamp(at_us + exec_us),
    }
    match outcome:
        case "completed":
            return Completed(
                **fields,
                output_tokens=90,
                model_served="sim-8b",
                first_token=stamp(at_us + 9_000, "engine"),
                last_token=stamp(at_us + exec_us - 700, "engine"),
                finish_reason="stop",
            )
        case "failed":
            return Failed(**fields, reason="engine_error", detail="simulated")
        case "cancelled":
            return Cancelled(**fields, phase="running")
        case _:
            return Expired(**fields, phase="running")


def queued_end(admitted: Admitted, outcome: str, at_us: int) -> Rejected | Cancelled | Expired:
    """The end of a request that no worker has."""
    if outcome == "rejected":
        return Rejected(
            tenant=admitted.tenant,
            id=admitted.id,
            requests_sequence=admitted.requests_sequence,
            reason="load_shed",
            tier=admitted.tier,
            arrival=admitted.arrival,
            decided=stamp(at_us, "scheduler"),
        )
    kind = Cancelled if outcome == "queued_cancelled" else Expired
    return kind(
        tenant=admitted.tenant,
        id=admitted.id,
        attempt=0,
        phase="queued",
        ended=stamp(at_us, "scheduler"),
    )


def _parts(leaves: list[bytes], size: int) -> Iterable[list[bytes]]:
    return (leaves[start : start + size] for start in range(0, len(leaves), size))
