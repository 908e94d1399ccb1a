"""Subjects, streams and who may cross an account border: data, from which configuration is made.

This table is the only place where a subject is spelled.
"""

from typing import Literal, cast

from msgspec import Struct

from waterclock_proto.events import EVENT_BYTES_MAX, EventData

EVENT_PREFIX = "wc.event."
NOBODY = "_"
"""Stands in a subject where an event has no tenant, pool or worker; also the receipt token of
a submission whose id could not be read, and therefore no valid request id."""

BODY_BYTES_MAX = 1_000_000
"""Of one submission. Below the bus's default max_payload of 1 MiB, headers included."""


def event_subject(data: EventData) -> str:
    """``wc.event.<type>.<tenant or _>.<pool, worker or _>``."""
    tenant = cast(str, getattr(data, "tenant", "")) or NOBODY
    scope = (cast(str, getattr(data, data.SCOPE)) or NOBODY) if data.SCOPE else NOBODY
    return f"{EVENT_PREFIX}{data.TYPE}.{tenant}.{scope}"


def event_filter(kind: type[EventData], *, tenant: str = "*", scope: str = "*") -> str:
    """The subject filter for one type of event."""
    return f"{EVENT_PREFIX}{kind.TYPE}.{tenant}.{scope}"


def request_subject(tenant: str) -> str:
    return f"wc.request.{tenant}"


def edge_subject(tenant: str) -> str:
    """Where the HTTP edge publishes: no tenant can write here, so its stamps can be believed."""
    return f"wc.edge.{tenant}"


def receipt_subject(tenant: str, request_id: str) -> str:
    return f"wc.receipt.{tenant}.{request_id or NOBODY}"


def answer_subject(tenant: str, request_id: str) -> str:
    return f"wc.answer.{tenant}.{request_id}"


def final_subject(tenant: str, request_id: str) -> str:
    return f"wc.final.{tenant}.{request_id}"


def cancel_subject(tenant: str, request_id: str) -> str:
    return f"wc.cancel.{tenant}.{request_id}"


def delivered_subject(tenant: str) -> str:
    return f"wc.delivered.{tenant}"


def beat_subject(worker: str) -> str:
    return f"wc.beat.{worker}"


def body_subject(worker: str, requests_sequence: int | str) -> str:
    """Where the scheduler hands a body on to the worker that it is about to dispatch to."""
    return f"wc.body.{worker}.{requests_sequence}"


def pulse_subject(pool: str) -> str:
    return f"wc.pulse.{pool}"


class StreamSpec(Struct, frozen=True, kw_only=True):
    """What a stream must look like; provisioning makes or verifies it."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: int
    max_msg_bytes: int
    max_msgs_per_subject: int = -1
    discard: Literal["new", "old"] = "new"
    allow_direct: bool = True
    allow_atomic: bool = False
    """Whether several messages can be stored as one batch, with one write to the disk."""
    why: str = ""


HOUR_S = 3600
REQUESTS = StreamSpec(
    name="REQUESTS",
    subjects=("wc.request.*", "wc.edge.*"),
    max_age_s=26 * HOUR_S,
    max_msg_bytes=BODY_BYTES_MAX + 8192,
    why="bodies: secret; kept for the longest admissible deadline and an hour",
)
EVENTS = StreamSpec(
    name="EVENTS",
    subjects=("wc.event.>",),
    max_age_s=7 * 24 * HOUR_S,
    max_msg_bytes=EVENT_BYTES_MAX,
    allow_atomic=True,
    why="the tape; full means refused, never forgotten",
)
ANSWERS = StreamSpec(
    name="ANSWERS",
    subjects=("wc.final.*.*",),
    max_age_s=HOUR_S,
    max_msg_bytes=BODY_BYTES_MAX + 8192,
    max_msgs_per_subject=1,
    discard="old",
    why="final answers for producers that come back",
)
STREAMS: tuple[StreamSpec, ...] = (REQUESTS, EVENTS, ANSWERS)

DEADLINE_S_MAX = 25 * HOUR_S
# A body must outlive its deadline, or an admitted request could not be executed any more.
assert DEADLINE_S_MAX + HOUR_S <= REQUESTS.max_age_s


class Crossing(Struct, frozen=True, kw_only=True):
    """One way across a tenant's account border; ``{tenant}`` is replaced by its name."""

    subject: str
    direction: Literal["in", "out"]
    """``in``: the tenant publishes, the mesh receives (a service export). ``out``: the mesh
    publishes, the tenant receives (a stream export)."""
    why: str


CROSSINGS: tuple[Crossing, ...] = (
    Crossing(subject="wc.request.{tenant}", direction="in", why="submissions"),
    Crossing(subject="wc.cancel.{tenant}.*", direction="in", why="cancelling by id"),
    Crossing(subject="wc.delivered.{tenant}", direction="in", why="the producer's own stamps"),
    Crossing(subject="wc.answer.{tenant}.*", direction="out", why="deltas"),
    Crossing(subject="wc.receipt.{tenant}.*", direction="out", why="receipts"),
    Crossing(subject="wc.final.{tenant}.*", direction="out", why="final answers"),
)
