"""The fold: which end counts, what is superseded, what is flagged."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic_tapes import (
    BOOT,
    SyntheticTape,
    dispatched,
    enqueued,
    first_token,
    queued_end,
    stamp,
    started,
    worker_end,
)
from waterclock_ledger.fold import Life, Settled, Summary, Tape, apply
from waterclock_proto.envelope import Chain, decode_event
from waterclock_proto.events import (
    Admitted,
    AttemptLost,
    CancelRequested,
    Delivered,
    EventData,
    Expired,
    Rejected,
    SchedulerElected,
    TerminalData,
    WriterSealed,
)
from waterclock_proto.leaves import decode_leaf
from waterclock_proto.stamps import Stamp

ADMITTED: Admitted = SyntheticTape().admitted("r", 1_000)
OUTCOMES = ("completed", "failed", "cancelled", "expired")


def lost(attempt: int, worker: str = "w1-aaaaaa") -> AttemptLost:
    return AttemptLost(
        tenant="acme",
        id="r",
        attempt=attempt,
        worker=worker,
        pool="main",
        reason="lease",
        lost=stamp(900_000, "scheduler"),
    )


# A request's events by a short name: what the tables below are written in.
EVENTS: dict[str, tuple[str, EventData]] = {
    "A": ("admission", ADMITTED),
    "E": ("scheduler", enqueued("r", 2_000)),
    **{f"D{n}": ("scheduler", dispatched(ADMITTED, n, 5_000 * n)) for n in (1, 2, 3)},
    **{f"S{n}": ("worker", started("r", n, 6_000 * n)) for n in (1, 2, 3)},
    **{f"F{n}": ("worker", first_token("r", n, 7_000 * n)) for n in (1, 2, 3)},
    **{f"L{n}": ("scheduler", lost(n)) for n in (1, 2, 3)},
    **{
        f"{outcome[0]}{n}": ("worker", worker_end("r", n, 7_000 * n, 90_000, outcome))
        for outcome in ("completed", "failed", "expired")
        for n in (1, 2, 3)
    },
    "x0": ("scheduler", queued_end(ADMITTED, "queued_expired", 80_000)),
    "r0": ("scheduler", queued_end(ADMITTED, "rejected", 80_000)),
    "C": (
        "admission",
        CancelRequested(
            tenant="acme", id="r", reason="producer", requested=stamp(50_000, "admission")
        ),
    ),
}


def fold(names: str, *, settle_after: int | None = None) -> Tape:
    """The tape of these events, each by a writer of its kind."""
    chains = {
        service: Chain(service=service, writer=f"{service}-1", key=b"k")
        for service in ("admission", "scheduler", "worker")
    }
    tape = Tape(settle_after=settle_after)
    for sequence, name in enumerate(names.split(), start=1):
        service, data = EVENTS[name]
        apply(tape, decode_event(*chains[service].seal(data)), sequence)
    return tape


def only(tape: Tape) -> Summary:
    (summary,) = tape.summaries()
    return summary


@pytest.mark.parametrize(
    ("names", "outcome", "end_sequence", "superseded", "flags"),
    [
        pytest.param("A E", "open", 0, 0, [], id="waiting"),
        pytest.param("A E D1 S1 F1", "open", 0, 0, [], id="running"),
        pytest.param("A E D1 S1 F1 c1", "completed", 6, 0, [], id="a good life"),
        pytest.param("A E D1 S1 f1", "failed", 5, 0, [], id="failed"),
        pytest.param("A E x0", "expired", 3, 0, [], id="expired in the queue"),
        pytest.param("A E r0", "rejected", 3, 0, [], id="refused by the scheduler"),
        pytest.param("C A E x0", "expired", 4, 0, [], id="cancelled before it was admitted"),
        pytest.param("A E D1 S1 F1 c1 C", "completed", 6, 0, [], id="cancelled too late"),
        pytest.param("A E D1 S1 L1 D2 S2 F2 c2", "completed", 9, 0, [], id="second attempt"),
        pytest.param("A E D1 L1 D2 L2 x0", "expired", 7, 0, [], id="all attempts lost"),
        pytest.param(
            "A E D1 S1 L1 D2 c1 S2 F2 c2",
            "completed",
            10,
            1,
            ["superseded:completed"],
            id="the lost attempt ended after all",
        ),
        pytest.param(
            "A E D1 S1 L1 c1 x0",
            "expired",
            7,
            1,
            ["superseded:completed"],
            id="a lost attempt never counts, even if no other was made",
        ),
        pytest.param(
            "A E D1 S1 F1 c1 L1 D2 S2 F2 c2",
            "completed",
            6,
            1,
            ["after_end:attempt_lost", "after_end:dispatched", "superseded:completed"],
            id="declared lost when it had just ended",
        ),
        pytest.param(
            "A E D1 S1 F1 c1 c1",
            "completed",
            6,
            1,
            ["duplicate:completed"],
            id="the same end twice",
        ),
        pytest.param(
            "A E D1 S1 F1 c1 f1",
            "completed",
            6,
            1,
            ["two_ends:failed"],
            id="two ends of one attempt",
        ),
        pytest.param(
            "A E D1 x0 S1 F1 c1",
            "completed",
            7,
            1,
            ["superseded:expired"],
            id="the scheduler has no say while a worker has it",
        ),
        pytest.param(
            "A E x0 D1 S1 F1 c1",
            "expired",
            3,
            1,
            ["after_end:dispatched", "superseded:completed"],
            id="dispatched after its end",
        ),
        pytest.param("A E c1", "open", 0, 1, ["undispatched:completed"], id="nobody asked"),
        pytest.param("A E S1", "open", 0, 0, ["undispatched:started"], id="started unasked"),
        pytest.param("A E L1 D1", "open", 0, 0, [], id="lost before it was dispatched"),
        pytest.param(
            "A E L1 D1 c1 x0",
            "expired",
            6,
            1,
            ["superseded:completed"],
            id="what was lost before it was dispatched never counts",
        ),
        pytest.param("A E D2 L1 D1 S2 F2 c2", "completed", 8, 0, [], id="changed places"),
        pytest.param(
            "A E D2 D1 S2 F2 c2",
            "completed",
            7,
            0,
            ["overlapping_attempts"],
            id="an older attempt after a newer",
        ),
        pytest.param(
            "A E D1 D2 S2 F2 c2",
            "completed",
            7,
            0,
            ["overlapping_attempts"],
            id="two attempts at once",
        ),
        pytest.param(
            "A A E E D1 D1 S1 S1 F1 F1 c1",
            "completed",
            11,
            0,
            [
                "duplicate:admitted",
                "duplicate:enqueued",
                "duplicate:dispatched",
                "duplicate:started",
                "duplicate:first_token",
            ],
            id="everything twice",
        ),
        pytest.param(
            "A D1 c1",
            "completed",
            3,
            0,
            ["missing:enqueued", "missing:started", "missing:first_token"],
            id="holes",
        ),
        pytest.param("E D1 S1 F1 c1", "completed", 5, 0, ["missing:admitted"], id="no admitted"),
    ],
)
def test_which_end_counts(
    names: str, outcome: str, end_sequence: int, superseded: int, flags: list[str]
) -> None:
    tape = fold(names)
    life = tape.find("acme", "r")
    assert isinstance(life, Life)
    summary = only(tape)
    assert (summary.outcome, life.end_sequence, summary.superseded) == (
        outcome,
        end_sequence,
        superseded,
    )
    assert list(summary.flags) == flags


def test_what_stands_behind_an_end_for_long_is_settled_and_says_the_same() -> None:
    for names in (
        "A E D1 S1 F1 c1",
        "A E D1 S1 L1 D2 c1 S2 F2 c2",
        "A E x0",
        "A E D1 r0 L1 r0",
    ):
        whole = fold(names)
        small = fold(names, settle_after=0)
        assert isinstance(small.find("acme", "r"), Life)
        small.settle(1_000)
        assert isinstance(small.find("acme", "r"), Settled)
        assert only(small) == only(whole)


def test_what_comes_after_settling_is_noted_and_changes_no_measure() -> None:
    tape = fold("A E D1 S1 F1 c1 C L1 D2 c2 f1 r0", settle_after=0)
    before = only(fold("A E D1 S1 F1 c1"))
    after = only(tape)
    assert after.flags == (
        "late:attempt_lost",
        "late:dispatched",
        "superseded:completed",
        "superseded:failed",
        "superseded:rejected",
    )
    assert after.superseded == 3
    assert (after.outcome, after.segments, after.total_us) == (
        before.outcome,
        before.segments,
        before.total_us,
    )


def test_stamps_too_far_apart_for_64_bits_are_kept_whole() -> None:
    largest = 2**63 - 1
    tape = Tape(settle_after=0)
    admitted = SyntheticTape().admitted(
        "r",
        0,
        arrival=Stamp(wall_us=0, source="bus"),
        received=Stamp(wall_us=largest, source="admission", boot=BOOT, mono_ns=0),
        decided=Stamp(wall_us=largest, source="admission", boot=BOOT, mono_ns=0),
    )
    ended = Expired(
        tenant="acme",
        id="r",
        attempt=0,
        phase="queued",
        ended=Stamp(wall_us=largest, source="scheduler", boot=BOOT, mono_ns=largest),
    )
    messages = seal("admission", "a", 0, admitted) + seal("scheduler", "s", 0, ended)
    for sequence, message in enumerate(messages, start=1):
        apply(tape, decode_event(*message), sequence)
    tape.settle(1_000)
    assert only(tape).total_us == largest + largest // 1000


def test_a_long_tape_costs_a_kilobyte_for_each_request() -> None:
    count = 2_000
    made = SyntheticTape()
    made.open()
    for number in range(count):
        made.run(f"request-{number:06d}", number * 1_000)
    leaves, made.leaves = made.leaves, []
    tape = Tape(settle_after=100)
    gc.collect()
    tracemalloc.start()
    try:
        for leaf in map(decode_leaf, leaves):
            apply(tape, decode_event(leaf.subject, leaf.payload), leaf.sequence)
        gc.collect()
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    settled = sum(isinstance(life, Settled) for life in tape.lives["acme"].values())
    assert settled > 0.98 * count
    assert used_bytes < 1_000 * count


# --- laws


NAMES = sorted(EVENTS)


def counted_by_the_book(names: list[str]) -> tuple[str, int]:
    """The end that counts, found the long way: from the definition, not step by step."""
    for place, name in enumerate(names):
        if name[0] not in "cfexr":
            continue
        before = names[:place]
        newest = max((int(other[1:]) for other in before if other[0] == "D"), default=0)
        lost = max((int(other[1:]) for other in before if other[0] == "L"), default=0)
        attempt = int(name[1:])
        alive = newest > lost
        if (alive and attempt == newest) if attempt else not alive:
            return name, place + 1
    return "", 0


@given(st.lists(st.sampled_from(NAMES), max_size=14))
def test_the_counted_end_is_the_one_of_the_definition(names: list[str]) -> None:
    tape = fold(" ".join(names))
    expected, place = counted_by_the_book(names)
    life = tape.find("acme", "r")
    if life is None:
        assert names == []
        return
    assert isinstance(life, Life)
    assert life.end_sequence == place
    assert life.end == (EVENTS[expected][1] if expected else None)


@given(st.lists(st.sampled_from(NAMES), max_size=14))
def test_every_end_either_counts_or_is_superseded(names: list[str]) -> None:
    tape = fold(" ".join(names))
    ends = sum(isinstance(EVENTS[name][1], TerminalData | Rejected) for name in names)
    for summary in tape.summaries():
        assert ends == summary.superseded + (summary.outcome != "open")


@given(st.lists(st.sampled_from(NAMES), max_size=14), st.integers(0, 13))
def test_repeating_an_event_later_changes_nothing_but_flags(names: list[str], place: int) -> None:
    if not names:
        return
    again = [*names, names[place % len(names)]]
    repeated_end = isinstance(EVENTS[again[-1]][1], TerminalData | Rejected)
    for before, after in zip(
        fold(" ".join(names)).summaries(), fold(" ".join(again)).summaries(), strict=True
    ):
        if before.outcome == "open" and (repeated_end or again[-1][0] in "DLSF"):
            # It may be the first that counts, since something in between has changed that.
            continue
        assert (before.outcome, before.segments, before.tries) == (
            after.outcome,
            after.segments,
            after.tries,
        )


@given(st.lists(st.sampled_from(NAMES), max_size=14))
def test_segments_sum_to_the_total_and_both_clocks_to_it_too(names: list[str]) -> None:
    for summary in fold(" ".join(names)).summaries():
        if summary.total_us is None:
            continue
        assert sum(summary.segments.values()) == summary.total_us
        if summary.queue_us is not None:
            assert summary.exec_us is not None
            assert summary.queue_us + summary.exec_us == summary.total_us


@given(st.lists(st.sampled_from(NAMES), max_size=14))
def test_settling_shows_nowhere(names: list[str]) -> None:
    small = fold(" ".join(names), settle_after=10_000)
    small.settle(1_000_000)
    assert list(small.summaries()) == list(fold(" ".join(names)).summaries())


# --- fences


def seal(service: str, writer: str, fence: int, *data: EventData) -> list[tuple[str, bytes]]:
    chain = Chain(service=service, writer=writer, key=b"k")
    chain.fence = fence
    return [chain.seal(one) for one in data]


def elected(fence: int, writer: str) -> list[tuple[str, bytes]]:
    return seal("scheduler", writer, fence, SchedulerElected(elected=stamp(0, "scheduler")))


def dispatch(fence: int, writer: str) -> list[tuple[str, bytes]]:
    return seal("scheduler", writer, fence, dispatched(ADMITTED, 1, 9_000))


def sealed(fence: int, writer: str) -> list[tuple[str, bytes]]:
    return seal(
        "scheduler",
        writer,
        fence,
        WriterSealed(
            sealed_counter=0, head_sha256="0" * 64, algorithm="none", sealed=stamp(0, "scheduler")
        ),
    )


@pytest.mark.parametrize(
    ("messages", "counts", "fenced_off"),
    [
        pytest.param(elected(1, "a") + dispatch(1, "a"), True, 0, id="elected"),
        pytest.param(dispatch(0, "a"), True, 0, id="no election at all"),
        pytest.param(elected(1, "a") + elected(2, "b") + dispatch(1, "a"), False, 1, id="deposed"),
        pytest.param(
            elected(1, "a") + dispatch(1, "a") + elected(2, "b"), True, 0, id="deposed later"
        ),
        pytest.param(
            elected(3, "a") + elected(2, "b") + dispatch(3, "a"), True, 1, id="elected too low"
        ),
        pytest.param(elected(1, "a") + dispatch(0, "b"), False, 1, id="never elected"),
        pytest.param(dispatch(4, "a"), True, 0, id="elected before the record begins"),
        pytest.param(dispatch(4, "a") + elected(3, "b"), True, 1, id="elected below what was seen"),
        pytest.param(
            elected(2, "a") + sealed(0, "b") + dispatch(2, "a"),
            True,
            0,
            id="a standby speaks of itself",
        ),
    ],
)
def test_of_the_scheduler_only_the_highest_fence_counts(
    messages: list[tuple[str, bytes]], counts: bool, fenced_off: int
) -> None:
    tape = Tape()
    for sequence, message in enumerate(messages, start=1):
        apply(tape, decode_event(*message), sequence)
    life = tape.find("acme", "r")
    assert (isinstance(life, Life) and len(life.tries) == 1) == counts
    assert tape.fenced_off == fenced_off


@pytest.mark.parametrize(
    ("service", "data"),
    [
        pytest.param("worker", ADMITTED, id="a worker admits"),
        pytest.param("admission", dispatched(ADMITTED, 1, 9_000), id="admission dispatches"),
        pytest.param("scheduler", started("r", 1, 9_000), id="the scheduler starts"),
        pytest.param("worker", queued_end(ADMITTED, "queued_expired", 9_000), id="no worker's end"),
        pytest.param(
            "scheduler", worker_end("r", 1, 9_000, 50, "failed"), id="the scheduler ends a worker's"
        ),
        pytest.param(
            "admission", queued_end(ADMITTED, "rejected", 9_000), id="admission refuses an admitted"
        ),
    ],
)
def test_what_a_service_may_not_say_does_not_count(service: str, data: EventData) -> None:
    tape = fold("A E D1")
    before = only(tape)
    (message,) = seal(service, "other", 0, data)
    apply(tape, decode_event(*message), 9)
    assert tape.foreign == 1
    assert only(tape) == before


def test_a_deposed_admission_numbers_nothing() -> None:
    made = SyntheticTape()
    made.open()
    made.run("r1", 0)
    made.elect(2, "0002")
    # The old one did not notice, and numbers a submission that the new one numbers too.
    made.emit(made.chain("admission"), made.admitted("zombie", 500))
    made.numbers["acme"] = 1
    made.emit(made.chain("admission", "admission-0002"), made.admitted("r2", 600))
    tape = folded(made)
    assert tape.numbers.faults() == []
    assert sorted(tape.lives["acme"]) == ["r1", "r2"]
    assert tape.fenced_off == 1


def folded(made: SyntheticTape) -> Tape:
    tape = Tape()
    for leaf in map(decode_leaf, made.leaves):
        apply(tape, decode_event(leaf.subject, leaf.payload), leaf.sequence)
    return tape


# --- what is not a request


def test_refused_submissions_are_counted_with_their_numbers() -> None:
    made = SyntheticTape()
    made.open()
    made.refuse("acme", 0)
    made.refuse("acme", 100, count=40, reason="malformed")
    made.run("r", 200)
    made.submit_again("r", 900_000)
    tape = folded(made)
    assert [(refusal.reason, refusal.count) for refusal in tape.refusals] == [
        ("requests_per_minute", 1),
        ("malformed", 40),
    ]
    assert tape.numbers.faults() == []
    assert tape.numbers.last("acme") == 43
    assert tape.resubmitted == 1


def test_a_refusal_under_numbers_that_were_given_is_counted_once() -> None:
    made = SyntheticTape()
    made.open()
    made.refuse("acme", 0)
    made.numbers["acme"] = 0
    made.refuse("acme", 0)
    tape = folded(made)
    assert len(tape.refusals) == 1
    assert len(tape.numbers.faults()) == 1


@pytest.mark.parametrize(
    "claim",
    [
        lambda: CancelRequested(
            tenant="acme", id="ghost", reason="producer", requested=stamp(0, "admission")
        ),
        lambda: Delivered(tenant="acme", id="ghost", sent_us=5, quoted=stamp(0, "admission")),
    ],
    ids=["cancel", "claim"],
)
def test_what_is_said_of_an_unknown_request_makes_no_request_of_it(
    claim: Callable[[], EventData],
) -> None:
    made = SyntheticTape()
    made.open()
    made.emit(made.chain("admission"), claim())
    summary = only(folded(made))
    assert (summary.arrival_us, summary.flags) == (None, ())
