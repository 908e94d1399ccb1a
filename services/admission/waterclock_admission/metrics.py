"""What admission counts and measures."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from waterclock_admission.core import Terms
from waterclock_proto.events import Admitted, Rejected, Resubmitted

_QUICK_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """All of admission's metrics. Tenants are labels, for they are configured and few."""

    def __init__(self, registry: CollectorRegistry, terms: Mapping[str, Terms]) -> None:
        self._tenants = frozenset(terms)
        self._submissions = Counter(
            "waterclock_admission_submissions",
            "Submissions decided",
            ("tenant", "outcome", "reason"),
            registry=registry,
        )
        self._children: dict[tuple[str, str, str], Counter] = {}
        self.decision_seconds = Histogram(
            "waterclock_admission_decision_seconds",
            "From the bus storing a submission to its receipt",
            buckets=_QUICK_S,
            registry=registry,
        )
        self.budget_seconds = Histogram(
            "waterclock_admission_budget_seconds",
            "One call to the shared budgets",
            buckets=_QUICK_S,
            registry=registry,
        )
        self.budgets_degraded = Gauge(
            "waterclock_admission_budgets_degraded",
            "1 while budgets are kept in this process because Redis is away",
            registry=registry,
        )
        self.open_requests = Gauge(
            "waterclock_admission_open_requests",
            "Requests admitted and not ended",
            ("tenant",),
            registry=registry,
        )
        self.dropped = Counter(
            "waterclock_admission_dropped",
            "Cancels and claims that made no event",
            ("why",),
            registry=registry,
        )
        self.folded = Counter(
            "waterclock_admission_malformed_folded",
            "Malformed submissions that share an event with others",
            registry=registry,
        )
        self.poisoned = Counter(
            "waterclock_admission_poisoned",
            "Messages about which nothing could be written",
            ("where",),
            registry=registry,
        )
        self.finals = Counter(
            "waterclock_admission_finals",
            "Final answers sent by admission",
            ("why",),
            registry=registry,
        )
        self.receipts_again = Counter(
            "waterclock_admission_receipts_again",
            "Receipts sent for what had been decided before",
            registry=registry,
        )
        self.known_requests = Gauge(
            "waterclock_admission_known_requests",
            "Ended requests that are remembered",
            registry=registry,
        )
        self.known_back_seconds = Gauge(
            "waterclock_admission_known_back_seconds",
            "How far back ids are remembered",
            registry=registry,
        )
        self.forgotten_early = Gauge(
            "waterclock_admission_forgotten_early",
            "Ended requests forgotten before their time, for want of room",
            registry=registry,
        )
        self.outstanding = Gauge(
            "waterclock_admission_outstanding_events",
            "Own events that have not come back from the tape",
            registry=registry,
        )
        self.fence = Gauge(
            "waterclock_admission_fence", "The election it decides under", registry=registry
        )
        self.snapshot_seconds = Histogram(
            "waterclock_admission_snapshot_seconds",
            "Copying the fold, during which nothing else happens",
            buckets=_QUICK_S,
            registry=registry,
        )
        self.snapshot_failures = Counter(
            "waterclock_admission_snapshot_failures", "Snapshots not written", registry=registry
        )
        self.http_requests = Counter(
            "waterclock_http_requests",
            "Answered HTTP requests",
            ("route", "status"),
            registry=registry,
        )
        self.http_refused = Counter(
            "waterclock_http_refused",
            "HTTP requests refused by the edge itself; they have no number",
            ("why",),
            registry=registry,
        )
        self.http_open = Gauge(
            "waterclock_http_open", "HTTP requests waiting for their answer", registry=registry
        )
        self.http_cut = Counter(
            "waterclock_http_cut",
            "HTTP answers cut off, by why",
            ("why",),
            registry=registry,
        )
        self.http_edge_seconds = Histogram(
            "waterclock_http_receipt_seconds",
            "From accepting an HTTP request to its receipt",
            buckets=_QUICK_S,
            registry=registry,
        )

    def count(self, data: Admitted | Rejected | Resubmitted) -> None:
        tenant = data.tenant if data.tenant in self._tenants else "_"
        key = (tenant, data.TYPE, data.reason if isinstance(data, Rejected) else "")
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._submissions.labels(*key)
        child.inc(data.count if isinstance(data, Rejected) else 1)
