"""The scheduler's own numbers for Prometheus. Labels are pools, types, reasons: few and fixed."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from waterclock_proto.events import AttemptLost, EventData, Rejected
from waterclock_scheduler.board import Board, Pool

_DECISION_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """Gauges read the board when they are scraped; counters are told."""

    def __init__(self, registry: CollectorRegistry, board: Board) -> None:
        self._by_type: dict[str, Counter] = {}
        self.events = Counter(
            "waterclock_scheduler_events_total", "Events published", ["type"], registry=registry
        )
        self.rejected = Counter(
            "waterclock_scheduler_rejected_total",
            "Admitted requests refused by the scheduler",
            ["reason"],
            registry=registry,
        )
        self.lost = Counter(
            "waterclock_scheduler_attempts_lost_total",
            "Attempts declared lost",
            ["reason"],
            registry=registry,
        )
        self.decision_s = Histogram(
            "waterclock_scheduler_decision_seconds",
            "One decision",
            buckets=_DECISION_S,
            registry=registry,
        )
        self.bodies_failed = Counter(
            "waterclock_scheduler_bodies_failed_total",
            "Groups of bodies that could not be read and are read again",
            registry=registry,
        )
        self.unreadable = Counter(
            "waterclock_scheduler_unreadable_total",
            "Messages that are not what their subject says",
            ["kind"],
            registry=registry,
        )
        self.leading = Gauge(
            "waterclock_scheduler_leading", "1 while it decides", registry=registry
        )
        _gauge(
            registry, "open_requests", "Admitted and not ended", lambda: float(board.open_requests)
        )
        _gauge(
            registry, "unread", "Requests whose bodies wait to be read", lambda: len(board.unread)
        )
        _gauge(
            registry,
            "position",
            "The last sequence of the tape that was folded",
            lambda: board.state.position,
        )
        readings: tuple[tuple[str, str, Callable[[Pool], int]], ...] = (
            ("depth", "Requests that wait", lambda pool: pool.waiting),
            ("in_flight", "Requests that a worker has", lambda pool: pool.running),
            ("workers", "Live workers that take new work", lambda pool: pool.takers),
            ("rung", "Where the ladder stands", lambda pool: pool.ladder.rung),
        )
        for name, text, read in readings:
            gauge = Gauge(f"waterclock_pool_{name}", text, ["pool"], registry=registry)
            for pool in board.pools.values():
                gauge.labels(pool.name).set_function(_reader(read, pool))

    def published(self, event: EventData) -> None:
        """Count an event that was published."""
        counter = self._by_type.get(event.TYPE)
        if counter is None:
            counter = self._by_type[event.TYPE] = self.events.labels(event.TYPE)
        counter.inc()
        if isinstance(event, Rejected):
            self.rejected.labels(event.reason).inc()
        elif isinstance(event, AttemptLost):
            self.lost.labels(event.reason).inc()


def _reader(read: Callable[[Pool], int], pool: Pool) -> Callable[[], float]:
    return lambda: read(pool)


def _gauge(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    Gauge(f"waterclock_scheduler_{name}", text, registry=registry).set_function(read)
