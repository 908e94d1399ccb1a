"""The one place that reads clocks."""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from waterclock_proto.stamps import Source, Stamp

SIMULATED_STEP_VARIABLE: Final = "WATERCLOCK_SIMULATED_CLOCK_STEP_FILE"
_STEP_READ_INTERVAL_NS: Final = 50_000_000


def boot_id() -> str:
    """The first 16 hex digits of the kernel's boot id: the name of this host's monotonic clock.

    In a time namespace with an offset of its own (time_namespaces(7)) that clock is another
    one, and so has another name.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.exists():
        boot = path.read_text().strip().replace("-", "")[:16]
        return name_in_namespace(boot, Path("/proc/self/timens_offsets"))
    # Elsewhere than on Linux nothing names the boot; the uptime's origin is stable within one.
    return f"{(time.time_ns() - time.monotonic_ns()) // 10**10:016x}"[:16]


def name_in_namespace(boot: str, offsets: Path) -> str:
    """``boot``, or another name where ``offsets`` moves this namespace's monotonic clock."""
    try:
        lines = offsets.read_text().splitlines()
    except OSError:
        # A kernel without time namespaces.
        return boot
    for line in lines:
        clock, *offset = line.split()
        if clock == "monotonic" and any(int(part) for part in offset):
            return hashlib.sha256(f"{boot} {' '.join(offset)}".encode()).hexdigest()[:16]
    return boot


class Clock:
    """Wall time in UTC microseconds, monotonic time in nanoseconds, and stamps of both.

    For fault tests only, ``WATERCLOCK_SIMULATED_CLOCK_STEP_FILE`` names a file with an
    integer: so many microseconds are added to the wall clock of this process.
    """

    def __init__(
        self, *, environ: Mapping[str, str] | None = None, error_us: int | None = None
    ) -> None:
        self.boot = boot_id()
        self.error_us = error_us
        step_file = (environ if environ is not None else os.environ).get(SIMULATED_STEP_VARIABLE)
        self._step_file = Path(step_file) if step_file else None
        self._step_us = 0
        self._step_read_ns = 0

    def now_us(self) -> int:
        """Wall time in UTC microseconds."""
        return self._wall_us(0)

    def mono_ns(self) -> int:
        """This boot's monotonic clock."""
        return time.monotonic_ns()

    def stamp(self, source: Source) -> Stamp:
        """Both clocks, now."""
        return Stamp(
            wall_us=self.now_us(),
            source=source,
            boot=self.boot,
            mono_ns=time.monotonic_ns(),
            error_us=self.error_us,
        )

    def stamp_at(self, source: Source, mono_ns: int, error_us: int | None = None) -> Stamp:
        """The stamp of a moment that was read as this host's CLOCK_MONOTONIC."""
        return Stamp(
            wall_us=max(0, self._wall_us(time.monotonic_ns() - mono_ns)),
            source=source,
            boot=self.boot,
            mono_ns=mono_ns,
            error_us=error_us if error_us is not None else self.error_us,
        )

    def _wall_us(self, ago_ns: int) -> int:
        if self._step_file is not None:
            self._read_simulated_step(self._step_file)
        return (time.time_ns() - ago_ns) // 1000 + self._step_us

    def _read_simulated_step(self, path: Path) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._step_read_ns < _STEP_READ_INTERVAL_NS:
            return
        self._step_read_ns = now_ns
        try:
            self._step_us = int(path.read_text())
        except (OSError, ValueError):
            # A test that has not written its step yet, or is writing it: the last one holds.
            return
