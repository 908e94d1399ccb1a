"""The sorted queue is a sorted list, only faster."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_scheduler.limits import LINE_BLOCK
from waterclock_scheduler.line import Line


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=200))
def test_it_holds_what_a_sorted_list_would(steps: list[tuple[bool, int]]) -> None:
    line: Line[tuple[int]] = Line()
    plain: list[tuple[int]] = []
    for add, number in steps:
        item = (number,)
        if add and item not in plain:
            line.add(item)
            plain.insert(bisect_left(plain, item), item)
        elif not add and item in plain:
            line.remove(item)
            plain.remove(item)
        assert list(line) == plain
        assert len(line) == len(plain)
        assert line.first() == (plain[0] if plain else None)
        assert line.rank(item) == bisect_left(plain, item)


@given(st.integers(0, 2**32))
def test_it_stays_sorted_over_many_blocks(seed: int) -> None:
    step = seed * 2 + 1
    count = 5 * LINE_BLOCK
    modulus = 2**31
    items = [((number * step) % modulus, number) for number in range(count)]
    line: Line[tuple[int, int]] = Line()
    for item in items:
        line.add(item)
    assert list(line) == sorted(items)
    for item in items[::2]:
        line.remove(item)
    left = sorted(items[1::2])
    assert list(line) == left
    assert [line.rank(item) for item in left[:: LINE_BLOCK // 2]] == list(
        range(0, len(left), LINE_BLOCK // 2)
    )
    while (first := line.first()) is not None:
        line.remove(first)
    assert len(line) == 0
    assert list(line) == []


def test_removing_what_is_not_there_is_a_mistake() -> None:
    line: Line[tuple[int]] = Line()
    line.add((1,))
    for item in ((0,), (2,)):
        with pytest.raises(KeyError, match="expected"):
            line.remove(item)
