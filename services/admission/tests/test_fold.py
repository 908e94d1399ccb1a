"""What counts on the tape, and what is remembered of it."""

import tracemalloc
from typing import Any

import pytest

from waterclock_admission import fold as fold_module
from waterclock_admission import limits
from waterclock_admission.core import COMMITMENT_BYTES, Known, Rung
from waterclock_admission.fold import Ended, EndedRequests, Fold, OpenRequest
from waterclock_proto.envelope import Chain, decode_event
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
    WindowClosed,
)
from waterclock_proto.stamps import Stamp, bus_stamp

NOW_US = 1_800_000_000_000_000
STAMP = Stamp(wall_us=NOW_US, source="admission")


class Tape:
    """Writers of every kind, and a fold that reads what they write at once."""

    def __init__(self, **options: Any) -> None:
        self.fold = Fold(**options)
        self.sequence = 0
        self.now_us = NOW_US
        self.admission = self.chain("admission", 1)
        self.scheduler = self.chain("scheduler", 1)
        self.worker = self.chain("worker", 0)
        self._submissions = 0
        self.payload = ("", b"")

    def chain(self, service: Any, fence: int, name: str = "1") -> Chain:
        chain = Chain(service=service, writer=f"{service}-{name}", key=b"k" * 32)
        chain.fence = fence
        return chain

    def write(self, chain: Chain, data: EventData) -> Any:
        self.payload = chain.seal(data)
        return self.again()

    def again(self) -> Any:
        """The same event stands on the tape once more."""
        subject, payload = self.payload
        self.sequence += 1
        self.now_us += 1
        return self.fold.apply(self.sequence, self.now_us * 1000, decode_event(subject, payload))

    def admit(self, request_id: str, *, tenant: str = "acme", number: int | None = None) -> Any:
        self._submissions += 1
        return self.write(
            self.admission,
            Admitted(
                tenant=tenant,
                id=request_id,
                tier="gold",
                requests_sequence=self._submissions,
                number=number or self.fold.last_number(tenant) + 1,
                contract_sha256="0" * 64,
                model="m",
                arrival=bus_stamp(self.now_us * 1000),
                received=STAMP,
                decided=STAMP,
                deadline_us=self.now_us + 10**7,
                body_bytes=1,
                prompt_tokens_estimate=1,
                output_tokens_max=1,
                body_commitment="ab" * 32,
            ),
        )

    def dispatch(self, request_id: str, attempt: int, chain: Chain | None = None) -> Any:
        return self.write(
            chain or self.scheduler,
            Dispatched(
                tenant="acme",
                id=request_id,
                attempt=attempt,
                worker=f"w{attempt}",
                pool="p",
                policy="fcfs",
                place=0,
                depth=1,
                requests_sequence=1,
                body_commitment="ab" * 32,
                model=f"m{attempt}",
                tier="gold",
                output_tokens_max=1,
                deadline_us=1,
                arrival=STAMP,
                received=STAMP,
                decided=STAMP,
                dispatched=STAMP,
            ),
        )

    def lose(self, request_id: str, attempt: int) -> Any:
        return self.write(
            self.scheduler,
            AttemptLost(
                tenant="acme",
                id=request_id,
                attempt=attempt,
                worker=f"w{attempt}",
                pool="p",
                reason="lease",
                lost=STAMP,
            ),
        )

    def complete(self, request_id: str, attempt: int) -> Any:
        return self.write(
            self.worker,
            Completed(
                tenant="acme",
                id=request_id,
                attempt=attempt,
                worker=f"w{attempt}",
                finish_reason="stop",
                ended=STAMP,
            ),
        )

    def expire(self, request_id: str, chain: Chain | None = None) -> Any:
        return self.write(
            chain or self.scheduler,
            Expired(tenant="acme", id=request_id, attempt=0, phase="queued", ended=STAMP),
        )

    def rung(self, *actions: Any, chain: Chain | None = None, rung_to: int = 1) -> Any:
        return self.write(
            chain or self.scheduler,
            RungChanged(
                pool="p",
                rung_from=0,
                rung_to=rung_to,
                actions=actions,
                retry_after_ms=500,
                depth=1,
                workers=1,
                in_flight=1,
                changed=STAMP,
            ),
        )


