"""Where the record goes on when it meets the tape again. Values in, values out."""

from collections.abc import Collection, Sequence
from typing import Final

from msgspec import Struct

from waterclock_ledger.files import LogHead
from waterclock_proto.events import LogOpened

HOLES_MAX: Final = 10_000_000
"""A wider gap is not filled with holes, one leaf each (21 bytes on disk): a new incarnation
begins behind it."""


class Continue(Struct, frozen=True):
    """The tape still has what the record has; read on."""

    next_sequence: int


class RolledBack(Struct, frozen=True):
    """The tape has another history from this sequence on, and the same before it."""

    first_sequence: int


class Replaced(Struct, frozen=True):
    """Nothing that can still be read is as the record has it: this is another tape."""

    first_sequence: int


Continuation = Continue | RolledBack | Replaced


class Overlap(Struct, frozen=True):
    """The sequences that both the tape and the record have; none if ``low > high``."""

    low: int
    high: int


def overlap(*, stream_first: int, stream_last: int, tape_first: int, next_sequence: int) -> Overlap:
    """What can be compared.

    Args:
        stream_first: First sequence that the stream still has.
        stream_last: Last sequence of the stream; ``stream_first - 1`` if it is empty.
        tape_first: First sequence of the present tape in the record.
        next_sequence: What the record expects next.
    """
    return Overlap(max(stream_first, tape_first), min(stream_last, next_sequence - 1))


def judge(
    both: Overlap,
    *,
    differs_from: int | None,
    stream_first: int,
    stream_last: int,
    next_sequence: int,
) -> Continuation:
    """How the record goes on.

    ``differs_from``: the first sequence of ``both`` at which tape and record differ; None if
    they do not. A stream only ever loses its end, so from there on everything differs.
    """
    if differs_from is not None:
        assert both.low <= differs_from <= both.high
        return Replaced(stream_first) if differs_from == both.low else RolledBack(differs_from)
    if stream_last < next_sequence - 1:
        # Shorter than the record. Without anything in common nobody can say that it is the same.
        if both.low > both.high:
            return Replaced(stream_first)
        return RolledBack(stream_last + 1)
    if stream_first - next_sequence > HOLES_MAX:
        return Replaced(stream_first)
    return Continue(next_sequence)


def governs(opened: LogOpened, *, first_sequence: int, known: Collection[str]) -> bool:
    """Whether a record that begins at ``first_sequence`` belongs to this incarnation.

    What the tape no longer has of it becomes holes, so that its leaves keep their index.
    """
    return (
        opened.incarnation not in known
        and opened.first_sequence <= first_sequence <= opened.first_sequence + HOLES_MAX
    )


def reopens(opened: LogOpened, *, sequence: int, heads: Sequence[LogHead], tape_first: int) -> bool:
    """Whether a ``log_opened`` met while reading closes the present incarnation.

    It does if another ledger opened it, for a rollback that this record never saw because it
    was made later. What a provisioner says about a stream that already has an incarnation
    changes nothing, nor does a second opinion about the same rollback.
    """
    present = heads[-1]
    return (
        opened.reason != "created"
        and all(opened.incarnation != head.incarnation for head in heads)
        and tape_first <= opened.first_sequence <= sequence
        and not (
            present.reason == "rolled_back" and opened.first_sequence == present.first_sequence
        )
    )
