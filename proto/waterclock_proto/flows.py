"""Who publishes what and who reads it: data, from which permissions, documents and tests are made.

``python -m waterclock_proto.flows`` prints the events as a Markdown table.

A service also reads its own events back, to act on them only once they stand on the tape; that
goes without saying here. The HTTP edge is part of admission.
"""

from typing import Literal

from msgspec import Struct

from waterclock_proto import events, requests
from waterclock_proto.events import EventData
from waterclock_proto.subjects import (
    ANSWERS,
    REQUESTS,
    answer_subject,
    beat_subject,
    body_subject,
    cancel_subject,
    delivered_subject,
    edge_subject,
    event_filter,
    final_subject,
    pulse_subject,
    receipt_subject,
    request_subject,
)

Service = Literal["admission", "scheduler", "worker", "ledger"]
SERVICES: tuple[Service, ...] = ("admission", "scheduler", "worker", "ledger")
Party = Service | Literal["producer"]


class EventFlow(Struct, frozen=True, kw_only=True):
    """One type of event: a row of the flow table."""

    event: type[EventData]
    publishers: tuple[Service, ...]
    readers: tuple[Service, ...]


class Channel(Struct, frozen=True, kw_only=True):
    """One subject that carries messages instead of events. ``{...}`` in an address is one token."""

    name: str
    address: str
    messages: tuple[type[Struct], ...]
    """Empty where the payload means nothing."""
    publishers: tuple[Party, ...]
    readers: tuple[Party, ...]
    stream: str = ""
    """The JetStream stream that keeps it; empty for what is only passed on."""
    why: str


_TERMINAL_READERS: tuple[Service, ...] = ("scheduler", "admission", "ledger")


def _flow(
    event: type[EventData], publishers: tuple[Service, ...], readers: tuple[Service, ...]
) -> EventFlow:
    return EventFlow(event=event, publishers=publishers, readers=readers)


EVENT_FLOWS: tuple[EventFlow, ...] = (
    _flow(events.Admitted, ("admission",), ("scheduler", "ledger")),
    _flow(events.Rejected, ("admission", "scheduler"), ("admission", "ledger")),
    _flow(events.Resubmitted, ("admission",), ("admission", "ledger")),
    _flow(events.CancelRequested, ("admission",), ("scheduler", "worker", "ledger")),
    _flow(events.Enqueued, ("scheduler",), ("ledger",)),
    _flow(events.Dispatched, ("scheduler",), ("worker", "ledger")),
    _flow(events.Started, ("worker",), ("ledger",)),
    _flow(events.FirstToken, ("worker",), ("ledger",)),
    _flow(events.Completed, ("worker",), _TERMINAL_READERS),
    _flow(events.Failed, ("worker", "scheduler"), _TERMINAL_READERS),
    _flow(events.Cancelled, ("worker", "scheduler"), _TERMINAL_READERS),
    _flow(events.Expired, ("worker", "scheduler"), _TERMINAL_READERS),
    _flow(events.AttemptLost, ("scheduler",), ("worker", "ledger")),
    _flow(events.RungChanged, ("scheduler",), ("admission", "worker", "ledger")),
    _flow(events.PoolDegraded, ("scheduler",), ("admission", "worker", "ledger")),
    _flow(events.SchedulerElected, ("scheduler",), SERVICES),
    _flow(events.AdmissionElected, ("admission",), SERVICES),
    _flow(events.Delivered, ("admission",), ("ledger",)),
    _flow(events.ContractActivated, ("admission",), ("ledger",)),
    _flow(events.ClockReported, SERVICES, ("ledger",)),
    _flow(events.WriterSealed, SERVICES, ("ledger",)),
    _flow(events.WindowClosed, ("admission",), ("ledger",)),
    _flow(events.LogOpened, SERVICES, SERVICES),
)

CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="request",
        address=request_subject("{tenant}"),
        messages=(requests.Submission,),
        publishers=("producer",),
        # Scheduler and worker read a body at the sequence that an event names.
        readers=("admission", "scheduler", "worker"),
        stream=REQUESTS.name,
        why="Submissions. Published as a request, it is answered by the bus once it is stored.",
    ),
    Channel(
        name="edge",
        address=edge_subject("{tenant}"),
        messages=(requests.Submission,),
        publishers=("admission",),
        readers=("admission", "scheduler", "worker"),
        stream=REQUESTS.name,
        why="Submissions that came over HTTP. No tenant can write here.",
    ),
    Channel(
        name="cancel",
        address=cancel_subject("{tenant}", "{id}"),
        messages=(),
        publishers=("producer",),
        readers=("admission",),
        why="Stop a request. The payload is empty and means nothing.",
    ),
    Channel(
        name="delivered",
        address=delivered_subject("{tenant}"),
        messages=(requests.DeliveredClaim,),
        publishers=("producer",),
        readers=("admission",),
        why="The producer's own stamps, quoted on the tape as a claim.",
    ),
    Channel(
        name="receipt",
        address=receipt_subject("{tenant}", "{id}"),
        messages=(requests.Receipt,),
        publishers=("admission",),
        readers=("producer",),
        why="What became of a submission. Where no id could be read, the last token is `_`.",
    ),
    Channel(
        name="answer",
        address=answer_subject("{tenant}", "{id}"),
        messages=(requests.Delta, requests.Restarted, requests.Final),
        publishers=("worker", "admission"),
        readers=("producer", "admission"),
        why="The answer as it is made. A final comes here only for whoever resumed the request.",
    ),
    Channel(
        name="final",
        address=final_subject("{tenant}", "{id}"),
        messages=(requests.Final,),
        publishers=("worker", "admission"),
        readers=("producer", "admission"),
        stream=ANSWERS.name,
        why="How a request ended, with the whole text; exactly one counts.",
    ),
    Channel(
        name="beat",
        address=beat_subject("{worker}"),
        messages=(requests.Beat,),
        publishers=("worker",),
        readers=("scheduler",),
        why="A worker lives, and what it can take.",
    ),
    Channel(
        name="body",
        address=body_subject("{worker}", "{sequence}"),
        messages=(requests.Submission,),
        publishers=("scheduler",),
        readers=("worker",),
        why="A body, handed on just before its dispatch to spare the worker a round trip. It may"
        " be missing; it is checked against its commitment like one that was read.",
    ),
    Channel(
        name="pulse",
        address=pulse_subject("{pool}"),
        messages=(),
        publishers=("scheduler",),
        readers=(),
        why="A pool's state, for whoever watches; version 1 says nothing of its payload.",
    ),
)


def publish_subjects(service: Service) -> tuple[str, ...]:
    """The subjects on which a service may publish, as NATS filters, without JetStream's own."""
    of_events = [event_filter(flow.event) for flow in EVENT_FLOWS if service in flow.publishers]
    of_channels = [
        wildcards(channel.address) for channel in CHANNELS if service in channel.publishers
    ]
    return (*of_events, *of_channels)


def wildcards(address: str) -> str:
    """The NATS filter of an address: ``wc.receipt.{tenant}.{id}`` → ``wc.receipt.*.*``."""
    return ".".join("*" if token.startswith("{") else token for token in address.split("."))


def event_table() -> str:
    """The events as a Markdown table: event, who publishes it, who reads it, what it says."""
    rows = ["| event | by | read by | says |", "|---|---|---|---|"]
    for flow in EVENT_FLOWS:
        says = (flow.event.__doc__ or "").partition("Published by")[0].strip()
        by, readers = (_listed(parties) for parties in (flow.publishers, flow.readers))
        rows.append(f"| `{flow.event.TYPE}` | {by} | {readers} | {says} |")
    return "\n".join(rows) + "\n"


def _listed(parties: tuple[Service, ...]) -> str:
    return "every service" if parties == SERVICES else ", ".join(parties)


if __name__ == "__main__":
    import sys

    sys.stdout.write(event_table())