@pytest.fixture
def tape() -> Tape:
    made = Tape()
    made.write(made.admission, AdmissionElected(elected=STAMP))
    made.write(made.scheduler, SchedulerElected(elected=STAMP))
    return made


# Who may write.


def test_a_lower_fence_counts_for_nothing(tape: Tape) -> None:
    later = tape.chain("admission", 2, "2")
    tape.write(later, AdmissionElected(elected=STAMP))
    assert tape.admit("a") == "ignored"
    assert tape.fold.open == {}
    assert tape.fold.last_number("acme") == 0
    tape.admission = later
    assert tape.admit("a") == "counted"


def test_the_first_of_a_fence_wins(tape: Tape) -> None:
    first, second = tape.chain("admission", 2, "first"), tape.chain("admission", 2, "second")
    assert tape.write(first, AdmissionElected(elected=STAMP)) == "counted"
    assert tape.write(second, AdmissionElected(elected=STAMP)) == "ignored"
    assert tape.fold.admission_writer == "admission-first"


def test_an_election_that_has_left_the_tape_still_counts(tape: Tape) -> None:
    tape.admission.fence = 7
    assert tape.admit("a") == "counted"
    assert tape.fold.admission_fence == 7


def test_an_old_schedulers_events_count_for_nothing(tape: Tape) -> None:
    tape.admit("a")
    tape.write(tape.chain("scheduler", 2, "2"), SchedulerElected(elected=STAMP))
    assert tape.dispatch("a", 1) == "ignored"
    assert tape.expire("a") == "ignored"
    assert tape.rung("refuse") == "ignored"
    assert "acme.a" in tape.fold.open


# Ends.


def test_the_newest_attempts_end_counts(tape: Tape) -> None:
    tape.admit("a")
    tape.dispatch("a", 1)
    tape.lose("a", 1)
    assert tape.complete("a", 1) == "ignored"
    tape.dispatch("a", 2)
    assert tape.complete("a", 1) == "ignored"
    ended = tape.complete("a", 2)
    assert isinstance(ended, Ended)
    assert (ended.request.id, ended.request.model) == ("a", "m2")
    assert tape.again() == "ignored"
    assert tape.expire("a") == "ignored"
    known = tape.fold.known("acme", "a")
    assert known is not None
    assert known.outcome == "completed"


def test_an_older_dispatch_that_comes_again_changes_nothing(tape: Tape) -> None:
    tape.admit("a")
    tape.dispatch("a", 1)
    first = tape.payload
    tape.lose("a", 1)
    tape.dispatch("a", 2)
    tape.payload = first
    assert tape.again() == "ignored"
    assert tape.fold.open["acme.a"].attempt == 2
    assert isinstance(tape.complete("a", 2), Ended)


def test_the_scheduler_ends_only_what_no_worker_has(tape: Tape) -> None:
    tape.admit("a")
    tape.dispatch("a", 1)
    assert tape.expire("a") == "ignored"
    tape.lose("a", 1)
    assert isinstance(tape.expire("a"), Ended)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (Cancelled(tenant="acme", id="a", attempt=0, phase="queued", ended=STAMP), "cancelled"),
        (
            Failed(tenant="acme", id="a", attempt=0, reason="attempts_exhausted", ended=STAMP),
            "failed",
        ),
        (
            Rejected(
                tenant="acme",
                id="a",
                requests_sequence=1,
                reason="load_shed",
                arrival=STAMP,
                decided=STAMP,
            ),
            "rejected",
        ),
    ],
)
def test_every_end_of_the_schedulers_is_an_end(tape: Tape, end: EventData, outcome: str) -> None:
    tape.admit("a")
    assert isinstance(tape.write(tape.scheduler, end), Ended)
    known = tape.fold.known("acme", "a")
    assert known is not None
    assert known.outcome == outcome
    assert tape.fold.open_by_tenant == {}


def test_what_is_not_known_has_no_end(tape: Tape) -> None:
    assert tape.expire("never") == "ignored"
    assert tape.complete("never", 1) == "ignored"


# Submissions and numbers.


def test_a_decision_that_stands_there_twice_counts_once(tape: Tape) -> None:
    assert tape.admit("a") == "counted"
    assert tape.again() == "ignored"
    (window,) = tape.fold.windows["acme"].values()
    assert window.admitted == 1


