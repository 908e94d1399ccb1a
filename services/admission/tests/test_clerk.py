"""Cancels, claims, floods and windows on the desk."""

from collections.abc import Iterator

import msgspec
import pytest

from waterclock_admission import limits
from waterclock_admission.clerk import receipt
from waterclock_admission.core import BudgetAnswer
from waterclock_proto.envelope import decode_event
from waterclock_proto.events import (
    Admitted,
    CancelRequested,
    Delivered,
    EventData,
    Rejected,
    Resubmitted,
    WindowClosed,
)
from waterclock_proto.requests import DeliveredClaim, body_commitment, body_salt
from waterclock_proto.stamps import Stamp

from .simulated_tape import KEY, START_US, SimulatedBus, _request, body, valid_decisions


class Desk(SimulatedBus):
    """A simulated bus on which producers also cancel and claim."""

    def cancel(self, request_id: str, tenant: str = "acme") -> bool:
        """Whether it makes an event."""
        written = self.life.clerk.cancel(tenant, request_id, "producer", self.stamp())
        self._publish([written] if written else [])
        return written is not None

    def claim(self, payload: bytes, tenant: str = "acme") -> bool:
        written = self.life.clerk.claim(tenant, payload, self.stamp())
        self._publish([written] if written else [])
        return written is not None

    def close_windows(self, say_again_s: int = 10**6) -> list[WindowClosed]:
        written = self.life.clerk.close_windows(self.stamp(), say_again_s=say_again_s)
        self._publish(written)
        return [one.data for one in written if isinstance(one.data, WindowClosed)]

    def admit(self, request_id: str) -> None:
        self.submit("acme", body(request_id))
        self.settle()

    def events(self, kind: type[EventData]) -> list[EventData]:
        found = [decode_event(m.subject, m.payload).data for m in self.tape]
        return [data for data in found if isinstance(data, kind)]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.settle()
    made.check()


def test_a_request_is_cancelled_once(desk: Desk) -> None:
    desk.admit("a")
    assert desk.cancel("a")
    assert not desk.cancel("a")
    desk.settle()
    assert not desk.cancel("a")
    assert len(desk.events(CancelRequested)) == 1


def test_a_request_may_be_cancelled_while_it_is_being_admitted(desk: Desk) -> None:
    desk.submit("acme", body("a"))
    desk.deliver(1)
    assert desk.cancel("a")
    desk.settle()
    assert desk.life.fold.open["acme.a"].cancelled


def test_a_cancel_may_come_before_its_request(desk: Desk) -> None:
    assert desk.cancel("a")
    desk.settle()
    assert not desk.cancel("a")
    desk.admit("a")
    assert desk.life.fold.open["acme.a"].cancelled
    assert not desk.cancel("a")


def test_what_has_ended_is_not_cancelled(desk: Desk) -> None:
    desk.admit("a")
    desk.end(0)
    desk.settle()
    assert not desk.cancel("a")
    assert desk.life.clerk.take_dropped() == {"cancel_after_end": 1}


@pytest.mark.parametrize(
    ("tenant", "request_id"), [("stranger", "a"), ("acme", "_"), ("acme", "a b"), ("acme", "")]
)
def test_nobody_cancels_nothing(desk: Desk, tenant: str, request_id: str) -> None:
    assert not desk.cancel(request_id, tenant)
    assert desk.life.clerk.take_dropped() == {"cancel_of_nobody": 1}


def test_invented_ids_make_only_so_many_events_a_second(desk: Desk) -> None:
    made = sum(desk.cancel(f"x{place}") for place in range(2 * limits.CANCELS_UNKNOWN_PER_S))
    assert made == limits.CANCELS_UNKNOWN_PER_S
    desk.now_us += 1_000_000
    assert desk.cancel("another")


def test_a_claim_is_quoted_once(desk: Desk) -> None:
    desk.admit("a")
    claim = msgspec.json.encode(DeliveredClaim(id="a", sent_us=1, last_token_us=9))
    assert desk.claim(claim)
    assert not desk.claim(claim)
    desk.settle()
    assert not desk.claim(claim)
    desk.end(0)
    desk.settle()
    assert not desk.claim(claim)
    (quoted,) = desk.events(Delivered)
    assert isinstance(quoted, Delivered)
    assert (quoted.sent_us, quoted.first_token_us, quoted.last_token_us) == (1, None, 9)


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        pytest.param(b"{", "claim_refused", id="cut off"),
        pytest.param(b'{"id":"a","x":1}', "claim_refused", id="unknown field"),
        pytest.param(b'{"id":"a","sent_us":1.5}', "claim_refused", id="no integer"),
        pytest.param(b'{"id":"a"}' + b" " * 512, "claim_refused", id="too long"),
        pytest.param(b'{"id":"b"}', "claim_of_unknown", id="unknown request"),
        pytest.param(b"[" * 500, "claim_refused", id="nested"),
    ],
)
def test_a_claim_that_is_none_is_dropped_and_counted(desk: Desk, claim: bytes, why: str) -> None:
    desk.admit("a")
    assert not desk.claim(claim)
    assert desk.life.clerk.take_dropped() == {why: 1}


