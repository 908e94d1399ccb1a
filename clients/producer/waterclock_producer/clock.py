"""The producer's clock: wall time for claims, monotonic time for durations, and waiting."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from, so that tests can move it by hand."""

    def wall_us(self) -> int:
        """UTC microseconds since 1970. May step; nothing is measured with it."""
        ...

    def mono_ns(self) -> int:
        """Nanoseconds that only ever grow; their zero means nothing."""
        ...

    async def sleep_ns(self, duration_ns: int) -> None:
        """Wait at least ``duration_ns``; for zero or less, let others run and return."""
        ...


class SystemClock:
    """This machine's clocks and the running event loop."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def mono_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_ns(self, duration_ns: int) -> None:
        await asyncio.sleep(max(duration_ns, 0) / 1_000_000_000)
