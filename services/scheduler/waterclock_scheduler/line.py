"""A queue that is kept sorted: add, take, remove and ask for the place of any item.

Blocks of sorted items, like a B-tree of two levels. Finding a block and a place in it are
binary searches; what then moves is at most one block of pointers.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from waterclock_scheduler.limits import LINE_BLOCK

T = TypeVar("T", bound="tuple[Any, ...]")


class Line(Generic[T]):
    """Distinct tuples in ascending order."""

    __slots__ = ("_blocks", "_length", "_tops")

    def __init__(self) -> None:
        self._blocks: list[list[T]] = []
        self._tops: list[T] = []
        """The last item of each block."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        for block in self._blocks:
            yield from block

    def first(self) -> T | None:
        """The smallest item, which stays."""
        return self._blocks[0][0] if self._blocks else None

    def add(self, item: T) -> None:
        """Put an item in its place. It must not be there already."""
        self._length += 1
        at = bisect_left(self._tops, item)
        if at == len(self._tops):
            if not self._blocks:
                self._blocks.append([item])
                self._tops.append(item)
                return
            at -= 1
            self._tops[at] = item
        block = self._blocks[at]
        insort(block, item)
        if len(block) > 2 * LINE_BLOCK:
            upper = block[LINE_BLOCK:]
            del block[LINE_BLOCK:]
            self._blocks.insert(at + 1, upper)
            self._tops[at : at + 1] = [block[-1], upper[-1]]

    def remove(self, item: T) -> None:
        """Take an item out that is there."""
        at, place = self._find(item)
        block = self._blocks[at]
        del block[place]
        self._length -= 1
        if not block:
            del self._blocks[at]
            del self._tops[at]
        else:
            self._tops[at] = block[-1]

    def rank(self, item: T) -> int:
        """How many items are smaller; the item itself need not be there."""
        at = bisect_left(self._tops, item)
        before = sum(len(block) for block in self._blocks[:at])
        return before + (bisect_left(self._blocks[at], item) if at < len(self._blocks) else 0)

    def _find(self, item: T) -> tuple[int, int]:
        at = bisect_left(self._tops, item)
        place = bisect_left(self._blocks[at], item) if at < len(self._blocks) else 0
        if at == len(self._blocks) or self._blocks[at][place] != item:
            raise KeyError(f"expected {item!r} in the line, not found")
        return at, place
