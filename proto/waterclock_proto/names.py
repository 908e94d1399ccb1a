"""Identifiers and ranges that every message shares.

Each named type carries its range, so that a value is checked where it is decoded and
nowhere else has to ask. Patterns end in ``\\Z``, because ``$`` would let a line feed through;
the schemas say ``$``, which in ECMA-262 is the end and nothing else.
"""

from typing import Annotated, Literal

from msgspec import Meta

NAME_PATTERN = r"^([A-Za-z0-9-][A-Za-z0-9_-]{0,63}|_[A-Za-z0-9_-]{1,63})\Z"
"""What a tenant, request id, pool or worker may be called: one token of a NATS subject, 1 to 64
letters, digits, ``_`` and ``-``. A lone ``_`` is no name: in a subject it stands for nobody."""

I64_MAX = 2**63 - 1

Tenant = Annotated[str, Meta(pattern=NAME_PATTERN)]
RequestId = Annotated[str, Meta(pattern=NAME_PATTERN)]
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
OptionalName = Annotated[
    str, Meta(pattern=r"^([A-Za-z0-9-][A-Za-z0-9_-]{0,63}|_[A-Za-z0-9_-]{1,63})?\Z")
]
Label = Annotated[str, Meta(min_length=1, max_length=200)]
"""Free text that people wrote as a name: a model, a tier, a version."""
Detail = Annotated[str, Meta(max_length=512)]
"""For people. Never a prompt, never an answer."""

UnixUs = Annotated[int, Meta(ge=0, le=I64_MAX)]
"""UTC microseconds since 1970."""
UnixNs = Annotated[int, Meta(ge=0, le=I64_MAX)]
MonotonicNs = Annotated[int, Meta(ge=0, le=I64_MAX)]
DurationUs = Annotated[int, Meta(ge=-I64_MAX, le=I64_MAX)]
"""Microseconds; may be negative, because a measured segment is never clamped."""
PositiveMs = Annotated[int, Meta(ge=1, le=10**12)]
Count = Annotated[int, Meta(ge=0, le=I64_MAX)]
TokenCount = Annotated[int, Meta(ge=0, le=2**40)]
Sequence = Annotated[int, Meta(ge=1, le=I64_MAX)]
"""A position in a JetStream stream; the first is 1."""
Attempt = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Counts from 1; 0 means that no attempt was ever made."""
Counter = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A writer's events count from 0. CloudEvents integers are 32 bits wide (section 3.1), so a
writer that reaches the end takes a new name and starts again."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]*\Z", max_length=256)]

Language = Literal["zh", "en", "other", "und"]
"""``und``: undetermined, as in BCP 47."""

RejectReason = Literal[
    "malformed",
    "unknown_field",
    "invalid_field",
    "empty_body",
    "body_too_large",
    "prompt_too_long",
    "unknown_tenant",
    "unknown_model",
    "unknown_request",
    "id_reused",
    "deadline_passed",
    "deadline_too_far",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
    "over_budget_ceiling",
    "load_shed",
    "backlog_full",
    "body_missing",
    "body_changed",
    "attempts_exhausted",
    "draining",
]
"""Why a submission was refused. These become metric labels: few, and fixed."""

Outcome = Literal["completed", "failed", "cancelled", "expired", "rejected"]
"""How a request ended."""

FinishReason = Literal["stop", "length", "abort", "error"]
FailReason = Literal["engine_error", "body_missing", "body_changed", "attempts_exhausted"]
