"""What crosses the border between a producer and the mesh: plain JSON on core subjects.

These are messages, not events: they are not kept on the tape, and may carry text.
"""

import hashlib
import hmac
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from waterclock_proto.names import (
    Attempt,
    Count,
    Detail,
    DurationUs,
    FailReason,
    FinishReason,
    Label,
    Language,
    OptionalName,
    Outcome,
    PositiveMs,
    RejectReason,
    RequestId,
    Sequence,
    Tenant,
    TokenCount,
    UnixNs,
    UnixUs,
)
from waterclock_proto.stamps import Stamp

OUTPUT_TOKENS_CEILING = 1_000_000

Decimal = Annotated[str, Meta(pattern=r"^[0-9]{1,3}(\.[0-9]{1,6})?\Z")]
"""A number as people write it, such as ``0.7``."""


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Passed to the engine as it is. Decimal numbers are strings here, so that no float crosses."""

    temperature: Decimal | None = None
    top_p: Decimal | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: tuple[Annotated[str, Meta(max_length=256)], ...] = ()


class Submission(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request as the producer publishes it on ``wc.request.<tenant>``.

    Exactly one of ``messages`` and ``prompt``, unless ``resume`` is set. To send it again,
    send the same bytes: another body under a known id is refused.
    """

    id: RequestId
    model: Label | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=OUTPUT_TOKENS_CEILING)] | None = None
    ignore_eos: bool = False
    """Go on until ``max_tokens``; for load tests."""
    stream: bool = False
    """Send deltas on ``wc.answer.<tenant>.<id>``; the final answer comes in any case."""
    deadline_ms: PositiveMs | None = None
    """Counted from arrival."""
    deadline_us: UnixUs | None = None
    """The same as Unix time. The earlier of the two holds."""
    language: Language | None = None
    session: Annotated[str, Meta(max_length=256)] | None = None
    sampling: Sampling | None = None
    sent_us: UnixUs | None = None
    resume: bool = False
    """Ask again for the outcome of ``id``; nothing else may be given, and nothing runs."""


class Receipt(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="kind",
    tag="receipt_unsigned",
):
    """What became of a submission, on ``wc.receipt.<tenant>.<id>``. Unsigned in this version.

    ``event`` is the exact payload that stands on the tape at ``sequence``; with ``salt`` the
    producer can prove which body it submitted: commitment = HMAC-SHA-256(salt, body).
    """

    tenant: Tenant
    id: OptionalName
    outcome: Literal["admitted", "rejected", "resubmitted"]
    requests_sequence: Sequence
    number: Sequence | None = None
    event: str
    incarnation: OptionalName
    sequence: Sequence
    stored_ns: UnixNs
    salt: str = ""
    reason: RejectReason | None = None
    detail: Detail = ""
    retry_after_ms: Count | None = None
    resubmitted_outcome: Outcome | Literal["open", "gone"] | None = None


class Delta(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="delta"):
    """A piece of the answer, on ``wc.answer.<tenant>.<id>``."""

    id: RequestId
    attempt: Attempt
    index: Count
    """Counts from 0 within the attempt; a hole means that a message was lost."""
    text: str
    tokens: TokenCount
    queue_us: DurationUs | None = None
    """On the first delta: arrival → execution start."""


class Restarted(Struct, frozen=True, kw_only=True, tag_field="kind", tag="restarted"):
    """An earlier attempt was lost after it had sent text: forget its deltas.

    On ``wc.answer.<tenant>.<id>``.
    """

    id: RequestId
    attempt: Attempt


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measured by the engine, not estimated."""

    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0
    cached_tokens: TokenCount = 0


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Queue and execution apart, as far as the worker could see them; the ledger has the record."""

    arrival_us: UnixUs
    queue_us: DurationUs | None = None
    """Arrival → execution start (the engine's own scheduling)."""
    exec_us: DurationUs | None = None
    """Execution start → end."""
    total_us: DurationUs
    segments: dict[str, DurationUs] = {}


class Final(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="final"):
    """How a request ended, with the whole text; on ``wc.final.<tenant>.<id>``, kept for an hour.

    To whoever resumes it is said again on ``wc.answer.<tenant>.<id>``.
    """

    tenant: Tenant
    id: RequestId
    attempt: Attempt = 0
    outcome: Outcome
    finish_reason: FinishReason | None = None
    fail_reason: FailReason | None = None
    reject_reason: RejectReason | None = None
    retry_after_ms: Count | None = None
    detail: Detail = ""
    text: str = ""
    answer_kept: bool = True
    """False where the request ended but its text is not to be had any more."""
    model_served: str = ""
    usage: Usage = Usage()
    timings: Timings | None = None


AnswerMessage: TypeAlias = Delta | Restarted | Final
ANSWER_DECODER: msgspec.json.Decoder[AnswerMessage] = msgspec.json.Decoder(AnswerMessage)


class DeliveredClaim(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a producer says about itself on ``wc.delivered.<tenant>``, at most 512 bytes."""

    id: RequestId
    sent_us: UnixUs | None = None
    receipt_us: UnixUs | None = None
    first_token_us: UnixUs | None = None
    last_token_us: UnixUs | None = None


DELIVERED_BYTES_MAX = 512


class Beat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker lives, on ``wc.beat.<worker>``. Published by worker; read by scheduler."""

    worker: OptionalName
    """Its life: ``<name>-<random>``; a worker that starts again is another one."""
    name: OptionalName
    """Who it is over all its lives."""
    pool: OptionalName
    models: tuple[Label, ...]
    slots: Count
    """How many requests it takes at once when nothing is shed."""
    draining: bool = False
    in_flight: Count = 0
    beat: Stamp


EDGE_ACCEPTED_HEADER = "Wc-Edge-Accepted"
"""On ``wc.edge.<tenant>`` only: a ``Stamp`` as JSON."""


def body_salt(mesh_key: bytes, tenant: str, request_id: str) -> bytes:
    """32 bytes that only the mesh can make, and that the producer gets with its receipt.

    The same for every submission of one id, so that a repeated body has the same commitment.
    """
    return hmac.digest(mesh_key, f"salt|{tenant}|{request_id}".encode(), "sha256")


def body_commitment(salt: bytes, body: bytes) -> str:
    """HMAC-SHA-256(salt, body) in hex: binds the event to the body and reveals nothing of it."""
    return hmac.digest(salt, body, "sha256").hex()


def session_fingerprint(mesh_key: bytes, tenant: str, session: str) -> str:
    """A tenant-salted, shortened hash of a session name (128 bits, hex)."""
    salt = hmac.digest(mesh_key, f"session|{tenant}".encode(), "sha256")
    return hashlib.blake2s(
        session.encode(errors="surrogatepass"), key=salt, digest_size=16
    ).hexdigest()


def cache_salt(mesh_key: bytes, tenant: str) -> str:
    """What an engine's prefix cache is salted with: shared within a tenant, never across."""
    return hmac.digest(mesh_key, f"cache|{tenant}".encode(), "sha256").hex()


def prompt_text(submission: Submission) -> str:
    """What the model reads, for counting and for language detection."""
    if submission.prompt is not None:
        return submission.prompt
    return "\n".join(message.content for message in submission.messages or ())


def estimate_prompt_tokens(text: str) -> int:
    """A cheap estimate: a token for every non-ASCII character, and for four ASCII ones.

    For budgets and ordering only. Measured token counts come from the engine.
    """
    if text.isascii():
        return (len(text) + 3) // 4
    ascii_bytes = len(text.encode("ascii", "ignore"))
    return (ascii_bytes + 3) // 4 + len(text) - ascii_bytes
