"""A set of positive integers that has few holes: what was decided, what was numbered."""

from bisect import bisect_right
from collections.abc import Iterable


class Ranges:
    """Positive integers as runs, in order. Adding the next one, as almost always, is cheap."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def __contains__(self, number: int) -> bool:
        lasts = self._lasts
        if not lasts or number > lasts[-1]:
            return False
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= lasts[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.runs() == other.runs()

    def __hash__(self) -> int:
        raise TypeError("Ranges change, so they have no hash")

    def __len__(self) -> int:
        """How many runs."""
        return len(self._firsts)

    def add(self, first: int, last: int | None = None) -> None:
        """Add ``first``, or all from ``first`` to ``last``."""
        last = first if last is None else last
        firsts, lasts = self._firsts, self._lasts
        if lasts and first == lasts[-1] + 1:
            lasts[-1] = last
            return
        if not lasts or first > lasts[-1]:
            firsts.append(first)
            lasts.append(last)
            return
        # Every run that overlaps or touches the new one melts into it.
        low = bisect_right(lasts, first - 2)
        high = bisect_right(firsts, last + 1)
        if low < high:
            first = min(first, firsts[low])
            last = max(last, lasts[high - 1])
        firsts[low:high] = [first]
        lasts[low:high] = [last]

    def covers(self, first: int, last: int) -> bool:
        """Whether all from ``first`` to ``last`` are in it; true where there are none."""
        if first > last:
            return True
        place = bisect_right(self._firsts, first) - 1
        return place >= 0 and last <= self._lasts[place]

    def first_missing(self) -> int:
        """The smallest positive integer that is not in it."""
        return self._lasts[0] + 1 if self._firsts and self._firsts[0] == 1 else 1

    def missing(self) -> list[int]:
        """All that are missing between 1 and the largest."""
        found: list[int] = []
        before = 0
        for first, last in self.runs():
            found.extend(range(before + 1, first))
            before = last
        return found

    @property
    def largest(self) -> int:
        """0 while it is empty."""
        return self._lasts[-1] if self._lasts else 0

    def cut_above(self, last: int) -> None:
        """Forget everything larger than ``last``."""
        while self._firsts and self._firsts[-1] > last:
            self._firsts.pop()
            self._lasts.pop()
        if self._lasts:
            self._lasts[-1] = min(self._lasts[-1], last)

    def runs(self) -> list[tuple[int, int]]:
        return list(zip(self._firsts, self._lasts, strict=True))
