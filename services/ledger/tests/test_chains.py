"""Chains and numbers: what a correct writer may do, and what is a break."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic_tapes import stamp
from waterclock_ledger import chains
from waterclock_ledger.chains import Chains, NumberFault, Numbers
from waterclock_proto.envelope import Chain, Envelope, decode_event
from waterclock_proto.events import EventData, SchedulerElected, WriterSealed

SECOND_NS = 10**9


def payloads(count: int, writer: str = "scheduler-1") -> list[tuple[str, bytes]]:
    chain = Chain(service="scheduler", writer=writer, key=b"k")
    return [chain.seal(SchedulerElected(elected=stamp(place))) for place in range(count)]


def observe(found: Chains, message: tuple[str, bytes], sequence: int, stored_ns: int = 0) -> str:
    subject, payload = message
    return found.observe(
        decode_event(subject, payload),
        hashlib.sha256(payload).digest(),
        sequence=sequence,
        stored_ns=stored_ns,
    )


def read(order: Sequence[int], count: int = 10, *, open_start: bool = False) -> Chains:
    made = payloads(count)
    found = Chains(open_start=open_start)
    for sequence, place in enumerate(order, start=1):
        observe(found, made[place], sequence)
    return found


@pytest.mark.parametrize(
    ("order", "kinds", "tails", "repeated"),
    [
        pytest.param([0, 1, 2, 3], [], [], 0, id="in order"),
        pytest.param([0, 1, 1, 2], [], [], 1, id="published twice"),
        pytest.param([0, 1, 2, 3, 1, 2, 3], [], [], 3, id="a whole window published twice"),
        pytest.param([0, 2, 3, 1], [], [], 0, id="refused, then repeated behind its successors"),
        pytest.param([0, 2, 3, 1, 2, 3], [], [], 2, id="and its successors repeated with it"),
        pytest.param([0, 2, 2, 3, 1], [], [], 1, id="repeated while something is missing"),
        pytest.param([0, 1, 3, 4], [], [(2, 2, 2)], 0, id="a crash in the window"),
        pytest.param([3, 4], [], [(0, 2, 2)], 0, id="nothing of it but its tail"),
    ],
)
def test_what_a_correct_writer_may_do(
    order: list[int], kinds: list[str], tails: list[tuple[int, int, int]], repeated: int
) -> None:
    found = read(order)
    assert [a_break.kind for a_break in found.breaks] == kinds
    assert [(t.missing_first, t.missing_last, t.behind) for t in found.tails] == tails
    assert found.repeated == repeated


@given(st.permutations(range(10)), st.lists(st.integers(0, 9), max_size=10))
def test_in_whatever_order_a_window_is_stored_and_repeated_its_chain_is_whole(
    order: list[int], repeats: list[int]
) -> None:
    found = read([*order, *repeats])
    assert found.breaks == []
    assert found.tails == []
    assert found.repeated == len(repeats)


@given(missing=st.integers(0, 8))
def test_a_missing_event_with_too_many_behind_it_is_a_break(missing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "TAIL_EVENTS_MAX", 3)
        found = read([place for place in range(20) if place != missing], 20)
    (a_break,) = found.breaks
    assert a_break.kind == "missing"
    assert f"counters {missing} to {missing} are not in the record" in a_break.detail
    assert found.tails == []


def test_a_missing_event_behind_which_the_writer_goes_on_for_long_is_a_break() -> None:
    made = payloads(4)
    found = Chains()
    observe(found, made[0], 1, 0)
    observe(found, made[2], 2, 0)
    assert found.breaks == []
    observe(found, made[3], 3, 31 * SECOND_NS)
    assert [a_break.kind for a_break in found.breaks] == ["missing"]
    assert found.tails == []


def test_an_event_that_names_another_one_before_it_is_a_break() -> None:
    made = payloads(3)
    forged = Chain(service="scheduler", writer="scheduler-1", key=b"k")
    forged.counter, forged.head = 2, "f" * 64
    found = Chains()
    observe(found, made[0], 1)
    observe(found, made[1], 2)
    observe(found, forged.seal(SchedulerElected(elected=stamp(0))), 3)
    assert [(b.kind, b.counter, b.sequence) for b in found.breaks] == [("previous", 2, 3)]


@pytest.mark.parametrize("ahead", [False, True], ids=["linked already", "still ahead"])
def test_another_event_under_a_known_counter_is_a_fork(ahead: bool) -> None:
    made = payloads(5)
    other = Chain(service="scheduler", writer="scheduler-1", key=b"k")
    for _ in range(3):
        other.seal(SchedulerElected(elected=stamp(99)))
    fork = other.seal(SchedulerElected(elected=stamp(99)))
    found = Chains()
    for sequence, place in enumerate([0, 3] if ahead else [0, 1, 2, 3], start=1):
        observe(found, made[place], sequence)
    assert observe(found, fork, 9) == "forked"
    assert [(b.kind, b.counter) for b in found.breaks] == [("forked", 3)]


def test_a_repetition_too_old_to_compare_is_not_taken_on_trust() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "REPEATS_MAX", 3)
        found = read([*range(10), 9, 7])
        assert found.breaks == []
        found = read([*range(10), 0])
    assert [(b.kind, b.counter) for b in found.breaks] == [("forked", 0)]
    assert "too long ago" in found.breaks[0].detail


def test_a_seal_over_another_head_is_a_break() -> None:
    made = Chain(service="ledger", writer="ledger-1", key=b"k")
    elected = made.seal(SchedulerElected(elected=stamp(0)))
    found = Chains()
    observe(found, elected, 1)
    for sequence, head in ((2, hashlib.sha256(elected[1]).hexdigest()), (3, "e" * 64)):
        sealed = made.seal(
            WriterSealed(
                sealed_counter=made.counter - 1,
                head_sha256=head,
                algorithm="none",
                sealed=stamp(0),
            )
        )
        observe(found, sealed, sequence)
    assert [(b.kind, b.sequence) for b in found.breaks] == [("sealed", 3)]


def test_where_a_record_begins_in_the_middle_a_writer_may_too() -> None:
    assert read([4, 5, 6], open_start=True).breaks == []
    assert read([4, 5, 6], open_start=True).tails == []
    assert [t.missing_last for t in read([4, 6], open_start=True).tails] == [5]
    assert read([5, 4, 6], open_start=True).breaks == []


def test_an_event_that_names_none_before_it_is_a_break() -> None:
    made = payloads(2)
    envelope: Envelope[EventData] = decode_event(*made[0])
    silent = Envelope(
        specversion=envelope.specversion,
        id=envelope.id,
        source=envelope.source,
        type=envelope.type,
        writer=envelope.writer,
        counter=envelope.counter,
        nonce=envelope.nonce,
        data=envelope.data,
    )
    found = Chains()
    found.observe(silent, bytes(32), sequence=1, stored_ns=0)
    assert [b.kind for b in found.breaks] == ["previous"]


def missing(first: int, last: int) -> NumberFault:
    return NumberFault(tenant="acme", kind="missing", first=first, last=last)


def reused(first: int, last: int) -> NumberFault:
    return NumberFault(tenant="acme", kind="reused", first=first, last=last)


@pytest.mark.parametrize(
    ("spans", "faults"),
    [
        pytest.param([(1, 1), (2, 1), (3, 1)], [], id="one after another"),
        pytest.param([(1, 4), (5, 1)], [], id="a folded flood"),
        pytest.param([(1, 1), (3, 1), (2, 1)], [], id="out of order"),
        pytest.param([(1, 1), (6, 1), (2, 4)], [], id="a flood behind its successor"),
        pytest.param([(2, 1)], [missing(1, 1)], id="the first is missing"),
        pytest.param([(1, 1), (5, 1), (9, 1)], [missing(2, 4), missing(6, 8)], id="two gaps"),
        pytest.param([(1, 1), (1, 1)], [reused(1, 1)], id="twice"),
        pytest.param([(1, 3), (2, 4)], [reused(2, 3)], id="overlapping"),
        pytest.param([(1, 1), (3, 2), (3, 1), (2, 1)], [reused(3, 3)], id="twice ahead of a gap"),
    ],
)
def test_numbers(spans: list[tuple[int, int]], faults: list[NumberFault]) -> None:
    numbers = Numbers()
    for first, count in spans:
        numbers.observe("acme", first, count)
    assert numbers.faults() == faults


@given(st.permutations(range(1, 15)))
def test_numbers_in_any_order_have_no_fault(order: list[int]) -> None:
    numbers = Numbers()
    assert all(numbers.observe("acme", number) for number in order)
    assert numbers.faults() == []
    assert numbers.last("acme") == 14


@given(st.sets(st.integers(1, 30), min_size=1))
def test_exactly_the_numbers_that_were_left_out_are_missing(given_out: set[int]) -> None:
    numbers = Numbers()
    for number in sorted(given_out):
        numbers.observe("acme", number)
    found = {number for fault in numbers.faults() for number in range(fault.first, fault.last + 1)}
    assert found == set(range(1, max(given_out))) - given_out


def test_each_tenant_has_its_own_numbers() -> None:
    numbers = Numbers()
    numbers.observe("acme", 1)
    numbers.observe("globex", 2)
    assert [str(fault) for fault in numbers.faults()] == ["tenant globex: number 1 missing"]
    assert Numbers(open_start=True).observe("acme", 7)
