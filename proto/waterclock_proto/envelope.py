"""The CloudEvents envelope, a writer's chain, and the one codec.

Structured-mode JSON as in the CloudEvents 1.0.2 JSON format; ``id`` is ``writer/counter``,
so a repetition is recognised by either. Extension attributes (section 3.1: lower case
letters and digits) carry the chain: each event names the SHA-256 of the payload that its
writer published before it. A writer's life is one chain: a process that starts again is a
new writer.

The payload bytes are the event. They are hashed, stored and compared as they are; nobody
encodes an event a second time.
"""

import hashlib
import hmac
from typing import Annotated, Generic, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from waterclock_proto.events import EVENT_BYTES_MAX, EVENT_TYPE_BY_NAME, EventData
from waterclock_proto.names import Count, Counter, Label, OptionalName
from waterclock_proto.subjects import EVENT_PREFIX, event_subject

COUNTER_MAX = 2**31 - 1
CHAIN_START = "0" * 64
TYPE_PREFIX = "waterclock."
TYPE_SUFFIX = ".v1"

DataT = TypeVar("DataT", bound=EventData)


class Envelope(Struct, Generic[DataT], frozen=True, kw_only=True, omit_defaults=True):
    """One event as it stands on the tape."""

    specversion: Literal["1.0"]
    id: str
    """``<writer>/<counter>``."""
    source: Label
    """``/waterclock/<service>``."""
    type: str
    """``waterclock.<event>.v1``."""
    tenant: OptionalName = ""
    """The event's own tenant, said once more where CloudEvents tools look."""
    writer: Label
    counter: Counter
    previous: msgspec.UnsetType | Annotated[str, Meta(min_length=64, max_length=64)] = msgspec.UNSET
    """SHA-256 (hex) of the writer's previous payload; 64 zeros for its first event."""
    nonce: Annotated[str, Meta(min_length=32, max_length=32)]
    """HMAC-SHA-256 (first 128 bits, hex) under the writer's key of what the event is about:
    a leaf hash reveals nothing to whoever guesses the rest."""
    fence: Count = 0
    """Which election the writer acts under; 0 for writers that are not elected."""
    incarnation: OptionalName = ""
    """The tape that the writer believes to write to; empty until it has read ``log_opened``."""
    data: DataT


class EventRefused(ValueError):
    """A payload is not an event of this version; says what was expected and what was found."""


class Chain:
    """A writer's counter and chain. Not shared between writers, not safe between threads."""

    __slots__ = ("_key", "_service", "counter", "fence", "head", "incarnation", "sealed", "writer")

    def __init__(self, *, service: str, writer: str, key: bytes) -> None:
        self.writer = writer
        self.counter = 0
        self.head = CHAIN_START
        self.fence = 0
        self.incarnation = ""
        self.sealed: Envelope[EventData] | None = None
        """The event that was sealed last, as any reader will read it."""
        self._service = service
        self._key = key

    def seal(self, data: EventData) -> tuple[str, bytes]:
        """The subject and exact payload of the chain's next event.

        What no reader would accept is refused here, before it can stand on the tape for good;
        the chain is then as it was. (Not so the six events of ``_MADE_OF_CHECKED``.)

        Raises:
            EventRefused: the event is larger than the tape takes, a value is out of its range,
                or the counter is used up.
        """
        if self.counter > COUNTER_MAX:
            raise EventRefused(f"writer {self.writer} has used its {COUNTER_MAX + 1} counters")
        kind = data.TYPE
        tenant = cast(str, getattr(data, "tenant", ""))
        about = f"{tenant}|{getattr(data, 'id', '')}|{kind}|{getattr(data, 'attempt', 0)}"
        if not hasattr(data, "id"):
            # Events about no single request have only the counter to tell them apart.
            about = f"{about}|{self.counter}"
        envelope = Envelope(
            specversion="1.0",
            id=f"{self.writer}/{self.counter}",
            source=f"/waterclock/{self._service}",
            type=f"{TYPE_PREFIX}{kind}{TYPE_SUFFIX}",
            tenant=tenant,
            writer=self.writer,
            counter=self.counter,
            previous=self.head,
            nonce=hmac.digest(self._key, about.encode(), "sha256")[:16].hex(),
            fence=self.fence,
            incarnation=self.incarnation,
            data=data,
        )
        try:
            payload = _ENCODER.encode(envelope)
        except UnicodeEncodeError as error:
            raise EventRefused(f"event {kind} holds what is not Unicode text: {error}") from error
        if len(payload) > EVENT_BYTES_MAX:
            raise EventRefused(
                f"event {kind} of {len(payload)} bytes, at most {EVENT_BYTES_MAX} allowed"
            )
        subject = event_subject(data)
        self.sealed = envelope if kind in _MADE_OF_CHECKED else decode_event(subject, payload)
        self.counter += 1
        self.head = hashlib.sha256(payload).hexdigest()
        return subject, payload


_ENCODER = msgspec.json.Encoder()
_MADE_OF_CHECKED = frozenset(
    ("admitted", "enqueued", "dispatched", "started", "first_token", "completed")
)
"""The six events that every request has, so that checking them twice is the largest cost of
sealing. Their fields were decoded before (from a submission, an event or the settings), or are
stamps and counts; what an engine says about itself, its worker has cut to size."""
_DECODERS: dict[str, msgspec.json.Decoder[Envelope[EventData]]] = {
    name: cast(
        "msgspec.json.Decoder[Envelope[EventData]]",
        msgspec.json.Decoder(Envelope[kind]),  # pyright: ignore[reportInvalidTypeForm] - a class chosen at run time
    )
    for name, kind in EVENT_TYPE_BY_NAME.items()
}


def decode_event(subject: str, payload: bytes) -> Envelope[EventData]:
    """The event that stands under ``subject``.

    Raises:
        EventRefused: unknown type, wrong shape, or the subject, the attributes and the data
            disagree.
    """
    if not subject.startswith(EVENT_PREFIX):
        raise EventRefused(f"subject {subject!r} does not start with {EVENT_PREFIX!r}")
    kind = subject[len(EVENT_PREFIX) :].partition(".")[0]
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise EventRefused(f"event type {kind!r} is not one of {sorted(_DECODERS)}")
    try:
        envelope = decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EventRefused(f"payload of {subject}: {error}") from error
    if envelope.type != f"{TYPE_PREFIX}{kind}{TYPE_SUFFIX}":
        raise EventRefused(f"subject {subject} carries an event of type {envelope.type!r}")
    if envelope.id != f"{envelope.writer}/{envelope.counter}":
        raise EventRefused(
            f"event of {subject} has id {envelope.id!r}, expected"
            f" {f'{envelope.writer}/{envelope.counter}'!r}"
        )
    tenant = cast(str, getattr(envelope.data, "tenant", ""))
    if envelope.tenant != tenant:
        raise EventRefused(
            f"event of {subject} has tenant {envelope.tenant!r}, and {tenant!r} in its data"
        )
    if event_subject(envelope.data) != subject:
        raise EventRefused(
            f"subject {subject} carries an event that belongs on {event_subject(envelope.data)}"
        )
    return envelope
