"""A simulated bus for the clerk: REQUESTS, the tape, and lives of admission that crash.

Everything that can go wrong between an admission and its bus is a method here: submissions
delivered twice, events lost with their writer, events of an old life that arrive after the next one
was elected. What must hold in the end is checked from the outside, by reading the tape alone.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from waterclock_admission.clerk import Clerk, Written
from waterclock_admission.core import BudgetAnswer, ModelTerms, Terms
from waterclock_admission.fold import Fold
from waterclock_admission.snapshot import Snapshots
from waterclock_proto.envelope import Chain, decode_event
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    Completed,
    Dispatched,
    Expired,
    Rejected,
    Resubmitted,
    SchedulerElected,
)
from waterclock_proto.requests import Submission
from waterclock_proto.stamps import Stamp
from waterclock_runtime.tape import RequestMessage

KEY = b"m" * 32
START_US = 1_800_000_000_000_000
MODEL = ModelTerms(
    name="m", context_tokens=1000, output_tokens_default=10, output_tokens_max=100, pools=("p",)
)


def terms(tenant: str, **changes) -> Terms:
    values = {
        "tenant": tenant,
        "tier": "gold",
        "contract_sha256": "0" * 64,
        "models": {"m": MODEL},
        "model_default": "m",
        "deadline_ms_default": 10**7,
    }
    return Terms(**(values | changes))


TERMS = {"acme": terms("acme", concurrency=10**6), "globex": terms("globex")}


@dataclass
class Stored:
    """One message of a stream."""

    sequence: int
    stored_us: int
    subject: str
    payload: bytes


@dataclass
class Life:
    """One admission process, from its election to its end."""

    fold: Fold
    clerk: Clerk
    chain: Chain
    read_to: int
    outbox: list[tuple[str, bytes]] = field(default_factory=list)
    """Published and not stored, in order."""


class SimulatedBus:
    def __init__(self, *, ended_requests_max: int = 1000, malformed_events_per_s: int = 2) -> None:
        self.now_us = START_US
        self.requests: list[Stored] = []
        self.tape: list[Stored] = []
        self.acknowledged: set[int] = set()
        self.delivered: dict[int, int] = {}
        """REQUESTS sequence → how often it was handed over in this life."""
        self.next = 1
        self.receipts: Counter[int] = Counter()
        self._ended_requests_max = ended_requests_max
        self._malformed_events_per_s = malformed_events_per_s
        self._lives = 0
        self._scheduler = Chain(service="scheduler", writer="scheduler-1", key=KEY)
        self._scheduler.fence = 1
        self._worker = Chain(service="worker", writer="worker-1", key=KEY)
        self._write(self._scheduler, SchedulerElected(elected=self.stamp()))
        self.life = self._begin()

    # What happens.

    def submit(self, tenant: str, payload: bytes) -> int:
        self._tick()
        self.requests.append(
            Stored(len(self.requests) + 1, self.now_us, f"wc.request.{tenant}", payload)
        )
        return len(self.requests)

    def deliver(self, count: int, *, refuse: bool = False) -> None:
        """Hand the next submissions over and let them be decided."""
        batch = self.requests[self.next - 1 : self.next - 1 + count]
        self.next += len(batch)
        self._decide(batch, refuse=refuse)

    def redeliver(self, count: int) -> None:
        """Hand submissions over again that were not acknowledged."""
        again = [s for s in self.delivered if s not in self.acknowledged][:count]
        self._decide([self.requests[s - 1] for s in again])

    def flush(self) -> None:
        """Write down what was held."""
        self._tick()
        self._publish(self.life.clerk.flush(self.stamp()))

    def store(self, count: int, *, twice: bool = False) -> None:
        """Let the tape take what was published, some of it perhaps twice."""
        for _ in range(min(count, len(self.life.outbox))):
            subject, payload = self.life.outbox.pop(0)
            self._store(subject, payload)
            if twice:
                self._store(subject, payload)

    def read(self, count: int) -> None:
        """Fold in what the tape has."""
        life = self.life
        for message in self.tape[life.read_to : life.read_to + count]:
            self._fold_in(life, message)

    def crash(self, *, arrives: int, arrives_late: int) -> None:
        """The admission dies; some of its events arrive, some after the next one's election."""
        old = self.life
        early, late = old.outbox[:arrives], old.outbox[arrives : arrives + arrives_late]
        for subject, payload in early:
            self._store(subject, payload)
        self.delivered.clear()
        self.life = self._begin(late)

    def end(self, place: int, *, by_scheduler: bool = False) -> None:
        """A request that is open on the tape ends."""
        fold = Fold()
        for message in self.tape:
            _apply(fold, message)
        if not fold.open:
            return
        request = list(fold.open.values())[place % len(fold.open)]
        identity: dict[str, Any] = {"tenant": request.tenant, "id": request.id}
        if by_scheduler:
            self._write(
                self._scheduler,
                Expired(**identity, attempt=0, phase="queued", ended=self.stamp()),
            )
            return
        stamp = self.stamp()
        self._write(
            self._scheduler,
            Dispatched(
                **identity,
                attempt=1,
                worker="w",
                pool="p",
                policy="fcfs",
                place=0,
                depth=1,
                requests_sequence=request.requests_sequence,
                body_commitment="0" * 64,
                model="m",
                tier="gold",
                output_tokens_max=1,
                deadline_us=request.deadline_us,
                arrival=stamp,
                received=stamp,
                decided=stamp,
                dispatched=stamp,
            ),
        )
        self._write(
            self._worker,
            Completed(**identity, attempt=1, worker="w", finish_reason="stop", ended=stamp),
        )

    def settle(self) -> None:
        """Let everything come to rest: all delivered, stored, read and acknowledged."""
        for _ in range(100):
            self.deliver(10)
            self.flush()
            self.store(1000)
            self.read(1000)
            if (
                self.next > len(self.requests)
                and not self.life.outbox
                and not self.life.clerk.outstanding
            ):
                return
        raise AssertionError("it does not come to rest")

    def snapshot_round_trip(self, folder) -> None:
        """Go on from a snapshot of the fold, as a restarted process does."""
        folder.mkdir()
        snapshots = Snapshots(folder)
        life = self.life
        snapshots.write(snapshots.prepare(life.fold, last_payload=b"", last_stored_ns=0, owed=()))
        restored = Snapshots(folder).load(ended_requests_max=self._ended_requests_max)
        assert restored is not None
        fresh = Fold(ended_requests_max=self._ended_requests_max)
        for message in self.tape[: life.read_to]:
            _apply(fresh, message)
        assert image(restored.fold, folder / "a") == image(fresh, folder / "b")

    # What must hold.

    def check(self) -> None:
        """One decision for each submission, numbers without holes, nothing admitted twice."""
        decided: Counter[int] = Counter()
        numbers: dict[str, list[int]] = {}
        admitted: Counter[tuple[str, str]] = Counter()
        for data in valid_decisions(self.tape):
            if isinstance(data, Rejected) and data.number is None:
                continue
            count = data.count if isinstance(data, Rejected) else 1
            assert data.number is not None
            numbers.setdefault(data.tenant, []).extend(range(data.number, data.number + count))
            if isinstance(data, Rejected) and data.requests_sequence_last is not None:
                # Which ones it stands for: those of this tenant that no other event decides.
                decided.update(self._covered(data))
            else:
                decided[data.requests_sequence] += 1
            if isinstance(data, Admitted):
                admitted[data.tenant, data.id] += 1
        every = [stored.sequence for stored in self.requests]
        assert sorted(decided.elements()) == every
        for tenant, used in numbers.items():
            assert sorted(used) == list(range(1, len(used) + 1)), tenant
        assert set(admitted.values()) <= {1}
        assert self.acknowledged <= set(decided)
        assert set(self.receipts) <= set(decided)

    def _covered(self, folded: Rejected) -> list[int]:
        others = {
            data.requests_sequence
            for data in valid_decisions(self.tape)
            if not (isinstance(data, Rejected) and data.requests_sequence_last is not None)
        }
        last = folded.requests_sequence_last
        assert last is not None
        covered = [
            stored.sequence
            for stored in self.requests[folded.requests_sequence - 1 : last]
            if stored.subject == f"wc.request.{folded.tenant}" and stored.sequence not in others
        ]
        assert len(covered) == folded.count
        return covered

    # Parts.

    def stamp(self) -> Stamp:
        return Stamp(wall_us=self.now_us, source="admission")

    def _begin(self, late: list[tuple[str, bytes]] | None = None) -> Life:
        self._lives += 1
        fold = Fold(ended_requests_max=self._ended_requests_max)
        for message in self.tape:
            _apply(fold, message)
        chain = Chain(service="admission", writer=f"admission-{self._lives}", key=KEY)
        chain.fence = fold.admission_fence + 1
        self._write(chain, AdmissionElected(elected=self.stamp()))
        for subject, payload in late or []:
            self._store(subject, payload)
        _apply(fold, self.tape[fold.position])
        clerk = Clerk(
            fold, TERMS, mesh_key=KEY, malformed_events_per_s=self._malformed_events_per_s
        )
        self.next = fold.decided.first_missing()
        return Life(fold=fold, clerk=clerk, chain=chain, read_to=fold.position)

    def _decide(self, batch: list[Stored], *, refuse: bool = False) -> None:
        self._tick()
        clerk = self.life.clerk
        for message in batch:
            self.delivered[message.sequence] = self.delivered.get(message.sequence, 0) + 1
        sheet = clerk.sort([_request(message) for message in batch], self.stamp())
        for message in sheet.known_again:
            self.acknowledged.add(message.sequence)
        answers: list[BudgetAnswer] = []
        for ask in sheet.asks:
            if ask.repeats >= 0 and answers[ask.repeats].outcome == "granted":
                answers.append(BudgetAnswer(outcome="repeated"))
            elif refuse:
                answers.append(BudgetAnswer(outcome="requests_per_minute", retry_after_ms=5))
            else:
                answers.append(BudgetAnswer(outcome="granted"))
        written, unused = clerk.conclude(sheet, answers, self.stamp())
        assert unused == []
        self._publish(written)

    def _publish(self, written: list[Written]) -> None:
        life = self.life
        for one in written:
            counter = life.chain.counter
            life.outbox.append(life.chain.seal(one.data))
            life.clerk.sent(one, life.chain.writer, counter)

    def _write(self, chain: Chain, data) -> None:
        self._store(*chain.seal(data))

    def _store(self, subject: str, payload: bytes) -> None:
        self._tick()
        self.tape.append(Stored(len(self.tape) + 1, self.now_us, subject, payload))

    def _fold_in(self, life: Life, message: Stored) -> None:
        _apply(life.fold, message)
        life.read_to = message.sequence
        envelope = decode_event(message.subject, message.payload)
        written = life.clerk.read_back(envelope.writer, envelope.counter)
        if written is None:
            return
        for submission in written.messages:
            # A submission that is still awaited may be acknowledged only once.
            self.acknowledged.add(submission.sequence)
        if written.messages:
            self.receipts[written.messages[0].sequence] += 1

    def _tick(self) -> None:
        self.now_us += 1_000


