"""Laws of the axis and of the segments on it."""

from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_proto.events import (
    Admitted,
    Cancelled,
    Completed,
    Dispatched,
    EventData,
    FirstToken,
    Started,
)
from waterclock_proto.golden import EVENTS
from waterclock_proto.segments import POINTS, SEGMENTS, measure, measure_request
from waterclock_proto.stamps import Axis, Stamp, bus_stamp

E = TypeVar("E", bound=EventData)
NAMES = [point for point, _ in POINTS]
BOOTS = ("a" * 16, "b" * 16)
SECOND_US = 1_000_000


def stamp(wall_us: int, boot: str | None = None, mono_ns: int | None = None) -> Stamp:
    return Stamp(wall_us=wall_us, source="worker", boot=boot, mono_ns=mono_ns)


# Two boots, so that stamps often share one, and all that may be absent.
ANY_STAMP = st.builds(
    stamp,
    st.integers(0, 2**53),
    st.none() | st.sampled_from(BOOTS),
    st.none() | st.integers(0, 2**62),
)
ANY_POINTS = st.tuples(*(st.none() | ANY_STAMP for _ in NAMES)).map(
    lambda stamps: tuple(zip(NAMES, stamps, strict=True))
)
KNOWN_POINTS = ANY_POINTS.filter(lambda points: any(stamp for _, stamp in points))


# --- the axis


@given(st.lists(ANY_STAMP, max_size=8))
def test_the_first_stamp_of_a_boot_stands_where_its_wall_clock_says(stamps: list[Stamp]) -> None:
    axis = Axis()
    seen: set[str] = set()
    for each in stamps:
        at_us = axis.place_us(each)
        if each.boot is None or each.mono_ns is None or each.boot not in seen:
            assert at_us == each.wall_us
        if each.boot is not None and each.mono_ns is not None:
            seen.add(each.boot)


@given(st.lists(st.tuples(ANY_STAMP, st.sampled_from((-5, 0, 5))), max_size=8))
def test_a_wall_clock_that_steps_moves_nothing_after_the_anchor(
    stepping: list[tuple[Stamp, int]],
) -> None:
    """The step hits every stamp but the first of each boot, each by its own amount."""
    steady, stepped = Axis(), Axis()
    anchored: set[str | None] = set()
    for original, step_s in stepping:
        moved = original
        if original.boot in anchored and original.mono_ns is not None:
            moved = msgspec.structs.replace(original, wall_us=original.wall_us + step_s * SECOND_US)
        if original.boot is not None and original.mono_ns is not None:
            anchored.add(original.boot)
        assert stepped.place_us(moved) == steady.place_us(original)


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 2**62)), min_size=2))
def test_within_a_boot_the_axis_keeps_the_monotonic_order(readings: list[tuple[int, int]]) -> None:
    axis = Axis()
    placed = [
        (mono_ns, axis.place_us(stamp(wall_us, BOOTS[0], mono_ns))) for wall_us, mono_ns in readings
    ]
    placed.sort()
    assert [at_us for _, at_us in placed] == sorted(at_us for _, at_us in placed)


@given(st.lists(ANY_STAMP, max_size=8))
def test_an_axis_can_be_given_its_stamps_at_once(stamps: list[Stamp]) -> None:
    one_by_one, at_once = Axis(), Axis([None, *stamps])
    for each in stamps:
        one_by_one.place_us(each)
    assert [at_once.place_us(s) for s in stamps] == [one_by_one.place_us(s) for s in stamps]


@pytest.mark.parametrize(
    ("stored_ns", "wall_us"),
    [(0, 0), (999, 0), (1000, 1), (1_767_323_045_123_456_789, 1_767_323_045_123_456)],
)
def test_the_bus_says_whole_nanoseconds(stored_ns: int, wall_us: int) -> None:
    assert bus_stamp(stored_ns) == Stamp(wall_us=wall_us, source="bus")


# --- segments


@given(KNOWN_POINTS)
def test_segments_sum_to_the_whole_exactly(points: tuple[tuple[str, Stamp | None], ...]) -> None:
    measured = measure(points)
    assert sum(measured.segments.values()) == measured.total_us
    assert measured.total_us == measured.end_us - measured.start_us


@given(KNOWN_POINTS)
def test_queue_and_execution_sum_to_the_whole_where_execution_is_known(
    points: tuple[tuple[str, Stamp | None], ...],
) -> None:
    measured = measure(points)
    queue_us, exec_us = measured.queue_us, measured.exec_us
    if dict(points)["scheduled"] is None:
        assert (queue_us, exec_us) == (None, None)
    else:
        assert queue_us is not None
        assert exec_us is not None
        assert queue_us + exec_us == measured.total_us


@given(KNOWN_POINTS)
def test_a_negative_segment_is_kept_and_flagged_and_no_other_is(
    points: tuple[tuple[str, Stamp | None], ...],
) -> None:
    measured = measure(points)
    negative = [f"negative:{name}" for name, us in measured.segments.items() if us < 0]
    assert list(measured.flags) == negative


@given(KNOWN_POINTS)
def test_segments_are_those_between_known_points_in_order(
    points: tuple[tuple[str, Stamp | None], ...],
) -> None:
    known = [name for name, stamp in points if stamp is not None]
    assert list(measure(points).segments) == [dict(POINTS)[name] for name in known[:-1]]


