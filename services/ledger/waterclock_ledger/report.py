"""The report of a replay: counts, percentiles of every segment and of both clocks.

A report is a function of the record and of the question, and of nothing else: no clock, no
float, no order that a hash table chose. Two people with the same record get the same bytes.

Percentiles are nearest-rank: P99 of N values is the ⌈0.99·N⌉-th smallest, so it is a value
that was measured. Milliseconds are written from integer microseconds with all three decimals.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from waterclock_ledger.fold import Summary
from waterclock_ledger.record import Record, read_record
from waterclock_proto.segments import SEGMENTS

Clock = Literal["queue", "exec"]

OUTCOMES: Final = ("completed", "failed", "cancelled", "expired", "rejected", "open")
EXECUTION_SEGMENTS: Final = ("prefill", "decode", "delivery")
"""Those that the execution clock consists of: from the engine's scheduling to the end."""
MEASURES: Final = (*SEGMENTS, "queue_time", "exec_clock", "queue_clock")
"""``queue_time``: arrival to execution start. ``exec_clock``: execution start to end.
``queue_clock``: arrival to end, the sum of both, and of all segments."""
FAULTS_NAMED_MAX: Final = 20
"""So many faults of a kind are named; all are counted."""

_CLOCK_TEXT: Final = {
    "queue": "queue (arrival to end)",
    "exec": "exec (the engine's scheduling to end)",
}


class Spread(Struct, frozen=True, kw_only=True):
    """How a measure is spread over ``n`` requests, in microseconds, nearest rank."""

    n: int
    p50_us: int
    p90_us: int
    p99_us: int
    max_us: int


class Group(Struct, frozen=True, kw_only=True):
    """One tenant and tier."""

    tenant: str
    tier: str
    submissions: int
    """Requests that were admitted, and submissions that were refused."""
    outcomes: dict[str, int]
    refused: dict[str, int]
    """Submissions that admission refused, by reason; they are in ``outcomes`` as rejected."""
    attempts_lost: int
    superseded: int
    flags: dict[str, int]
    """How many requests bear each."""
    ended: dict[str, Spread]
    """By measure, over all requests that were admitted and ended, however they ended."""
    by_outcome: dict[str, dict[str, Spread]]


class PartTotals(Struct, frozen=True, kw_only=True):
    incarnation: str
    reason: str
    first_sequence: int
    leaves: int
    sha256: str


class Totals(Struct, frozen=True, kw_only=True):
    """The whole record, whatever was asked about."""

    head_sequence: int
    sha256: str
    incarnations: list[PartTotals]
    events: int
    events_by_type: dict[str, int]
    holes: int
    unreadable: int
    abandoned: int
    repeated: int
    fenced_off: int
    foreign: int
    resubmitted: int
    fragments: int
    """Requests of which the record has no ``admitted``."""
    writers: int
    chain_breaks: int
    chain_tails: int
    number_faults: int
    torn_bytes: int


