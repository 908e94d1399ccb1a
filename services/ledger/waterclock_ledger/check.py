"""What must hold of every record, verified from outside: from the leaves and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from waterclock_ledger.files import LogDamaged, LogMissing
from waterclock_ledger.fold import Summary, Tape
from waterclock_ledger.record import Record, read_record

NEVER_FLAGS: Final = (
    "duplicate:admitted",
    "two_ends:",
    "undispatched:",
    "other_worker:",
    "overlapping_attempts",
    "missing:",
    "late:",
)
"""Flags (or what they begin with) that no crash and no race explains. The others mark what may
happen to a correct mesh: repetitions, ends of attempts given up, work overtaken by an end."""


class Check(Struct, frozen=True, kw_only=True):
    """What a check found."""

    violations: list[str]
    open: list[str]
    """``tenant/id`` of requests that were admitted and have not ended."""


def check_log(data_dir: Path) -> list[str]:
    """The violations alone; see ``check``."""
    return check(data_dir).violations


def check(data_dir: Path) -> Check:
    """Verify a record.

    * the sequences of every incarnation are contiguous, without a hole, and each incarnation is
      as long as its successor says
    * every event can be read, every writer's chain is unbroken, every tenant's numbers are
      1, 2, 3, … without a gap and without a repetition
    * an admitted request has at most one end that counts, and had all that must come before it
    * the segments of every request sum to its total exactly; queue time and execution clock
      too; no segment is negative without a flag, and no execution clock exceeds its queue
      clock without one
    """
    try:
        record = read_record(data_dir)
    except (LogDamaged, LogMissing) as error:
        return Check(violations=[str(error)], open=[])
    violations = list(_record_violations(record))
    still_open: list[str] = []
    for tape in record.tapes:
        violations += _tape_violations(tape)
        for summary in tape.summaries():
            name = f"{summary.tenant}/{summary.id}"
            if summary.outcome == "open" and summary.arrival_us is not None:
                still_open.append(name)
            violations += [f"request {name}: {found}" for found in life_violations(summary)]
    return Check(violations=violations, open=still_open)


def life_violations(summary: Summary) -> Iterator[str]:
    """What must hold of one life."""
    for flag in summary.flags:
        if flag.startswith(NEVER_FLAGS):
            yield f"flag {flag}"
    if summary.total_us is None:
        return
    together = sum(summary.segments.values())
    if together != summary.total_us:
        yield f"segments sum to {together} µs, expected the total, {summary.total_us} µs"
    for segment, duration_us in summary.segments.items():
        if duration_us < 0 and f"negative:{segment}" not in summary.flags:
            yield f"segment {segment} is {duration_us} µs and not flagged"
    if summary.exec_us is None or summary.queue_us is None:
        return
    if summary.queue_us + summary.exec_us != summary.total_us:
        yield (
            f"queue time {summary.queue_us} µs and execution clock {summary.exec_us} µs,"
            f" expected to sum to {summary.total_us} µs"
        )
    negative = any(flag.startswith("negative:") for flag in summary.flags)
    if summary.exec_us > summary.total_us and not negative:
        yield (
            f"execution clock {summary.exec_us} µs exceeds the queue clock,"
            f" {summary.total_us} µs, and no segment is flagged"
        )


def _record_violations(record: Record) -> Iterator[str]:
    for first, last in record.hole_ranges:
        yield f"hole: nothing is known of sequences {first} to {last}"
    for part, following in zip(record.parts, record.parts[1:], strict=False):
        if part.leaves != following.head.previous_size:
            yield (
                f"incarnation {part.head.incarnation} has {part.leaves} leaves, expected"
                f" {following.head.previous_size} as its successor says"
            )
    yield from (f"unreadable event: {named}" for named in record.unreadable_named)
    if record.unreadable > len(record.unreadable_named):
        yield f"{record.unreadable - len(record.unreadable_named)} more events cannot be read"
    yield from (f"chain broken: {found}" for found in record.chains.breaks)


def _tape_violations(tape: Tape) -> Iterator[str]:
    yield from (f"numbers: {fault}" for fault in tape.numbers.faults())
    if tape.foreign:
        yield f"{tape.foreign} events were said by services that may not say them"
