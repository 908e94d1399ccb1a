"""What must hold whatever the bus and the process do, over a simulated tape."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from waterclock_proto.events import Admitted, Rejected, Resubmitted

from .simulated_tape import SimulatedBus, body, valid_decisions

tenants = st.sampled_from(["acme", "globex", "stranger"])
submissions = st.one_of(
    st.builds(body, st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(["x", "y"])),
    st.sampled_from([b"{", b"", b'{"id":"a"}', b'{"id":"a","resume":true}', b"not json at all"]),
)
steps = st.one_of(
    st.tuples(st.just("submit"), tenants, submissions),
    st.tuples(st.just("deliver"), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("redeliver"), st.integers(1, 4)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("store"), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("read"), st.integers(1, 10)),
    st.tuples(st.just("crash"), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5), st.booleans()),
)


def perform(bus: SimulatedBus, step: tuple) -> None:
    match step:
        case ("submit", tenant, payload):
            bus.submit(tenant, payload)
        case ("deliver", count, refuse):
            bus.deliver(count, refuse=refuse)
        case ("redeliver", count):
            bus.redeliver(count)
        case ("flush",):
            bus.flush()
        case ("store", count, twice):
            bus.store(count, twice=twice)
        case ("read", count):
            bus.read(count)
        case ("crash", arrives, arrives_late):
            bus.crash(arrives=arrives, arrives_late=arrives_late)
        case ("end", place, by_scheduler):
            bus.end(place, by_scheduler=by_scheduler)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60))
def test_every_submission_is_decided_once_and_numbered_without_a_hole(
    script: list[tuple],
) -> None:
    bus = SimulatedBus()
    for step in script:
        perform(bus, step)
    bus.settle()
    bus.check()
    # Nothing is left over on the desk, and everything was acknowledged.
    assert bus.life.clerk.undecided == 0
    bus.redeliver(10**6)
    assert bus.acknowledged >= set(bus.delivered)


@settings(max_examples=100)
@given(st.lists(steps, max_size=50), st.integers(1, 8))
def test_a_fold_from_a_snapshot_is_the_fold_from_the_start(
    script: list[tuple], ended_requests_max: int
) -> None:
    bus = SimulatedBus(ended_requests_max=ended_requests_max)
    with tempfile.TemporaryDirectory() as folder:
        for place, step in enumerate(script):
            perform(bus, step)
            if place % 7 == 6:
                bus.snapshot_round_trip(Path(folder) / str(place))


@pytest.mark.parametrize("arrives", range(9))
@pytest.mark.parametrize("arrives_late", [0, 1, 3])
def test_a_crash_between_any_two_events_leaves_no_hole(arrives: int, arrives_late: int) -> None:
    bus = SimulatedBus()
    for request_id in "abcd":
        bus.submit("acme", body(request_id))
        bus.submit("acme", b"{")
    bus.deliver(8)
    bus.flush()
    bus.crash(arrives=arrives, arrives_late=arrives_late)
    bus.settle()
    bus.check()


def test_what_a_dead_admission_still_writes_counts_for_nothing() -> None:
    bus = SimulatedBus()
    bus.submit("acme", body("a"))
    bus.deliver(1)
    bus.crash(arrives=0, arrives_late=1)
    bus.read(10)
    bus.settle()
    bus.check()
    assert [d.number for d in valid_decisions(bus.tape)] == [1]


def test_events_that_arrive_in_another_order_leave_no_hole() -> None:
    """A refused event may be overtaken; if its writer then dies, its number is used by another."""
    bus = SimulatedBus()
    for request_id in "abc":
        bus.submit("acme", body(request_id))
    bus.deliver(3)
    del bus.life.outbox[1]
    bus.store(2)
    bus.crash(arrives=0, arrives_late=0)
    bus.settle()
    bus.check()
    numbers = [d.number for d in valid_decisions(bus.tape)]
    assert numbers == [1, 3, 2]


def test_a_repeated_id_in_one_batch_runs_once() -> None:
    bus = SimulatedBus()
    for payload in (body("a"), body("a"), body("a", "other"), body("b")):
        bus.submit("acme", payload)
    bus.deliver(4)
    bus.settle()
    bus.check()
    found = valid_decisions(bus.tape)
    assert [type(d) for d in found] == [Admitted, Resubmitted, Rejected, Admitted]
    assert isinstance(found[1], Resubmitted)
    assert (found[1].outcome, found[1].first_requests_sequence) == ("open", 1)
    assert isinstance(found[2], Rejected)
    assert found[2].reason == "id_reused"


def test_what_was_refused_may_come_again_under_its_id() -> None:
    bus = SimulatedBus()
    bus.submit("acme", body("a"))
    bus.deliver(1, refuse=True)
    bus.submit("acme", body("a"))
    bus.deliver(1)
    bus.settle()
    bus.check()
    assert [type(d) for d in valid_decisions(bus.tape)] == [Rejected, Admitted]


def test_a_flood_of_malformed_submissions_is_one_event_that_counts_all() -> None:
    bus = SimulatedBus(malformed_events_per_s=2)
    for place in range(20):
        bus.submit("acme", b"{")
        if place % 4 == 0:
            bus.submit("globex", body(f"g{place}"))
    bus.deliver(25)
    bus.store(100)
    bus.read(100)
    bus.settle()
    bus.check()
    rejected = [d for d in valid_decisions(bus.tape) if isinstance(d, Rejected)]
    assert [d.count for d in rejected] == [1, 1, 18]
    assert rejected[2].requests_sequence_last == 25
    assert bus.acknowledged == set(range(1, 26))


def test_a_flood_hides_nothing_that_was_not_decided() -> None:
    """An event that claims sequences never steps over one that is not on the tape yet."""
    bus = SimulatedBus(malformed_events_per_s=1)
    for payload in (b"{", b"{", body("a"), b"{"):
        bus.submit("acme", payload)
    bus.deliver(4)
    # The good one was published, and has not come back: it may still be lost.
    bus.flush()
    bus.life.outbox = [one for one in bus.life.outbox if b'"id":"a"' not in one[1]]
    bus.crash(arrives=10, arrives_late=0)
    bus.settle()
    bus.check()
    assert any(isinstance(d, Admitted) for d in valid_decisions(bus.tape))
