"""Where a request's time went: segments that sum exactly, and both clocks.

A request passes through named points; a segment runs from one known point to the next and
bears the name of what the request was doing from its start point on. A point that nobody
recorded is skipped, so the time around it falls to the segment before: the sum is the whole,
always. Nothing is clamped: a segment that comes out negative is kept and flagged.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from msgspec import Struct

from waterclock_proto.events import Admitted, Dispatched, FirstToken, Started, TerminalData
from waterclock_proto.stamps import Axis, Stamp

POINTS: Final[tuple[tuple[str, str], ...]] = (
    ("edge_accepted", "edge"),
    ("arrival", "bus"),
    ("received", "admission"),
    ("decided", "queue"),
    ("lost", "retry"),
    ("dispatched", "dispatch"),
    ("submitted", "engine_wait"),
    ("scheduled", "prefill"),
    ("first_token", "decode"),
    ("last_token", "delivery"),
    ("ended", ""),
)
"""(point, segment that begins there), in the order of a request's life. ``lost`` is the first
dispatch of a request whose first attempt was lost."""

SEGMENTS: Final[tuple[str, ...]] = tuple(segment for _, segment in POINTS if segment)


class Measured(Struct, frozen=True, kw_only=True):
    """One request's time, in integer microseconds on its own axis."""

    start_us: int
    """Where its axis begins: accepted by the edge, or stored by the bus."""
    execution_us: int | None
    """Where execution began; None if it never did, or nobody could say."""
    end_us: int
    segments: dict[str, int]
    """Only those that happened. They sum to ``total_us``."""
    flags: tuple[str, ...]
    """``negative:<segment>`` for what two clocks could not agree on."""

    @property
    def total_us(self) -> int:
        """The queue clock: from arrival to end."""
        return self.end_us - self.start_us

    @property
    def queue_us(self) -> int | None:
        """Everything before execution."""
        return None if self.execution_us is None else self.execution_us - self.start_us

    @property
    def exec_us(self) -> int | None:
        """The execution clock: from the engine's scheduling to the end."""
        return None if self.execution_us is None else self.end_us - self.execution_us


def measure(points: Iterable[tuple[str, Stamp | None]]) -> Measured:
    """The segments between the known points, which come in the order of ``POINTS``.

    Raises:
        ValueError: no known point, or names that are not those of ``POINTS`` in their order.
    """
    points = tuple(points)
    places = [_PLACES.get(name, -1) for name, _ in points]
    if -1 in places or any(a >= b for a, b in pairwise(places)):
        found = [name for name, _ in points]
        raise ValueError(f"expected points of {list(_PLACES)} in this order, found {found}")
    axis = Axis()
    known = [(name, axis.place_us(stamp)) for name, stamp in points if stamp is not None]
    if not known:
        raise ValueError("expected at least one stamped point, found none")
    segments: dict[str, int] = {}
    flags: list[str] = []
    for (name, at_us), (_, next_us) in pairwise(known):
        segment = _SEGMENT_FROM[name]
        segments[segment] = next_us - at_us
        if next_us < at_us:
            flags.append(f"negative:{segment}")
    return Measured(
        start_us=known[0][1],
        execution_us=dict(known).get("scheduled"),
        end_us=known[-1][1],
        segments=segments,
        flags=tuple(flags),
    )


def measure_request(
    admitted: Admitted,
    dispatches: tuple[Dispatched, ...],
    started: Started | None,
    first: FirstToken | None,
    end: TerminalData,
) -> Measured:
    """One request from its events; ``started`` and ``first`` are those of the attempt that counts.

    The end's own engine stamps come before those of ``first``: they were written last.
    """
    last = dispatches[-1] if dispatches and dispatches[-1].attempt == end.attempt else None
    lost = dispatches[0] if dispatches and dispatches[0] is not last else None
    if end.worker == "":
        # Ended by the scheduler: whatever was dispatched before had been lost.
        last, lost = None, dispatches[0] if dispatches else None
    return measure(
        (
            ("edge_accepted", admitted.edge_accepted),
            ("arrival", admitted.arrival),
            ("received", admitted.received),
            ("decided", admitted.decided),
            ("lost", lost.dispatched if lost else None),
            ("dispatched", last.dispatched if last else None),
            ("submitted", end.submitted or (started.submitted if started else None)),
            ("scheduled", end.scheduled or (first.scheduled if first else None)),
            ("first_token", end.first_token or (first.first_token if first else None)),
            ("last_token", end.last_token),
            ("ended", end.ended),
        )
    )


_SEGMENT_FROM: Final[dict[str, str]] = dict(POINTS)
_PLACES: Final[dict[str, int]] = {point: place for place, (point, _) in enumerate(POINTS)}
