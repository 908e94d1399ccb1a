"""The ladder of load shedding: which rung a pool stands on, as a pure step.

Depth is the number of waiting requests for each live worker. Rung 1 caps the batch, rung 2
also switches speculation off, rung 3 also refuses new work. Every rung has an upper threshold
that is climbed at and a lower one that is left at, and a time that the depth must stay below
before it is left: without both, a ladder swings.
"""

from typing import Final, Literal, TypeAlias

from msgspec import Struct, structs

from waterclock_scheduler.config import LadderSettings

Action: TypeAlias = Literal["batch_cap", "speculation_off", "refuse"]
ACTIONS: Final[tuple[Action, ...]] = ("batch_cap", "speculation_off", "refuse")
"""Rung r does the first r of them."""
RUNG_REFUSE: Final = len(ACTIONS)
_MS: Final = 1_000_000


class Ladder(Struct, frozen=True):
    """Where a pool stands, and since when its depth has been asking for another rung."""

    rung: int = 0
    above_since_ns: int | None = None
    below_since_ns: int | None = None


def step(
    settings: LadderSettings, ladder: Ladder, *, depth: int, workers: int, now_ns: int
) -> Ladder:
    """The ladder after looking at a pool: ``depth`` waiting requests, ``workers`` live workers.

    A pool without workers climbs nothing: there is nobody whose batch could be capped, and
    whether its requests are worth waiting for is said by their deadlines and the backlog's
    bound. It can still come down. ``now_ns`` is monotonic and never goes backwards.
    """
    wanted = _highest_above(settings, depth, workers) if workers else 0
    if wanted > ladder.rung:
        since_ns = now_ns if ladder.above_since_ns is None else ladder.above_since_ns
        if now_ns - since_ns >= settings.rise_ms * _MS:
            return Ladder(rung=wanted)
        return Ladder(rung=ladder.rung, above_since_ns=since_ns)
    if ladder.rung and depth <= _below(settings, ladder.rung) * max(1, workers):
        since_ns = now_ns if ladder.below_since_ns is None else ladder.below_since_ns
        if now_ns - since_ns >= settings.dwell_ms * _MS:
            # The next rung down waits for a dwell of its own.
            return Ladder(rung=ladder.rung - 1)
        return Ladder(rung=ladder.rung, below_since_ns=since_ns)
    if ladder.above_since_ns is None and ladder.below_since_ns is None:
        return ladder
    return structs.replace(ladder, above_since_ns=None, below_since_ns=None)


def actions_of(rung: int) -> tuple[Action, ...]:
    """What holds on a rung: its own action, and those of all below it."""
    return ACTIONS[:rung]


def batch_cap_of(settings: LadderSettings, rung: int) -> int | None:
    """Requests in flight that a worker may have on this rung; None: as many as it has slots."""
    return settings.batch_cap if rung >= 1 else None


def retry_after_ms(settings: LadderSettings, *, depth: int, workers: int, drained: int) -> int:
    """When a refused producer may come back: when the depth will have left the refusing rung.

    ``drained`` requests ended during the last ``drain_window_ms``; at that pace the depth
    comes down to the rung's lower threshold in the time returned, within the configured
    bounds. If nothing ended, nobody knows: the upper bound.
    """
    if drained <= 0:
        return settings.retry_after_ms_max
    excess = max(1, depth - settings.refuse_below * max(1, workers))
    wait_ms = -(-excess * settings.drain_window_ms // drained)
    return min(max(wait_ms, settings.retry_after_ms_min), settings.retry_after_ms_max)


class Drain:
    """Counts ends over a sliding window, in ten buckets; the window's edge is that coarse."""

    __slots__ = ("_bucket_ns", "_buckets", "_newest")
    BUCKETS: Final = 10

    def __init__(self, window_ms: int) -> None:
        self._bucket_ns = max(1, window_ms * _MS // self.BUCKETS)
        self._buckets = [0] * self.BUCKETS
        self._newest = 0

    def count(self, now_ns: int) -> None:
        self._advance(now_ns)
        self._buckets[self._newest % self.BUCKETS] += 1

    def drained(self, now_ns: int) -> int:
        """Ends within the window that ends at ``now_ns``."""
        self._advance(now_ns)
        return sum(self._buckets)

    def _advance(self, now_ns: int) -> None:
        bucket = now_ns // self._bucket_ns
        for passed in range(self._newest + 1, min(bucket, self._newest + self.BUCKETS) + 1):
            self._buckets[passed % self.BUCKETS] = 0
        if bucket > self._newest + self.BUCKETS:
            self._buckets = [0] * self.BUCKETS
        self._newest = max(self._newest, bucket)


def _highest_above(settings: LadderSettings, depth: int, workers: int) -> int:
    if depth > settings.refuse_above * workers:
        return 3
    if depth > settings.speculation_off_above * workers:
        return 2
    return 1 if depth > settings.batch_cap_above * workers else 0


def _below(settings: LadderSettings, rung: int) -> int:
    return (settings.batch_cap_below, settings.speculation_off_below, settings.refuse_below)[
        rung - 1
    ]
