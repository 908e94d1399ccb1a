"""A clock for the simulated engine that is moved by hand."""

import heapq
from collections.abc import Callable


class HandTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class HandClock:
    """Timers fire in order of time, then of being set, and only within ``run`` and ``advance``."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self._now_ns = now_ns
        self._timers: list[tuple[int, int, HandTimer]] = []
        self._set = 0
        self.shift_ns = 0
        """How much later than asked each timer fires, earlier if negative. A timer for less
        than that fires as asked, or waiting again for the rest would never end."""

    def now_ns(self) -> int:
        return self._now_ns

    def call_in(self, delay_ns: int, callback: Callable[[], None]) -> HandTimer:
        assert delay_ns >= 0
        timer = HandTimer(callback)
        shift_ns = self.shift_ns if delay_ns > abs(self.shift_ns) else 0
        due_ns = self._now_ns + delay_ns + shift_ns
        heapq.heappush(self._timers, (due_ns, self._set, timer))
        self._set += 1
        return timer

    def advance(self, ns: int) -> None:
        """Let ``ns`` pass; timers fire on the way."""
        end_ns = self._now_ns + ns
        while self._timers and self._timers[0][0] <= end_ns:
            self.fire()
        self._now_ns = end_ns

    def block(self, ns: int) -> None:
        """Let ``ns`` pass in which no timer can fire, as when something holds up the loop."""
        self._now_ns += ns

    def run(self, timers_max: int = 100_000) -> None:
        """Let time pass until no timer is set."""
        for _ in range(timers_max):
            if not self._timers:
                return
            self.fire()
        raise AssertionError(f"timers are still set after {timers_max} have fired")

    def fire(self) -> None:
        """Let the next timer fire, and time pass until then."""
        due_ns, _, timer = heapq.heappop(self._timers)
        self._now_ns = max(self._now_ns, due_ns)
        if timer.callback is not None:
            timer.callback()
