"""Where the record goes on: tables of what the tape may look like when it is met again."""

import pytest

from waterclock_ledger import core
from waterclock_ledger.core import Continue, Overlap, Replaced, RolledBack
from waterclock_ledger.files import LogHead
from waterclock_proto.events import LogOpened
from waterclock_proto.stamps import Stamp


@pytest.mark.parametrize(
    ("stream", "record", "differs_from", "expected"),
    [
        # stream: first and last; record: first sequence of its tape and the next one it expects.
        pytest.param((1, 100), (1, 81), None, Continue(81), id="behind"),
        pytest.param((1, 80), (1, 81), None, Continue(81), id="up to date"),
        pytest.param((60, 100), (1, 81), None, Continue(81), id="its beginning expired"),
        pytest.param((90, 100), (1, 81), None, Continue(81), id="expired past the record"),
        pytest.param((81, 80), (1, 81), None, Continue(81), id="everything expired"),
        pytest.param((1, 70), (1, 81), None, RolledBack(71), id="shorter"),
        pytest.param((1, 70), (1, 81), 66, RolledBack(66), id="shorter, and other at its end"),
        pytest.param((1, 100), (1, 81), 80, RolledBack(80), id="other at the last one"),
        pytest.param((1, 100), (1, 81), 1, Replaced(1), id="other from the beginning"),
        pytest.param((40, 100), (1, 81), 40, Replaced(40), id="other as far as can be seen"),
        pytest.param((1, 0), (1, 81), None, Replaced(1), id="empty and new"),
        pytest.param((51, 50), (1, 81), None, Replaced(51), id="emptied and shorter"),
        pytest.param((1, 3), (1, 1), None, Continue(1), id="nothing recorded yet"),
        pytest.param((1, 3), (9, 9), None, Replaced(1), id="nothing recorded, and shorter"),
        pytest.param(
            (20_000_000, 20_000_005), (1, 81), None, Replaced(20_000_000), id="a gap too wide"
        ),
    ],
)
def test_where_the_record_goes_on(
    stream: tuple[int, int],
    record: tuple[int, int],
    differs_from: int | None,
    expected: core.Continuation,
) -> None:
    both = core.overlap(
        stream_first=stream[0],
        stream_last=stream[1],
        tape_first=record[0],
        next_sequence=record[1],
    )
    found = core.judge(
        both,
        differs_from=differs_from,
        stream_first=stream[0],
        stream_last=stream[1],
        next_sequence=record[1],
    )
    assert found == expected


def test_what_can_be_compared_is_what_both_have() -> None:
    assert core.overlap(
        stream_first=40, stream_last=100, tape_first=1, next_sequence=81
    ) == Overlap(40, 80)


def opened(incarnation: str, first: int, reason: str, previous: str = "") -> LogOpened:
    return LogOpened(
        incarnation=incarnation,
        first_sequence=first,
        reason=reason,  # pyright: ignore[reportArgumentType] - a literal in every case below
        previous_incarnation=previous,
        opened=Stamp(wall_us=0, source="ledger"),
    )


@pytest.mark.parametrize(
    ("event", "first_sequence", "governs"),
    [
        pytest.param(opened("i0", 1, "created"), 1, True, id="the first message"),
        pytest.param(opened("i0", 1, "created"), 500, True, id="its beginning expired"),
        pytest.param(opened("i0", 501, "rolled_back"), 500, False, id="a later one"),
        pytest.param(opened("old", 1, "created"), 1, False, id="one that is known"),
        pytest.param(opened("i0", 1, "created"), 10_000_002, False, id="too many holes"),
    ],
)
def test_which_incarnation_a_tape_belongs_to(
    event: LogOpened, first_sequence: int, governs: bool
) -> None:
    assert core.governs(event, first_sequence=first_sequence, known=["old"]) == governs


HEADS = [
    LogHead(ordinal=1, incarnation="i0", first_sequence=1, reason="created"),
    LogHead(
        ordinal=2,
        incarnation="i1",
        first_sequence=50,
        reason="rolled_back",
        previous_incarnation="i0",
    ),
]


@pytest.mark.parametrize(
    ("event", "sequence", "reopens"),
    [
        pytest.param(opened("i2", 70, "rolled_back"), 90, True, id="a rollback not seen here"),
        pytest.param(opened("i2", 30, "rolled_back"), 90, True, id="one further back"),
        pytest.param(opened("i2", 70, "replaced"), 90, True, id="opened for want of a name"),
        pytest.param(opened("i2", 1, "created"), 90, False, id="a second provisioner"),
        pytest.param(opened("i1", 50, "rolled_back"), 90, False, id="our own"),
        pytest.param(opened("i0", 1, "rolled_back"), 90, False, id="an old one of ours"),
        pytest.param(opened("i2", 50, "rolled_back"), 90, False, id="a second opinion"),
        pytest.param(opened("i2", 95, "rolled_back"), 90, False, id="of the future"),
        pytest.param(opened("i2", 4, "rolled_back"), 90, False, id="before the record"),
    ],
)
def test_which_opening_closes_the_incarnation(
    event: LogOpened, sequence: int, reopens: bool
) -> None:
    found = core.reopens(event, sequence=sequence, heads=HEADS, tape_first=5 if sequence else 1)
    assert found == reopens
