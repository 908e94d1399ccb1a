"""Which of a writer's events may be on their way to the tape: pure bookkeeping.

What it is for is order. An event that is refused, or that a broken connection lost, must not be
overtaken by those behind it, although many are on their way at once. So a refusal, a break or a
proven loss sends everything back to the first unanswered event (Go-Back-N), which then goes
*alone*; each acknowledgement doubles how many may follow (as in TCP's slow start, RFC 5681
section 3.1). While the tape is nearly full one goes at a time all along.

What remains: an event that was on its way *behind* the first refused one may still be taken, if
the refusal's cause ended just then or if it is smaller. It then stands before its elder, and
``turned`` counts it.
"""

from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class Entry(Struct, Generic[T]):
    """One event that the tape has not acknowledged."""

    number: int
    item: T
    sent_s: float = 0.0
    """When it went on its way last."""
    tries: int = 0
    """How often it went."""


class Window(Generic[T]):
    """Entries by number, in order; numbers count from 1 without a hole."""

    __slots__ = (
        "_held",
        "_in_flight",
        "_limit",
        "_next",
        "_refused",
        "_size",
        "_unanswered",
        "last",
        "size_max",
        "turned",
    )

    def __init__(self, size_max: int) -> None:
        assert size_max >= 1
        self.size_max = size_max
        self.last = 0
        """The newest number."""
        self.turned = 0
        """Events that were taken although an elder one had been refused. (It may stand there
        all the same, from before a break that swallowed its acknowledgement.)"""
        self._size = size_max
        self._limit = 1
        self._next = 1
        """All numbers from here on are not on their way."""
        self._in_flight = 0
        self._held = False
        self._refused = 0
        """The eldest that was refused and not taken since; 0 for none."""
        self._unanswered: dict[int, Entry[T]] = {}

    def __len__(self) -> int:
        """How many the tape has not acknowledged, on their way or not."""
        return len(self._unanswered)

    @property
    def held(self) -> bool:
        """Whether the first one was refused and waits to be tried again."""
        return self._held

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def unsent(self) -> bool:
        """Whether there are some that are not on their way."""
        return self._next <= self.last

    @property
    def behind(self) -> int:
        """How many are not on their way."""
        return self.last + 1 - self._next

    def add(self, item: T) -> int:
        """Put one behind all others; its number."""
        self.last += 1
        self._unanswered[self.last] = Entry(self.last, item)
        return self.last

    def first(self) -> Entry[T] | None:
        """The eldest that is not acknowledged."""
        for entry in self._unanswered.values():
            return entry
        return None

    def take(self, now_s: float) -> Entry[T] | None:
        """The next that may go now; it counts as on its way. None if none may."""
        if self._held or self._in_flight >= self._limit:
            return None
        while self._next <= self.last:
            entry = self._unanswered.get(self._next)
            self._next += 1
            if entry is not None:
                entry.sent_s = now_s
                entry.tries += 1
                self._in_flight += 1
                return entry
        return None

    def put_back(self, entry: Entry[T]) -> None:
        """The entry just taken could not be sent; it is the next again."""
        assert entry.number == self._next - 1
        self._next = entry.number
        self._in_flight -= 1
        entry.tries -= 1

    def stored(self, number: int) -> Entry[T] | None:
        """The tape has it. None if that was known."""
        entry = self._unanswered.pop(number, None)
        if entry is None:
            return None
        if number < self._next:
            self._in_flight -= 1
            self._limit = min(self._size, 2 * self._limit)
        elif number > self._refused > 0:
            self.turned += 1
        if number == self._refused:
            # Perhaps by a copy that was under way when it was refused.
            self._refused = 0
            self._held = False
        return entry

    def refused(self, number: int) -> bool:
        """The tape refused it. Whether that is news: then nothing goes until ``release``."""
        if number not in self._unanswered or number >= self._next:
            return False
        self._go_back_to(number)
        self._refused = number
        self._held = True
        return True

    def release(self) -> None:
        """Let the refused one be tried again, alone."""
        self._held = False

    def restart(self) -> None:
        """Whatever was on its way may be lost: all of it goes again, the first one alone."""
        first = self.first()
        self._go_back_to(self.last + 1 if first is None else first.number)
        self._refused = 0
        self._held = False

    def narrow(self, size: int) -> None:
        """At most so many on their way from now on."""
        self._size = max(1, min(size, self.size_max))
        self._limit = min(self._limit, self._size)

    def lost_before(self, sent_s: float) -> bool:
        """Whether the first one is on its way since before ``sent_s``."""
        first = self.first()
        return first is not None and first.number < self._next and first.sent_s < sent_s

    def _go_back_to(self, number: int) -> None:
        self._in_flight = 0
        for elder in self._unanswered:
            if elder >= number:
                break
            self._in_flight += 1
        self._next = number
        self._limit = 1