class Report(Struct, frozen=True, kw_only=True):
    """The answer to one question about one record."""

    format: Literal["waterclock-report-1"] = "waterclock-report-1"
    clock: Clock
    tenant: str | None
    since_us: int | None
    totals: Totals
    groups: list[Group]
    faults: list[str]
    """The first few of each kind, in words."""

    def to_json(self) -> bytes:
        """Indented JSON with a line feed at the end."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def to_text(self) -> str:
        """A page for people, with a line feed at the end."""
        return render(self)


def replay(
    data_dir: Path, clock: Clock = "queue", tenant: str | None = None, since_us: int | None = None
) -> Report:
    """Read a ledger's record and say what it shows.

    Args:
        data_dir: The ledger's data folder. It is only read; nothing has to run.
        clock: Which clock the first table is about.
        tenant: Show this tenant alone. The totals are of the whole record in any case.
        since_us: Leave out what arrived before this Unix time in microseconds.

    Raises:
        LogMissing, LogDamaged: see ``read_record``.
    """
    return build(read_record(data_dir), clock=clock, tenant=tenant, since_us=since_us)


def build(
    record: Record,
    *,
    clock: Clock = "queue",
    tenant: str | None = None,
    since_us: int | None = None,
) -> Report:
    """The report of a record that has been read."""
    tallies: dict[tuple[str, str], _Tally] = {}
    fragments = 0
    for tape in record.tapes:
        for refusal in tape.refusals:
            if tenant not in (None, refusal.tenant):
                continue
            if since_us is not None and refusal.arrival_us < since_us:
                continue
            tally = tallies.setdefault((refusal.tenant, refusal.tier), _Tally())
            tally.refuse(refusal.reason, refusal.count)
        for summary in tape.summaries():
            if summary.arrival_us is None:
                fragments += "missing:admitted" in summary.flags
                continue
            if tenant not in (None, summary.tenant):
                continue
            if since_us is not None and summary.arrival_us < since_us:
                continue
            tallies.setdefault((summary.tenant, summary.tier), _Tally()).add(summary)
    return Report(
        clock=clock,
        tenant=tenant,
        since_us=since_us,
        totals=_totals(record, fragments),
        groups=[tallies[key].group(*key) for key in sorted(tallies)],
        faults=list(_faults(record)),
    )


def spread(values: Sequence[int]) -> Spread:
    """The nearest-rank percentiles of at least one value."""
    ordered = sorted(values)
    return Spread(
        n=len(ordered),
        p50_us=nearest_rank(ordered, 50),
        p90_us=nearest_rank(ordered, 90),
        p99_us=nearest_rank(ordered, 99),
        max_us=ordered[-1],
    )


def nearest_rank(ordered: Sequence[int], percent: int) -> int:
    """The ⌈percent·N/100⌉-th smallest of N ordered values; ``percent`` is 1 to 100."""
    rank = (percent * len(ordered) + 99) // 100
    return ordered[rank - 1]


def milliseconds(microseconds: int | None) -> str:
    """``-1.234`` for -1234: all three decimals, no float; ``-`` for what is not known."""
    if microseconds is None:
        return "-"
    whole, rest = divmod(abs(microseconds), 1000)
    return f"{'-' if microseconds < 0 else ''}{whole}.{rest:03d}"


def columns(text: str) -> int:
    """How many columns of a terminal a text takes; Chinese characters take two."""
    return sum(
        0
        if unicodedata.combining(character)
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Aligned lines: the first ``left`` columns to the left, the others to the right."""
    everything = [header, *rows]
    widths = [max(columns(row[place]) for row in everything) for place in range(len(header))]
    lines: list[str] = []
    for row in everything:
        cells = [
            text + " " * (width - columns(text))
            if place < left
            else " " * (width - columns(text)) + text
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def render(report: Report) -> str:
    """The report as a page of plain text."""
    return "\n".join([*_head_lines(report), *_group_lines(report), *_fault_lines(report), ""])


def _head_lines(report: Report) -> Iterator[str]:
    totals = report.totals
    yield "Waterclock replay"
    yield ""
    yield f"clock       {_CLOCK_TEXT[report.clock]}"
    if report.tenant is not None:
        yield f"tenant      {report.tenant}"
    if report.since_us is not None:
        yield f"since       {report.since_us} µs"
    yield f"head        sequence {totals.head_sequence}"
    yield f"sha256      {totals.sha256}"
    for part in totals.incarnations:
        last = part.first_sequence + part.leaves - 1
        span = f"sequences {part.first_sequence} to {last}" if part.leaves else "empty"
        yield f"incarnation {part.incarnation}: {part.reason}, {span}"
    yield f"events      {totals.events} in {len(totals.events_by_type)} types"
    for kind, count in totals.events_by_type.items():
        yield f"            {kind:<18} {count:>9}"
    yield (
        f"writers     {totals.writers}; broken chains {totals.chain_breaks},"
        f" tails of a crash {totals.chain_tails}"
    )
    yield (
        f"faults      holes {totals.holes}, numbers {totals.number_faults},"
        f" unreadable {totals.unreadable}, fragments {totals.fragments}"
    )
    yield (
        f"set aside   repeated {totals.repeated}, fenced off {totals.fenced_off},"
        f" foreign {totals.foreign}, rolled back {totals.abandoned}, torn bytes {totals.torn_bytes}"
    )


def _group_lines(report: Report) -> Iterator[str]:
    yield ""
    if not report.groups:
        yield "no submissions"
        return
    clock = "queue_clock" if report.clock == "queue" else "exec_clock"
    yield f"Submissions, and the {report.clock} clock in ms over those admitted and ended"
    rows: list[list[str]] = []
    for group in report.groups:
        counts = [str(group.outcomes[outcome]) for outcome in OUTCOMES]
        rows.append(
            [
                group.tenant,
                group.tier,
                str(group.submissions),
                *counts,
                *_cells(group.ended.get(clock)),
            ]
        )
    header = ["tenant", "tier", "N", *OUTCOMES, "n", "P50", "P90", "P99", "max"]
    yield from table(header, rows, left=2)
    measures = MEASURES if report.clock == "queue" else (*EXECUTION_SEGMENTS, "exec_clock")
    for group in report.groups:
        yield ""
        yield f"{group.tenant} / {group.tier}: ms over all admitted and ended"
        rows = [
            [measure, *_cells(group.ended[measure])]
            for measure in measures
            if measure in group.ended
        ]
        if rows:
            yield from table(["measure", "n", "P50", "P90", "P99", "max"], rows, left=1)
        if group.refused:
            yield "refused     " + ", ".join(f"{why} {n}" for why, n in group.refused.items())
        if group.attempts_lost or group.superseded:
            yield f"attempts    lost {group.attempts_lost}, ends superseded {group.superseded}"
        if group.flags:
            yield "flags       " + ", ".join(f"{flag} {n}" for flag, n in group.flags.items())


def _fault_lines(report: Report) -> Iterator[str]:
    if report.faults:
        yield ""
        yield "Faults of the record (the first few of each kind)"
        yield from report.faults


def _cells(found: Spread | None) -> list[str]:
    if found is None:
        return ["0", "-", "-", "-", "-"]
    return [
        str(found.n),
        *(
            milliseconds(value)
            for value in (found.p50_us, found.p90_us, found.p99_us, found.max_us)
        ),
    ]


def _totals(record: Record, fragments: int) -> Totals:
    return Totals(
        head_sequence=record.head_sequence,
        sha256=record.sha256,
        incarnations=[
            PartTotals(
                incarnation=part.head.incarnation,
                reason=part.head.reason,
                first_sequence=part.head.first_sequence,
                leaves=part.leaves,
                sha256=part.sha256,
            )
            for part in record.parts
        ],
        events=record.events,
        events_by_type=record.events_by_type,
        holes=record.holes,
        unreadable=record.unreadable,
        abandoned=record.abandoned,
        repeated=record.chains.repeated,
        fenced_off=sum(tape.fenced_off for tape in record.tapes),
        foreign=sum(tape.foreign for tape in record.tapes),
        resubmitted=sum(tape.resubmitted for tape in record.tapes),
        fragments=fragments,
        writers=record.chains.writers,
        chain_breaks=len(record.chains.breaks),
        chain_tails=len(record.chains.tails),
        number_faults=sum(len(tape.numbers.faults()) for tape in record.tapes),
        torn_bytes=record.torn.torn_bytes if record.torn else 0,
    )


def _faults(record: Record) -> Iterator[str]:
    holes = [
        f"hole: sequence {first}" if first == last else f"hole: sequences {first} to {last}"
        for first, last in record.hole_ranges
    ]
    numbers = [f"numbers: {fault}" for tape in record.tapes for fault in tape.numbers.faults()]
    chains = [f"chain: {found}" for found in record.chains.breaks]
    tails = [
        f"tail: writer {tail.writer} lacks counters {tail.missing_first} to {tail.missing_last}"
        f" before its last {tail.behind}"
        for tail in record.chains.tails
    ]
    unreadable = [f"unreadable: {named}" for named in record.unreadable_named]
    for kind in (holes, numbers, chains, tails, unreadable):
        yield from kind[:FAULTS_NAMED_MAX]


class _Tally:
    """What is counted for one tenant and tier."""

    def __init__(self) -> None:
        self._outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._refused: dict[str, int] = {}
        self._flags: dict[str, int] = {}
        self._lost = 0
        self._superseded = 0
        self._values: dict[str, dict[str, list[int]]] = {}

    def refuse(self, reason: str, count: int) -> None:
        self._outcomes["rejected"] += count
        self._refused[reason] = self._refused.get(reason, 0) + count

    def add(self, summary: Summary) -> None:
        self._outcomes[summary.outcome] += 1
        self._superseded += summary.superseded
        self._lost += summary.lost
        for flag in summary.flags:
            self._flags[flag] = self._flags.get(flag, 0) + 1
        if summary.total_us is None:
            return
        values = self._values.setdefault(summary.outcome, {})
        for measure, value in (
            *summary.segments.items(),
            ("queue_time", summary.queue_us),
            ("exec_clock", summary.exec_us),
            ("queue_clock", summary.total_us),
        ):
            if value is not None:
                values.setdefault(measure, []).append(value)

    def group(self, tenant: str, tier: str) -> Group:
        together: dict[str, list[int]] = {}
        for values in self._values.values():
            for measure, found in values.items():
                together.setdefault(measure, []).extend(found)
        return Group(
            tenant=tenant,
            tier=tier,
            submissions=sum(self._outcomes.values()),
            outcomes=self._outcomes,
            refused=dict(sorted(self._refused.items())),
            attempts_lost=self._lost,
            superseded=self._superseded,
            flags=dict(sorted(self._flags.items())),
            ended=_spreads(together),
            by_outcome={
                outcome: _spreads(self._values[outcome])
                for outcome in OUTCOMES
                if outcome in self._values
            },
        )


def _spreads(values: dict[str, list[int]]) -> dict[str, Spread]:
    return {measure: spread(values[measure]) for measure in MEASURES if measure in values}