def test_a_sequence_that_was_given_out_again_is_another_submission(tape: Tape) -> None:
    tape.admit("a")
    stored_us = tape.fold.recent[1][0]
    assert tape.fold.is_decided(1, stored_us)
    assert not tape.fold.is_decided(1, stored_us + 1)
    tape.fold.rewind(0)
    assert not tape.fold.is_decided(1, stored_us)


def test_what_left_requests_by_age_is_not_waited_for(tape: Tape) -> None:
    tape.fold.forget_before(40)
    assert tape.fold.decided.first_missing() == 40


def test_numbers_go_on_after_the_tape_has_lost_its_beginning(tape: Tape) -> None:
    tape.admit("a", number=500)
    assert tape.fold.last_number("acme") == 500
    assert tape.fold.missing_numbers("acme") == []


def test_a_last_number_that_is_said_again_is_enough(tape: Tape) -> None:
    tape.write(
        tape.admission,
        WindowClosed(tenant="acme", start_us=0, end_us=0, number_last=77, closed=STAMP),
    )
    assert tape.fold.last_number("acme") == 77
    assert tape.fold.missing_numbers("acme") == []


def test_windows_count_by_the_minute_and_close(tape: Tape) -> None:
    tape.admit("a")
    tape.write(
        tape.admission,
        Rejected(
            tenant="acme",
            requests_sequence=2,
            requests_sequence_last=4,
            number=2,
            count=3,
            reason="malformed",
            arrival=bus_stamp(1),
            decided=STAMP,
        ),
    )
    tape.write(
        tape.admission,
        Resubmitted(
            tenant="acme",
            id="a",
            requests_sequence=5,
            number=5,
            first_requests_sequence=1,
            outcome="open",
            arrival=bus_stamp(2),
            decided=STAMP,
        ),
    )
    tape.now_us += 60_000_000
    tape._submissions = 5
    tape.admit("b")
    first, second = tape.fold.windows["acme"].values()
    assert (first.number_first, first.number_last) == (1, 5)
    assert (first.admitted, first.rejected, first.resubmitted) == (1, 3, 1)
    assert (second.number_first, second.number_last, second.admitted) == (6, 6, 1)
    closing = WindowClosed(
        tenant="acme", start_us=first.start_us, end_us=0, number_last=5, closed=STAMP
    )
    assert tape.write(tape.admission, closing) == "counted"
    assert tape.again() == "ignored"
    assert list(tape.fold.windows["acme"].values()) == [second]


def test_a_folded_event_decides_all_that_it_counts(tape: Tape) -> None:
    tape.write(
        tape.admission,
        Rejected(
            tenant="acme",
            requests_sequence=1,
            requests_sequence_last=300,
            number=1,
            count=300,
            reason="malformed",
            arrival=bus_stamp(1),
            decided=STAMP,
        ),
    )
    assert tape.fold.decided.first_missing() == 301
    assert tape.fold.last_number("acme") == 300


# Cancels, claims, rungs, contracts.


def test_a_cancel_is_remembered_before_and_after_admission(tape: Tape) -> None:
    early = CancelRequested(tenant="acme", id="a", reason="producer", requested=STAMP)
    assert tape.write(tape.admission, early) == "counted"
    assert tape.again() == "ignored"
    tape.admit("a")
    assert tape.fold.open["acme.a"].cancelled
    assert tape.fold.cancelled_early == {}
    tape.admit("b")
    late = CancelRequested(tenant="acme", id="b", reason="producer", requested=STAMP)
    assert tape.write(tape.admission, late) == "counted"
    assert tape.fold.open["acme.b"].cancelled