def valid_decisions(tape: list[Stored]) -> list[Admitted | Rejected | Resubmitted]:
    """What counts, by the rule alone: no lower fence, no repetition of a writer's event."""
    fence = 0
    seen: set[tuple[str, int]] = set()
    found: list[Admitted | Rejected | Resubmitted] = []
    for message in tape:
        envelope = decode_event(message.subject, message.payload)
        if envelope.source != "/waterclock/admission":
            continue
        if envelope.fence < fence or (envelope.writer, envelope.counter) in seen:
            continue
        fence = envelope.fence
        seen.add((envelope.writer, envelope.counter))
        if isinstance(envelope.data, Admitted | Rejected | Resubmitted):
            found.append(envelope.data)
    return found


def image(fold: Fold, folder) -> tuple[bytes, tuple[bytes, ...]]:
    """Everything that a fold knows, as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in fold.ended.slices:
        part.changed = True
    prepared = Snapshots(folder).prepare(fold, last_payload=b"", last_stored_ns=0, owed=())
    return prepared.image, tuple(prepared.slices.values())


def body(request_id: str, text: str = "hello") -> bytes:
    return msgspec.json.encode(Submission(id=request_id, prompt=text, max_tokens=5))


def _apply(fold: Fold, message: Stored) -> None:
    fold.apply(
        message.sequence,
        message.stored_us * 1000,
        decode_event(message.subject, message.payload),
    )


def _request(message: Stored) -> RequestMessage:
    return RequestMessage(
        message.sequence,
        message.stored_us * 1000,
        message.subject,
        message.payload,
        None,
        f"reply.{message.sequence}",
    )
