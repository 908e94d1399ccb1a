"""Stamps and the one axis on which a request's stamps are compared.

A stamp says what a clock showed, how far that clock may be off, and what the monotonic
clock of that boot showed at the same moment. Wall clocks step; monotonic clocks do not. So
each boot has one wall *anchor* for a request (its first stamp), and every later stamp of
that boot lies at anchor + monotonic difference. Differences on the axis sum exactly,
because all of them are differences of the same integers.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, Struct

from waterclock_proto.names import Count, MonotonicNs, UnixUs

Source = Literal["bus", "edge", "admission", "scheduler", "worker", "engine", "ledger", "producer"]
Boot = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""The first 16 hex digits of the kernel's boot id. Processes on one boot share one clock."""


class Stamp(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a clock showed at one moment.

    A stamp is never clamped, altered or dropped, however impossible it looks.
    """

    wall_us: UnixUs
    source: Source
    boot: Boot | None = None
    """Absent for a clock whose boot nobody knows, such as the bus's."""
    mono_ns: MonotonicNs | None = None
    error_us: Count | None = None
    """How far ``wall_us`` may be from UTC, either way. Absent means unknown, not zero."""


class Axis:
    """Places the stamps of one request on one axis of integer microseconds.

    Feed it the request's stamps in the order in which they are recorded in the events; the
    first of each boot becomes that boot's anchor. A stamp without a boot or without a
    monotonic reading stands where its wall clock says.
    """

    __slots__ = ("_anchors",)

    def __init__(self, stamps: Iterable[Stamp | None] = ()) -> None:
        self._anchors: dict[str, tuple[int, int]] = {}
        for stamp in stamps:
            if stamp is not None:
                self.place_us(stamp)

    def place_us(self, stamp: Stamp) -> int:
        """Where the stamp stands, in microseconds; its boot's first becomes the anchor."""
        if stamp.boot is None or stamp.mono_ns is None:
            return stamp.wall_us
        wall_us, mono_ns = self._anchors.setdefault(stamp.boot, (stamp.wall_us, stamp.mono_ns))
        return wall_us + (stamp.mono_ns - mono_ns) // 1000


def bus_stamp(stored_ns: int) -> Stamp:
    """The bus's own stamp of a stored message, from integer nanoseconds."""
    return Stamp(wall_us=stored_ns // 1000, source="bus")
