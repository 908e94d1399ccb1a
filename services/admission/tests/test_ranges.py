"""Ranges against a plain set."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from waterclock_admission.ranges import Ranges

runs = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 6)).map(lambda r: (r[0], r[0] + r[1])),
    max_size=20,
)


def as_set(added: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in added for number in range(first, last + 1)}


@given(runs)
def test_ranges_are_a_set(added: list[tuple[int, int]]) -> None:
    ranges, numbers = Ranges(added), as_set(added)
    assert [n for n in range(60) if n in ranges] == sorted(numbers)
    assert ranges.largest == max(numbers, default=0)
    assert ranges.first_missing() == next(n for n in range(1, 99) if n not in numbers)
    assert ranges.missing() == [n for n in range(1, ranges.largest) if n not in numbers]


@given(runs)
def test_runs_never_touch_one_another(added: list[tuple[int, int]]) -> None:
    found = Ranges(added).runs()
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(found))


@given(runs, st.integers(1, 50), st.integers(0, 10))
def test_covers_is_containing_each(added: list[tuple[int, int]], first: int, more: int) -> None:
    numbers = as_set(added)
    last = first + more - 1
    assert Ranges(added).covers(first, last) == all(n in numbers for n in range(first, last + 1))


@given(runs, st.integers(0, 50))
def test_cutting_forgets_what_is_above(added: list[tuple[int, int]], last: int) -> None:
    ranges = Ranges(added)
    ranges.cut_above(last)
    assert [n for n in range(60) if n in ranges] == sorted(n for n in as_set(added) if n <= last)


@given(runs)
def test_the_order_does_not_matter(added: list[tuple[int, int]]) -> None:
    assert Ranges(added) == Ranges(reversed(added))
