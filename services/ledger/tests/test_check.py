"""The invariants, seen from outside: a healthy record has none broken, and each fault is found."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic_tapes import (
    SyntheticTape,
    dispatched,
    queued_end,
    stamp,
    started,
    worker_end,
)
from waterclock_ledger import chains
from waterclock_ledger.check import check, check_log, life_violations
from waterclock_ledger.files import LogWriter
from waterclock_ledger.fold import Life, Summary, Tape
from waterclock_ledger.record import read_record
from waterclock_proto.envelope import Chain
from waterclock_proto.events import SchedulerElected
from waterclock_proto.leaves import Leaf, encode_leaf


def healthy(count: int = 3) -> SyntheticTape:
    tape = SyntheticTape()
    tape.open()
    for number in range(1, count + 1):
        tape.run(f"r{number}", number * 1_000)
    return tape


def test_a_healthy_record_has_no_violation(tmp_path: Path) -> None:
    tape = healthy()
    tape.run("lost-twice", 9_000, lost_attempts=2)
    tape.run("expired", 9_100, outcome="queued_expired")
    tape.run("shed", 9_200, outcome="rejected")
    tape.run("open", 9_300, outcome="open")
    tape.refuse("acme", 9_400, count=5)
    tape.submit_again("r1", 9_500)
    tape.elect(2, "0002")
    tape.write(tmp_path)
    found = check(tmp_path)
    assert found.violations == []
    assert found.open == ["acme/open"]


def a_hole(tape: SyntheticTape) -> None:
    tape.hole()


def an_unreadable_event(tape: SyntheticTape) -> None:
    tape.store("wc.event.completed.acme.w1", b"{}")


def a_number_left_out(tape: SyntheticTape) -> None:
    tape.number("acme")
    tape.run("next", 50_000)


def a_number_twice(tape: SyntheticTape) -> None:
    tape.numbers["acme"] -= 1
    tape.run("next", 50_000)


def a_forged_event(tape: SyntheticTape) -> None:
    chain = tape.chain("scheduler")
    chain.head = "f" * 64
    tape.emit(chain, SchedulerElected(elected=stamp(0)))


def a_missing_event(tape: SyntheticTape) -> None:
    tape.chain("scheduler").seal(SchedulerElected(elected=stamp(0)))
    tape.run("next", 50_000)
    tape.now_us += 40_000_000
    tape.run("later", 50_000_000)


def two_ends(tape: SyntheticTape) -> None:
    pen = tape.chain("worker", "worker-w1-aaaaaa")
    tape.emit(pen, worker_end("r1", 1, 1_000, 5_000, "failed"))


def an_end_that_nobody_asked_for(tape: SyntheticTape) -> None:
    admitted = tape.admitted("x", 1_000)
    tape.emit(tape.chain("admission"), admitted)
    tape.emit(tape.chain("worker", "w"), worker_end("x", 1, 1_000, 5_000, "completed"))


def an_end_of_something_never_admitted(tape: SyntheticTape) -> None:
    ghost = SyntheticTape().admitted("ghost", 0)
    tape.emit(tape.chain("scheduler"), queued_end(ghost, "queued_expired", 1_000))


def a_worker_that_was_not_given_it(tape: SyntheticTape) -> None:
    admitted = tape.admitted("x", 1_000)
    tape.emit(tape.chain("admission"), admitted)
    tape.emit(tape.chain("scheduler"), dispatched(admitted, 1, 9_000, worker="w7-aaaaaa"))
    tape.emit(tape.chain("worker", "w"), started("x", 1, 9_500, worker="w1-aaaaaa"))


def two_attempts_at_once(tape: SyntheticTape) -> None:
    admitted = tape.admitted("x", 1_000)
    tape.emit(tape.chain("admission"), admitted)
    tape.emit(tape.chain("scheduler"), dispatched(admitted, 1, 9_000))
    tape.emit(tape.chain("scheduler"), dispatched(admitted, 2, 9_100))


def a_worker_that_admits(tape: SyntheticTape) -> None:
    tape.emit(tape.chain("worker", "worker-w1-aaaaaa"), tape.admitted("x", 1_000))
    tape.numbers["acme"] -= 1


def admitted_twice(tape: SyntheticTape) -> None:
    tape.emit(tape.chain("admission"), tape.admitted("r1", 90_000))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (a_hole, "hole: nothing is known of sequences 22 to 22"),
        (an_unreadable_event, "unreadable event: sequence 22"),
        (a_number_left_out, "numbers: tenant acme: number 4 missing"),
        (a_number_twice, "numbers: tenant acme: number 3 given twice"),
        (a_forged_event, "chain broken: writer scheduler-0001 at counter 7"),
        (a_missing_event, "counters 7 to 7 are not in the record"),
        (two_ends, "request acme/r1: flag two_ends:failed"),
        (an_end_that_nobody_asked_for, "request acme/x: flag undispatched:completed"),
        (an_end_of_something_never_admitted, "request acme/ghost: flag missing:admitted"),
        (a_worker_that_was_not_given_it, "request acme/x: flag other_worker:started"),
        (two_attempts_at_once, "request acme/x: flag overlapping_attempts"),
        (a_worker_that_admits, "1 events were said by services that may not say them"),
        (admitted_twice, "request acme/r1: flag duplicate:admitted"),
    ],
)
def test_a_broken_invariant_is_found(
    tmp_path: Path, spoil: Callable[[SyntheticTape], None], said: str
) -> None:
    tape = healthy()
    assert tape.next_sequence == 22
    spoil(tape)
    tape.write(tmp_path)
    violations = check_log(tmp_path)
    assert [violation for violation in violations if said in violation], violations


def test_a_changed_byte_anywhere_in_an_event_is_found(tmp_path: Path) -> None:
    tape = healthy(2)
    # A seal by each writer, so that every event has one behind it that knows its hash.
    for chain in tape.chains.values():
        tape.seal(chain)
    tape.write(tmp_path)
    assert check_log(tmp_path) == []
    path = tmp_path / "log" / "i0" / "leaves-000000000000.bin"
    content = path.read_bytes()
    position = 0
    # Of every leaf but the seals at the end, one byte in the middle of its payload.
    for leaf in tape.leaves[: -len(tape.chains)]:
        place = position + 2 + len(leaf) - 100
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert check_log(tmp_path) != [], leaf
        position += 2 + len(leaf)


@given(removed=st.integers(3, 20))
def test_whichever_event_is_taken_out_it_is_missed(
    removed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tape = healthy(3)
    for chain in tape.chains.values():
        tape.seal(chain)
    leaves = [leaf for place, leaf in enumerate(tape.leaves) if place != removed]
    # Whoever takes it out also counts the sequences anew.
    tape.leaves = [
        leaf[:1] + sequence.to_bytes(8) + leaf[9:] for sequence, leaf in enumerate(leaves, start=1)
    ]
    data_dir = tmp_path_factory.mktemp("record")
    tape.write(data_dir)
    found = read_record(data_dir)
    # So short a record cannot tell it from a crash; the tail says which event is not there.
    assert check_log(data_dir) != [] or len(found.chains.tails) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "TAIL_EVENTS_MAX", 0)
        assert any("are not in the record" in line for line in check_log(data_dir))


def test_damage_and_absence_are_violations(tmp_path: Path) -> None:
    assert "expected the folder of at least one incarnation" in check_log(tmp_path)[0]
    healthy().write(tmp_path)
    path = tmp_path / "log" / "i0" / "leaves-000000000000.bin"
    content = bytearray(path.read_bytes())
    content[2] = 7
    path.write_bytes(content)
    (violation,) = check_log(tmp_path)
    assert "leaves-000000000000.bin at byte 0" in violation


def test_more_unreadable_events_than_are_named_are_counted(tmp_path: Path) -> None:
    tape = healthy()
    for _ in range(25):
        an_unreadable_event(tape)
    tape.write(tmp_path)
    violations = check_log(tmp_path)
    assert len([line for line in violations if line.startswith("unreadable event")]) == 20
    assert "5 more events cannot be read" in violations


def test_an_incarnation_shorter_than_its_successor_says_is_found(tmp_path: Path) -> None:
    tape = healthy()
    tape.write(tmp_path)
    writer = LogWriter(tmp_path)
    writer.begin(incarnation="i1", first_sequence=22, reason="rolled_back")
    writer.close()
    folder = tmp_path / "log" / "i0"
    path = folder / "leaves-000000000000.bin"
    content = path.read_bytes()[: -len(tape.leaves[-1]) - 2]
    path.write_bytes(content)
    (folder / "synced").write_text(f"file {0:012d} bytes {len(content):015d}\n")
    assert "incarnation i0 has 20 leaves, expected 21 as its successor says" in check_log(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"total_us": 101}, "segments sum to 100"),
        ({"segments": {"queue": 130, "decode": -30}}, "segment decode is -30"),
        ({"exec_us": 61}, "queue time 40 µs and execution clock 61 µs"),
        ({"segments": {"queue": -20, "decode": 120}}, "segment queue is -20"),
        (
            {"queue_us": -20, "exec_us": 120, "segments": {"queue": 40, "decode": 60}},
            "execution clock 120 µs exceeds the queue clock",
        ),
        ({"flags": ("late:started",)}, "flag late:started"),
        ({"flags": ("superseded:completed", "after_end:dispatched")}, ""),
        ({"segments": {"queue": 130, "decode": -30}, "flags": ("negative:decode",)}, ""),
        ({"total_us": None}, ""),
    ],
)
def test_what_must_hold_of_a_life(change: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {
        "tenant": "acme",
        "id": "r",
        "tier": "gold",
        "outcome": "completed",
        "arrival_us": 0,
        "total_us": 100,
        "queue_us": 40,
        "exec_us": 60,
        "segments": {"queue": 40, "decode": 60},
        "tries": 1,
        "lost": 0,
        "superseded": 0,
        "flags": (),
    }
    assert list(life_violations(Summary(**fields))) == []  # pyright: ignore[reportArgumentType] - one dict of all fields
    found = list(life_violations(Summary(**(fields | change))))  # pyright: ignore[reportArgumentType] - one dict of all fields
    assert bool(found) == bool(said)
    assert all(said in line for line in found[:1])


# --- more than one incarnation


def rolled_back(data_dir: Path, common: int, kept: SyntheticTape, new: SyntheticTape) -> None:
    """A record of ``kept``, and then of ``new``, which has its first ``common`` leaves."""
    kept.write(data_dir)
    writer = LogWriter(data_dir)
    writer.begin(incarnation="i1", first_sequence=common + 1, reason="rolled_back")
    writer.append(new.leaves[common:])
    writer.close()


def test_what_a_rollback_took_off_the_tape_is_kept_and_not_folded(tmp_path: Path) -> None:
    kept, new = healthy(2), healthy(1)
    common = len(new.leaves)
    for name, old in kept.chains.items():
        # The writers live on: what they wrote is lost, what they write next goes on from there.
        new.chains[name].counter, new.chains[name].head = old.counter, old.head
    # The tape lost r2, and the producer submitted r3 under the number that r2 had.
    new.run("r3", 70_000)
    rolled_back(tmp_path, common, kept, new)
    record = read_record(tmp_path)
    (tape,) = record.tapes
    assert sorted(tape.lives["acme"]) == ["r1", "r3"]
    assert record.abandoned == 6
    assert tape.numbers.faults() == []
    assert record.chains.breaks == []
    assert [part.leaves for part in record.parts] == [15, 6]
    assert record.head_sequence == 15
    content = b"".join(
        (tmp_path / "log" / name / "leaves-000000000000.bin").read_bytes() for name in ("i0", "i1")
    )
    assert record.sha256 == hashlib.sha256(content).hexdigest()
    assert (
        record.parts[0].sha256
        == hashlib.sha256(
            (tmp_path / "log" / "i0" / "leaves-000000000000.bin").read_bytes()
        ).hexdigest()
    )


def test_what_is_published_again_after_a_rollback_counts(tmp_path: Path) -> None:
    kept = healthy(2)
    new = healthy(2)
    # The same bytes, stored a little later: what had not been acknowledged was repeated.
    again = [
        encode_leaf(Leaf(sequence=16 + place, stored_ns=7, subject="wc.event.x._._"))
        for place in range(2)
    ]
    new.leaves = [*new.leaves[:9], *new.leaves[9:15]]
    kept.leaves += again
    rolled_back(tmp_path, 9, kept, new)
    record = read_record(tmp_path)
    (tape,) = record.tapes
    assert sorted(tape.lives["acme"]) == ["r1", "r2"]
    assert [summary.outcome for summary in tape.summaries()] == ["completed", "completed"]
    assert record.chains.breaks == []
    assert record.chains.repeated == 6


def test_a_tape_made_anew_is_another_one(tmp_path: Path) -> None:
    first, second = healthy(2), SyntheticTape()
    first.write(tmp_path)
    second.chains = {name: Chain(service="x", writer=f"{name}-2", key=b"k") for name in ("unused",)}
    second.emit(second.chain("admission", "admission-9"), second.admitted("r1", 9))
    writer = LogWriter(tmp_path)
    writer.begin(incarnation="i1", first_sequence=1, reason="replaced")
    writer.append(second.leaves)
    writer.close()
    record = read_record(tmp_path)
    assert [sorted(tape.lives["acme"]) for tape in record.tapes] == [["r1", "r2"], ["r1"]]
    found = check(tmp_path)
    assert found.violations == []
    assert found.open == ["acme/r1"]


def test_a_record_that_begins_in_the_middle_of_a_tape_misses_nothing_of_before(
    tmp_path: Path,
) -> None:
    tape = healthy(4)
    late = SyntheticTape(first_sequence=16)
    late.leaves = tape.leaves[15:]
    late.write(tmp_path)
    record = read_record(tmp_path)
    assert record.chains.breaks == []
    assert record.chains.tails == []
    assert record.tapes[0].numbers.faults() == []
    assert sorted(record.tapes[0].lives["acme"]) == ["r3", "r4"]


def test_a_life_without_its_events_is_a_fragment() -> None:
    tape = Tape()
    assert isinstance(tape.life("acme", "r"), Life)
    assert [summary.arrival_us for summary in tape.summaries()] == [None]