def test_early_cancels_are_bounded(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CANCELLED_EARLY_MAX", 2)
    for request_id in "abc":
        tape.write(
            tape.admission,
            CancelRequested(tenant="acme", id=request_id, reason="producer", requested=STAMP),
        )
    assert list(tape.fold.cancelled_early) == ["acme.b", "acme.c"]


def delivered(tape: Tape, request_id: str) -> bool:
    known = tape.fold.known("acme", request_id)
    assert known is not None
    return known.delivered


def test_a_claim_counts_once_before_or_after_the_end(tape: Tape) -> None:
    tape.admit("a")
    tape.admit("b")
    claim = Delivered(tenant="acme", id="a", quoted=STAMP)
    tape.write(tape.admission, claim)
    for request_id in "ab":
        tape.dispatch(request_id, 1)
        tape.complete(request_id, 1)
    assert delivered(tape, "a")
    assert not delivered(tape, "b")
    assert tape.write(tape.admission, Delivered(tenant="acme", id="b", quoted=STAMP)) == "counted"
    assert delivered(tape, "b")
    assert tape.again() == "ignored"


def test_a_rung_is_what_was_said_last(tape: Tape) -> None:
    tape.rung("batch_cap", "refuse", rung_to=3)
    refusing = tape.payload
    assert tape.fold.rungs["p"] == Rung(refuses=True, retry_after_ms=500)
    tape.rung(rung_to=0)
    assert tape.fold.rungs["p"] == Rung(refuses=False, retry_after_ms=500)
    tape.payload = refusing
    assert tape.again() == "ignored"
    assert not tape.fold.rungs["p"].refuses


def test_a_degraded_pool_says_where_its_requests_go(tape: Tape) -> None:
    tape.rung("refuse")
    for event in (
        PoolDegraded(pool="p", to_pool="q", reason="no_workers", changed=STAMP),
        PoolDegraded(pool="p", reason="recovered", changed=STAMP),
    ):
        tape.write(tape.scheduler, event)
        assert tape.fold.rungs["p"].to_pool == event.to_pool
        assert tape.fold.rungs["p"].refuses


def test_contract_and_incarnation_are_the_last_ones(tape: Tape) -> None:
    for sha256 in ("1" * 64, "2" * 64):
        tape.write(
            tape.admission,
            ContractActivated(
                tenant="acme", contract_sha256=sha256, valid_from_us=1, activated=STAMP
            ),
        )
    tape.write(
        tape.chain("ledger", 0),
        LogOpened(incarnation="i2", first_sequence=9, reason="rolled_back", opened=STAMP),
    )
    assert tape.fold.contracts == {"acme": "2" * 64}
    assert tape.fold.incarnation == "i2"


# What is remembered.


def open_request(request_id: str) -> OpenRequest:
    return OpenRequest(
        tenant="acme",
        id=request_id,
        commitment=b"c" * COMMITMENT_BYTES,
        requests_sequence=5,
        arrival_us=NOW_US,
        deadline_us=NOW_US,
        event_sequence=1,
    )


def test_an_ended_request_is_known_by_its_outcome_and_its_body() -> None:
    ended = EndedRequests(100)
    ended.add(open_request("a"), "cancelled", NOW_US)
    assert ended.known("acme", "a") == Known(
        commitment=b"c" * COMMITMENT_BYTES,
        requests_sequence=5,
        outcome="cancelled",
        ended_us=NOW_US,
    )
    assert ended.known("acme", "b") is None
    assert ended.known("globex", "a") is None


def test_the_oldest_are_forgotten_when_there_is_no_room() -> None:
    ended = EndedRequests(160)
    for place in range(1_000):
        ended.add(open_request(f"r{place}"), "completed", NOW_US + place)
        assert len(ended) <= 160
    known = [place for place in range(1_000) if ended.known("acme", f"r{place}")]
    assert known == list(range(1_000 - len(known), 1_000))
    assert len(known) >= 150
    assert ended.forgotten_early == 1_000 - len(known)


def test_what_is_older_than_its_body_is_forgotten() -> None:
    ended = EndedRequests(100)
    ended.add(open_request("old"), "completed", NOW_US)
    later_us = NOW_US + (limits.FORGET_AFTER_S + 1) * 1_000_000
    ended.add(open_request("new"), "completed", later_us)
    assert ended.known("acme", "old") is None
    assert ended.known("acme", "new") is not None
    assert ended.forgotten_early == 0


def test_an_ended_request_takes_no_more_memory_than_the_limit_says() -> None:
    count = 50_000
    ended = EndedRequests(10 * count)
    requests = [open_request(f"{place:020d}") for place in range(count)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for request in requests:
        ended.add(request, "completed", NOW_US)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(ended) == count
    assert (after - before) / count < 190


def test_a_packed_slice_is_read_back() -> None:
    ended = EndedRequests(100)
    for place in range(10):
        ended.add(open_request(f"r{place}"), "completed", NOW_US)
    part = ended.slices[0]
    assert fold_module.Slice.unpacked(part.packed()) == part.records
    with pytest.raises(ValueError, match="no whole number of records"):
        fold_module.Slice.unpacked(part.packed()[:-1])
