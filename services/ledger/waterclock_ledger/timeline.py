"""One request, drawn: its segments as a bar, its attempts, its stamps, its flags.

Everything but the names that people gave is ASCII, so that the bar has the same width in every
terminal and in every language; in the names Chinese characters count as two columns.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from waterclock_ledger.files import LogMissing, effective_ends, incarnations, open_reader
from waterclock_ledger.fold import Life, Tape, Try, apply, missing_flags
from waterclock_ledger.report import columns, milliseconds, table
from waterclock_proto.envelope import EventRefused, decode_event
from waterclock_proto.events import (
    Admitted,
    Completed,
    Dispatched,
    EventData,
    Failed,
    Rejected,
    RequestEventData,
    TerminalData,
)
from waterclock_proto.segments import SEGMENTS
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import EVENT_PREFIX

WIDTH_MIN: Final = 40
_FENCED: Final = re.compile(
    rb'"source":"/waterclock/(scheduler|admission)".*?"fence":(\d{1,19})', re.DOTALL
)
"""In the order in which the codec writes an envelope; quotes within a text are escaped."""
LETTERS: Final = dict(
    zip(SEGMENTS, ("e", "b", "a", "q", "r", "d", "w", "p", "t", "y"), strict=True)
)
"""One for each segment of the bar; ``t`` is for tokens, and ``y`` ends delivery."""


class Timeline(Struct, kw_only=True):
    """A request as one tape of the record has it."""

    incarnation: str
    """The first of the tape."""
    life: Life
    events: list[tuple[int, EventData]]
    """All that is said of it, with sequences, in order; also what does not count."""
    abandoned: int
    """Events about it that a rollback took off the tape; not among ``events``."""


def find_timelines(data_dir: Path, tenant: str, request_id: str) -> list[Timeline]:
    """The request on every tape that knows it: one, unless the stream was made anew.

    Raises:
        LogMissing, LogDamaged: see ``read_record``.
    """
    heads = incarnations(data_dir)
    if not heads:
        raise LogMissing(f"{data_dir / 'log'}: expected a record, found no incarnation")
    found: list[Timeline] = []
    tape = Tape()
    for head, end in zip(heads, effective_ends(heads), strict=True):
        if head.reason != "rolled_back" or not found:
            tape = Tape(open_start=head.first_sequence > 1, settle_after=None)
            found.append(
                Timeline(
                    incarnation=head.incarnation,
                    life=Life(tenant=tenant, id=request_id),
                    events=[],
                    abandoned=0,
                )
            )
        timeline = found[-1]
        for batch in open_reader(data_dir, head):
            for leaf in batch.leaves:
                if leaf.hole or not (
                    _may_name(leaf.subject, leaf.payload, tenant, request_id)
                    or _raises_fence(tape, leaf.payload)
                ):
                    continue
                try:
                    envelope = decode_event(leaf.subject, leaf.payload)
                except EventRefused:
                    continue
                data = envelope.data
                named = isinstance(data, RequestEventData | Rejected) and (
                    data.tenant,
                    data.id,
                ) == (tenant, request_id)
                if end is not None and leaf.sequence >= end:
                    timeline.abandoned += named
                    continue
                apply(tape, envelope, leaf.sequence)
                if named:
                    timeline.events.append((leaf.sequence, data))
        life = tape.find(tenant, request_id)
        if isinstance(life, Life):
            timeline.life = life
    return [timeline for timeline in found if timeline.events or timeline.abandoned]


def request_text(data_dir: Path, tenant: str, request_id: str, *, width: int = 100) -> str:
    """The page about one request.

    Args:
        data_dir: The ledger's data folder.
        tenant: Together with ``request_id`` the request's identity.
        request_id: See above.
        width: Columns of the terminal; at least ``WIDTH_MIN`` are used.

    Raises:
        LogMissing: there is no record, or the request is not in it.
    """
    timelines = find_timelines(data_dir, tenant, request_id)
    if not timelines:
        raise LogMissing(
            f"request {tenant}/{request_id}: expected at least one event about it, found none"
        )
    lines: list[str] = []
    for timeline in timelines:
        if lines:
            lines.append("")
        if len(timelines) > 1:
            lines.append(f"On the tape that began with incarnation {timeline.incarnation}")
        lines += _page(timeline, max(width, WIDTH_MIN))
    return "\n".join([*lines, ""])


def bar(segments: dict[str, int], width: int) -> str:
    """A bar of exactly ``width`` characters, each segment as wide as its share of the whole.

    Shares are rounded so that the widths sum (largest remainder, ties to the earlier segment).
    Negative segments have no width, and none is drawn where nothing is positive.
    """
    positive = [(name, segments[name]) for name in SEGMENTS if segments.get(name, 0) > 0]
    whole = sum(duration for _, duration in positive)
    if whole == 0:
        return ""
    # The whole parts never take more than there is, so that what is left is shared out again.
    widths = [duration * width // whole for _, duration in positive]
    remainders = sorted(
        range(len(positive)), key=lambda place: (-(positive[place][1] * width % whole), place)
    )
    for place in remainders[: width - sum(widths)]:
        widths[place] += 1
    return "".join(
        LETTERS[name] * columns_ for (name, _), columns_ in zip(positive, widths, strict=True)
    )


def _may_name(subject: str, payload: bytes, tenant: str, request_id: str) -> bool:
    """Whether it is worth decoding: an event of the tenant that has the id somewhere in it."""
    _, _, rest = subject.removeprefix(EVENT_PREFIX).partition(".")
    return rest.partition(".")[0] == tenant and request_id.encode() in payload


def _raises_fence(tape: Tape, payload: bytes) -> bool:
    """Whether the tape must see it to know which later events do not count."""
    found = _FENCED.search(payload)
    if found is None:
        return False
    fence = tape.scheduler if found[1] == b"scheduler" else tape.admission
    return int(found[2]) > fence.highest


def _page(timeline: Timeline, width: int) -> Iterator[str]:
    life = timeline.life
    yield _fit(f"{life.tenant}/{life.id}  {_headline(life)}", width)
    measured = life.measured()
    if measured is not None:
        yield (
            f"queue clock {milliseconds(measured.total_us)} ms"
            f" = queue time {milliseconds(measured.queue_us)}"
            f" + exec clock {milliseconds(measured.exec_us)}"
        )
        yield ""
        yield bar(measured.segments, width)
        yield ""
        rows = [
            [
                LETTERS[name],
                name,
                milliseconds(measured.segments[name]),
                _share(measured.segments[name], measured.total_us),
            ]
            for name in SEGMENTS
            if name in measured.segments
        ]
        yield from table(["", "segment", "ms", "share"], rows, left=2)
    flags = [
        *life.flags,
        *(missing_flags(life) if timeline.events else ()),
        *(measured.flags if measured else ()),
    ]
    yield ""
    yield "flags: " + (", ".join(flags) or "none")
    if timeline.abandoned:
        yield f"{timeline.abandoned} events about it were taken off the tape by a rollback"
    if life.resubmissions:
        yield f"submitted again {life.resubmissions} times"
    yield from _attempts(life, width)
    yield ""
    yield from _stamps(timeline.events, width)


def _headline(life: Life) -> str:
    parts: list[str] = []
    if life.admitted is not None:
        parts += [life.admitted.tier, life.admitted.model]
    parts.append(life.outcome)
    end = life.end
    if isinstance(end, Completed):
        parts.append(f"({end.finish_reason}, {end.output_tokens} tokens)")
    elif isinstance(end, Failed | Rejected):
        parts.append(f"({end.reason})")
    return "  ".join(parts)


def _attempts(life: Life, width: int) -> Iterator[str]:
    counted = life.counted_try()
    for a_try in life.tries:
        yield from _wrapped(_attempt(a_try, life, counts=a_try is counted), width)
    if life.end is not None and counted is None:
        yield f"ended without a worker at sequence {life.end_sequence}"
    for sequence, end in life.superseded:
        attempt = f" of attempt {end.attempt}" if isinstance(end, TerminalData) else ""
        yield f"superseded: {end.TYPE}{attempt} at sequence {sequence}"


def _attempt(a_try: Try, life: Life, *, counts: bool) -> list[str]:
    sent = a_try.dispatched
    parts = [
        f"attempt {a_try.number}: {sent.worker} in pool {sent.pool}",
        f"{sent.policy} took it at place {sent.place} of {sent.depth}",
    ]
    if a_try.started is not None:
        parts.append("started")
    if a_try.first is not None:
        parts.append("first token")
    lost = life.losses.get(a_try.number)
    if lost is not None:
        parts.append(f"lost ({lost.reason})")
    if counts:
        parts.append(f"{life.outcome} at sequence {life.end_sequence}")
    return parts


def _stamps(events: Sequence[tuple[int, EventData]], width: int) -> list[str]:
    """Every stamp as it was recorded; of the columns as many as have room."""
    header = ["sequence", "event", "stamp", "wall (UTC)", "+/- us", "source", "mono ns", "boot"]
    rows: list[list[str]] = []
    for sequence, data in events:
        stamps = [
            (field, value)
            for field in data.__struct_fields__
            if isinstance(value := getattr(data, field), Stamp)
            # A dispatch repeats these for its worker.
            and not (isinstance(data, Dispatched) and field in Admitted.__struct_fields__)
        ]
        rows += [
            [
                str(sequence),
                data.TYPE,
                field,
                utc(value.wall_us),
                "-" if value.error_us is None else str(value.error_us),
                value.source,
                "-" if value.mono_ns is None else str(value.mono_ns),
                value.boot or "-",
            ]
            for field, value in stamps
        ]
    for kept in range(len(header), 3, -1):
        lines = table(header[:kept], [row[:kept] for row in rows], left=4)
        if max(map(columns, lines)) <= width:
            return lines
    return table(header[2:4], [row[2:4] for row in rows], left=2)


def utc(wall_us: int) -> str:
    """``2026-01-02 03:04:05.678901``; the bare number where no calendar has it."""
    seconds, rest = divmod(wall_us, 1_000_000)
    try:
        at = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
            seconds=seconds
        )
    except OverflowError:
        return str(wall_us)
    return f"{at:%Y-%m-%d %H:%M:%S}.{rest:06d}"


def _share(part: int, whole: int) -> str:
    if whole <= 0:
        return "-"
    tenths = part * 1000 // whole
    return f"{'-' if tenths < 0 else ''}{abs(tenths) // 10}.{abs(tenths) % 10}%"


def _wrapped(parts: Sequence[str], width: int) -> Iterator[str]:
    """The parts with commas between them, in lines that have room for them; a long one is cut."""
    line = ""
    for part in parts:
        if line and columns(f"{line}, {part}") > width - 1:
            yield f"{line},"
            line = f"  {part}"
        else:
            line = f"{line}, {part}" if line else part
        line = _fit(line, width - 1)
    yield line


def _fit(text: str, width: int) -> str:
    """The text, or as much of it as has room before three dots."""
    if columns(text) <= width:
        return text
    while columns(text) > width - 3:
        text = text[:-1]
    return text + "..."