@given(
    st.lists(st.integers(0, 10**9), min_size=len(NAMES), max_size=len(NAMES)),
    st.integers(1, len(NAMES) - 2),
)
def test_the_time_around_a_missing_point_falls_to_the_segment_before(
    walls: list[int], missing: int
) -> None:
    whole = [(name, stamp(at_us)) for name, at_us in zip(NAMES, walls, strict=True)]
    full = measure(whole).segments
    less = measure([point for place, point in enumerate(whole) if place != missing]).segments
    before, lost = SEGMENTS[missing - 1], SEGMENTS[missing]
    expected = full | {before: full[before] + full[lost]}
    del expected[lost]
    assert less == expected


@given(KNOWN_POINTS, st.integers(-(10**15), 10**15))
def test_only_differences_count(
    points: tuple[tuple[str, Stamp | None], ...], shift_us: int
) -> None:
    shifted = [
        (
            name,
            None
            if each is None
            else msgspec.structs.replace(each, wall_us=each.wall_us + shift_us),
        )
        for name, each in points
    ]
    assert measure(shifted).segments == measure(points).segments


@given(KNOWN_POINTS)
def test_a_point_nobody_recorded_need_not_be_named(
    points: tuple[tuple[str, Stamp | None], ...],
) -> None:
    assert measure([(name, each) for name, each in points if each is not None]) == measure(points)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param([], "at least one stamped point", id="none"),
        pytest.param(["arrival", "lunch"], r"found \['arrival', 'lunch'\]", id="unknown"),
        pytest.param(
            ["ended", "arrival"], r"in this order, found \['ended', 'arrival'\]", id="order"
        ),
        pytest.param(["arrival", "arrival"], "in this order", id="twice"),
    ],
)
def test_points_that_are_no_way_of_a_request_are_refused(names: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        measure([(name, stamp(1)) for name in names])


def test_points_without_any_stamp_are_refused() -> None:
    with pytest.raises(ValueError, match="found none"):
        measure([(name, None) for name in NAMES])


# --- one request from its events


def example(kind: type[E]) -> E:
    return next(data for data in EVENTS if isinstance(data, kind))


ADMITTED = example(Admitted)
DISPATCHED = example(Dispatched)
STARTED = example(Started)
FIRST = example(FirstToken)
COMPLETED = example(Completed)


def test_a_request_that_went_well() -> None:
    measured = measure_request(ADMITTED, (DISPATCHED,), STARTED, FIRST, COMPLETED)
    assert measured.segments == {
        "edge": 900,
        "bus": 400,
        "admission": 150,
        "queue": 11_450,
        "dispatch": 800,
        "engine_wait": 2200,
        "prefill": 46_000,
        "decode": 829_000,
        "delivery": 1000,
    }
    assert (measured.queue_us, measured.exec_us, measured.flags) == (15_900, 876_000, ())


def test_the_end_knows_best_what_the_engine_did() -> None:
    """Stamps of ``first_token`` count only where the end has none of its own."""
    silent = msgspec.structs.replace(COMPLETED, submitted=None, scheduled=None, first_token=None)
    assert measure_request(ADMITTED, (DISPATCHED,), STARTED, FIRST, silent) == measure_request(
        ADMITTED, (DISPATCHED,), None, None, COMPLETED
    )
    assert COMPLETED.scheduled is not None
    scheduled = msgspec.structs.replace(COMPLETED.scheduled, mono_ns=86_400_020_000_000)
    later = msgspec.structs.replace(COMPLETED, scheduled=scheduled)
    assert measure_request(ADMITTED, (DISPATCHED,), STARTED, FIRST, later).queue_us == 20_900


def test_a_lost_attempt_is_time_of_its_own() -> None:
    second = msgspec.structs.replace(
        DISPATCHED,
        attempt=2,
        dispatched=msgspec.structs.replace(DISPATCHED.dispatched, mono_ns=86_402_000_000_000),
    )
    end = msgspec.structs.replace(
        COMPLETED, attempt=2, submitted=None, scheduled=None, first_token=None, last_token=None
    )
    measured = measure_request(ADMITTED, (DISPATCHED, second), None, None, end)
    assert measured.segments["queue"] == 11_450
    assert measured.segments["retry"] == 1_988_000
    assert "execution_us" not in measured.segments
    assert measured.exec_us is None


@pytest.mark.parametrize(
    ("dispatches", "segments"),
    [
        pytest.param((), {"edge", "bus", "admission", "queue"}, id="never dispatched"),
        pytest.param((DISPATCHED,), {"edge", "bus", "admission", "queue", "retry"}, id="lost"),
    ],
)
def test_what_the_scheduler_ended_was_waiting(dispatches, segments: set[str]) -> None:
    end = Cancelled(
        tenant="acme", id="r-1001", attempt=0, phase="queued", ended=stamp(1_767_323_046_000_000)
    )
    measured = measure_request(ADMITTED, dispatches, None, None, end)
    assert set(measured.segments) == segments
    assert measured.queue_us is None
    assert measured.total_us == SECOND_US + 900
