"""The ladder of load shedding, its thresholds and its times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_scheduler.config import LadderSettings
from waterclock_scheduler.ladder import (
    Drain,
    Ladder,
    actions_of,
    batch_cap_of,
    retry_after_ms,
    step,
)

MS = 1_000_000
SETTINGS = LadderSettings(rise_ms=0, dwell_ms=1_000)


def walk(
    settings: LadderSettings, readings: list[tuple[int, int]], *, workers: int = 1, rung: int = 0
) -> list[int]:
    """The rungs after readings of (milliseconds, depth)."""
    ladder, rungs = Ladder(rung=rung), list[int]()
    for at_ms, depth in readings:
        ladder = step(settings, ladder, depth=depth, workers=workers, now_ns=at_ms * MS)
        rungs.append(ladder.rung)
    return rungs


@pytest.mark.parametrize(
    ("depth", "workers", "rung"),
    [
        pytest.param(0, 1, 0, id="empty"),
        pytest.param(5, 1, 0, id="at the first threshold"),
        pytest.param(6, 1, 1, id="above it: batch cap"),
        pytest.param(10, 1, 1, id="at the second"),
        pytest.param(11, 1, 2, id="above it: speculation off"),
        pytest.param(15, 1, 2, id="at the third"),
        pytest.param(16, 1, 3, id="above it: refuse"),
        pytest.param(15, 3, 0, id="a depth is for each worker"),
        pytest.param(16, 3, 1, id="and one more"),
        pytest.param(1_000, 0, 0, id="without workers nothing is climbed"),
    ],
)
def test_thresholds_up(depth: int, workers: int, rung: int) -> None:
    assert walk(SETTINGS, [(0, depth)], workers=workers) == [rung]


@pytest.mark.parametrize(
    ("readings", "rungs"),
    [
        pytest.param([(0, 9), (999, 9), (1_000, 9)], [3, 3, 2], id="one rung after a dwell"),
        pytest.param([(0, 10), (5_000, 10)], [3, 3], id="above the lower threshold it stays"),
        pytest.param(
            [(0, 0), (1_000, 0), (1_999, 0), (2_000, 0), (2_999, 0), (3_000, 0), (4_000, 0)],
            [3, 2, 2, 2, 1, 1, 0],
            id="each rung has a dwell of its own, from the first look on",
        ),
        pytest.param(
            [(0, 9), (900, 10), (1_000, 9), (1_900, 9), (2_000, 9)],
            [3, 3, 3, 3, 2],
            id="a rise between begins the dwell anew",
        ),
        pytest.param([(0, 9), (1_000, 9), (1_001, 16)], [3, 2, 3], id="up again at once"),
    ],
)
def test_the_way_down(readings: list[tuple[int, int]], rungs: list[int]) -> None:
    assert walk(SETTINGS, readings, rung=3) == rungs


@pytest.mark.parametrize(
    ("readings", "rungs"),
    [
        pytest.param([(0, 6), (99, 6), (100, 6)], [0, 0, 1], id="after the rise time"),
        pytest.param([(0, 6), (50, 5), (100, 6), (199, 6)], [0, 0, 0, 0], id="broken off"),
        pytest.param([(0, 6), (100, 16)], [0, 3], id="to where it stands by then"),
    ],
)
def test_a_rise_time(readings: list[tuple[int, int]], rungs: list[int]) -> None:
    assert walk(LadderSettings(rise_ms=100), readings) == rungs


def test_a_pool_that_lost_its_workers_can_still_come_down() -> None:
    readings = [(0, 9), (1_000, 9), (2_000, 6), (3_000, 6), (4_000, 3), (5_000, 3)]
    assert walk(SETTINGS, readings, workers=0, rung=3) == [3, 2, 2, 1, 1, 0]


@given(st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 30)), max_size=60))
def test_between_its_thresholds_a_ladder_never_moves_and_never_falls_faster_than_it_dwells(
    steps: list[tuple[int, int]],
) -> None:
    ladder, at_ms, moved_ms = Ladder(), 0, -10_000
    lower, upper = (0, 3, 6, 9), (5, 10, 15, 10**9)
    for gap_ms, depth in steps:
        at_ms += gap_ms
        after = step(SETTINGS, ladder, depth=depth, workers=1, now_ns=at_ms * MS)
        if after.rung > ladder.rung:
            assert depth > upper[ladder.rung]
        elif after.rung < ladder.rung:
            assert after.rung == ladder.rung - 1
            assert depth <= lower[ladder.rung]
            assert at_ms - moved_ms >= SETTINGS.dwell_ms
        if after.rung != ladder.rung:
            moved_ms = at_ms
        ladder = after


def test_what_the_rungs_do() -> None:
    assert [actions_of(rung) for rung in range(4)] == [
        (),
        ("batch_cap",),
        ("batch_cap", "speculation_off"),
        ("batch_cap", "speculation_off", "refuse"),
    ]
    assert [batch_cap_of(SETTINGS, rung) for rung in range(4)] == [None, 4, 4, 4]


@pytest.mark.parametrize(
    ("depth", "workers", "drained", "expected"),
    [
        pytest.param(29, 1, 100, 2_000, id="20 too many at 10 a second"),
        pytest.param(38, 2, 100, 2_000, id="20 too many for two workers"),
        pytest.param(10, 1, 100, 1_000, id="not below the minimum"),
        pytest.param(5, 1, 1, 10_000, id="at least one must go"),
        pytest.param(1_000_000, 1, 1, 60_000, id="not above the maximum"),
        pytest.param(29, 1, 0, 60_000, id="nothing ended: nobody knows"),
        pytest.param(29, 0, 100, 2_000, id="no worker counts as one"),
    ],
)
def test_retry_after(depth: int, workers: int, drained: int, expected: int) -> None:
    assert retry_after_ms(SETTINGS, depth=depth, workers=workers, drained=drained) == expected


@given(st.lists(st.integers(0, 4_000), max_size=60))
def test_the_drain_counts_what_ended_within_the_window(gaps_ms: list[int]) -> None:
    drain, at_ms, ends_ms = Drain(1_000), 0, list[int]()
    for gap_ms in gaps_ms:
        at_ms += gap_ms
        drain.count(at_ms * MS)
        ends_ms.append(at_ms)
        found = drain.drained(at_ms * MS)
        # The window's edge is a tenth of it coarse.
        assert sum(at_ms - end_ms < 900 for end_ms in ends_ms) <= found
        assert found <= sum(at_ms - end_ms < 1_000 for end_ms in ends_ms)
    assert drain.drained((at_ms + 1_000) * MS) == 0
