"""One pass over a record: every leaf read once, hashed, checked against its chain and folded.

Incarnations that go on with one tape (``rolled_back``) are folded as one: what an incarnation
holds from the next one's first sequence on was on the tape once and is not any more. Such
events are counted as abandoned and not folded, because the mesh, which reads the tape, does
not know them; their writers' chains are checked nevertheless, because they were written.
"""

import contextlib
import gc
import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import Final

from msgspec import Struct

from waterclock_ledger.chains import Chains
from waterclock_ledger.files import (
    LogHead,
    LogMissing,
    Torn,
    effective_ends,
    incarnations,
    open_reader,
)
from waterclock_ledger.fold import SETTLE_SEQUENCES, Tape, apply
from waterclock_proto.envelope import EventRefused, decode_event
from waterclock_proto.leaves import Leaf

UNREADABLE_NAMED_MAX: Final = 20
"""So many events that cannot be read are named; all are counted."""
UNREADABLE_CHARACTERS_MAX: Final = 160
"""What is said of each: whoever wrote it chose some of the words."""


class Part(Struct, kw_only=True):
    """What was found of one incarnation."""

    head: LogHead
    leaves: int = 0
    sha256: str = ""
    """Over the record up to the end of this incarnation."""


class Record(Struct, kw_only=True):
    """A record, read."""

    parts: list[Part]
    tapes: list[Tape]
    """One for each tape: a stream that was made anew is another one."""
    chains: Chains
    events: int = 0
    events_by_type: dict[str, int]
    hole_ranges: list[tuple[int, int]]
    """First and last sequence of each."""
    holes: int = 0
    abandoned: int = 0
    unreadable: int = 0
    unreadable_named: list[str]
    torn: Torn | None = None
    head_sequence: int = 0
    """The last sequence of the last incarnation; 0 in an empty record."""
    sha256: str
    """Over the leaf files in order: of one incarnation, ``cat leaves-*.bin | sha256sum``."""


def read_record(data_dir: Path, *, settle_after: int | None = SETTLE_SEQUENCES) -> Record:
    """Read all that is in the record now. Writes nothing, and needs nothing that runs.

    Raises:
        LogMissing: no record there.
        LogDamaged: a file is not what a writer wrote.
    """
    heads = incarnations(data_dir)
    if not heads:
        raise LogMissing(
            f"{data_dir / 'log'}: expected the folder of at least one incarnation, found none."
            " Name the ledger's own data folder"
        )
    with _no_cycle_collection():
        return _read(data_dir, heads, settle_after)


def _read(data_dir: Path, heads: list[LogHead], settle_after: int | None) -> Record:
    first = heads[0].first_sequence
    hasher = hashlib.sha256()
    seen_on_tape: Chains | None = None
    record = Record(
        parts=[],
        tapes=[],
        chains=Chains(open_start=first > 1),
        events_by_type={},
        hole_ranges=[],
        unreadable_named=[],
        sha256="",
    )
    for head, end in zip(heads, effective_ends(heads), strict=True):
        if head.reason != "rolled_back" or not record.tapes:
            record.tapes.append(Tape(open_start=head.first_sequence > 1, settle_after=settle_after))
            # What was said twice is known from the writers' chains. A writer may have said on one
            # tape what it repeats on the next, so where there are several, each has its own count.
            seen_on_tape = Chains() if len(heads) > 1 else None
        part = Part(head=head)
        record.parts.append(part)
        reader = open_reader(data_dir, head)
        for batch in reader:
            hasher.update(batch.framed)
            part.leaves += len(batch.leaves)
            for leaf in batch.leaves:
                if leaf.hole:
                    _note_hole(record, leaf.sequence)
                else:
                    abandoned = end is not None and leaf.sequence >= end
                    _note_event(record, leaf, seen_on_tape, abandoned=abandoned)
        part.sha256 = hasher.copy().hexdigest()
        record.torn = record.torn or reader.torn
        record.head_sequence = head.first_sequence + part.leaves - 1
    record.sha256 = hasher.hexdigest()
    record.events_by_type = dict(sorted(record.events_by_type.items()))
    return record


@contextlib.contextmanager
def _no_cycle_collection() -> Generator[None]:
    """What is read has no cycles; looking for some takes a fifth of the time of a long record."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _note_hole(record: Record, sequence: int) -> None:
    record.holes += 1
    if record.hole_ranges and record.hole_ranges[-1][1] == sequence - 1:
        record.hole_ranges[-1] = (record.hole_ranges[-1][0], sequence)
    else:
        record.hole_ranges.append((sequence, sequence))


def _note_event(
    record: Record, leaf: Leaf, seen_on_tape: Chains | None, *, abandoned: bool
) -> None:
    record.events += 1
    try:
        envelope = decode_event(leaf.subject, leaf.payload)
    except EventRefused as error:
        record.unreadable += 1
        if len(record.unreadable_named) < UNREADABLE_NAMED_MAX:
            text = str(error)[:UNREADABLE_CHARACTERS_MAX]
            record.unreadable_named.append(f"sequence {leaf.sequence}: {text}")
        return
    kind = envelope.data.TYPE
    record.events_by_type[kind] = record.events_by_type.get(kind, 0) + 1
    sha256 = hashlib.sha256(leaf.payload).digest()
    at = {"sequence": leaf.sequence, "stored_ns": leaf.stored_ns}
    seen = record.chains.observe(envelope, sha256, **at)
    if abandoned:
        record.abandoned += 1
        return
    if seen_on_tape is not None:
        seen = seen_on_tape.observe(envelope, sha256, **at)
    if seen == "new":
        apply(record.tapes[-1], envelope, leaf.sequence)