def test_a_window_is_closed_once_when_it_is_over(desk: Desk) -> None:
    desk.admit("a")
    assert desk.close_windows() == []
    desk.now_us += limits.WINDOW_US + limits.WINDOW_GRACE_US
    (closed,) = desk.close_windows()
    assert (closed.tenant, closed.number_first, closed.number_last) == ("acme", 1, 1)
    assert closed.admitted == 1
    assert closed.end_us - closed.start_us == limits.WINDOW_US
    assert closed.start_us <= START_US + 100_000 < closed.end_us
    assert desk.close_windows() == []
    desk.settle()
    assert desk.close_windows() == []


def test_the_last_number_is_said_again_before_the_tape_forgets_it(desk: Desk) -> None:
    desk.admit("a")
    desk.now_us += limits.WINDOW_US * 2
    desk.close_windows()
    desk.settle()
    desk.now_us += 3_600 * 1_000_000
    assert desk.close_windows(say_again_s=7_200) == []
    (again,) = desk.close_windows(say_again_s=3_000)
    assert (again.number_first, again.number_last, again.admitted) == (None, 1, 0)
    assert desk.close_windows(say_again_s=3_000) == []
    desk.settle()
    assert desk.close_windows(say_again_s=3_000) == []


def test_a_flood_is_written_down_when_it_is_large_or_old() -> None:
    desk = Desk(malformed_events_per_s=1)
    clerk = desk.life.clerk
    for _ in range(limits.FLOOD_HELD_MAX + 1):
        desk.submit("acme", b"{")
    desk.now_us = START_US
    desk.deliver(10)
    assert not clerk.flush_due(desk.now_us)
    assert clerk.flush_due(desk.now_us + 1_000_000)
    desk.deliver(10**6)
    assert clerk.flush_due(desk.now_us)
    desk.settle()
    desk.check()
    assert clerk.folded >= limits.FLOOD_HELD_MAX - 10


def test_two_floods_at_once_are_folded_and_hide_nothing_of_each_other() -> None:
    desk = Desk(malformed_events_per_s=1)
    for _ in range(30):
        desk.submit("acme", b"{")
        desk.submit("globex", b"{")
    desk.deliver(60)
    desk.flush()
    # The first of the two arrives, and the process dies.
    desk.crash(arrives=33, arrives_late=0)
    desk.settle()
    desk.check()


def test_a_receipt_says_what_the_event_says() -> None:
    desk = Desk()
    for payload in (body("a"), body("a"), b'{"id":"a","nonsense":1}', b"{"):
        desk.submit("acme", payload)
    desk.settle()
    admitted, resubmitted, rejected, unreadable = valid_decisions(desk.tape)

    def made(data):
        return receipt(
            data,
            payload=b"{}",
            sequence=9,
            stored_ns=8,
            incarnation="i1",
            mesh_key=KEY,
        )

    assert isinstance(admitted, Admitted)
    first = made(admitted)
    assert (first.outcome, first.number, first.sequence, first.event) == ("admitted", 1, 9, "{}")
    assert first.salt == body_salt(KEY, "acme", "a").hex()
    assert body_commitment(bytes.fromhex(first.salt), body("a")) == admitted.body_commitment
    assert isinstance(resubmitted, Resubmitted)
    assert made(resubmitted).resubmitted_outcome == "open"
    assert isinstance(rejected, Rejected)
    assert (made(rejected).outcome, made(rejected).reason) == ("rejected", "unknown_field")
    assert isinstance(unreadable, Rejected)
    assert (made(unreadable).id, made(unreadable).salt) == ("", "")


def test_a_decision_that_no_event_can_hold_is_a_refusal_and_the_id_is_free() -> None:
    desk = Desk()
    desk.submit("acme", body("a"))
    clerk = desk.life.clerk
    sheet = clerk.sort([_request(desk.requests[0])], desk.stamp())
    (written,), _ = clerk.conclude(sheet, [BudgetAnswer(outcome="granted")], desk.stamp())
    assert isinstance(written.data, Admitted)
    clerk.refuse_unwritable(written)
    desk._publish([written])
    desk.next = 2
    desk.submit("acme", body("a"))
    desk.settle()
    desk.check()
    assert [type(d) for d in valid_decisions(desk.tape)] == [Rejected, Admitted]


def test_what_names_no_tenant_is_passed_over() -> None:
    desk = Desk()
    desk.submit("_", body("a"))
    sheet = desk.life.clerk.sort([], Stamp(wall_us=1, source="admission"))
    assert sheet.poisoned == []
    sheet = desk.life.clerk.sort([_request(desk.requests[0])], desk.stamp())
    assert [message.sequence for message in sheet.poisoned] == [1]
    assert sheet.cases == []
